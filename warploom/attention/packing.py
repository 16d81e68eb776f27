"""Packed and paged calls, and chunks of sequences, cut into plain dense calls, for what walks them on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom.attention.bias_terms import chunk_part, sequence_part
from warploom.attention.problem import AttentionArgs


@dataclass(frozen=True)
class Sequence:
    """One sequence of a packed call as a dense call of batch 1, with where it lies in the packed tensors."""

    args: AttentionArgs
    queries: slice
    keys: slice | None  # None: the keys were gathered from pages
    pages: Tensor | None  # int64 page numbers, for paged calls
    keys_used: int


def sequences(args: AttentionArgs) -> Iterator[Sequence]:
    """The sequences of a packed call in order; reads lengths on the host.

    Out-of-range contents are clamped, so that bad lengths never read out of bounds.
    """
    assert args.cu_seqlens_q is not None
    starts_q = _clamped(args.cu_seqlens_q, args.q.shape[0])
    used = None if args.seqused_k is None else args.seqused_k.tolist()
    if args.block_table is None:
        cu_k = args.cu_seqlens_q if args.cu_seqlens_k is None else args.cu_seqlens_k
        starts_k = _clamped(cu_k, args.k.shape[0])
    for n in range(len(starts_q) - 1):
        queries = slice(starts_q[n], starts_q[n + 1])
        if args.block_table is not None:
            page_size = args.k.shape[1]
            assert used is not None
            length = max(0, min(used[n], args.block_table.shape[1] * page_size))
            count = -(-length // page_size)
            pages = args.block_table[n, :count].clamp(0, args.k.shape[0] - 1).long()
            k, v = _of_pages(args, pages, length)
            keys, columns = None, slice(0, length)
        else:
            start, stop = starts_k[n], starts_k[n + 1]
            length = stop - start if used is None else max(0, min(used[n], stop - start))
            pages, keys = None, slice(start, start + length)
            k, v, columns = args.k[keys], args.v[keys], keys
        vectors: dict[str, Any] = {
            name: None if (vector := getattr(args, name)) is None else vector[..., columns]
            for name in ("lts", "lte", "uts", "ute")
        }
        dense = args._replace(
            q=args.q[queries][None],
            k=k[None],
            v=v[None],
            bounds=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            seqused_k=None,
            block_table=None,
            k_scale=None,
            v_scale=None,
            q_offset=None if args.q_offset is None else args.q_offset[n : n + 1],
            bias=None if args.bias is None else sequence_part(args.bias, args, n, queries.stop - queries.start, length),
            **vectors,
        )
        yield Sequence(dense, queries, keys, pages, length)


def entries(args: AttentionArgs) -> Iterator[AttentionArgs]:
    """The batch entries of a dense call in order, each a call of batch 1."""

    def own(t: Tensor | None, b: int) -> Tensor | None:
        return t if t is None or t.shape[0] == 1 else t[b : b + 1]

    for b in range(args.q.shape[0]):
        vectors: dict[str, Any] = {name: own(getattr(args, name), b) for name in ("lts", "lte", "uts", "ute", "q_offset")}
        bias = args.bias if args.bias_kind == "distance" else own(args.bias, b)
        q, k, v = (t[b : b + 1] for t in (args.q, args.k, args.v))
        yield args._replace(q=q, k=k, v=v, bounds=None, bias=bias, **vectors)


def alone(args: AttentionArgs) -> AttentionArgs:
    """A dense call of batch 1 whose q, k and v lie as those of any equal call: in memory of their own, contiguous.

    Where numbers lie, and at what strides, decides how matrix products of torch's libraries round on a CPU.
    """
    q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in (args.q, args.k, args.v))
    return args._replace(q=q, k=k, v=v)


def _of_pages(args: AttentionArgs, pages: Tensor, length: int) -> list[Tensor]:
    """The first ``length`` keys and values of some pages; of FP8 the numbers that they stand for, in float32."""
    found = []
    for t, scale in ((args.k, args.k_scale), (args.v, args.v_scale)):
        own = t[pages].flatten(0, 1)[:length]
        if scale is not None:
            scale = scale if scale.ndim == 1 else scale[pages].flatten(0, 1)[:length]
            own = own.float() * scale[..., None]
        found.append(own)
    return found


@dataclass(frozen=True)
class Chunk:
    """One batch entry of a call with query offsets as a dense call of batch 1 without: the same elements by local rows."""

    args: AttentionArgs
    entry: slice
    first_row: int  # of the whole
    batch: int  # by which dropout's elements are counted


def chunks(args: AttentionArgs, first_batch: int) -> Iterator[Chunk]:
    """The batch entries of a dense call with query offsets, which are read on the host.

    ``first_batch`` is the number of the first entry.
    """
    assert args.q_offset is not None
    seqlen_q, seqlen_k = args.q.shape[1], args.k.shape[1]
    for b, row in enumerate(args.q_offset.tolist()):
        entry = slice(b, b + 1)
        shift = row - (seqlen_k - seqlen_q)  # what the chunk's own alignment leaves out
        vectors: dict[str, Any] = {
            name: None if t is None else t[entry if t.shape[0] > 1 else slice(None)].clamp(row, row + seqlen_q) - row
            for name, t in zip(("lts", "lte", "uts", "ute"), args.mask.vectors, strict=True)
        }
        dense = args._replace(
            q=args.q[entry],
            k=args.k[entry],
            v=args.v[entry],
            bounds=None,
            left=None if args.left is None else args.left - shift,
            right=None if args.right is None else args.right + shift,
            q_offset=None,
            **vectors,
            **chunk_part(args, entry, row),
        )
        yield Chunk(dense, entry, row, (first_batch + b) // args.q_chunks)


Gradients = tuple[Tensor, ...]  # of q, k, v, sink and bias


def no_bias(args: AttentionArgs, dtype: torch.dtype) -> Tensor:
    """Zeros for the gradient of the call's bias; no elements where none is asked for.

    The few elements of slopes and tables sum so many terms, one after the other, that they need fp64.
    """
    dtype = dtype if args.bias_kind == "tensor" else torch.float64
    bias = args.bias if args.bias_grad else None
    return torch.zeros(0 if bias is None else bias.shape, dtype=dtype, device=args.q.device)


def gradients(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dense: Callable[[AttentionArgs, Tensor, Tensor | None, Tensor, Tensor, int], Gradients],
) -> Gradients:
    """dq, dk, dv and dsink (empty without a sink), and with ``bias_grad`` dbias, in their inputs' dtypes, of any call.

    What sequences share, pages, the sink and a bias, is summed before it is rounded.

    Args:
        dense: the five gradients of a dense call before they are rounded, that of no bias empty; its last argument is the
            number of the call's first batch entry.
    """
    if args.cu_seqlens_q is None:
        return _rounded(args, dense(args, dout, dlse, out, lse, 0))
    wide = torch.promote_types(args.q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (args.q, args.k, args.v))
    dsink = torch.zeros(0 if args.sink is None else args.sink.shape, dtype=wide, device=args.q.device)
    dbias = no_bias(args, wide)
    for n, sequence in enumerate(sequences(args)):
        rows = sequence.queries
        if not sequence.args.q.shape[1]:
            continue
        row_dlse = None if dlse is None else dlse[None, :, rows]
        part = dense(sequence.args, dout[rows][None], row_dlse, out[rows][None], lse[None, :, rows], n)
        dq[rows] = part[0][0]
        for total, gradient in ((dk, part[1][0]), (dv, part[2][0])):
            if sequence.keys is not None:
                total[sequence.keys] += gradient
            else:
                assert sequence.pages is not None
                page_size = total.shape[1]
                slots = (sequence.pages[:, None] * page_size + torch.arange(page_size, device=total.device)).flatten()
                total.flatten(0, 1).index_add_(0, slots[: sequence.keys_used], gradient)
        if args.sink is not None:
            dsink += part[3]
        if args.bias_grad:
            own = sequence_part(dbias, args, n, sequence.args.q.shape[1], sequence.args.k.shape[1])
            own += part[4]
    return _rounded(args, (dq, dk, dv, dsink, dbias))


def _rounded(args: AttentionArgs, wide: Gradients) -> Gradients:
    dq, dk, dv, dsink, dbias = wide
    sink = args.q if args.sink is None else args.sink
    found = (dq.to(args.q.dtype), dk.to(args.k.dtype), dv.to(args.v.dtype), dsink.to(sink.dtype))
    return found if args.bias is None or not args.bias_grad else (*found, dbias.to(args.bias.dtype))


def _clamped(cu: Tensor, total: int) -> list[int]:
    result, last = [], 0
    for value in cu.tolist():
        last = min(max(value, last), total)
        result.append(last)
    return result
