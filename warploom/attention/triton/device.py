"""What the forward and backward kernels share: sequences of a packed call, masks, tile loads, scores, dropout.

Legend: M query rows of a tile, N key columns of a tile, `m0` and `n0` their first row and column, both local to the
sequence; `shift` = seqlen_k - seqlen_q, so that row i sits at key position i + shift; of a chunk it is the offset of its rows
in the whole sequence, by which column vectors are shifted where they are loaded. Scores are in units of log2, so
that exp2 needs no multiply. Tensors of a tile hold query rows along dimension 0 and keys along dimension 1, or, where
the name ends in _t, the other way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.columns import BOUND_BLOCK, load_columns, normalised, of_chunk
from warploom.kernels.triton.numerics import LOG2E, capped, clamp
from warploom.kernels.triton.packed import find_tile, span

# Strides of the tensors that these kernels write count in 8 elements: they are contiguous, and head dims multiples of 8.
OUT_UNIT = tl.constexpr(8)

# Classes of tiles, as `walk` relies on: PARTIAL is bit 0, FULL bit 1. EDGE: some column or row is past the end or visible
# to nothing, and may hold NaN.
HIDDEN = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)
EDGE = tl.constexpr(3)


# None in a tuple of the kernels' context means that the call has no such thing; it is known when compiling. (Triton turns
# other constants in an assigned tuple into run-time values.) Kernels make these tuples of flat arguments: Triton 3.6 launches
# no kernel with a tensor descriptor in a tuple, specialises all members of one alike, and takes it apart on the host at every
# launch.


class Lengths(NamedTuple):
    """One sequence: its number (the batch index), lengths and where its tokens begin in packed tensors."""

    batch: Any
    q: Any
    k: Any
    first_q: Any
    first_k: Any


class Heads(NamedTuple):
    """k or v as a kernel gets it, and a row of its tiles: `dims`, of which `live` (None: all) are the head's."""

    pointer: Any
    boxes: Any  # descriptor of the (batch, seqlen, heads, head_dim) tensor, or None
    stride_b: Any  # in units of UNIT elements; of a page where there is a block table
    stride_s: Any
    stride_h: Any
    dims: Any
    live: Any
    scale: Any = None  # pointer to what the e4m3 numbers of this head are multiplied by, or None
    scale_page: Any = None  # strides of scales; None of one that all tokens share
    scale_token: Any = None


class Keys(NamedTuple):
    """The keys or values of one sequence and head."""

    boxes: Any
    first: Any  # pointer to the first one's row
    stride: Any  # elements
    page: Any  # elements between pages
    dims: Any
    live: Any
    scale: Any = None  # as in Heads
    scale_page: Any = None
    scale_token: Any = None


class Mask(NamedTuple):
    """What hides keys: a band, and column vectors with their `bounds`; strides of both by batch and mask head."""

    band: Any
    columns: Any
    stride_b: Any
    stride_h: Any
    bounds: Any
    bounds_stride_b: Any
    bounds_stride_h: Any
    group: Any  # query heads of a mask head


class Extrema(NamedTuple):
    """Minimum and maximum of each column vector over some columns."""

    lts_min: Any
    lts_max: Any
    lte_min: Any
    lte_max: Any
    uts_min: Any
    uts_max: Any
    ute_min: Any
    ute_max: Any


class Pages(NamedTuple):
    """The block table, or a sequence's row of it; `scattered` is None where a tile of keys lies within one page."""

    table: Any
    stride: Any  # of the table's rows
    count: Any
    size: Any
    scattered: Any


class Softmax(NamedTuple):
    """How products become scores, see `scores`; `descending` is None where the scale is positive."""

    scale: Any
    softcap: Any
    descending: Any


class Dropout(NamedTuple):
    """Philox key (None without dropout), `philox.kernel_bound`, query head, `philox.keep_scale`, chunks of a sequence."""

    seed: Any
    threshold: Any
    head: Any
    scale: Any
    chunks: Any  # None where the call has no offsets


class Queries(NamedTuple):
    """A tile of one head's queries."""

    q: Any
    dout: Any  # with lse (in log2 units) and delta: None in the forward pass
    lse: Any
    delta: Any
    m0: Any
    rows: Any
    head: Any
    offset: Any  # of the rows in the whole sequence; None where the call has no offsets


class Tile(NamedTuple):
    """A query tile and what it meets: the keys and values of its head, and the mask."""

    queries: Any
    lengths: Any
    head_kv: Any
    k: Any
    v: Any
    n: Any  # 0 … N-1, int64 where N rows pass 32 bits
    first: Any  # columns [first, last) that the band shows to some row of the sequence
    last: Any
    pages: Any
    columns: Any
    has_columns: Any  # None without a column mask
    band: Any
    softmax: Any
    dropout: Any
    bias: Any
    careful: Any  # not None: what hides from all of the tile's rows must not be multiplied, not even by zero


@triton.jit
def in_turn(pid, tiles, heads, batches, stride_ab):
    """Tile, head and batch entry of a program of a dense call with a bias.

    Two or four batch entries that share the bias read a tile of it one behind the other, so that it comes from memory once.
    """
    turns = tl.where(batches % 4 == 0, 4, tl.where(batches % 2 == 0, 2, 1))
    turns = tl.where(stride_ab == 0, turns, 1)
    at = pid // turns
    return at % tiles, at // tiles % heads, at // tiles // heads * turns + pid % turns


@triton.jit
def used_keys(sequence, length, used_ptr, batches):
    """The length that seqused_k leaves of it."""
    if used_ptr is None:
        return length
    else:
        # Tokens past the last sequence have no entry, and there may be no sequence at all.
        used = tl.load(used_ptr + sequence, mask=sequence < batches, other=0)
        return clamp(used, 0, length)


@triton.jit
def shift_of(lengths, offset):
    """The key position of row 0."""
    if offset is None:
        return lengths.k - lengths.q
    else:
        return offset


@triton.jit
def packed_query_tile(tile, batch, cu_q_ptr, cu_k_ptr, used_ptr, table_ptr, batches, seqlen_q, seqlen_k, M: tl.constexpr):
    """Lengths and first local row of a query tile, the `tile`th of the call where it is packed, else of `batch`.

    m0 lies outside [0, lengths.q) where the slot holds no rows. seqlen_k is the most keys a paged sequence can have.
    """
    if cu_q_ptr is None:
        return Lengths(batch, seqlen_q, seqlen_k, 0, 0), tile * M
    else:
        sequence, m0, first_q, len_q = find_tile(tile, cu_q_ptr, batches, seqlen_q, M)
        if table_ptr is not None:
            first_k = 0
            len_k = tl.where(sequence < batches, seqlen_k, 0)
        elif cu_k_ptr is not None:
            first_k, len_k = span(sequence, cu_k_ptr, batches, seqlen_k)
        else:
            first_k = first_q
            len_k = tl.where(sequence < batches, len_q, 0)
        return Lengths(sequence, len_q, used_keys(sequence, len_k, used_ptr, batches), first_q, first_k), m0


@triton.jit
def readable_columns(tile, cols, KIND: tl.constexpr):
    """Which of a tile's columns may be read: those that some row of the sequence sees."""
    readable = (cols >= tile.first) & (cols < tile.last)
    if KIND == EDGE:
        vectors = load_columns(tile.columns, tl.minimum(cols, tile.lengths.k - 1))
        vectors = of_chunk(vectors, tile.columns, tile.queries.offset, tile.lengths.q)
        shift = shift_of(tile.lengths, tile.queries.offset)
        _, _, _, _, dead = normalised(vectors, tile.columns, cols, tile.band, tile.lengths.q, shift)
        readable = readable & (dead == 0)
    return readable


@triton.jit
def tile_visible(tile, cols, KIND: tl.constexpr):
    """The element test of a tile, (M, N) or what broadcasts to it."""
    offset = tile.queries.offset
    shift = shift_of(tile.lengths, offset)
    rows, keys = tile.queries.rows[:, None], cols[None, :]
    at = tl.minimum(cols, tile.lengths.k - 1) if KIND == EDGE else cols
    lts, lte, uts, ute = of_chunk(load_columns(tile.columns, at), tile.columns, offset, tile.lengths.q)
    vectors = (lts[None, :], lte[None, :], uts[None, :], ute[None, :])
    return visible(rows, keys, vectors, tile.columns, tile.band, shift, tile.lengths.k)


@triton.jit
def score_factor(softmax):
    """What `scores` still has to be multiplied by; 1 where it already holds scores in log2 units."""
    if softmax.softcap is not None or softmax.descending is not None:
        return 1.0
    else:
        return softmax.scale * LOG2E


@triton.jit
def scores(products, softmax):
    """Scores in log2 units over `score_factor`, and tanh of the capped ones for the derivative (else unused)."""
    if softmax.softcap is not None:
        return capped(products, softmax.scale, softmax.softcap)
    elif softmax.descending is not None:
        return products * (softmax.scale * LOG2E), products
    else:
        return products, products


@triton.jit
def load_rows(pointers, inside, live, MASKED: tl.constexpr):
    """A tile (rows, dims); zeros where dims are not `live` and, if MASKED, in rows not `inside`."""
    if MASKED:
        if live is None:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=inside[:, None] & live[None, :], other=0.0)
    else:
        if live is None:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=live[None, :], other=0.0)


@triton.jit
def store_rows(pointers, values, inside, live):
    """Store a tile (rows, dims) in the pointers' dtype, where rows are `inside` and dims `live` (None: all)."""
    values = values.to(pointers.dtype.element_ty)
    if live is None:
        tl.store(pointers, values, mask=inside[:, None])
    else:
        tl.store(pointers, values, mask=inside[:, None] & live[None, :])


@triton.jit
def key_pointers(keys, n0, n, pages, len_k):
    """Pointers to keys n0 + n of a sequence; `n` is int64 where N rows pass 32 bits."""
    if pages.table is None:
        return keys.first + tl.cast(n0, tl.int64) * keys.stride + (n[:, None] * keys.stride + keys.dims[None, :])
    elif pages.scattered is None:
        page = clamp(tl.load(pages.table + n0 // pages.size), 0, pages.count - 1).to(tl.int64)
        start = page * keys.page + tl.cast(n0 % pages.size, tl.int64) * keys.stride
        return keys.first + start + (n[:, None] * keys.stride + keys.dims[None, :])
    else:
        rows = n0 + n
        page = tl.load(pages.table + rows // pages.size, mask=rows < len_k, other=0)
        page = clamp(page, 0, pages.count - 1).to(tl.int64)
        start = page * keys.page + (rows % pages.size).to(tl.int64) * keys.stride
        return keys.first + start[:, None] + keys.dims[None, :]


@triton.jit
def load_keys(keys, tile, n0, readable, EDGES: tl.constexpr, MASKED: tl.constexpr):
    """N keys or values from n0 on, (N, dims), zeros past the end; of EDGES only the readable ones."""
    if keys.boxes is not None and not EDGES:
        box = keys.boxes.load([tile.lengths.batch, n0, tile.head_kv, 0])
        return tl.reshape(box, (tile.n.shape[0], keys.dims.shape[0]))
    else:
        pointers = key_pointers(keys, n0, tile.n, tile.pages, tile.lengths.k)
        return load_rows(pointers, readable, keys.live, MASKED)


@triton.jit
def load_scales(keys, tile, n0, readable):
    """Scales of N keys or values from n0 on, (N,), zeros where they are not readable; one number where tokens share it."""
    if keys.scale_token is None:
        return tl.load(keys.scale)
    else:
        pages, rows = tile.pages, n0 + tile.n
        if pages.scattered is None:
            page = clamp(tl.load(pages.table + n0 // pages.size), 0, pages.count - 1).to(tl.int64)
        else:
            page = tl.load(pages.table + rows // pages.size, mask=rows < tile.lengths.k, other=0)
            page = clamp(page, 0, pages.count - 1).to(tl.int64)
        at = page * keys.scale_page + (rows % pages.size).to(tl.int64) * keys.scale_token
        return tl.load(keys.scale + at, mask=readable, other=0.0)


@triton.jit
def visible(rows, cols, vectors, columns, band, shift, len_k):
    """The element test of warploom.masks.visible on broadcastable rows, cols and vectors; columns past len_k hide.

    `vectors` are those of `load_columns`, of which `columns` says which exist.
    """
    last = len_k - 1
    if band.right is not None:
        last = tl.minimum(rows + (shift + band.right), last)
    seen = cols <= last
    if band.left is not None:
        seen = seen & (cols >= rows + (shift - band.left))
    lts, lte, uts, ute = vectors
    if columns.lts is not None:
        shown = rows < lts
        if columns.lte is not None:
            shown = shown | (rows >= lte)
        seen = seen & shown
    if columns.ute is not None:
        shown = rows >= ute
        if columns.uts is not None:
            shown = shown | (rows < uts)
        seen = seen & shown
    return seen


@triton.jit
def band_columns(m0, m1, shift, band, len_k):
    """Of rows [m0, m1): columns [low, high) that some row sees by the band and [full_low, full_high) that all see."""
    low = 0
    full_low = 0
    high = len_k
    full_high = len_k
    if band.left is not None:
        low = clamp(m0 + shift - band.left, 0, len_k)
        full_low = clamp(m1 - 1 + shift - band.left, 0, len_k)
    if band.right is not None:
        high = clamp(m1 + shift + band.right, 0, len_k)
        full_high = clamp(m0 + shift + band.right + 1, 0, len_k)
    return low, tl.maximum(high, low), full_low, full_high


@triton.jit
def live_columns(lengths, offset, band):
    """Columns [first, past-the-last) that the band shows to some row of the sequence, or of the chunk."""
    first = 0
    last = lengths.k
    if band.left is not None:
        first = clamp(shift_of(lengths, offset) - band.left, 0, lengths.k)
    if band.right is not None:
        end = lengths.k if offset is None else offset + lengths.q
        last = clamp(end + band.right, 0, lengths.k)
    if band.left is not None and band.right is not None:
        last = tl.where(band.left < -band.right, first, last)
    return first, last


@triton.jit
def block_extrema(bounds_ptr, n0, len_k, N: tl.constexpr):
    """Minimum and maximum of lts, lte, uts and ute over the blocks of bounds that columns n0 … n0 + N - 1 touch."""
    at = bounds_ptr + n0 // BOUND_BLOCK * 8
    found = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    more = (tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7))
    lts_min, lts_max, lte_min, lte_max = found
    uts_min, uts_max, ute_min, ute_max = more
    tl.static_assert(N <= 2 * BOUND_BLOCK)
    if N > BOUND_BLOCK:
        # Past the last block, the first one again.
        at += tl.where(n0 + BOUND_BLOCK < len_k, 8, 0)
        lts_min, lts_max = tl.minimum(lts_min, tl.load(at)), tl.maximum(lts_max, tl.load(at + 1))
        lte_min, lte_max = tl.minimum(lte_min, tl.load(at + 2)), tl.maximum(lte_max, tl.load(at + 3))
        uts_min, uts_max = tl.minimum(uts_min, tl.load(at + 4)), tl.maximum(uts_max, tl.load(at + 5))
        ute_min, ute_max = tl.minimum(ute_min, tl.load(at + 6)), tl.maximum(ute_max, tl.load(at + 7))
    return Extrema(lts_min, lts_max, lte_min, lte_max, uts_min, uts_max, ute_min, ute_max)


@triton.jit
def classify(bounds_ptr, block, inside, m0, m1, band, len_q, len_k, shift):
    """Classes of blocks of BOUND_BLOCK columns against rows [m0, m1); see warploom.masks.tiles.classify_row_block."""
    at = bounds_ptr + block * 8
    lts_min = tl.load(at, mask=inside, other=0)
    lts_max = tl.load(at + 1, mask=inside, other=0)
    lte_min = tl.load(at + 2, mask=inside, other=0)
    lte_max = tl.load(at + 3, mask=inside, other=0)
    uts_min = tl.load(at + 4, mask=inside, other=0)
    uts_max = tl.load(at + 5, mask=inside, other=0)
    ute_min = tl.load(at + 6, mask=inside, other=0)
    ute_max = tl.load(at + 7, mask=inside, other=0)
    hidden = ((lts_max <= m0) & (lte_min >= m1)) | ((uts_max <= m0) & (ute_min >= m1))
    hidden = hidden | ((uts_max <= m0) & (ute_min >= lts_max) & (lte_min >= m1))
    hidden = hidden | ((lts_max <= m0) & (lte_min >= uts_max) & (ute_min >= m1))
    touched = ((lte_max > m0) & (lts_min < m1)) | ((ute_max > m0) & (uts_min < m1))
    n0 = block * BOUND_BLOCK
    n1 = n0 + BOUND_BLOCK
    edge = (lts_min == 0) & (lte_max == len_q) & (uts_min == 0) & (ute_max == len_q)
    edge = edge | (n1 > len_k)
    nearest = m0 + shift - (tl.minimum(n1, len_k) - 1)
    farthest = m1 - 1 + shift - n0
    if band.right is not None:
        touched = touched | (nearest < -band.right)
        hidden = hidden | (farthest < -band.right)
    if band.left is not None:
        touched = touched | (farthest > band.left)
        hidden = hidden | (nearest > band.left)
    if band.left is not None and band.right is not None:
        hidden = hidden | (-band.right > band.left)
    shown = tl.where(edge, EDGE, tl.where(touched, PARTIAL, FULL))
    return tl.where(hidden | (inside == 0), HIDDEN, shown)


@triton.jit
def kept(dropout, batch, offset, m0, n0, M: tl.constexpr, N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Which elements of a tile survive dropout, (M, N) or, KEYS_FIRST, (N, M); see warploom.attention.philox.

    One Philox call gives the four words of sixteen neighbouring keys.
    """
    seed = tl.load(dropout.seed).to(tl.uint64)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    head = dropout.head.to(tl.uint32)
    if offset is not None:
        batch = batch // dropout.chunks
        head += tl.load(dropout.seed + 1).to(tl.uint32)  # the whole's number of the first one
        m0 += offset
    rows = m0 + tl.arange(0, M)
    counters = n0 // 16 + tl.arange(0, N // 16)
    if KEYS_FIRST:
        zero = tl.zeros([N // 16, M], tl.uint32)
        c0 = zero + counters.to(tl.uint32)[:, None]
        c1 = zero + rows.to(tl.uint32)[None, :]
    else:
        zero = tl.zeros([M, N // 16], tl.uint32)
        c0 = zero + counters.to(tl.uint32)[None, :]
        c1 = zero + rows.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, zero + head, zero + batch.to(tl.uint32), low, high, 10)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (.., i, j) holds word 2i + j
    bound = (dropout.threshold & 0x7FFF).to(tl.uint32)
    exchanged = ((words & 0xFF00FF) << 8) | ((words >> 8) & 0xFF00FF)
    own = tl.join((words & 0x7FFF) < bound, ((words >> 16) & 0x7FFF) < bound)  # keys 4i + 2j and the next
    later = tl.join((exchanged & 0x7FFF) < bound, ((exchanged >> 16) & 0x7FFF) < bound)  # eight keys further on
    below = tl.join(own, later)
    if KEYS_FIRST:
        below = tl.reshape(tl.permute(below, (0, 5, 2, 3, 4, 1)), (N, M))
    else:
        below = tl.reshape(tl.permute(below, (0, 1, 5, 2, 3, 4)), (M, N))
    return below == (dropout.threshold < 0)
