"""From the user's arguments to a validated LinearCall: every error is raised here, in words, before any work."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from warploom.linear.feature_maps import FeatureMap, FeatureMaps, resolve
from warploom.linear.problem import LinearCall
from warploom.runtime import arguments
from warploom.runtime.qkv import autocast_inputs, check_starts, check_tensors, finite, last_contiguous


def linear_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    feature_map: FeatureMaps,
    normalize: bool,
    eps: float,
    scale: float,
    state: tuple[Tensor, Tensor] | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    decay: Tensor | None = None,
) -> LinearCall:
    """The call of linear_attention()'s arguments, with callable feature maps applied."""
    q, k, v = autocast_inputs(q, k, v)
    packed = cu_seqlens is not None and isinstance(q, Tensor) and q.ndim == 3
    if packed:
        check_tensors(q, k, v, 3, "(total_tokens, heads, head_dim)")
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    else:
        check_tensors(q, k, v, 4, "(batch, seqlen, heads, head_dim)")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} but k has batch {k.shape[0]}")
    causal, normalize = arguments.flag("causal", causal), arguments.flag("normalize", normalize)
    eps, scale = numbers(eps, scale, normalize)
    lengths, cu_seqlens = arguments.int32("lengths", lengths, 1, q), arguments.int32("cu_seqlens", cu_seqlens, 1, q)
    _check_packing(q, k, lengths, cu_seqlens)
    if decay is not None:
        decay = checked_decay(decay, q, k, causal, packed)
        # torch.vmap lets nobody look at a tensor's values.
        if arguments.readable(decay) and not torch._C._are_functorch_transforms_active():
            _check_signs(decay, k, lengths, cu_seqlens)
    maps = resolve(feature_map)
    if not all(isinstance(each, str) for each in maps):
        q, k = _mapped(maps, q, k, v.dtype, lengths, cu_seqlens)
    names = [each if isinstance(each, str) else "identity" for each in maps]
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    s, z = checked_state(state, (sequences, k.shape[2], q.shape[3], v.shape[3]), q)
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    asks = decay is not None and decay.requires_grad
    return LinearCall(q, k, v, names[0], names[1], causal, normalize, eps, scale, s, z, lengths, cu_seqlens, decay, asks)


def numbers(eps: Any, scale: Any, normalize: bool) -> tuple[float, float]:
    """eps and scale as floats within their ranges."""
    eps, scale = arguments.number("eps", eps), arguments.number("scale", scale)
    finite("scale", scale)
    if normalize and not 0 < eps < math.inf:
        raise ValueError(f"eps must be a positive finite number, lest a query that sees no key is divided by 0, got {eps}")
    return float(eps), float(scale)


def checked_decay(decay: object, q: Tensor, k: Tensor, causal: bool, packed: bool) -> Tensor:
    """A decay that fits k (batch, seqlen_k, heads_kv, ·): (heads_kv,) or (batch, seqlen_k, heads_kv)."""
    batch, seqlen, heads = k.shape[:3]
    each = "(total_tokens, heads_kv)" if packed else "(batch, seqlen_k, heads_kv)"
    want = (seqlen, heads) if packed else (batch, seqlen, heads)
    takes = f"(heads_kv,) = ({heads},) or {each} = {want}"
    if not isinstance(decay, Tensor):
        raise TypeError(f"decay must be a tensor of natural logs of shape {takes}, got {arguments.describe(decay)}")
    arguments.strided("decay", decay)
    if not causal:
        raise ValueError("decay needs causal=True: without an order of keys nothing says how far each has faded")
    if tuple(decay.shape) not in ((heads,), want):
        raise ValueError(f"decay must have shape {takes}, got {tuple(decay.shape)}")
    dtype = torch.promote_types(q.dtype, torch.float32)
    if decay.dtype != dtype:
        raise TypeError(
            f"decay must be {dtype} beside {q.dtype} inputs: sums of logs lose too much in others; got {decay.dtype}"
        )
    if decay.device != q.device:
        raise ValueError(f"decay is on {decay.device} but q is on {q.device}")
    return decay.unsqueeze(0) if decay.ndim == 2 else decay


def checked_state(
    state: object, shape: tuple[int, int, int, int], q: Tensor, name: str = "state"
) -> tuple[Tensor | None, Tensor | None]:
    """s and z of a state that fits (sequences, heads_kv, E, M), or None twice."""
    if state is None:
        return None, None
    if not isinstance(state, tuple) or len(state) != 2 or not all(isinstance(t, Tensor) for t in state):
        raise TypeError(f"{name} must be a LinearState or a pair of tensors (s, z), got {type(state).__name__}")
    dtype = torch.promote_types(q.dtype, torch.float32)
    for part, t, want in (("s", state[0], shape), ("z", state[1], shape[:3])):
        arguments.strided(f"{name}.{part}", t)
        if tuple(t.shape) != want:
            words = "(batch, heads_kv, E, M)" if part == "s" else "(batch, heads_kv, E)"
            raise ValueError(f"{name}.{part} must have shape {words} = {want}, got {tuple(t.shape)}")
        if t.dtype != dtype:
            raise TypeError(f"{name}.{part} must be {dtype} beside {q.dtype} inputs: sums in fewer bits stall; got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name}.{part} is on {t.device} but q is on {q.device}")
    return state[0], state[1]


def _check_packing(q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths and cu_seqlens together are not supported: packed sequences have no padding")
    if lengths is not None and lengths.shape[0] != q.shape[0]:
        raise ValueError(f"lengths has {lengths.shape[0]} entries but q has batch {q.shape[0]}")
    if cu_seqlens is not None:
        if cu_seqlens.shape[0] < 1:
            raise ValueError("cu_seqlens must have sequences + 1 entries, got none")
        if q.shape[0] != 1:
            raise ValueError(f"with cu_seqlens q is (total_tokens, heads, head_dim) or has batch 1, got shape {tuple(q.shape)}")
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"with cu_seqlens q and k have the same tokens, got {q.shape[1]} and {k.shape[1]}")
    if arguments.readable(q):
        _check_contents(q, k, lengths, cu_seqlens)


def _check_contents(q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if lengths is not None and lengths.numel():
        low, high = (int(x) for x in torch.aminmax(lengths))
        if low < 0 or high > k.shape[1]:
            raise ValueError(f"lengths must be from 0 to the {k.shape[1]} keys of a row, got {low} to {high}")
    if cu_seqlens is not None:
        check_starts("cu_seqlens", cu_seqlens, q.shape[1])


def _check_signs(decay: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Decays of keys that count are at most 0; the others may hold anything."""
    decay = decay.detach()
    if decay.ndim == 3:
        position = torch.arange(k.shape[1], device=k.device)
        if lengths is not None:
            decay = decay.masked_fill((position >= lengths[:, None])[:, :, None], 0.0)
        if cu_seqlens is not None:
            decay = decay.masked_fill((position >= cu_seqlens[-1])[:, None], 0.0)
    if bool((decay > 0).any()):
        raise ValueError(
            f"decay must be at most 0, the natural log of a factor of at most 1, got {float(decay.nan_to_num(0.0).max()):.6g}"
        )


def _mapped(
    maps: tuple[str | FeatureMap, str | FeatureMap],
    q: Tensor,
    k: Tensor,
    dtype: torch.dtype,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys through the maps that are callables, in ``dtype``."""
    # A position that counts for nothing may hold NaN, which a map would send into its own parameters' gradients.
    if lengths is not None:
        k = k.masked_fill((torch.arange(k.shape[1], device=k.device) >= lengths[:, None])[:, :, None, None], 0.0)
    if cu_seqlens is not None:
        unused = (torch.arange(q.shape[1], device=q.device) >= cu_seqlens[-1])[:, None, None]
        q, k = (t.masked_fill(unused, 0.0) for t in (q, k))
    found = []
    for name, each, t in (("q", maps[0], q), ("k", maps[1], k)):
        mapped = t if isinstance(each, str) else each(t)
        if not isinstance(mapped, Tensor) or not mapped.is_floating_point():
            raise TypeError(f"feature_map must return a floating point tensor, got {mapped!r:.80} for {name}")
        if mapped.shape[:-1] != t.shape[:-1]:
            raise ValueError(
                f"feature_map may change the last dimension only, got {tuple(mapped.shape)} for {name} of {tuple(t.shape)}"
            )
        found.append(mapped.to(dtype))
    if found[0].shape[-1] != found[1].shape[-1] or not found[0].shape[-1]:
        raise ValueError(f"feature_map must give q and k one head_dim, got {found[0].shape[-1]} and {found[1].shape[-1]}")
    return found[0], found[1]
