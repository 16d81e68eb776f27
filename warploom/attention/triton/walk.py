"""The way of a query tile along the keys, shared by the forward and the dQ kernel.

`walk` calls a step for every tile of N keys that is not hidden. A step takes (state, tile, n0, test, KIND): KIND says
whether its elements need a test (`PARTIAL`, `EDGE`), none (`FULL`) or one where `test` is true (`MIXED`), and `EDGE`
that some of its columns must not be read or count as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.attention.triton.device import (
    EDGE,
    FULL,
    PARTIAL,
    Keys,
    Pages,
    Tile,
    band_columns,
    classify,
    live_columns,
    shift_of,
)
from warploom.kernels.triton.columns import BOUND_BLOCK, Columns, shifted
from warploom.kernels.triton.numerics import clamp

MIXED = tl.constexpr(4)

# Blocks of columns classified at once, and row tiles looked over: 32k keys in one go, one or two a thread.
CHUNK = tl.constexpr(512)
WORD = tl.constexpr(64)


@triton.jit
def attend(
    step,
    state,
    queries,
    lengths,
    k,
    v,
    mask,
    pages,
    softmax,
    dropout,
    bias,
    group,
    N: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    CAREFUL: tl.constexpr,
    ASCENDING: tl.constexpr,
    APART: tl.constexpr,
):
    """Gather what a query tile meets and walk along it.

    Args:
        step, state: see `walk`.
        queries, lengths: the tile, and the sequence it is of.
        k, v: `Heads`, which `group` query heads share.
        mask, pages, softmax, dropout: those of the call.
        bias: that of the head.
        N: keys of a tile; UNIT, WIDE: see the kernels; SPLIT, ASCENDING, APART: see `walk`.
        CAREFUL: see `Tile`.
    """
    batch = tl.cast(lengths.batch, tl.int64)
    head_kv = tl.cast(queries.head // group, tl.int64)
    # Packed calls have batch strides of 0. In paged ones that of k and v is a page's: the table finds the batch.
    k_batch = batch if pages.table is None else 0
    first_k = tl.cast(lengths.first_k, tl.int64)
    mask_head = tl.cast(queries.head // mask.group, tl.int64)
    mask_at = batch * mask.stride_b + mask_head * mask.stride_h + first_k
    first, last = live_columns(lengths, queries.offset, mask.band)
    n = tl.arange(0, N)
    k_first = k.pointer + (k_batch * k.stride_b + head_kv * k.stride_h + first_k * k.stride_s) * UNIT
    v_first = v.pointer + (k_batch * v.stride_b + head_kv * v.stride_h + first_k * v.stride_s) * UNIT
    k_stride, v_stride = k.stride_s * UNIT, v.stride_s * UNIT
    columns = mask.columns
    tile = Tile(
        queries=queries,
        lengths=lengths,
        head_kv=queries.head // group,
        k=Keys(
            k.boxes, k_first, k_stride, k.stride_b * UNIT, k.dims, k.live, k.scale, k.scale_page, k.scale_token
        ),
        v=Keys(
            v.boxes, v_first, v_stride, v.stride_b * UNIT, v.dims, v.live, v.scale, v.scale_page, v.scale_token
        ),
        n=n.to(tl.int64) if WIDE else n,
        first=first,
        last=last,
        pages=Pages(shifted(pages.table, batch * pages.stride), None, pages.count, pages.size, pages.scattered),
        columns=Columns(
            shifted(columns.lts, mask_at),
            shifted(columns.lte, mask_at),
            shifted(columns.uts, mask_at),
            shifted(columns.ute, mask_at),
        ),
        has_columns=None if columns.lts is None and columns.ute is None else 1,
        band=mask.band,
        softmax=softmax,
        dropout=dropout,
        bias=bias,
        careful=1 if CAREFUL else None,
    )
    bounds = shifted(mask.bounds, batch * mask.bounds_stride_b + mask_head * mask.bounds_stride_h)
    m1 = tl.minimum(queries.m0 + queries.q.shape[0], lengths.q)
    return walk(step, state, tile, queries.m0, m1, bounds, N, SPLIT, ASCENDING, APART)


@triton.jit
def walk(
    step, state, tile, m0, m1, bounds_ptr, N: tl.constexpr, SPLIT: tl.constexpr, ASCENDING: tl.constexpr, APART: tl.constexpr
):
    """Fold every visible tile of keys into `state` for query rows [m0, m1).

    SPLIT walks partial and full tiles in loops of their own; else one loop decides tile by tile. `bounds_ptr` None under
    a column mask: nothing is known about blocks of columns, all are treated as edges.

    ASCENDING takes them by their keys, first to last. A tile that hides a row changes nothing of it, so its result then
    depends on no other row: not on where the tile of queries begins or ends, nor on what is known of the mask.

    APART jumps over a band's loops that have no tile before they begin, so that their products end inside (see `opaque_zeros`).
    """
    shift = shift_of(tile.lengths, tile.queries.offset)
    low, high, full_low, full_high = band_columns(m0, m1, shift, tile.band, tile.lengths.k)
    if tile.has_columns is not None:
        first = low // BOUND_BLOCK
        last = tl.where(low < high, tl.cdiv(high, BOUND_BLOCK), first)
        if bounds_ptr is None:
            # Rare, and its loads depend on the vectors: not worth a pipeline's shared memory.
            for n0 in tl.range(first * BOUND_BLOCK, last * BOUND_BLOCK, N, num_stages=1):
                state = step(state, tile, n0, True, EDGE)
        else:
            for at in range(first // CHUNK * CHUNK, last, CHUNK):
                state = _walk_chunk(step, state, tile, at, first, last, m0, m1, bounds_ptr, N, SPLIT, ASCENDING)
    else:
        first = low // N
        # Both are right, as no key is readable where the band is empty. By the first, ptxas makes the forward pass of head_dim
        # 128 under a causal mask 4 to 8 % faster, and that of 256 a quarter slower.
        if tile.k.dims.shape[0] < 256:
            last = tl.where(low < high, tl.cdiv(high, N), first)
        else:
            last = tl.maximum(tl.cdiv(high, N), first)
        full_first = clamp(tl.cdiv(full_low, N), first, last)
        full_last = clamp(full_high // N, full_first, last)
        tested = last - first - (full_last - full_first)
        before = full_first - first
        if ASCENDING:
            if tile.band.left is not None:  # noqa: SIM102 - known when compiling
                if not APART or first * N < full_first * N:
                    for n0 in tl.range(first * N, full_first * N, N):
                        state = step(state, tile, n0, True, PARTIAL)
            if not APART or full_first * N < full_last * N:
                for n0 in tl.range(full_first * N, full_last * N, N):
                    state = step(state, tile, n0, False, FULL)
            if not APART or full_last * N < last * N:
                for n0 in tl.range(full_last * N, last * N, N):
                    state = step(state, tile, n0, True, PARTIAL)
        elif SPLIT:
            if not APART or tested > 0:
                for i in tl.range(0, tested):
                    n0 = (first + i + tl.where(i < before, 0, full_last - full_first)) * N
                    state = step(state, tile, n0, True, PARTIAL)
            if not APART or full_first * N < full_last * N:
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
def _walk_chunk(
    step, state, tile, at, first, last, m0, m1, bounds_ptr, N: tl.constexpr, SPLIT: tl.constexpr, ASCENDING: tl.constexpr
):
    """The visible blocks of one chunk, WORD at a time: a bit for each in a word of its class, then a loop over the bits.

    Runs of a class would need a loop each, whose pipeline fills anew; words are as many loops however often the classes
    alternate.
    """
    block = at + tl.arange(0, CHUNK)
    inside = (block >= first) & (block < last)
    lengths, shift = tile.lengths, shift_of(tile.lengths, tile.queries.offset)
    kind = classify(bounds_ptr, block, inside, m0, m1, tile.band, lengths.q, lengths.k, shift)
    kind = tl.reshape(kind, (CHUNK // WORD, WORD))
    bit = (tl.full((WORD,), 1, tl.int64) << tl.arange(0, WORD).to(tl.int64))[None, :]
    none = tl.zeros((1, 1), tl.int64)
    # A class's number is two bits, and so a word each; a sum that crosses warps costs more than the logic.
    low = tl.sum(tl.where((kind & 1) != 0, bit, none), 1)
    high = tl.sum(tl.where((kind & 2) != 0, bit, none), 1)
    words = tl.arange(0, CHUNK // WORD)
    for word in range(tl.maximum(first - at, 0) // WORD, tl.cdiv(tl.minimum(last - at, CHUNK), WORD)):
        base = at + word * WORD
        low_bits = tl.sum(tl.where(words == word, low, 0), 0)
        high_bits = tl.sum(tl.where(words == word, high, 0), 0)
        edge_bits = low_bits & high_bits
        partial_bits = low_bits ^ edge_bits
        full_bits = high_bits ^ edge_bits
        if ASCENDING:
            state = _in_order(step, state, tile, base, low_bits | high_bits, edge_bits, N)
        else:
            state = _blocks(step, state, tile, base, edge_bits, edge_bits, N, EDGE)
            # An empty pipeline is filled and drained all the same.
            if SPLIT:
                if partial_bits != 0:
                    state = _blocks(step, state, tile, base, partial_bits, partial_bits, N, PARTIAL)
                if full_bits != 0:
                    state = _blocks(step, state, tile, base, full_bits, none, N, FULL)
            elif (partial_bits | full_bits) != 0:
                state = _blocks(step, state, tile, base, partial_bits | full_bits, partial_bits, N, MIXED)
    return state


@triton.jit
def _in_order(step, state, tile, base, shown, edges, N: tl.constexpr):
    """The blocks that `shown` counts from `base`, lowest first: runs of `edges`, whose loads are not staged, and of others."""
    while shown != 0:
        edge = (shown & -shown & edges) != 0
        others = shown & tl.where(edge, ~edges, edges)
        run = shown & ((others & -others) - 1)  # below the first of the other kind, or all
        if edge:
            state = _blocks(step, state, tile, base, run, run, N, EDGE)
        else:
            state = _blocks(step, state, tile, base, run, run, N, MIXED)
        shown = shown ^ run
    return state


@triton.jit
def _blocks(step, state, tile, base, bits, tested, N: tl.constexpr, KIND: tl.constexpr):
    """The blocks of columns that `bits` counts from `base`, lowest first; those of `tested` need an element test."""
    TILES: tl.constexpr = BOUND_BLOCK // N
    tl.static_assert(TILES > 0)
    # The test's vectors are staged too: with a stage less, what both need lets two programs share a multiprocessor.
    SHORT: tl.constexpr = KIND == PARTIAL and tile.k.boxes is not None
    for i in tl.range(0, _count(bits) * TILES, num_stages=1 if KIND == EDGE else (2 if SHORT else None)):
        low = bits & -bits
        n0 = (base + _exponent(low)) * BOUND_BLOCK
        if TILES == 1:
            bits = bits ^ low
        else:
            n0 += i % TILES * N
            bits = tl.where(i % TILES == TILES - 1, bits ^ low, bits)
        if KIND == MIXED:
            state = step(state, tile, n0, (tested & low) != 0, KIND)
        else:
            state = step(state, tile, n0, KIND != FULL, KIND)
    return state


@triton.jit
def _count(bits):
    """How many bits of an int64 are set; shifts are arithmetic, and the masks drop what they draw in."""
    pairs = bits - ((bits >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    bytes = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    sums = bytes + (bytes >> 8)
    sums = sums + (sums >> 16)
    sums = sums + (sums >> 32)
    return (sums & 0x7F).to(tl.int32)


@triton.jit
def _exponent(power):
    """n of an int64 2^n, 63 for the negative one."""
    return ((power.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
