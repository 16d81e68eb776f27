"""Tiled attention on the CPU: skips what the mask hides, runs torch's own kernels on what it shows.

A plan covers the visible elements by rectangles (masks/rectangles.py). Each rectangle is one call of torch's CPU
flash kernel, or of the tile arithmetic below for what that kernel lacks (softcap, dropout, unequal head dims, a bias
that is no finite tensor, gradients of a bias and through lse). Partial results merge by log-sum-exp in fp32; the
backward of a rectangle needs only the merged out and lse (FlashAttention-2, arXiv 2307.08691, section 3). Extra memory
is O(seqlen), beyond that of a copy of a bias tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from warploom.attention import philox
from warploom.attention.bias_terms import add_chunk_gradient, add_gradient, terms
from warploom.attention.packing import Gradients, alone, chunks, entries, gradients, no_bias, sequences
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import StatsBackend
from warploom.masks.rectangles import BLOCK_COLS, BLOCK_ROWS, Rectangle, covers, single
from warploom.masks.visible import visible

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Columns of one step of the tile arithmetic: its score tile stays within a core's L2.
_ARITHMETIC_COLS = 512


def _readable(args: AttentionArgs) -> AttentionArgs:
    """The call with copies of what torch's flash kernel misreads: tensors with a stride of 1 in a dimension before the last."""
    q, k, v = (t.clone(memory_format=torch.contiguous_format) if _misread(t) else t for t in (args.q, args.k, args.v))
    return args._replace(q=q, k=k, v=v)


def _misread(t: Tensor) -> bool:
    return 1 in [stride for size, stride in zip(t.shape[:-1], t.stride(), strict=False) if size > 1]


@dataclass(frozen=True)
class _Part:
    """A slice of the call that shares one mask: its batch entries and query heads, and the plan."""

    batches: slice
    heads: slice  # of q
    heads_kv: slice
    mask_batch: int
    mask_head: int
    batch_index: Tensor  # int64, the entries' numbers in the whole call: dropout is keyed by them
    first_row: int  # of the call's queries in the sequence: dropout is keyed by rows too
    plan: list[Rectangle]


def _parts(args: AttentionArgs, first_batch: int, first_row: int) -> Iterator[_Part]:
    """One part for each (batch, head) of the mask vectors that differs."""
    batch, seqlen_q, heads_q = args.q.shape[:3]
    seqlen_k, heads_kv = args.k.shape[1:3]
    vectors = [t for t in (args.lts, args.lte, args.uts, args.ute) if t is not None]
    mask_batches = 1 if all(_same_along(t, 0) for t in vectors) else batch
    widths = {t.shape[1] for t in vectors if not _same_along(t, 1)}
    mask_heads = max(widths, default=1)
    per_head = heads_q // mask_heads
    group = heads_q // heads_kv
    plans = iter(covers(args.mask, mask_batches, mask_heads, seqlen_q, seqlen_k))
    for b in range(mask_batches):
        batches = slice(None) if mask_batches == 1 else slice(b, b + 1)
        for h in range(mask_heads):
            kv = slice(h * per_head // group, -(-(h + 1) * per_head // group))
            yield _Part(
                batches=batches,
                heads=slice(h * per_head, (h + 1) * per_head),
                heads_kv=kv,
                mask_batch=b,
                mask_head=h,
                batch_index=torch.arange(first_batch, first_batch + batch)[batches],
                first_row=first_row,
                plan=next(plans),
            )


def _same_along(t: Tensor, dim: int) -> bool:
    return t.shape[dim] == 1 or bool((t == t.narrow(dim, 0, 1)).all())


class _Tile:
    """One rectangle of one part: the rows and columns it reads and, when masked, its element test.

    Rows and columns without a visible element are left out, so that a NaN hidden from every query is never read.
    """

    def __init__(self, args: AttentionArgs, part: _Part, rectangle: Rectangle) -> None:
        self.causal = rectangle.kind == "causal"
        self.rows: slice | Tensor = slice(rectangle.r0, rectangle.r1)
        self.cols: slice | Tensor = slice(rectangle.c0, rectangle.c1)
        self.row_index = torch.arange(rectangle.r0, rectangle.r1)
        self.col_index = torch.arange(rectangle.c0, rectangle.c1)
        self.seen: Tensor | None = None
        self.empty = False
        if rectangle.kind != "masked":
            return
        offset = args.k.shape[1] - args.q.shape[1]
        mask = single(args.mask, part.mask_batch, part.mask_head)
        seen = visible(mask, self.row_index, self.col_index, offset)[0, 0]
        some_row, some_col = seen.any(1), seen.any(0)
        self.empty = not bool(some_row.any())
        if not bool(some_row.all()):
            self.row_index = self.rows = self.row_index[some_row]
            seen = seen[some_row]
        if not bool(some_col.all()):
            self.col_index = self.cols = self.col_index[some_col]
            seen = seen[:, some_col]
        self.seen = seen

    def shown(self, step: _Step) -> Tensor | None:
        """(rows, cols) of a step that the mask shows; None: all."""
        if self.causal:
            return torch.arange(step.start, step.stop) <= torch.arange(self.row_index.numel())[:, None]
        return None if self.seen is None else self.seen[:, step.start : step.stop]

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask (1, 1, rows, cols) for torch's kernel, or None."""
        if self.seen is None:
            return None
        return torch.zeros(self.seen.shape, dtype=dtype).masked_fill_(~self.seen, float("-inf"))[None, None]


def _take(t: Tensor, part: _Part, heads: slice, index: slice | Tensor) -> Tensor:
    """(batch, heads, rows, dim) view (or gather, where rows were left out) of a (batch, seqlen, heads, dim) tensor."""
    return t[part.batches][:, index][:, :, heads].transpose(1, 2)


def _needs_arithmetic(args: AttentionArgs) -> bool:
    """Whether torch's flash kernel lacks a feature of the call.

    It masks before it scales, so that a scale of 0 or below turns a causal mask's -inf into NaN.
    """
    return bool(args.softcap or args.dropout_p) or args.q.shape[-1] != args.v.shape[-1] or args.scale <= 0


def _forward_dense(args: AttentionArgs, first_batch: int = 0) -> tuple[Tensor, Tensor]:
    if args.q_offset is None:
        return _forward_rows(args, first_batch, 0)
    found = [_forward_rows(chunk.args, chunk.batch, chunk.first_row) for chunk in chunks(args, first_batch)]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _forward_rows(args: AttentionArgs, first_batch: int, first_row: int) -> tuple[Tensor, Tensor]:
    q = args.q
    batch, seqlen_q, heads = q.shape[:3]
    parts = list(_parts(args, first_batch, first_row))
    arithmetic = _needs_arithmetic(args)
    if len(parts) == 1 and _is_whole(parts[0].plan, args) and not arithmetic and args.sink is None:
        tile = _Tile(args, parts[0], parts[0].plan[0])
        out, lse = _flash_forward(args, parts[0], tile)
        return out.transpose(1, 2).to(q.dtype).contiguous(), lse.contiguous()

    run = _arithmetic_forward if arithmetic else _flash_forward
    merges = any(_rows_overlap(part.plan) for part in parts) or args.sink is not None
    wide = torch.float32 if merges or arithmetic or args.bias is not None else q.dtype
    out = torch.zeros((batch, seqlen_q, heads, args.v.shape[-1]), dtype=wide)
    lse = torch.full((batch, heads, seqlen_q), float("-inf"), dtype=torch.float32)
    for part in parts:
        for tile in _tiles(args, part):
            part_out, part_lse = run(args, part, tile)
            _merge(out, lse, part, tile.rows, part_out, part_lse, merges)
    if args.sink is not None:
        with_sink = torch.logaddexp(lse, args.sink.float()[:, None])
        out *= _weight(lse, with_sink).transpose(1, 2)[..., None]
        lse = with_sink
    return out.to(q.dtype), lse


def _is_whole(plan: list[Rectangle], args: AttentionArgs) -> bool:
    seqlen_q, seqlen_k = args.q.shape[1], args.k.shape[1]
    return len(plan) == 1 and plan[0][:4] == (0, seqlen_q, 0, seqlen_k) and plan[0].kind != "masked"


def _tiles(args: AttentionArgs, part: _Part) -> Iterator[_Tile]:
    for rectangle in part.plan:
        tile = _Tile(args, part, rectangle)
        if not tile.empty:
            yield tile


def _rows_overlap(plan: list[Rectangle]) -> bool:
    spans = sorted((r.r0, r.r1) for r in plan)
    return any(b[0] < a[1] for a, b in pairwise(spans))


def _merge(
    out: Tensor,
    lse: Tensor,
    part: _Part,
    rows: slice | Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    merges: bool,
) -> None:
    """Fold one rectangle's result into out (batch, seqlen, heads, dim) and lse (batch, heads, seqlen)."""
    out_view = out[part.batches][:, :, part.heads].transpose(1, 2)
    lse_view = lse[part.batches][:, part.heads]
    if not merges:
        out_view[:, :, rows], lse_view[:, :, rows] = part_out.to(out.dtype), part_lse
        return
    before = lse_view[:, :, rows]
    after = torch.logaddexp(before, part_lse)
    old = out_view[:, :, rows] * _weight(before, after)[..., None]
    out_view[:, :, rows] = old.addcmul_(part_out.float(), _weight(part_lse, after)[..., None])
    lse_view[:, :, rows] = after


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total), 0 where both are -inf; a NaN stays a NaN."""
    return torch.exp(part - total.masked_fill(total == float("-inf"), 0.0))


def _flash_forward(args: AttentionArgs, part: _Part, tile: _Tile) -> tuple[Tensor, Tensor]:
    q = _take(args.q, part, part.heads, tile.rows)
    k, v = (_take(t, part, part.heads_kv, tile.cols) for t in (args.k, args.v))
    mask, causal = tile.bias(q.dtype), tile.causal
    if args.bias is not None:
        mask, causal = _kernel_bias(args, part, part.heads, tile), False
        if mask is None:
            return _arithmetic_forward(args, part, tile)
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=args.scale)
    if bool((lse == 0.0).any()) and not _bounded(q, k, args.scale):
        # The kernel's lse of a row whose scores are all NaN or -inf, which it takes for a row that sees nothing.
        out, lse = _arithmetic_forward(args, part, tile)
    return out, lse


def _kernel_bias(args: AttentionArgs, part: _Part, heads: slice, tile: _Tile) -> Tensor | None:
    """The bias of a tile, and what its mask hides, as torch's kernel takes it; None where that lacks it.

    So where it would take a matrix that the caller did not bring, or spread a NaN that -inf hides.
    """
    if args.bias is None or args.bias_kind != "tensor":
        return None
    dtype = args.bias.dtype if args.bias.dtype == args.q.dtype else torch.float32
    bias = terms(args, tile.row_index, tile.col_index, 0, dtype, part.batches, heads)
    low, high = torch.aminmax(bias)
    if not (float(low) > -math.inf and float(high) < math.inf):
        return None
    shown = tile.shown(_Step(0, tile.col_index.numel()))
    if shown is not None:
        return bias.masked_fill(~shown, float("-inf")) if bias.shape[2:] == shown.shape else None
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def _bounded(q: Tensor, k: Tensor, scale: float) -> bool:
    """Whether no score of q and k can be NaN or infinite."""
    most = scale * q.shape[-1]
    for t in (q, k):
        low, high = torch.aminmax(t)
        most *= max(-float(low), float(high)) if bool(low == low) else math.inf
    return abs(most) < torch.finfo(torch.float32).max


def _arithmetic_forward(args: AttentionArgs, part: _Part, tile: _Tile) -> tuple[Tensor, Tensor]:
    group = args.q.shape[2] // args.k.shape[2]
    outs, lses = [], []
    for heads, heads_kv in _by_group(part, group):
        q = _take(args.q, part, heads, tile.rows).float()
        out = torch.zeros((*q.shape[:-1], args.v.shape[-1]))
        top = torch.full((*q.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(top)
        for step in _steps(tile):
            k, v = (_take(t, part, heads_kv, step.take(tile.cols)).float() for t in (args.k, args.v))
            added = _added(args, part, heads, tile, step)
            scores, _ = _scores(args, q, k, tile, step, added)
            if added is not None:
                v = added.keys(v)
            before, top = top, torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrunk = _weight(scores, top), _weight(before, top)
            total = total * shrunk + weights.sum(-1, keepdim=True)
            keep = _kept(args, part, heads, tile, step)
            if keep is not None:
                weights = weights * keep
            out = (out * shrunk).add_(weights @ v)
        outs.append(out / total.masked_fill(total == 0.0, 1.0))
        lses.append((top + torch.log(total)).squeeze(-1))
    return torch.cat(outs, 1), torch.cat(lses, 1)


@dataclass(frozen=True)
class _Step:
    """Columns [start, stop) of a tile's column list."""

    start: int
    stop: int

    def take(self, cols: slice | Tensor) -> slice | Tensor:
        if isinstance(cols, slice):
            return slice(cols.start + self.start, cols.start + self.stop)
        return cols[self.start : self.stop]


def _steps(tile: _Tile) -> Iterator[_Step]:
    count = tile.col_index.numel()
    for start in range(0, count, _ARITHMETIC_COLS):
        yield _Step(start, min(start + _ARITHMETIC_COLS, count))


def _by_group(part: _Part, group: int) -> Iterator[tuple[slice, slice]]:
    """(query heads, key head) that share a key head; all heads at once without grouping."""
    if group == 1:
        yield part.heads, part.heads_kv
        return
    for head in range(part.heads_kv.start, part.heads_kv.stop):
        yield (
            slice(max(part.heads.start, head * group), min(part.heads.stop, (head + 1) * group)),
            slice(head, head + 1),
        )


@dataclass(frozen=True)
class _Added:
    """The bias of one step of a tile, for some heads, and what it hides there: keys and rows wholly hidden are not read."""

    terms: Tensor  # (batch|1, heads|1, rows|1, cols|1) in fp32
    seen: Tensor | None  # of the mask and the bias together, likewise; None: the bias hides nothing

    def keys(self, t: Tensor) -> Tensor:
        """k or v, (batch, heads_kv, cols, dim), without the keys that the bias hides from all of these rows and heads."""
        if self.seen is None:
            return t
        shown = self.seen.any(-2)
        if t.shape[1] == 1:
            shown = shown.any(1, keepdim=True)
        return t.masked_fill(~shown[..., None], 0.0)

    def queries(self, t: Tensor) -> Tensor:
        """q or dout, (batch, heads, rows, dim), without the rows from which the bias hides all of these keys."""
        return t if self.seen is None else t.masked_fill(~self.seen.any(-1)[..., None], 0.0)


def _added(args: AttentionArgs, part: _Part, heads: slice, tile: _Tile, step: _Step) -> _Added | None:
    if args.bias is None:
        return None
    cols, shift = tile.col_index[step.start : step.stop], args.k.shape[1] - args.q.shape[1]
    found = terms(args, tile.row_index, cols, shift, torch.float32, part.batches, heads)
    seen = found != float("-inf")
    if bool(seen.all()):
        return _Added(found, None)
    shown = tile.shown(step)
    return _Added(found, seen if shown is None else seen & shown)


def _scores(
    args: AttentionArgs, q: Tensor, k: Tensor, tile: _Tile, step: _Step, added: _Added | None
) -> tuple[Tensor, Tensor | None]:
    """Scaled, softcapped, biased and masked scores, and d(softcapped)/d(scaled product) under a softcap."""
    scores = (q @ k.transpose(-1, -2)).mul_(args.scale)
    slope = None
    if args.softcap:
        squashed = torch.tanh(scores / args.softcap)
        scores, slope = args.softcap * squashed, 1.0 - squashed * squashed
    shown = tile.shown(step)
    if added is not None:
        scores = scores + added.terms
        shown = shown if added.seen is None else added.seen
    return scores if shown is None else scores.masked_fill(~shown, float("-inf")), slope


def _kept(args: AttentionArgs, part: _Part, heads: slice, tile: _Tile, step: _Step) -> Tensor | None:
    """`philox.keep_scale` where dropout keeps an element, else 0; None without dropout."""
    if not args.dropout_p:
        return None
    assert args.dropout_seed is not None
    heads_index = torch.arange(heads.start, heads.stop)
    cols = tile.col_index[step.start : step.stop]
    rows = part.first_row + tile.row_index
    seed, first = philox.split_seed(args.dropout_seed)
    keep = philox.keep_mask(seed, args.dropout_p, part.batch_index, heads_index + first, rows, cols)
    return keep.float() * philox.keep_scale(args.dropout_p)


def _backward_dense(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, first_batch: int
) -> Gradients:
    """dq, dk, dv, dsink and dbias in fp32: what sequences share is summed before it is rounded."""
    if args.q_offset is None:
        return _backward_rows(args, dout, dlse, out, lse, first_batch, 0)
    found, dbias = [], no_bias(args, torch.float32)
    for chunk in chunks(args, first_batch):
        at = chunk.entry
        given = (dout[at], None if dlse is None else dlse[at], out[at], lse[at])
        found.append(_backward_rows(chunk.args, *given, chunk.batch, chunk.first_row))
        if args.bias_grad:
            add_chunk_gradient(dbias, args, found[-1][4], chunk.entry, chunk.first_row)
    dq, dk, dv, dsinks = list(zip(*found, strict=True))[:4]
    return torch.cat(dq), torch.cat(dk), torch.cat(dv), torch.stack(dsinks).sum(0), dbias


def _backward_rows(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    first_batch: int,
    first_row: int,
) -> Gradients:
    # In half precision torch's backward kernel sums dk and dv in that precision too; fp32 copies are O(seqlen), keep
    # sums in fp32, and are an order of magnitude faster where the CPU has no half-precision instructions.
    args = args._replace(q=args.q.float(), k=args.k.float(), v=args.v.float())
    dout, out = dout.float(), out.float()
    arithmetic = _needs_arithmetic(args) or dlse is not None or args.bias_grad
    need_delta = arithmetic or args.sink is not None or args.bias is not None
    delta = None
    if need_delta:
        delta = (dout * out).sum(-1).transpose(1, 2)
        if dlse is not None:
            delta = delta - dlse
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32) for t in (args.q, args.k, args.v))
    dbias = no_bias(args, torch.float32)
    for part in _parts(args, first_batch, first_row):
        for tile in _tiles(args, part):
            mask, lacks = tile.bias(args.q.dtype), arithmetic
            if args.bias is not None and not arithmetic:
                mask = _kernel_bias(args, part, part.heads, tile)
                lacks = mask is None
            if lacks:
                assert delta is not None
                _arithmetic_backward(args, part, tile, dout, delta, lse, (dq, dk, dv, dbias))
            else:
                _flash_backward_tile(args, part, tile, mask, dout, out, lse, (dq, dk, dv))
    dsink = torch.zeros(0)
    if args.sink is not None:
        assert delta is not None
        share = torch.exp(args.sink.float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
        dsink = (-share * delta).sum((0, 2))
    return dq, dk, dv, dsink, dbias


def _add(total: Tensor, part: _Part, heads: slice, index: slice | Tensor, gradient: Tensor) -> None:
    """total[batches, index, heads] += gradient (batch, heads, rows, dim); index holds no row twice."""
    view = total[part.batches][:, :, heads].transpose(1, 2)
    if isinstance(index, slice):
        view[:, :, index] += gradient
    else:
        view.index_add_(2, index, gradient.to(view.dtype))


def _flash_backward_tile(
    args: AttentionArgs,
    part: _Part,
    tile: _Tile,
    mask: Tensor | None,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    totals: tuple[Tensor, Tensor, Tensor],
) -> None:
    causal = tile.causal and args.bias is None
    for heads, heads_kv in _by_group(part, args.q.shape[2] // args.k.shape[2]):
        q, do, o = (_take(t, part, heads, tile.rows) for t in (args.q, dout, out))
        k, v = (_take(t, part, heads_kv, tile.cols).expand(-1, q.shape[1], -1, -1) for t in (args.k, args.v))
        tile_lse = lse[part.batches][:, heads][:, :, tile.rows]
        bias = mask
        if mask is not None and mask.shape[1] > 1:
            bias = mask[:, heads.start - part.heads.start : heads.stop - part.heads.start]
        dq, dk, dv = _flash_backward(do, q, k, v, o, tile_lse, 0.0, causal, attn_mask=bias, scale=args.scale)
        if heads_kv.stop - heads_kv.start < q.shape[1]:
            dk, dv = dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)
        _add(totals[0], part, heads, tile.rows, dq)
        _add(totals[1], part, heads_kv, tile.cols, dk)
        _add(totals[2], part, heads_kv, tile.cols, dv)


def _arithmetic_backward(
    args: AttentionArgs,
    part: _Part,
    tile: _Tile,
    dout: Tensor,
    delta: Tensor,
    lse: Tensor,
    totals: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """P = exp(S - lse), dV = Pᵀ dO, dS = P∘(dP - delta), dQ = dS·K, dK = dSᵀ·Q on one tile, column step by step."""
    for heads, heads_kv in _by_group(part, args.q.shape[2] // args.k.shape[2]):
        all_q, all_do = (_take(t, part, heads, tile.rows).float() for t in (args.q, dout))
        row_lse, row_delta = (t[part.batches][:, heads][:, :, tile.rows][..., None] for t in (lse, delta))
        row_lse = row_lse.masked_fill(row_lse == float("-inf"), 0.0)
        for step in _steps(tile):
            cols = step.take(tile.cols)
            k, v = (_take(t, part, heads_kv, cols).float() for t in (args.k, args.v))
            added, q, do = _added(args, part, heads, tile, step), all_q, all_do
            if added is not None:
                k, v, q, do = added.keys(k), added.keys(v), added.queries(q), added.queries(do)
            scores, slope = _scores(args, q, k, tile, step, added)
            weights = torch.exp(scores - row_lse)
            keep = _kept(args, part, heads, tile, step)
            dweights = do @ v.transpose(-1, -2)
            dropped = weights
            if keep is not None:
                dropped, dweights = weights * keep, dweights * keep
            dscores = weights * (dweights - row_delta)
            if added is not None:
                dscores = dscores.masked_fill(scores == float("-inf"), 0.0)
            if args.bias_grad:
                index, shift = tile.col_index[step.start : step.stop], args.k.shape[1] - args.q.shape[1]
                add_gradient(totals[3], args, dscores, tile.row_index, index, shift, part.batches, heads)
            if slope is not None:
                dscores = dscores * slope
            dscores = dscores * args.scale
            dk, dv = dscores.transpose(-1, -2) @ q, dropped.transpose(-1, -2) @ do
            if heads_kv.stop - heads_kv.start < q.shape[1]:
                dk, dv = dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)
            _add(totals[0], part, heads, tile.rows, dscores @ k)
            _add(totals[1], part, heads_kv, cols, dk)
            _add(totals[2], part, heads_kv, cols, dv)


def _stats_dense(args: AttentionArgs, lse: Tensor | None, max_logits: bool) -> tuple[Tensor | None, Tensor | None]:
    """Max logits, if asked for, and column sums, given lse, of a dense call, column step by step."""
    batch, _, heads_q, _ = args.q.shape
    largest = torch.full((batch, heads_q), float("-inf")) if max_logits else None
    sums = None if lse is None else torch.zeros((batch, heads_q, args.k.shape[1]))
    for part in _parts(args, 0, 0):
        for tile in _tiles(args, part):
            for heads, heads_kv in _by_group(part, heads_q // args.k.shape[2]):
                all_q = _take(args.q, part, heads, tile.rows).float()
                for step in _steps(tile):
                    k, q = _take(args.k, part, heads_kv, step.take(tile.cols)).float(), all_q
                    added = _added(args, part, heads, tile, step)
                    if added is not None:
                        k, q = added.keys(k), added.queries(q)
                    scores, _ = _scores(args, q, k, tile, step, added)
                    if largest is not None:
                        view = largest[part.batches, heads]
                        view.copy_(torch.maximum(view, scores.amax((-2, -1))))
                    if sums is not None and lse is not None:
                        row_lse = lse[part.batches][:, heads][:, :, tile.rows][..., None]
                        # At most 1: an lse of huge scores is rounded by more than its sum is worth.
                        weights = torch.exp((scores - row_lse).clamp(max=0.0))
                        # What is hidden weighs nothing, whatever the row's lse.
                        weights = weights.masked_fill(scores == float("-inf"), 0.0).sum(-2)
                        sums[part.batches, heads].index_add_(2, tile.col_index[step.start : step.stop], weights)
    return largest, sums


class Cpu(StatsBackend):
    """Every call on CPU tensors but those in float64."""

    name = "cpu"
    device = "cpu"

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cpu":
            return f"runs on CPU tensors, not on {problem.device}"
        if problem.dtype == torch.float64:
            return "accumulates in fp32; float64 runs on the reference"
        return None

    def describe(self, problem: AttentionProblem) -> str:
        return "batch-invariant: each sequence by itself, in memory of its own" if problem.batch_invariant else ""

    def tiles(self, args: AttentionArgs) -> tuple[tuple[int, int], int]:
        return (BLOCK_ROWS, BLOCK_COLS), BLOCK_COLS

    def forward(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
        q = args.q
        if args.cu_seqlens_q is None and args.batch_invariant:
            found = [_forward_dense(alone(entry), n) for n, entry in enumerate(entries(args))]
            return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
        # Keys of FP8 become fp32 as they leave their pages, and torch's kernel takes one dtype.
        args = _readable(args) if args.k_scale is None else args._replace(q=q.float().contiguous())
        if args.cu_seqlens_q is None:
            return _forward_dense(args)
        out = q.new_zeros((*q.shape[:-1], args.v.shape[-1]))
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
        for n, sequence in enumerate(sequences(args)):
            if sequence.args.q.shape[1]:
                # Keys lie as they did in pages of FP8, which were no copies.
                dense = alone(sequence.args) if args.batch_invariant else _readable(sequence.args)
                part_out, part_lse = _forward_dense(dense, n)
                out[sequence.queries], lse[:, sequence.queries] = part_out[0], part_lse[0]
        return out, lse

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> Gradients:
        """dq, dk, dv, dsink (empty without a sink) and a bias's gradient in the dtypes of what they are of."""
        args = _readable(args)
        return gradients(args, dout, dlse, out, lse, _backward_dense)

    def stats(
        self, args: AttentionArgs, lse: Tensor | None, max_logits: bool, column_sums: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both from one more walk over the visible tiles, in fp32."""
        lse = lse if column_sums else None
        if args.cu_seqlens_q is None:
            return _stats_dense(args, lse, max_logits)
        heads = args.q.shape[1]
        sums = None if lse is None else torch.zeros((heads, args.k.shape[0]))
        largest = [torch.empty((0, heads))]
        for sequence in sequences(args):
            if not (sequence.args.q.shape[1] and sequence.args.k.shape[1]):
                largest.append(torch.full((1, heads), float("-inf")))
                continue
            part = _stats_dense(sequence.args, None if lse is None else lse[None, :, sequence.queries], max_logits)
            if part[0] is not None:
                largest.append(part[0])
            if sums is not None and part[1] is not None:
                assert sequence.keys is not None
                sums[:, sequence.keys] = part[1][0]
        return torch.cat(largest) if max_logits else None, sums


BACKEND = Cpu()
