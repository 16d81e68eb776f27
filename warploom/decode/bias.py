"""A decode call's bias: from the user's object to what implementations read, and its terms in torch ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.bias import Bias, Key, narrowed
from warploom.decode.problem import DecodeArgs
from warploom.runtime import arguments


def parts_of(bias: Any) -> list[Tensor]:
    """The tensors that a bias is made of, none without one; TypeError for what is no bias of a cache."""
    if bias is None:
        return []
    if isinstance(bias, Bias):
        return bias.tensors()
    if isinstance(bias, Tensor):
        raise TypeError(
            f"decode() takes no tensor as bias, got {arguments.describe(bias)}: give ALiBi(slopes), Relative(table) or "
            "Key(values) of warploom.bias"
        )
    raise TypeError(f"bias must be ALiBi, Relative or Key of warploom.bias, got {arguments.describe(bias)}")


def with_bias(args: DecodeArgs, bias: Bias | None) -> DecodeArgs:
    """The call with its bias, None for none."""
    if bias is None:
        return args
    q, capacity = args.q, args.capacity
    batch, _, heads, _ = q.shape
    for part in bias.tensors():
        if part.device != q.device:
            raise ValueError(f"bias is on {part.device} but q is on {q.device}; move it to q's")
    values, kind, origin = bias.resolve(heads, torch.promote_types(q.dtype, torch.float32))
    if isinstance(bias, Key):
        values, kind = bias.values, "key"
        have = tuple(values.shape)
        if have[0] not in (1, batch) or have[1] not in (1, heads) or have[2] < capacity:
            raise ValueError(
                f"bias has values of shape {have}, but over a cache Key takes (batch or 1, heads_q or 1, as many keys as a "
                f"sequence can hold, or more) = ({batch} or 1, {heads} or 1, {capacity})"
            )
    elif kind == "alibi" and values.shape[0] not in (1, batch):
        raise ValueError(f"bias has slopes of batch {values.shape[0]}, but q has batch {batch}")
    return args._replace(bias=values, bias_kind=kind, bias_origin=origin)


def terms(args: DecodeArgs, b: int, tokens: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores of sequence ``b``, (heads_q, T, keys), by the places (T,) of tokens and (keys,) of keys."""
    assert args.bias is not None
    bias, shape = args.bias, (args.q.shape[2], tokens.shape[0], keys.shape[0])
    if args.bias_kind == "distance":
        entry = (tokens[:, None] - keys + args.bias_origin).clamp(0, bias.shape[1] - 1)
        return bias.to(dtype)[:, entry]
    own = bias[b if bias.shape[0] > 1 else 0]
    if args.bias_kind == "key":
        return narrowed(own[:, keys.clamp(min=0)], dtype)[:, None].expand(shape)
    return -own.to(dtype)[:, None, None] * (tokens[:, None] - keys).abs().to(dtype)
