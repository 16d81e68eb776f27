"""Oracles of softmax attention with one mistake each, as a kernel might make it; each has to be told from the right one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.oracle import attention, masks, philox


def _left_off_by_one(p: Tensor, j: Tensor, left: int | None, right: int | None) -> Tensor:
    return masks.band(p, j, None if left is None else left - 1, right)


def _right_off_by_one(p: Tensor, j: Tensor, left: int | None, right: int | None) -> Tensor:
    return masks.band(p, j, left, None if right is None else right + 1)


def _swapped_words(seed: int, *rest: Any) -> Tensor:
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return philox.kept(high | low << 32, *rest)


def _one_head(seed: int, dropout_p: float, batch: int, heads: int, *rest: Any) -> Tensor:
    return philox.kept(seed, dropout_p, batch, 1, *rest).expand(-1, heads, -1, -1)


def _transposed(seed: int, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: Any) -> Tensor:
    return philox.kept(seed, dropout_p, batch, heads, seqlen_k, seqlen_q, device).transpose(-1, -2)


def _first_rows(whole: Tensor, sequences: list[int], offsets: tuple[int, ...], rows: int) -> Tensor:
    return masks.of_chunks(whole, sequences, (0,) * len(offsets), rows)


def _own_entries(whole: Tensor, sequences: list[int], offsets: tuple[int, ...], rows: int) -> Tensor:
    return masks.of_chunks(whole, list(range(len(offsets))), offsets, rows)


def _tiled(t: Tensor, heads_q: int) -> Tensor:
    return t.repeat(1, heads_q // t.shape[1], 1, 1)


def _first_of_group(t: Tensor, heads_kv: int) -> Tensor:
    return t.unflatten(1, (heads_kv, -1))[:, :, 0]


def _without_sink(lse: Tensor, scores: Tensor) -> Tensor:
    return attention.denominator(scores, None)


def _zero_where_nothing(lse: Tensor, scores: Tensor) -> Tensor:
    return torch.where(lse == float("-inf"), 0.0, lse)


def _bias_of_another_key(scores: Tensor, bias: Tensor) -> Tensor:
    return scores + torch.nan_to_num(bias.roll(1, -1), neginf=0.0)


def _bias_of_another_row(scores: Tensor, bias: Tensor) -> Tensor:
    return scores + torch.nan_to_num(bias.roll(1, -2), neginf=0.0)


def _with_another_key(scores: Tensor) -> Tensor:
    lse = attention.denominator(scores, None)
    return torch.logaddexp(lse, torch.zeros_like(lse))


# name: the function that is replaced, and by what
_CHANGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal masks aligned top-left": ("position", lambda i, seqlen_q, seqlen_k: i + 0 * seqlen_k),
    "a window of one key less on the left": ("band", _left_off_by_one),
    "a window of one key more on the right": ("band", _right_off_by_one),
    "the end of a hidden interval inclusive": ("interval", lambda i, start, stop: (i >= start) & (i <= stop)),
    "mask heads by modulo": ("over_heads", lambda seen, heads_q: seen if seen.shape[1] == 1 else _tiled(seen, heads_q)),
    "key heads by modulo": ("over_queries", _tiled),
    "gradients of the first query head of a group alone": ("over_keys", _first_of_group),
    "sink scaled": ("sink_score", lambda sink, scale: sink * scale),
    "lse without the sink": ("returned_lse", _without_sink),
    "lse 0 of a row that sees nothing": ("returned_lse", _zero_where_nothing),
    "words of the dropout's seed swapped": ("kept", _swapped_words),
    "dropout the same in every head": ("kept", _one_head),
    "dropout's rows and keys swapped": ("kept", _transposed),
    "softcap without its derivative": ("bend", lambda s, c: (attention.bend(s, c)[0], 1.0)),
    "softcap not divided by": ("bend", lambda s, c: (c * torch.tanh(s), 1 - torch.tanh(s) ** 2) if c else (s, 1.0)),
    "scale missing in dq": ("scaled_q", lambda gradient, scale: gradient),
    "scale missing in dk": ("scaled_k", lambda gradient, scale: gradient),
    "gradient of lse with the other sign": (
        "delta",
        lambda dout, out, dlse: attention.delta(dout, out, None if dlse is None else -dlse),
    ),
    "gradient of lse ignored": ("delta", lambda dout, out, dlse: attention.delta(dout, out, None)),
    "bias ignored": ("biased", lambda scores, bias: scores),
    "bias of another key": ("biased", _bias_of_another_key),
    "bias of another row": ("biased", _bias_of_another_row),
    "column sums with another key": ("denominator_of_keys", _with_another_key),
    "seqused ignored": ("used", lambda used, lengths: lengths),
    "offsets of chunks ignored": ("seen_of_chunks", _first_rows),
    "dropout by a chunk's own rows": ("kept_of_chunks", _first_rows),
    "dropout by a chunk's own batch entry": ("kept_of_chunks", _own_entries),
}
# Those that only packed calls can tell, and those that they cannot.
_PACKED = ("seqused ignored",)
_DENSE = tuple(name for name in _CHANGES if "chunk" in name)


def mutants(base: SimpleNamespace, packed: bool) -> dict[str, SimpleNamespace]:
    """Namespaces by name, each `base` with one function replaced."""
    return {
        name: SimpleNamespace(**{**vars(base), function: changed})
        for name, (function, changed) in _CHANGES.items()
        if name not in (_DENSE if packed else _PACKED)
    }
