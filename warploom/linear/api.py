"""The door: linear_attention() and linear_attention_step()."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from warploom.linear import (
    launcher,
    registry,  # noqa: F401  (it fills the dispatch list)
)
from warploom.linear.arguments import linear_call
from warploom.linear.feature_maps import FeatureMaps
from warploom.linear.ops import flat, linear_op, step_args, step_op
from warploom.linear.problem import LinearCall
from warploom.linear.state import LinearState
from warploom.runtime import arguments, dispatch, kept
from warploom.runtime.op import differentiates_forward, recorded


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., feature_map: FeatureMaps = ..., normalize: bool = ...,
    eps: float = ..., scale: float = ..., state: LinearState | tuple[Tensor, Tensor] | None = ...,
    return_state: Literal[False] = ..., lengths: Tensor | None = ..., cu_seqlens: Tensor | None = ...,
    decay: Tensor | None = ..., backend: str | None = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., feature_map: FeatureMaps = ..., normalize: bool = ...,
    eps: float = ..., scale: float = ..., state: LinearState | tuple[Tensor, Tensor] | None = ...,
    return_state: Literal[True], lengths: Tensor | None = ..., cu_seqlens: Tensor | None = ...,
    decay: Tensor | None = ..., backend: str | None = ...,
) -> tuple[Tensor, LinearState]: ...


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., feature_map: FeatureMaps = ..., normalize: bool = ...,
    eps: float = ..., scale: float = ..., state: LinearState | tuple[Tensor, Tensor] | None = ..., return_state: bool,
    lengths: Tensor | None = ..., cu_seqlens: Tensor | None = ..., decay: Tensor | None = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, LinearState]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    feature_map: FeatureMaps = "elu+1",
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    state: LinearState | tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    decay: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LinearState]:
    """Linear attention, O(seqlen) in time and memory, differentiable in q, k, v, the state and the decay.

    out_i = scale · phi(q_i) s_i / (scale · phi(q_i) · z_i + eps), where s_i sums phi(k_j) ⊗ v_j and z_i sums phi(k_j) over the
    keys j that query i sees: j <= i when causal, both counted from the start, else all (Katharopoulos et al., 2020,
    "Transformers are RNNs", eq. 5-9; conventions and defaults of idiap's fast-transformers). Sums are fp32 whatever the dtype.

    With a decay the sums forget: s_t = exp(decay_t) s_{t-1} + phi(k_t) ⊗ v_t and z_t = exp(decay_t) z_{t-1} + phi(k_t). The
    state is multiplied before token t's key joins it, so that query t sees its own key whole (RetNet: Sun et al., 2023, eq. 6,
    one constant a head; Mamba-2: Dao and Gu, 2024, one number a head and token).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); float16, bfloat16, float32 or float64. Any strides; where the last dimension
            is not contiguous a copy is made.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_q is a multiple of heads_kv. When causal, keys past the last query are
            seen by none (yet counted in the state), and queries past the last key see all.
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        causal: whether query i sees keys j <= i only.
        feature_map: "elu+1", "relu", "identity", a callable (…, head_dim) -> (…, E), or a pair of these for queries and keys;
            see `warploom.linear.feature_maps` for random features. What a callable returns is used in v's dtype.
        normalize: divide by the denominator above; else out is the numerator.
        eps: added to the denominator, after the scale; positive.
        scale: multiplies phi(q), in numerator and denominator.
        state: sums over earlier keys that every query sees: s (batch, heads_kv, E, head_dim_v) and z (batch, heads_kv, E),
            fp32 (fp64 for fp64 inputs); the batch is the number of sequences for packed calls.
        return_state: also return the state after all keys.
        lengths: int32 (batch,), keys of each row that count; later ones are in neither numerator nor denominator, and may
            hold anything.
        cu_seqlens: int32 (sequences + 1,), starts of packed sequences, from 0; q, k and v are then (total_tokens, heads, ·), or
            have batch 1, and each sequence sees its own keys. Read on the device. Tokens past the last entry get out 0.
        decay: natural logs of the factors, at most 0, -inf included, which forgets all: (heads_kv,), one constant a head, or
            one for each key, (batch, seqlen_k, heads_kv), packed (total_tokens, heads_kv); fp32 (fp64 for fp64 inputs). Causal
            calls only. Positions past the last key, or past ``lengths``, neither add nor fade; there it may hold anything.
            Positive ones are refused on the CPU, and under WARPLOOM_CHECK=1; elsewhere sums then grow, up to inf or NaN, and
            nothing is read or written out of bounds.
        backend: run this implementation or raise its refusal; default: the first that does not refuse.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v), or as packed as q, in the inputs' dtype; or (out, LinearState).

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes.
    """
    s, z = (None, None) if state is None else _parts(state)
    given = (q, k, v, s, z, decay, lengths, cu_seqlens)
    options = (causal, feature_map, normalize, eps, scale, return_state, backend)
    key, launch, records = kept.find("linear_attention", given, 6, options)
    if launch is not None:
        found = launch(*given)
        if found is not None:
            return (found[0], LinearState(found[2], found[3])) if return_state else found[0]
    call = linear_call(
        q,
        k,
        v,
        causal=causal,
        feature_map=feature_map,
        normalize=normalize,
        eps=eps,
        scale=scale,
        state=state,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
        decay=decay,
    )
    return_state = arguments.flag("return_state", return_state)
    call = _seen(call, return_state)
    chosen = dispatch.choose(call, backend, "linear")
    out, last = _run(call, chosen, return_state)
    if launch is None:
        launcher.keep(key, call, given, chosen, backend, return_state, records)
    if q.ndim == 3:
        out = out.squeeze(0)
    return out if last is None else (out, last)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState | tuple[Tensor, Tensor],
    *,
    feature_map: FeatureMaps = "elu+1",
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    decay: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, LinearState]:
    """One token of causal linear attention for each sequence, in time independent of what came before.

    The token's key and value join the state, then its query reads it, as the next row of `linear_attention` would. The state
    given is not changed: a captured CUDA graph copies the new one over it. One launch on a GPU.

    Args:
        q: (batch, heads_q, head_dim), or (batch, 1, heads_q, head_dim) as one row of a longer call.
        k: (batch, heads_kv, head_dim), or with the dimension of 1.
        v: (batch, heads_kv, head_dim_v), or with the dimension of 1.
        state: what the earlier tokens left, or LinearState.zeros(...).
        feature_map, normalize, eps, scale, backend: as in `linear_attention`.
        decay: natural log of what the state is multiplied by before the token's key joins it, at most 0: (heads_kv,) or
            (batch, heads_kv), with the dimension of 1 where q has it; fp32.

    Returns:
        out, of q's dimensions with head_dim_v last, and the new state. Differentiable.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes.
    """
    given = (q, k, v, *(_parts(state) if state is not None else (None, None)), decay)
    key, launch, _ = kept.find("linear_attention_step", given, 6, (feature_map, normalize, eps, scale, backend))
    if launch is not None:
        found = launch(*given)
        if found is not None:
            return found[0], LinearState(found[1], found[2])
    if state is None:
        raise TypeError("state must be a LinearState, got None; LinearState.zeros(batch, heads_kv, E, M) is an empty one")
    if isinstance(q, Tensor) and q.ndim not in (3, 4):
        raise ValueError(
            f"q must have 3 dimensions (batch, heads_q, head_dim) or 4 (batch, 1, heads_q, head_dim), got {tuple(q.shape)}"
        )
    rows = q, k, v
    if isinstance(q, Tensor) and q.ndim == 3:
        for name, t in (("q", q), ("k", k), ("v", v)):
            if not isinstance(t, Tensor) or t.ndim != 3:
                got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
                raise ValueError(f"{name} must have 3 dimensions (batch, heads, head_dim) as q has, got {got}")
        rows = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        if isinstance(decay, Tensor):
            batch, heads = k.shape[:2]
            if tuple(decay.shape) not in ((heads,), (batch, heads)):
                takes = f"(heads_kv,) = ({heads},) or (batch, heads_kv) = ({batch}, {heads})"
                raise ValueError(f"decay must have shape {takes}, got {tuple(decay.shape)}")
            decay = decay.unsqueeze(1) if decay.ndim == 2 else decay
    call = linear_call(
        *rows,
        causal=True,
        feature_map=feature_map,
        normalize=normalize,
        eps=eps,
        scale=scale,
        state=state,
        lengths=None,
        cu_seqlens=None,
        decay=decay,
    )
    if call.q.shape[1] != 1 or call.k.shape[1] != 1:
        raise ValueError(
            f"a step takes one token a sequence, got {call.q.shape[1]} queries and {call.k.shape[1]} keys; "
            "linear_attention(..., state=state, return_state=True) takes several"
        )
    tensors = (call.q, call.k, call.v, call.s, call.z, call.decay)
    if recorded(*tensors) or (not torch.compiler.is_compiling() and differentiates_forward(*tensors)):
        out, last = _run(call, dispatch.choose(call, backend, "linear"), True)
    else:
        args = step_args(call, dispatch.choose(call, backend, "linear"))
        out, s, z = step_op(*args)
        if launch is None:
            launcher.keep_step(key, call, args, given, q.ndim == 4, backend)
        out = out.unsqueeze(1)
        last = LinearState(s, z)
    assert last is not None
    return out.squeeze(1) if q.ndim == 3 else out, last


def _parts(state: object) -> tuple[Any, Any]:
    """s and z of a state, whatever it is; what is none, the checks name."""
    return state if isinstance(state, tuple) and len(state) == 2 else ((), None)


def _seen(call: LinearCall, return_state: bool) -> LinearCall:
    """The call without keys past the last query, which reach the state alone: nobody may ask for it, and they hold anything."""
    if not call.causal or return_state or call.k.shape[1] <= call.q.shape[1]:
        return call
    seen, decay = slice(call.q.shape[1]), call.decay
    if decay is not None and decay.ndim == 3:
        decay = decay[:, seen]
    return replace(call, k=call.k[:, seen], v=call.v[:, seen], decay=decay)


def _run(call: LinearCall, chosen: str, return_state: bool) -> tuple[Tensor, LinearState | None]:
    implementation = dispatch.find(chosen, "linear")
    if implementation.eager:
        out, _, s, z = implementation.forward(call, return_state)
    else:
        out, _, s, z = linear_op(*flat(call, chosen, return_state))
    return out, LinearState(s, z) if return_state and s is not None and z is not None else None
