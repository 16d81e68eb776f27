"""A bias on the device: its values, added to a tile of scores, and where a tile's gradient goes.

Scores are in log2 units here, see `device`. A tile's rows and columns are m0 + m and n0 + n of the sequence, m and n of shapes
that broadcast to the tile's: a backward kernel's tile has its keys first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import INTERPRETED, LOG2E, clamp, in_log2, narrowed


class Bias(NamedTuple):
    """The bias of one batch entry and query head; all None where a call has none. Kernels make it, see `device`."""

    given: Any
    hides: Any  # None where no value is -inf: of slopes
    first: Any  # pointer to the first of a tensor's or a table's; a slope in log2 units
    row: Any  # elements from a row to the next; None: one row for all
    column: Any  # likewise of columns
    rows: Any  # how many there are; None: distances are read
    columns: Any  # likewise; a table's entries
    origin: Any  # added to distances
    gradient: Any  # where tiles are stored: pointer to the first element or, with `gradient_row` None, as `box` is
    gradient_row: Any
    sums: Any  # a backward kernel's state has sums of rows, or of columns
    box: Any  # how the copy engine reads a tensor's tiles: `box_of`


@triton.jit
def bias_values(values, stride_b, stride_h, batch, head, inside, KIND: tl.constexpr, UNIT: tl.constexpr):
    """`Bias.first` of a batch entry and head, both int64; slopes are not read where not `inside`.

    UNIT: strides but that of columns and the number of columns count in so many elements, columns are contiguous; 0: elements.
    """
    if KIND == "alibi":
        return tl.load(values + (batch * stride_b + head * stride_h), mask=inside, other=0.0) * LOG2E
    elif KIND != "":
        first = values + (batch * stride_b + head * stride_h) * (UNIT if UNIT else 1)
        if UNIT > 1:
            first = tl.multiple_of(first, 16)
        return first


@triton.jit
def in_elements(n, UNIT: tl.constexpr):
    """A number of UNIT elements; None where there is none."""
    if n is not None:
        return n * (UNIT if UNIT else 1)


@triton.jit
def column_stride(stride, UNIT: tl.constexpr):
    """`Bias.column`."""
    if stride is not None:
        return 1 if UNIT else stride


@triton.jit
def box_of(box, stride_b, stride_h, batch, head):
    """`Bias.box` of a batch entry and head, int32: the descriptor, and where they are in it; None: no tiles are read so."""
    if box is not None:
        return box, tl.where(stride_b == 0, 0, batch), tl.where(stride_h == 0, 0, head)


@triton.jit
def _read(pointers):
    """fp32 numbers of a table: into registers at once, where a load would be staged in shared memory, number by number."""
    if INTERPRETED:
        return tl.load(pointers)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def entries_of(first, entry, entries):
    """A table's entries, fp32; those before and behind it are its ends."""
    return _read(first + clamp(entry, 0, entries - 1))


@triton.jit
def tile_of(box, r0, n0, M: tl.constexpr, N: tl.constexpr):
    """A tile (M, N) from row r0 and column n0 on; zeros past the ends."""
    return tl.reshape(box[0].load([box[1], box[2], tl.cast(r0, tl.int32), tl.cast(n0, tl.int32)]), (M, N))


@triton.jit
def store_tile(box, tile, r0, n0):
    """Where `tile_of` would read it; what is past the ends is not written."""
    whole = tl.reshape(tile.to(box[0].dtype), (1, 1, tile.shape[0], tile.shape[1]))
    box[0].store([box[1], box[2], tl.cast(r0, tl.int32), tl.cast(n0, tl.int32)], whole)


@triton.jit
def holds_nan(tile):
    """Whether some element is NaN: what hid from all rows may have been multiplied by zero."""
    return tl.max(tl.max((tile != tile).to(tl.int32), 1), 0) != 0


@triton.jit
def shown_only(keys, s, tile):
    """`keys` (N, dims), where the tile is careful zeros in those that no row of its scores `s` (M, N) sees."""
    if tile.careful is not None:
        inside = (tile.queries.rows < tile.lengths.q)[:, None]
        keys = tl.where((tl.max(tl.where(inside, s, float("-inf")), 0) > float("-inf"))[:, None], keys, 0.0)
    return keys


@triton.jit
def far(bias, m0, n0, m, n, shift):
    """|p - j + origin|, in fp32: lengths below 2^24 are exact."""
    return tl.abs((m + (m0 + (shift - n0) + bias.origin)).to(tl.float32) - n.to(tl.float32))


@triton.jit
def biased(s, factor, bias, m0, n0, m, n, shift, offset, careful):
    """Scores in log2 units, `s` times a factor, with the bias of their elements.

    `offset`: of the rows in the whole sequence, by which a tensor's are counted; None: they are its own. `careful`: as `added`
    has it.
    """
    if bias.hides is None:
        return s * factor - far(bias, m0, n0, m, n, shift) * bias.first
    else:
        if bias.rows is None:
            b = entries_of(bias.first, m + (m0 + (shift - n0) + bias.origin) - n, bias.columns)
        else:
            r0 = m0 if offset is None else m0 + offset
            if bias.box is not None and n.shape[0] == 1:
                b = tile_of(bias.box, r0, n0, m.shape[0], n.shape[1])
            elif bias.box is not None:
                b = tl.trans(tile_of(bias.box, r0, n0, m.shape[1], n.shape[0]))
            elif bias.row is None and bias.column is None:
                b = tl.load(bias.first)
            elif bias.row is None:
                at = bias.first + tl.cast(n0, tl.int64) * bias.column
                b = tl.load(at + n * bias.column, mask=n < bias.columns - n0, other=0.0)
            elif bias.column is None:
                at = bias.first + tl.cast(r0, tl.int64) * bias.row
                b = tl.load(at + m * bias.row, mask=m < bias.rows - r0, other=0.0)
            else:
                at = bias.first + tl.cast(r0, tl.int64) * bias.row + tl.cast(n0, tl.int64) * bias.column
                inside = (m < bias.rows - r0) & (n < bias.columns - n0)
                b = tl.load(at + (m * bias.row + n * bias.column), mask=inside, other=0.0)
            b = narrowed(b)
        return added(s, factor, b, careful)


@triton.jit
def stored():
    """Wait for the tiles that the copy engine has been given: it keeps no order between those of one place."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()


@triton.jit
def added(s, factor, b, careful):
    """Scores `s` times a factor and a tile of a bias in fp32, in log2 units; -inf where that is -inf.

    There NaN stays NaN unless `careful` is given: two instructions an element less, for who looks for NaN in what it sums.
    """
    if INTERPRETED:
        found = s * factor + tl.where(b == float("-inf"), b, in_log2(b))
    else:
        # Towards zero, so that no finite number becomes -inf.
        scaled = tl.inline_asm_elementwise("mul.rz.f32 $0, $1, 0f3FB8AA3B;", "=f,f", [b], tl.float32, True, 1)
        found = tl.inline_asm_elementwise("fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [s, factor, scaled], tl.float32, True, 1)
    if careful is not None:
        found = tl.where(b == float("-inf"), float("-inf"), found)
    return found


@triton.jit
def probabilities(s, lse2, bias):
    """exp2(s - lse2), at most 1: a row of huge scores has an lse that fp32 rounds by more than its sum is worth."""
    if bias.hides is None:
        return tl.exp2(s - lse2)
    else:
        return tl.exp2(tl.minimum(s - lse2, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def store_gradient(ds, bias, m0, n0, m, n, offset):
    """A tile's gradient in the bias's dtype; its elements past the sequence's end are zeros, those past the bias's are none."""
    r0 = m0 if offset is None else m0 + offset
    if bias.gradient_row is None:
        store_tile(bias.gradient, ds, r0, n0)
    else:
        at = bias.gradient + tl.cast(r0, tl.int64) * bias.gradient_row + tl.cast(n0, tl.int64)
        inside = (m < bias.rows - r0) & (n < bias.columns - n0)
        tl.store(at + (m * bias.gradient_row + n), ds.to(bias.gradient.dtype.element_ty), mask=inside)
