"""From a user's ``bias=`` to what implementations read: its kind, and its shape against the call's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.bias import Bias, Resolved
from warploom.runtime import arguments


def with_bias(args: AttentionArgs, bias: Tensor | Bias | None, rows: int, keys: int) -> AttentionArgs:
    """The call with its bias, None for none. ``rows`` and ``keys``: what a tensor has to hold, of packed calls at the least."""
    if bias is None:
        return args
    q = args.q
    packed = args.cu_seqlens_q is not None
    batch = q.shape[0] if args.cu_seqlens_q is None else args.cu_seqlens_q.shape[0] - 1
    heads = q.shape[-2]
    values, kind, origin = resolved(bias, heads, torch.promote_types(q.dtype, torch.float32))
    for part in bias.tensors() if isinstance(bias, Bias) else [bias]:
        if part.device != q.device:
            raise ValueError(f"bias is on {part.device} but q is on {q.device}; move it to q's")
    if kind == "alibi":
        if values.shape[0] not in (1, batch):
            what = f"describes {batch} sequences" if packed else f"has batch {batch}"
            raise ValueError(f"bias has slopes of batch {values.shape[0]}, but the call {what}")
    elif kind == "tensor":
        _check_shape(values, (batch, heads, rows, keys), packed)
    gradient = torch.is_grad_enabled() and values.requires_grad
    return args._replace(bias=values, bias_kind=kind, bias_origin=origin, bias_grad=gradient)


def resolved(bias: Any, heads: int, dtype: torch.dtype) -> Resolved:
    """What implementations read of a bias, or a TypeError."""
    if isinstance(bias, Bias):
        return bias.resolve(heads, dtype)
    if not isinstance(bias, Tensor) or bias.dtype not in arguments.FLOATS:
        hint = "; a boolean mask is no bias: give it as mask, by ColumnMask.from_dense" if _is_bool(bias) else ""
        raise TypeError(
            "bias must be a floating point tensor or a bias of warploom.bias (ALiBi, Relative, Key), "
            f"got {arguments.describe(bias)}{hint}"
        )
    if arguments.strided("bias", bias).ndim > 4:
        raise ValueError(f"bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k), got shape {tuple(bias.shape)}")
    return Resolved(bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias, "tensor")


def _is_bool(bias: Any) -> bool:
    return isinstance(bias, Tensor) and bias.dtype == torch.bool


def _check_shape(values: Tensor, full: tuple[int, ...], packed: bool) -> None:
    have = tuple(values.shape)
    if not packed:
        if any([a not in (1, b) for a, b in zip(have, full, strict=True)]):
            raise ValueError(f"bias must broadcast to (batch, heads_q, seqlen_q, seqlen_k) = {full}, got shape {have}")
        return
    if have[0] not in (1, full[0]) or have[1] not in (1, full[1]):
        raise ValueError(f"bias must have shape (sequences|1, heads_q|1, ·, ·) with {full[0]} and {full[1]}, got shape {have}")
    for at, name in ((2, "max_seqlen_q"), (3, "max_seqlen_k")):
        if have[at] != 1 and have[at] < full[at]:
            raise ValueError(
                f"bias of packed sequences is read by rows and keys of each: it must have 1 or at least {name} = {full[at]} "
                f"in dimension {at}, got shape {have}; without {name} it is what any sequence could have"
            )
