"""A bias that is read by distance, on the device: spread out once a call, so that a tile's values lie at fixed offsets.

A table has an entry for each distance d = p - j + origin from 0 on; distances beyond its ends count as they. Spread out it has
PAD copies of either end around it and is kept twice, the second time an element on, so that two neighbours are read by one load
wherever they begin. What is kept is the value less that of the far left, which counts as nothing then, in raw scores' units.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.basics import LOG2_E, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import assembly
from warploom.kernels.distances import HEADER, PAD, copy_length, head_length

# The header: what values are less, and what the far right is; then words, 1 where the far left is nothing, where the far right
# is a number, and where values may hide.
BASE, RIGHT, LEFT_FAR, RIGHT_FAR, HIDES = range(5)
SPREAD_THREADS = 1024
NEAR_ZERO = 64.0  # what may be taken off all values: more would round small ones
LARGEST = 1e37  # magnitude of a finite value, which the softmax multiplies


class Distances(Fields):
    """A table as the host passes it, and where it is spread out."""

    table: Any  # fp32 (heads_q, entries), contiguous
    spread: Any  # fp32, flat
    origin: Any  # of distances
    gradient: Any  # fp32 as the table, which sums are added to; or None


def distances_of(bias: Any) -> Distances | None:
    """Of the tuple that the host passes: table, spread values, origin and, where it is asked for, gradient; None of None."""
    if bias is None:
        return None
    table, spread, origin, *gradient = bias
    return Distances(table=table, spread=spread, origin=origin, gradient=gradient[0] if gradient else None)


@dsl_user_op
def some_thread(x: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 if ``x`` is not 0 in some thread of the block."""
    text = "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; barrier.cta.red.or.pred q, 0, p; selp.s32 $0, 1, 0, q; }"
    return Int32(assembly(T.i32(), [Int32(x).ir_value(loc=loc, ip=ip)], text, "=r,r,~{memory}", side_effects=True))


@dsl_user_op
def load_two(address: Int64, offset: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Two fp32 of global memory that nobody writes, loaded where it stands: into registers of a coming wgmma."""
    values = [Int64(address).ir_value(loc=loc, ip=ip)]
    text = f"ld.global.nc.v2.f32 {{$0, $1}}, [$2+{offset}];"
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    parts = assembly(struct, values, text, "=f,=f,l", side_effects=True)
    return [Float32(llvm.extractvalue(T.f32(), parts, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def fetch_ahead(address: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Have 128 bytes of global memory brought to L1."""
    assembly(None, [Int64(address).ir_value(loc=loc, ip=ip)], "prefetch.global.L1 [$0];", "l", side_effects=True)


@cute.jit
def values_at(head, entries, place, own, onward):
    """Address of the values of a thread's first pair.

    ``head``: address of the head's values; ``place`` in them of a tile's first element, which is moved to where all are alike
    if the tile is far; ``own``: from there to the thread's. The values of the tile ``onward`` from it are asked for.
    """
    last, length = PAD + entries + 63, copy_length(entries)
    lane = cute.arch.lane_idx()
    following = cutlass.min(cutlass.max(place + onward, 64), last) - 64 + lane // 2 * 32
    if lane < 16:  # 256 floats of each copy
        fetch_ahead(head + Int64(4 * (following + lane % 2 * length)))
    here = cutlass.min(cutlass.max(place, 64), last) + own
    odd = here & 1
    return head + Int64(4 * (here - odd + odd * length))


@dsl_user_op
def add_to(address: Int64, x: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Add to an fp32 in global memory."""
    values = [Int64(address).ir_value(loc=loc, ip=ip), Float32(x).ir_value(loc=loc, ip=ip)]
    assembly(None, values, "red.relaxed.gpu.global.add.f32 [$0], $1;", "l,f,~{memory}", side_effects=True)


@dsl_user_op
def with_shown(bits: Int32, position: int, x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``bits`` with that bit set unless ``x`` is -inf."""
    text = f"{{ .reg .pred p; setp.neu.f32 p, $2, 0fFF800000; @p or.b32 $0, $0, {1 << position}; }}"
    values = [Int32(bits).ir_value(loc=loc, ip=ip), Float32(x).ir_value(loc=loc, ip=ip)]
    return Int32(assembly(T.i32(), values, text, "=r,0,f"))


@cute.jit
def spread_out(distances, scale, rising):
    """A thread block's head; ``rising``: with the distance, otherwise from the far left on."""
    thread, head = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    _, entries = distances.table.shape
    table = distances.table[head, None]
    length = copy_length(entries)
    into = cute.make_tensor(
        distances.spread.iterator + Int64(head) * head_length(entries), cute.make_layout((HEADER + 2 * length,))
    )
    far_left, far_right = table[entries - 1], table[0]
    base = far_left if (far_left >= -NEAR_ZERO) & (far_left <= NEAR_ZERO) else Float32(0.0)
    factor = 1.0 / scale
    most = LARGEST * cute.arch.fmin(Float32(1.0), factor / LOG2_E)
    hides = Int32(0)
    for at in cutlass.range(thread, length, SPREAD_THREADS, unroll=4):
        entry = cutlass.min(cutlass.max(at - PAD, 0), entries - 1)
        if const_expr(not rising):
            entry = entries - 1 - entry
        value = raw(table[entry], base, factor, most)
        hides = choose(value == -Float32.inf, 1, hides)
        into[HEADER + at] = value
        if at > 0:
            into[HEADER + length + at - 1] = value
    hides = some_thread(hides)
    if thread == 0:
        into[BASE] = base
        into[RIGHT] = raw(far_right, base, factor, most)
        words = cute.recast_tensor(into, Int32)
        words[LEFT_FAR] = Int32(1) if far_left == base else Int32(0)
        words[RIGHT_FAR] = Int32(1) if (far_right > -Float32.inf) & (far_right < Float32.inf) else Int32(0)
        words[HIDES] = hides


@cute.jit
def raw(value, base, factor, most):
    """A value in raw scores' units. Only -inf hides: a finite one stays so."""
    found = (value - base) * factor
    found = most if (found > most) & (value < Float32.inf) else found
    found = -most if (found < -most) & (value > -Float32.inf) else found
    return found
