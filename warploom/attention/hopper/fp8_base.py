"""What the parts of the FP8 forward share: how keys are ordered, scales, packed sequences of keys.

Both products of e4m3 need operands whose neighbours along k lie together. For QKᵀ they do; for PV the keys of V have to, so V
comes with keys contiguous. P leaves QKᵀ in registers whose columns are not those of an 8-bit left operand: thread t of a quad
has columns 2t and 2t + 1 of each eight, and must give keys 4t to 4t + 3 of each sixteen. So the rows of a K tile are permuted
as it is loaded: its first half are keys 0 and 1 of each four, its second half keys 2 and 3. A thread then has four neighbouring
keys of each sixteen, in two pairs of registers, and nothing is exchanged.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.packed import RAGGED

E4M3 = cutlass.Float8E4M3FN
SCALED = 128  # rows that share a scale
QUAD = 4  # neighbouring keys of a thread


class Scales(Fields):
    """The scales of a call: fp32 (batch, blocks, heads), of packed sequences (blocks, heads); strides may be 0."""

    q: Any
    k: Any
    v: Any
    members: Any  # query heads that share a key head


def halved(config: Fp8ForwardConfig, layout: Any, stages: int) -> Any:
    """The shared tiles of K as TMA fills them: (key of two, two of four keys, head_dim, part of a stage).

    Parts are halves of the rows of a box of columns: box after box, tile after tile.
    """
    box = config.boxes[0]
    rows = config.tile_n // 2
    parts = stages * (config.head_dim // box) * 2
    outer = cute.make_layout((2, rows // 2, box, parts), stride=(box, 2 * box, 1, rows * box))
    return cute.make_composed_layout(layout.inner, layout.offset, outer)


def quads(k: Any) -> Any:
    """K (seqlen, head_dim, heads, batch) as (key of four, four keys, head_dim, heads, batch).

    The last four may have up to three keys behind K, which memory must have.
    """
    shape, stride = k.shape, k.stride
    layout = cute.make_layout(
        (QUAD, cute.ceil_div(shape[0], QUAD), *shape[1:]), stride=(stride[0], QUAD * stride[0], *stride[1:])
    )
    return cute.make_tensor(k.iterator, layout)


def ragged_quads(k: Any) -> Any:
    """Packed K (tokens, head_dim, heads) as (key of four, four keys, head_dim, heads, end), as `ragged` has it.

    An end is a sequence's start plus a multiple of four, up to three keys behind its last, and those behind K memory must have.
    """
    step = k.stride[0]
    shape = (QUAD, RAGGED // QUAD, k.shape[1], k.shape[2], k.shape[0] + QUAD)
    layout = cute.make_layout(shape, stride=(step, QUAD * step, k.stride[1], k.stride[2], step))
    return cute.make_tensor(cute.domain_offset((-RAGGED, 0, 0), k).iterator, layout)


def sequence_quads(k: Any, head: Any, start: Any, length: Any) -> Any:
    """(key of four, four keys, head_dim) of a head of the sequence from key ``start`` on, of a tensor of ``ragged_quads``."""
    fours = cute.ceil_div(length, QUAD)
    return cute.domain_offset((0, RAGGED // QUAD - fours, 0), k[None, None, None, head, start + fours * QUAD])


def first_block(start: Any, sequence: Any) -> Any:
    """Which block of 128 rows, of all packed sequences, is the first of a sequence that begins at row ``start``."""
    return start // SCALED + sequence
