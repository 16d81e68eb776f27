"""The way of a query tile along the keys, shared by the forward and the dQ kernel.

`walk` calls a step for every tile of N keys that is not hidden. A step takes (state, tile, n0, test, KIND): KIND says
whether its elements need a test (`PARTIAL`, `EDGE`), none (`FULL`) or one where `test` is true (`MIXED`), and `EDGE`
that some of its columns must not be read or count as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.attention.triton.device import (
    BOUND_BLOCK,
    EDGE,
    FULL,
    HIDDEN,
    PARTIAL,
    Band,
    Columns,
    Dropout,
    Pages,
    Softmax,
    Tile,
    band_columns,
    clamp,
    classify,
    live_columns,
)

MIXED = tl.constexpr(4)

# Blocks of columns classified at once, and row tiles looked over: 32k keys in one go, one or two a thread.
CHUNK = tl.constexpr(512)


@triton.jit
def attend(
    step,
    state,
    q,
    dout,
    lse,
    delta,
    m0,
    rows,
    head,
    lengths,
    k_ptr,
    v_ptr,
    lts_ptr,
    lte_ptr,
    uts_ptr,
    ute_ptr,
    bounds_ptr,
    seed_ptr,
    table_ptr,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_mb,
    stride_mh,
    stride_bb,
    stride_bh,
    stride_table,
    group,
    mask_group,
    pages,
    page_size,
    left,
    right,
    scale,
    softcap,
    threshold,
    keep_scale,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    DESCENDING: tl.constexpr,
    SCATTERED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Gather what a query tile meets and walk along it; the arguments are the kernels'."""
    batch = tl.cast(lengths.batch, tl.int64)
    head_kv = tl.cast(head // group, tl.int64)
    # Packed calls have batch strides of 0. In paged ones that of k and v is a page's: the table finds the batch.
    k_batch = batch if table_ptr is None else 0
    first_k = tl.cast(lengths.first_k, tl.int64)
    mask_head = tl.cast(head // mask_group, tl.int64)
    mask_at = batch * stride_mb + mask_head * stride_mh + first_k
    band = Band(left, right)
    first, last = live_columns(lengths.k - lengths.q, band, lengths.k)
    n = tl.arange(0, N)
    dims = tl.arange(0, D)
    dims_v = tl.arange(0, DV)
    tile = Tile(
        q=q,
        dout=dout,
        lse=lse,
        delta=delta,
        m0=m0,
        rows=rows,
        k=k_ptr + (k_batch * stride_kb + head_kv * stride_kh + first_k * stride_ks) * UNIT,
        v=v_ptr + (k_batch * stride_vb + head_kv * stride_vh + first_k * stride_vs) * UNIT,
        stride_k=stride_ks * UNIT,
        stride_v=stride_vs * UNIT,
        page_k=stride_kb * UNIT,
        page_v=stride_vb * UNIT,
        n=n.to(tl.int64) if WIDE else n,
        dims=dims,
        dims_v=dims_v,
        live=None if DIM == D else dims < DIM,
        live_v=None if DIM_V == DV else dims_v < DIM_V,
        first=first,
        last=last,
        pages=Pages(
            None if table_ptr is None else table_ptr + batch * stride_table,
            pages,
            page_size,
            1 if SCATTERED else None,
        ),
        columns=Columns(
            None if lts_ptr is None else lts_ptr + mask_at,
            None if lte_ptr is None else lte_ptr + mask_at,
            None if uts_ptr is None else uts_ptr + mask_at,
            None if ute_ptr is None else ute_ptr + mask_at,
        ),
        has_columns=None if lts_ptr is None and ute_ptr is None else 1,
        band=band,
        softmax=Softmax(scale, softcap, 1 if DESCENDING else None),
        dropout=Dropout(seed_ptr, threshold, head, keep_scale),
        lengths=lengths,
    )
    bounds = None if bounds_ptr is None else bounds_ptr + batch * stride_bb + mask_head * stride_bh
    return walk(step, state, tile, m0, tl.minimum(m0 + q.shape[0], lengths.q), bounds, N, SPLIT)


@triton.jit
def walk(step, state, tile, m0, m1, bounds_ptr, N: tl.constexpr, SPLIT: tl.constexpr):
    """Fold every visible tile of keys into `state` for query rows [m0, m1).

    SPLIT walks partial and full tiles in loops of their own; else one loop decides tile by tile. `bounds_ptr` None under
    a column mask: nothing is known about blocks of columns, all are treated as edges.
    """
    low, high, full_low, full_high = band_columns(m0, m1, tile.lengths.k - tile.lengths.q, tile.band, tile.lengths.k)
    if tile.has_columns is not None:
        first = low // BOUND_BLOCK
        last = tl.cdiv(high, BOUND_BLOCK)
        if bounds_ptr is None:
            state = _tiles(step, state, tile, first, last, N, EDGE)
        else:
            for at in range(first // CHUNK * CHUNK, last, CHUNK):
                state = _walk_chunk(step, state, tile, at, first, last, m0, m1, bounds_ptr, N, SPLIT)
    else:
        first = low // N
        last = tl.maximum(tl.cdiv(high, N), first)
        full_first = clamp(tl.cdiv(full_low, N), first, last)
        full_last = clamp(full_high // N, full_first, last)
        tested = last - first - (full_last - full_first)
        before = full_first - first
        if SPLIT:
            for i in tl.range(0, tested):
                n0 = (first + i + tl.where(i < before, 0, full_last - full_first)) * N
                state = step(state, tile, n0, True, PARTIAL)
            for n0 in tl.range(full_first * N, full_last * N, N):
                state = step(state, tile, n0, False, FULL)
        else:
            # Tested tiles come first: those before the full ones, then those after them.
            for i in tl.range(0, last - first):
                after = first + i + tl.where(i < before, 0, full_last - full_first)
                n0 = tl.where(i < tested, after, full_first + i - tested) * N
                state = step(state, tile, n0, i < tested, MIXED)
    return state


@triton.jit
def _walk_chunk(step, state, tile, at, first, last, m0, m1, bounds_ptr, N: tl.constexpr, SPLIT: tl.constexpr):
    """The blocks of one chunk, in runs: edges, then tested, then full ones, as often as they alternate."""
    block = at + tl.arange(0, CHUNK)
    inside = (block >= first) & (block < last)
    kind = classify(bounds_ptr, block, inside, m0, m1, tile.band, tile.lengths.q, tile.lengths.k)
    end = at + CHUNK
    begin = tl.min(tl.where(kind != HIDDEN, block, end), 0)
    while begin < end:
        tested = tl.min(tl.where((block >= begin) & (kind != EDGE), block, end), 0)
        full = tl.min(tl.where((block >= tested) & (kind != PARTIAL), block, end), 0)
        stop = tl.min(tl.where((block >= full) & (kind != FULL), block, end), 0)
        state = _tiles(step, state, tile, begin, tested, N, EDGE)
        if SPLIT:
            state = _tiles(step, state, tile, tested, full, N, PARTIAL)
            state = _tiles(step, state, tile, full, stop, N, FULL)
        else:
            for n0 in tl.range(tested * BOUND_BLOCK, stop * BOUND_BLOCK, N):
                state = step(state, tile, n0, n0 < full * BOUND_BLOCK, MIXED)
        begin = tl.min(tl.where((block >= stop) & (kind != HIDDEN), block, end), 0)
    return state


@triton.jit
def _tiles(step, state, tile, first, last, N: tl.constexpr, KIND: tl.constexpr):
    """Blocks [first, last) of columns, all of one kind."""
    if KIND == EDGE:
        # Rare, and its loads depend on the vectors: not worth a pipeline's shared memory.
        for n0 in tl.range(first * BOUND_BLOCK, last * BOUND_BLOCK, N, num_stages=1):
            state = step(state, tile, n0, True, KIND)
    else:
        for n0 in tl.range(first * BOUND_BLOCK, last * BOUND_BLOCK, N):
            state = step(state, tile, n0, KIND == PARTIAL, KIND)
    return state
