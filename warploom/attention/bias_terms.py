"""What a bias adds to scores, and its gradient, in torch ops: for implementations that compute scores in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.bias import narrowed

ALL = slice(None)


def terms(
    args: AttentionArgs, rows: Tensor, cols: Tensor, shift: int, dtype: torch.dtype, batches: slice = ALL, heads: slice = ALL
) -> Tensor:
    """The bias of some elements, (batch|1, heads|1, rows|1, cols|1), differentiable.

    Args:
        rows: of the queries, (rows,) or with ``q_offset`` (batch, 1, rows); ascending.
        cols: (cols,), ascending.
        shift: p - row.
        batches, heads: those of the call that are asked for.
    """
    assert args.bias is not None
    if args.bias_kind == "tensor":
        return narrowed(_elements(_part(args.bias, batches, heads), rows, cols), dtype)
    distance = _distances(args, rows, cols, shift)
    if args.bias_kind == "alibi":
        slopes = args.bias[batches if args.bias.shape[0] > 1 else ALL, heads].to(dtype)
        return -slopes[..., None, None] * distance.abs()[:, None].to(dtype)
    table = args.bias[heads].to(dtype)
    return table[:, distance.clamp(0, table.shape[1] - 1)].transpose(0, 1)


def add_gradient(
    total: Tensor,
    args: AttentionArgs,
    dscores: Tensor,
    rows: Tensor,
    cols: Tensor,
    shift: int,
    batches: slice = ALL,
    heads: slice = ALL,
) -> None:
    """total += the gradient of the bias, of whose shape it is, from that of some elements' sums, (batch, heads, rows, cols)."""
    if rows.ndim > 1:
        for b in range(dscores.shape[0]):
            own = total[b : b + 1] if _has_batch(args, total) else total
            add_gradient(own, args, dscores[b : b + 1], rows[b, 0], cols, shift, ALL, heads)
        return
    if args.bias_kind == "tensor":
        _add_elements(_part(total, batches, heads), dscores, rows, cols)
        return
    distance = _distances(args, rows, cols, shift)[0]
    if args.bias_kind == "alibi":
        view = total[batches if total.shape[0] > 1 else ALL, heads]
        view -= (dscores * distance.abs().to(dscores.dtype)).sum((-2, -1), dtype=total.dtype).sum_to_size(view.shape)
        return
    at = distance.clamp(0, total.shape[1] - 1).flatten()
    total[heads].index_add_(1, at, dscores.sum(0).flatten(1).to(total.dtype))


def sequence_part(t: Tensor, args: AttentionArgs, n: int, rows: int, cols: int) -> Tensor:
    """What sequence ``n`` of a packed call, of so many queries and keys, has of its bias, or of its bias's gradient: a view."""
    if _has_batch(args, t):
        t = t[n : n + 1]
    if args.bias_kind != "tensor":
        return t
    if args.q_offset is None and t.shape[2] > 1:
        t = t[:, :, :rows]
    return t[..., :cols] if t.shape[3] > 1 else t


def chunk_part(args: AttentionArgs, entry: slice, row: int) -> dict[str, Any]:
    """Fields of a dense call that has the bias of one entry of a call with query offsets, whose first row is ``row``."""
    bias = args.bias
    if bias is None:
        return {}
    if _has_batch(args, bias):
        bias = bias[entry]
    if args.bias_kind == "tensor":
        return {"bias": bias if bias.shape[2] == 1 else bias.index_select(2, _chunk_rows(args, bias, row))}
    return {"bias": bias, "bias_origin": args.bias_origin + row - (args.k.shape[1] - args.q.shape[1])}


def add_chunk_gradient(total: Tensor, args: AttentionArgs, part: Tensor, entry: slice, row: int) -> None:
    """total += the gradient of what ``chunk_part`` gave."""
    if _has_batch(args, total):
        total = total[entry]
    if args.bias_kind == "tensor" and total.shape[2] > 1:
        total.index_add_(2, _chunk_rows(args, total, row), part)
    else:
        total += part


def _chunk_rows(args: AttentionArgs, t: Tensor, row: int) -> Tensor:
    return torch.arange(row, row + args.q.shape[1], device=t.device).clamp(max=t.shape[2] - 1)


def _has_batch(args: AttentionArgs, t: Tensor) -> bool:
    return args.bias_kind != "distance" and t.shape[0] > 1


def _distances(args: AttentionArgs, rows: Tensor, cols: Tensor, shift: int) -> Tensor:
    """d, (batch|1, rows, cols)."""
    rows = rows[None] if rows.ndim == 1 else rows[:, 0]
    return rows[..., None] + (shift + args.bias_origin) - cols


def _part(t: Tensor, batches: slice, heads: slice) -> Tensor:
    return t[batches if t.shape[0] > 1 else ALL][:, heads if t.shape[1] > 1 else ALL]


def _elements(t: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    if t.shape[2] > 1:
        if rows.ndim > 1:
            rows = rows.clamp(max=t.shape[2] - 1)
            at = torch.arange(rows.shape[0], device=rows.device)[:, None]
            t = t.expand(rows.shape[0], -1, -1, -1)[at, :, rows[:, 0]].transpose(1, 2)
        else:
            t = t[:, :, _span(rows, t.shape[2])]
    return t[..., _span(cols, t.shape[3])]


def _add_elements(total: Tensor, dscores: Tensor, rows: Tensor, cols: Tensor) -> None:
    """total, a view (batch|1, heads|1, rows|1, cols|1), += dscores summed over its dimensions of 1."""
    shape = [full if have != 1 else 1 for have, full in zip(total.shape, dscores.shape, strict=True)]
    part = dscores.sum_to_size(shape).to(total.dtype)
    if total.shape[2] == 1:
        total[..., _span(cols, total.shape[3])] += part
    elif total.shape[3] == 1 or cols.shape[0] == total.shape[3]:
        total.index_add_(2, rows.clamp(max=total.shape[2] - 1), part)  # clamped rows of a chunk may be one row
    else:
        total[:, :, rows[:, None], cols] += part


def _span(index: Tensor, size: int) -> Any:
    """The same as a slice, where it is all of a dimension or that has one element."""
    return ALL if size in (1, index.shape[0]) else index
