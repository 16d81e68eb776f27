"""The kernel that prepares a column mask: minimum and maximum of each vector over each block of columns, in one launch."""

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

_PLAIN = [
    "lts_ptr", "lte_ptr", "uts_ptr", "ute_ptr", "blocks", "seqlen_q", "seqlen_k", "left", "right", "offset_ptr", "heads",
    "batches",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def bounds_kernel(
    lts_ptr, lte_ptr, uts_ptr, ute_ptr, bounds_ptr, blocks, seqlen_q, seqlen_k, left, right, offset_ptr, heads, batches
):
    """One block of one (batch, head): int32 (blocks, 8), as warploom.masks.tiles.column_bounds defines them.

    With an offset for each batch entry, of its rows; `heads` and `batches` are the vectors' then, of one batch or all.
    """
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    offset = load_offset(offset_ptr, 0 if heads is None else row // heads, True)
    if batches is not None:
        row = tl.where(batches == 1, row % heads, row)
    # Columns past the end repeat the last one, which changes no extremum.
    cols = tl.minimum(pid % blocks * BOUND_BLOCK + tl.arange(0, BOUND_BLOCK), seqlen_k - 1)
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
    out = bounds_ptr + pid.to(tl.int64) * 8
    tl.store(out, tl.min(lts, 0))
    tl.store(out + 1, tl.max(lts, 0))
    tl.store(out + 2, tl.min(lte, 0))
    tl.store(out + 3, tl.max(lte, 0))
    tl.store(out + 4, tl.min(uts, 0))
    tl.store(out + 5, tl.max(uts, 0))
    tl.store(out + 6, tl.min(ute, 0))
    tl.store(out + 7, tl.max(ute, 0))
