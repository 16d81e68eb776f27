"""From the user's arguments to a validated DeltaCall: every error is raised here, in words, before any work."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from warploom.delta.problem import DeltaCall
from warploom.runtime import arguments
from warploom.runtime.qkv import autocast_inputs, check_starts, finite, last_contiguous


def delta_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None,
    *,
    scale: float | None,
    normalize_qk: bool,
    eps: float,
    state: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> DeltaCall:
    """The call of gated_delta_rule()'s arguments."""
    q, k, v = autocast_inputs(q, k, v)
    packed = cu_seqlens is not None and isinstance(q, Tensor) and q.ndim == 3
    _check_tensors(q, k, v, 3 if packed else 4, "(total_tokens, heads, ·)" if packed else "(batch, seqlen, heads, ·)")
    normalize_qk = arguments.flag("normalize_qk", normalize_qk)
    scale, eps = numbers(scale, eps, q.shape[-1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    shape = "(total_tokens, heads_v)" if packed else "(batch, seqlen, heads_v)"
    beta = _of_tokens("beta", beta, v, dtype, shape)
    decay = None if decay is None else _of_tokens("decay", decay, v, dtype, shape)
    if packed:
        q, k, v, beta = (t.unsqueeze(0) for t in (q, k, v, beta))
        decay = None if decay is None else decay.unsqueeze(0)
    lengths, cu_seqlens = arguments.int32("lengths", lengths, 1, q), arguments.int32("cu_seqlens", cu_seqlens, 1, q)
    check_packing("q", q, lengths, cu_seqlens)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = checked_state(state, (sequences, v.shape[2], q.shape[3], v.shape[3]), q)
    _check_decay(decay, lengths, cu_seqlens)
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    state = None if state is None else last_contiguous(state)
    return DeltaCall(q, k, v, beta, decay, scale, normalize_qk, eps, state, lengths, cu_seqlens)


def step_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    decay: Tensor | None,
    *,
    scale: float | None,
    normalize_qk: bool,
    eps: float,
    inplace: bool,
) -> DeltaCall:
    """The call of gated_delta_step()'s arguments: of one token a sequence, with a state."""
    if state is None:
        raise TypeError("state must be a tensor (batch, heads_v, E, M), got None; before the first token it is zeros")
    if isinstance(q, Tensor) and q.ndim not in (3, 4):
        raise ValueError(f"q must have 3 dimensions (batch, heads_qk, E) or 4 (batch, 1, heads_qk, E), got {tuple(q.shape)}")
    if isinstance(q, Tensor) and q.ndim == 3:
        given: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": beta, **({} if decay is None else {"decay": decay})}
        for name, t in given.items():
            rank, words = (3, "(batch, heads, ·)") if name in "qkv" else (2, "(batch, heads_v)")
            if arguments.strided(name, t).ndim != rank:
                raise ValueError(f"{name} must have {rank} dimensions {words} beside q of 3, got {tuple(t.shape)}")
        q, k, v, beta = (t.unsqueeze(1) for t in (q, k, v, beta))
        decay = None if decay is None else decay.unsqueeze(1)
    call = delta_call(
        q, k, v, beta, decay, scale=scale, normalize_qk=normalize_qk, eps=eps, state=state, lengths=None, cu_seqlens=None
    )
    if call.q.shape[1] != 1:
        raise ValueError(
            f"a step takes one token a sequence, got {call.q.shape[1]}; "
            "gated_delta_rule(..., state=state, return_state=True) takes several"
        )
    if inplace and (_overlaps(state) or call.state is not state):
        raise ValueError(
            "with inplace=True the last dimension of state must be contiguous and no two elements share memory, got strides "
            f"{tuple(state.stride())}"
        )
    return call


def _overlaps(t: Tensor) -> bool:
    """Whether elements share memory, or might: a dimension steps no further than those of smaller steps reach."""
    reach = 0
    for step, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


def numbers(scale: Any, eps: Any, dim: int) -> tuple[float, float]:
    """scale and eps as floats within their ranges; a scale of None is 1/√E."""
    scale, eps = 1.0 / math.sqrt(dim) if scale is None else arguments.number("scale", scale), arguments.number("eps", eps)
    finite("scale", scale)
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be a positive finite number, lest a query or key of zeros is divided by 0, got {eps}")
    return float(scale), float(eps)


def checked_state(state: object, shape: tuple[int, int, int, int], q: Tensor) -> Tensor | None:
    """A state that fits (sequences, heads_v, E, M), or None."""
    if state is None:
        return None
    found = arguments.strided("state", state)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if tuple(found.shape) != shape:
        raise ValueError(f"state must have shape (batch, heads_v, E, M) = {shape}, got {tuple(found.shape)}")
    if found.dtype != dtype:
        raise TypeError(f"state must be {dtype} beside {q.dtype} inputs: sums in fewer bits stall; got {found.dtype}")
    if found.device != q.device:
        raise ValueError(f"state is on {found.device} but q is on {q.device}")
    return found


def _check_tensors(q: object, k: object, v: object, rank: int, layout: str) -> None:
    """Type, rank, dtype, device and shape agreement of q, k and v."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if arguments.strided(name, t).ndim != rank:
            raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(t.shape)}")  # type: ignore[attr-defined]
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if q.dtype not in arguments.FLOATS:
        raise TypeError(f"q has dtype {q.dtype}; the gated delta rule takes float16, bfloat16, float32 or float64")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} but q has {q.dtype}; give all three one dtype, or use torch.autocast")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} but q is on {q.device}; move them to one device")
    arguments.with_values("q", q)
    if q.shape != k.shape:
        raise ValueError(f"q and k must have one shape, got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"q and v must agree in all but the last two dimensions, got {tuple(q.shape)} and {tuple(v.shape)}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"the last dimension must be at least 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")
    heads, heads_v = q.shape[-2], v.shape[-2]
    if heads_v % heads if heads else heads_v:
        raise ValueError(f"v has {heads_v} heads, which is not a multiple of the {heads} heads of q and k")


def _of_tokens(name: str, value: Any, v: Tensor, dtype: torch.dtype, words: str) -> Tensor:
    """A number for each token and value head, in ``dtype``."""
    if not isinstance(value, Tensor) or value.dtype not in arguments.FLOATS:
        raise TypeError(f"{name} must be a floating point tensor {words}, got {arguments.describe(value)}")
    found = arguments.strided(name, value)
    if found.shape != v.shape[:-1]:
        raise ValueError(f"{name} must have shape {words} = {tuple(v.shape[:-1])}, got {tuple(found.shape)}")
    if found.device != v.device:
        raise ValueError(f"{name} is on {found.device} but q is on {v.device}")
    return found.to(dtype)


def check_packing(name: str, q: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """lengths or cu_seqlens, and what may be read of them, beside a tensor ``name`` (batch, seqlen, …)."""
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths and cu_seqlens together are not supported: packed sequences have no padding")
    if lengths is not None and lengths.shape[0] != q.shape[0]:
        raise ValueError(f"lengths has {lengths.shape[0]} entries but {name} has batch {q.shape[0]}")
    if cu_seqlens is not None:
        if cu_seqlens.shape[0] < 1:
            raise ValueError("cu_seqlens must have sequences + 1 entries, got none")
        if q.shape[0] != 1:
            raise ValueError(f"with cu_seqlens {name} is (total_tokens, …) or has batch 1, got shape {tuple(q.shape)}")
    if not arguments.readable(q):
        return
    if lengths is not None and lengths.numel():
        low, high = (int(x) for x in torch.aminmax(lengths))
        if low < 0 or high > q.shape[1]:
            raise ValueError(f"lengths must be from 0 to the {q.shape[1]} tokens of a row, got {low} to {high}")
    if cu_seqlens is not None:
        check_starts("cu_seqlens", cu_seqlens, q.shape[1])


def _check_decay(decay: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """A decay is a logarithm, never above 0, where it may be read and counts."""
    if decay is None or not arguments.readable(decay):
        return
    position = torch.arange(decay.shape[1], device=decay.device)
    if lengths is not None:
        decay = decay.masked_fill((position >= lengths[:, None]).unsqueeze(-1), 0.0)
    if cu_seqlens is not None:
        decay = decay.masked_fill((position >= cu_seqlens[-1]).unsqueeze(-1), 0.0)
    if (decay > 0).any():
        raise ValueError(f"decay must be at most 0, the natural logarithm of what is kept, got {float(decay[decay > 0].max())}")
