"""dQ of the batch entries that share a bias, and the bias's gradient, by one walk along the keys.

A program owns a tile of rows of a head and takes each tile of keys for ENTRIES batch entries one after the other: their
accumulators of dQ stay in registers, and the sum of their dscores is stored once. A pass of its own would multiply queries by
keys, and dO by values, once more.
"""

# ruff: noqa: RUF005 - Triton knows no starred elements of a tuple
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.attention.triton.bias import added, holds_nan, probabilities, shown_only, store_tile, stored, tile_of
from warploom.attention.triton.device import (
    OUT_UNIT,
    Keys,
    Lengths,
    Queries,
    Softmax,
    Tile,
    live_columns,
    load_rows,
    score_factor,
    scores,
    store_rows,
    tile_visible,
)
from warploom.attention.triton.walk import walk
from warploom.kernels.triton.columns import Band, Columns
from warploom.kernels.triton.numerics import INTERPRETED, dot, narrowed

AHEAD = tl.constexpr(4)  # tiles of a bias that are on their way from memory


class SharedBias(NamedTuple):
    """A bias of a head, and its gradient: descriptors of (1, heads, rows, columns)."""

    hides: Any
    box: Any
    gradient: Any
    before: Any  # not None: the gradient holds a sum of other batch entries, to be added to
    ahead: Any  # pointers to rows of the head's, and with `before` to those of the gradient behind them, at column 0


@triton.jit
def _beside(a, b):
    """`a` in fp32, as if made from `b` too: Triton loads ahead no more than what products need."""
    if INTERPRETED:
        return a
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def _shown(ds, given):
    """`ds`, 0 where a bias is -inf: compared anew for each batch entry, as bits kept of it take more instructions."""
    if INTERPRETED:
        return tl.where(given == float("-inf"), 0.0, ds)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.neu.f32 p, $2, 0fFF800000; selp.f32 $0, $1, 0f00000000, p; }", "=f,f,f", [ds, given],
            tl.float32, True, 1,
        )  # fmt: skip


@triton.jit
def _ask(pointers):
    """Have the second-level cache bring what is there."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _step(state, tile, n0, test, KIND: tl.constexpr):
    """One tile of keys of each batch entry."""
    queries, bias = tile.queries, tile.bias
    M: tl.constexpr = queries.rows.shape[0]
    N: tl.constexpr = tile.n.shape[0]
    cols = n0 + tl.arange(0, N)
    # The next tile is asked for behind these products, so all of its way is waited for: half as long from that cache.
    _ask(bias.ahead + tl.minimum(n0 + AHEAD * N, tile.lengths.k - 1))
    given = narrowed(tile_of((bias.box, 0, queries.head), queries.m0, n0, M, N))
    if bias.before is not None:
        total = tile_of((bias.gradient, 0, queries.head), queries.m0, n0, M, N).to(tl.float32)
        given = _beside(given, total)
    else:
        total = tl.zeros([M, N], tl.float32)
    if test:
        given = tl.where(tile_visible(tile, cols, KIND), given, float("-inf"))
    found = ()
    for i in tl.static_range(len(state)):
        batch = tile.lengths.batch + i
        k = tl.reshape(tile.k.boxes.load([batch, n0, tile.head_kv, 0]), (N, tile.k.dims.shape[0]))
        v = tl.reshape(tile.v.boxes.load([batch, n0, tile.head_kv, 0]), (N, tile.v.dims.shape[0]))
        s, bent = scores(dot(queries.q[i], tl.trans(k), None), tile.softmax)
        dp = dot(queries.dout[i], tl.trans(v), None)
        s = added(s, score_factor(tile.softmax), given, tile.careful)
        p = probabilities(s, queries.lse[i][:, None], bias)
        ds = p * (dp - queries.delta[i][:, None])
        if tile.careful is not None:
            ds = tl.where(s == float("-inf"), 0.0, ds)
        elif bias.before is not None:
            # What was there before can be added to once: the first walk stores what the second would.
            ds = _shown(ds, given)
        total += ds
        if tile.softmax.softcap is not None:
            ds = tl.where(s == float("-inf"), 0.0, ds * (1.0 - bent * bent))
        found = found + (dot(ds.to(k.dtype), shown_only(k, s, tile), state[i]),)  # type: ignore[assignment]
    if tile.careful is None or bias.before is None:
        store_tile((bias.gradient, 0, queries.head), total, queries.m0, n0)
    return found


@triton.jit
def _attend(
    state, queries, lengths, k, v, band, softmax, bias, group, N: tl.constexpr, SPLIT: tl.constexpr, CAREFUL: tl.constexpr
):
    """As `warploom.attention.triton.walk.attend`, of the batch entries from `lengths.batch` on."""
    first, last = live_columns(lengths, None, band)
    tile = Tile(
        queries=queries,
        lengths=lengths,
        head_kv=queries.head // group,
        k=k,
        v=v,
        n=tl.arange(0, N),
        first=first,
        last=last,
        pages=None,
        columns=Columns(None, None, None, None),
        has_columns=None,
        band=band,
        softmax=softmax,
        dropout=None,
        bias=bias,
        careful=1 if CAREFUL else None,
    )
    m1 = tl.minimum(queries.m0 + queries.rows.shape[0], lengths.q)
    return walk(_step, state, tile, queries.m0, m1, None, N, SPLIT, False, False)


_PLAIN = [
    "rows_ptr", "bias_ptr", "gradient_ptr", "stride_qb", "stride_qs", "stride_qh", "stride_gb", "stride_gs", "stride_gh",
    "stride_dqb", "stride_dqs", "stride_dqh", "stride_ah", "stride_aq", "first_batch", "tiles", "row_tiles", "seqlen_q",
    "seqlen_k", "heads", "group", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def shared_dq_kernel(
    q_ptr,
    dout_ptr,
    rows_ptr,
    dq_ptr,
    k_boxes,
    v_boxes,
    bias_ptr,
    bias_box,
    gradient_ptr,
    to_box,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    stride_ah,
    stride_aq,
    first_batch,
    tiles,
    row_tiles,
    seqlen_q,
    seqlen_k,
    heads,
    group,
    left,
    right,
    scale,
    softcap,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    DESCENDING: tl.constexpr,
    ROW_TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """dQ of one tile of M queries of one head, of batch entries first_batch to first_batch + ENTRIES, and their dbias.

    k_boxes, v_boxes, bias_box, to_box: descriptors of K, V, the bias (1, heads, seqlen_q, seqlen_k) and its gradient, which is
    contiguous; stride_ah and stride_aq are the bias's. rows_ptr is what `rows_kernel` leaves. BEFORE: the gradient holds the
    sum of the batch entries before first_batch.
    """
    # In one loop with a test, ptxas serialises the products of narrow heads; those of wide ones leave no registers for two.
    SPLIT: tl.constexpr = D <= 64
    pid = tl.program_id(0)
    m0 = (tiles - 1 - pid % tiles) * M
    head = pid // tiles
    head64 = tl.cast(head, tl.int64)
    rows = m0 + tl.arange(0, M)
    inside = rows < seqlen_q
    row = rows.to(tl.int64)
    dims, dims_v = tl.arange(0, D), tl.arange(0, DV)
    live = None if DIM == D else dims < DIM
    live_v = None if DIM_V == DV else dims_v < DIM_V
    q, dout, lse, delta, state = (), (), (), (), ()
    for i in tl.static_range(ENTRIES):
        batch = tl.cast(first_batch + i, tl.int64)
        q_at = q_ptr + (batch * stride_qb + head64 * stride_qh) * UNIT
        g_at = dout_ptr + (batch * stride_gb + head64 * stride_gh) * UNIT
        q_tile = load_rows(q_at + (row * (stride_qs * UNIT))[:, None] + dims[None, :], inside, live, True)
        dout_tile = load_rows(g_at + (row * (stride_gs * UNIT))[:, None] + dims_v[None, :], inside, live_v, True)
        q, dout = q + (q_tile,), dout + (dout_tile,)  # type: ignore[assignment]
        # Row r of (tiles, 2, ROW_TILE).
        at = rows_ptr + (batch * heads + head) * row_tiles * (2 * ROW_TILE) + (rows // ROW_TILE * ROW_TILE + rows)
        lse = lse + (tl.load(at, mask=inside, other=float("inf")),)  # type: ignore[assignment]
        delta = delta + (tl.load(at + ROW_TILE, mask=inside, other=0.0),)  # type: ignore[assignment]
        state = state + (tl.zeros([M, D], tl.float32),)  # type: ignore[assignment]
    queries = Queries(q, dout, lse, delta, m0, rows, head, None)
    lengths = Lengths(first_batch, seqlen_q, seqlen_k, 0, 0)
    k, v = Keys(k_boxes, None, None, None, dims, live), Keys(v_boxes, None, None, None, dims_v, live_v)
    softmax = Softmax(scale, softcap, 1 if DESCENDING else None)
    both = tl.arange(0, 2 * M if BEFORE else M)
    last = tl.minimum(m0 + both % M, seqlen_q - 1).to(tl.int64)
    ahead = bias_ptr + (head64 * stride_ah + last * stride_aq) * OUT_UNIT
    if BEFORE:
        ahead = tl.where(both < M, ahead, gradient_ptr + (head64 * seqlen_q + last) * seqlen_k)
    bias = SharedBias(1, bias_box, to_box, 1 if BEFORE else None, ahead)
    found = _attend(state, queries, lengths, k, v, Band(left, right), softmax, bias, group, N, SPLIT, False)
    nan = 0
    for i in tl.static_range(ENTRIES):
        nan |= holds_nan(found[i]).to(tl.int32)
    if nan != 0:
        stored()
        found = _attend(state, queries, lengths, k, v, Band(left, right), softmax, bias, group, N, False, True)
    for i in tl.static_range(ENTRIES):
        dq_at = dq_ptr + (tl.cast(first_batch + i, tl.int64) * stride_dqb + head64 * stride_dqh) * OUT_UNIT
        store_rows(dq_at + (row * (stride_dqs * OUT_UNIT))[:, None] + dims[None, :], found[i] * scale, inside, live)
