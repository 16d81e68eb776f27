"""The kernels that prepare a column mask: minimum and maximum of each vector over each block of columns, in one launch.

One for dense calls, one for packed sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.columns import (
    BOUND_BLOCK,
    Band,
    Columns,
    load_columns,
    load_offset,
    normalised,
    of_chunk,
    shifted,
)
from warploom.kernels.triton.numerics import clamp
from warploom.kernels.triton.packed import find_tile, span

# Blocks of a coarse one, of 2048 columns: what a warp passes over at one look where they hide all of its rows.
COARSE = tl.constexpr(32)

_PLAIN = [
    "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "blocks", "seqlen_q", "seqlen_k", "left", "right", "offset_ptr", "heads",
    "batches",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def bounds_kernel(
    lts_ptr, lte_ptr, uts_ptr, ute_ptr, bounds_ptr, blocks, seqlen_q, seqlen_k, left, right, offset_ptr, heads, batches
):
    """COARSE blocks of one (batch, head), and the coarse block that they are, as warploom.masks.tiles.column_bounds has them.

    Of int32 `bounds` (…, blocks + coarse blocks, 8), where the coarse ones stand behind all others.
    With an offset for each batch entry, of its rows; `heads` and `batches` are the vectors' then, of one batch or all.
    """
    groups = tl.cdiv(blocks, COARSE)
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    own = bounds_ptr + row * (blocks + groups) * 8
    offset = load_offset(offset_ptr, 0 if heads is None else row // heads, True)
    if batches is not None:
        row = tl.where(batches == 1, row % heads, row)
    # Columns past the end repeat the last one, which changes no extremum.
    block = group * COARSE + tl.arange(0, COARSE)
    cols = tl.minimum(block[:, None] * BOUND_BLOCK + tl.arange(0, BOUND_BLOCK)[None, :], seqlen_k - 1)
    at = row * seqlen_k
    columns = Columns(
        shifted(lts_ptr, at),
        shifted(lte_ptr, at),
        shifted(uts_ptr, at),
        shifted(ute_ptr, at),
    )
    vectors = of_chunk(load_columns(columns, cols), columns, offset, seqlen_q)
    shift = seqlen_k - seqlen_q if offset is None else offset
    lts, lte, uts, ute, _ = normalised(vectors, columns, cols, Band(left, right), seqlen_q, shift)
    fine, coarse = own + block * 8, own + (blocks + group) * 8
    _store(fine, coarse, lts, block < blocks)
    _store(fine + 2, coarse + 2, lte, block < blocks)
    _store(fine + 4, coarse + 4, uts, block < blocks)
    _store(fine + 6, coarse + 6, ute, block < blocks)


_PACKED = [
    "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "cu_q_ptr", "cu_k_ptr", "used_ptr", "sequences", "total_q", "total_k", "left",
    "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_PACKED)
def packed_bounds_kernel(
    lts_ptr, lte_ptr, uts_ptr, ute_ptr, bounds_ptr, cu_q_ptr, cu_k_ptr, used_ptr, sequences, total_q, total_k, left, right
):
    """As ``bounds_kernel``, of one head of packed sequences: a coarse block of one, as `warploom.attention.bounds` places it.

    Blocks begin at a sequence's first key, and none is written that has no key which counts. Starts and lengths are held to
    the call's tokens, so that no contents lead elsewhere.
    """
    fine, groups = total_k // BOUND_BLOCK + sequences, total_k // (COARSE * BOUND_BLOCK) + sequences
    head, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    sequence, begins, start, length = find_tile(group, cu_k_ptr, sequences, total_k, COARSE * BOUND_BLOCK)
    len_q = span(sequence, cu_q_ptr, sequences, total_q)[1]
    if used_ptr is not None:
        length = clamp(tl.load(used_ptr + sequence, mask=sequence < sequences, other=0), 0, length)
    # Past the last sequence there are tokens too, but no blocks.
    if (sequence < sequences) & (begins >= 0) & (begins < length):
        block = begins // BOUND_BLOCK + tl.arange(0, COARSE)
        cols = tl.minimum(block[:, None] * BOUND_BLOCK + tl.arange(0, BOUND_BLOCK)[None, :], length - 1)
        at = head * total_k + start
        columns = Columns(
            shifted(lts_ptr, at),
            shifted(lte_ptr, at),
            shifted(uts_ptr, at),
            shifted(ute_ptr, at),
        )
        vectors = load_columns(columns, cols)
        lts, lte, uts, ute, _ = normalised(vectors, columns, cols, Band(left, right), len_q, length - len_q)
        own = bounds_ptr + head * (fine + groups) * 8
        place = own + (start // BOUND_BLOCK + sequence + block) * 8
        coarse = own + (fine + group) * 8
        inside = block * BOUND_BLOCK < length
        _store(place, coarse, lts, inside)
        _store(place + 2, coarse + 2, lte, inside)
        _store(place + 4, coarse + 4, uts, inside)
        _store(place + 6, coarse + 6, ute, inside)


@triton.jit
def _store(fine, coarse, vector, inside):
    """Minimum and maximum of each row of `vector`, and of all."""
    low, high = tl.min(vector, 1), tl.max(vector, 1)
    tl.store(fine, low, mask=inside)
    tl.store(fine + 1, high, mask=inside)
    tl.store(coarse, tl.min(low, 0))
    tl.store(coarse + 1, tl.max(high, 0))
