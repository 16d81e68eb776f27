"""The door: gated_delta_rule() and gated_delta_step()."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from warploom.delta import (
    launcher,
    registry,  # noqa: F401  (it fills the dispatch list)
)
from warploom.delta.arguments import delta_call, step_call
from warploom.delta.ops import delta_op, flat, inplace_step_op, step_args, step_op
from warploom.delta.problem import DeltaCall
from warploom.runtime import arguments, dispatch, kept
from warploom.runtime.op import differentiates_forward, recorded


@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None = ..., *, scale: float | None = ...,
    normalize_qk: bool = ..., eps: float = ..., state: Tensor | None = ..., return_state: Literal[False] = ...,
    lengths: Tensor | None = ..., cu_seqlens: Tensor | None = ..., backend: str | None = ...,
) -> Tensor: ...


@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None = ..., *, scale: float | None = ...,
    normalize_qk: bool = ..., eps: float = ..., state: Tensor | None = ..., return_state: Literal[True],
    lengths: Tensor | None = ..., cu_seqlens: Tensor | None = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None = ..., *, scale: float | None = ...,
    normalize_qk: bool = ..., eps: float = ..., state: Tensor | None = ..., return_state: bool,
    lengths: Tensor | None = ..., cu_seqlens: Tensor | None = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    eps: float = 1e-6,
    state: Tensor | None = None,
    return_state: bool = False,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule, O(seqlen) in time and memory, differentiable in every tensor.

    Each value head has a state S (E, M). At each token it decays, S <- exp(decay) S, then learns to answer the token's key with
    its value, S <- S + beta k ⊗ (v - Sᵀk), and is asked, out = scale · Sᵀq (Yang et al., 2024, "Gated Delta Networks",
    arXiv 2412.06464, eq. 10; without a decay DeltaNet, arXiv 2406.06484). States and sums are fp32 whatever the dtype.

    Args:
        q: (batch, seqlen, heads_qk, E); float16, bfloat16, float32 or float64. Any strides; where the last dimension is not
            contiguous a copy is made.
        k: of q's shape. With beta |k|² past 2 states grow without bound; `normalize_qk` keeps |k| at 1.
        v: (batch, seqlen, heads_v, M); heads_v is a multiple of heads_qk, and value head h reads query and key head
            h // (heads_v / heads_qk).
        beta: (batch, seqlen, heads_v), how much of v is written: 1 replaces what the key had, values up to 2 reflect it. Any
            floating point dtype, computed with in fp32 (fp64 for fp64 inputs).
        decay: (batch, seqlen, heads_v), natural logarithm of what the state keeps at this token, at most 0; -inf forgets all
            that came before. Dtypes as beta. None: nothing is forgotten.
        scale: multiplies q; None is 1/√E.
        normalize_qk: use q / √(|q|² + eps) and k / √(|k|² + eps), computed in fp32.
        eps: added to the squared norms; positive.
        state: S before the first token, (batch, heads_v, E, M), fp32 (fp64 for fp64 inputs); the batch is the number of
            sequences for packed calls. None: zeros.
        return_state: also return S after the last token.
        lengths: int32 (batch,), tokens of each row that count; later ones may hold anything, change no state and get out 0.
        cu_seqlens: int32 (sequences + 1,), starts of packed sequences, from 0; tensors are then (total_tokens, heads, ·), or
            have batch 1, and each sequence has its own state. Read on the device. Tokens past the last entry get out 0.
        backend: run this implementation or raise its refusal; default: the first that does not refuse.

    Returns:
        out (batch, seqlen, heads_v, M), or as packed as q, in the inputs' dtype; or (out, state).

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes.
    """
    given = (q, k, v, beta, decay, state, lengths, cu_seqlens)
    options = (scale, normalize_qk, eps, return_state, backend)
    key, launch, records = kept.find("gated_delta_rule", given, 6, options)
    if launch is not None:
        found = launch(*given)
        if found is not None:
            return found if return_state else found[0]
    call = delta_call(
        q,
        k,
        v,
        beta,
        decay,
        scale=scale,
        normalize_qk=normalize_qk,
        eps=eps,
        state=state,
        lengths=lengths,
        cu_seqlens=cu_seqlens,
    )
    return_state = arguments.flag("return_state", return_state)
    chosen = dispatch.choose(call, backend, "delta")
    out, last = _run(call, chosen, return_state)
    if launch is None:
        launcher.keep(key, call, given, chosen, backend, return_state, records)
    if q.ndim == 3:
        out = out.squeeze(0)
    return out if last is None else (out, last)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    inplace: bool = False,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule for each sequence, in time independent of what came before.

    One launch on a GPU, which a CUDA graph may capture.

    Args:
        q: (batch, heads_qk, E), or (batch, 1, heads_qk, E) as one row of a longer call.
        k: of q's shape.
        v: (batch, heads_v, M), or with the dimension of 1.
        beta: (batch, heads_v), or with the dimension of 1.
        state: what the earlier tokens left, (batch, heads_v, E, M), fp32 (fp64 for fp64 inputs).
        decay: as beta, or None.
        scale, normalize_qk, eps, backend: as in `gated_delta_rule`.
        inplace: write the new state over ``state``, for which no gradient may be asked; else ``state`` is not changed.

    Returns:
        out, of v's shape, and the new state: a new tensor, or ``state``. Differentiable unless in place.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes.
    """
    given = (q, k, v, beta, decay, state)
    key, launch, _ = kept.find("gated_delta_step", given, 6, (scale, normalize_qk, inplace, eps, backend))
    if launch is not None:
        found = launch(q, k, v, beta, state, decay)
        if found is not None:
            return found
    inplace = arguments.flag("inplace", inplace)
    call = step_call(q, k, v, beta, state, decay, scale=scale, normalize_qk=normalize_qk, eps=eps, inplace=inplace)
    tensors = (call.q, call.k, call.v, call.beta, call.decay, call.state)
    differentiated = recorded(*tensors) or (not torch.compiler.is_compiling() and differentiates_forward(*tensors))
    if inplace and differentiated:
        raise ValueError("inplace=True writes over a state that a gradient would need; use torch.no_grad(), or inplace=False")
    if differentiated:
        out, last = _run(call, dispatch.choose(call, backend, "delta"), True)
        assert last is not None
    else:
        args = step_args(call, dispatch.choose(call, backend, "delta"))
        out, last = (inplace_step_op(*args), state) if inplace else step_op(*args)
        if launch is None:
            launcher.keep_step(key, call, args, given, backend, inplace)
        out = out.unsqueeze(1)
    return out.squeeze(1) if q.ndim == 3 else out, last


def _run(call: DeltaCall, chosen: str, return_state: bool) -> tuple[Tensor, Tensor | None]:
    implementation = dispatch.find(chosen, "delta")
    if implementation.eager:
        out, state = implementation.forward(call, return_state)
    else:
        out, state = delta_op(*flat(call, chosen, return_state))
    return out, state if return_state else None
