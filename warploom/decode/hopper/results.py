"""What becomes of a warp's part: merged with those of other warps, of other splits and of other blocks, and stored.

Parts are put together from the first to the last, whichever warp, split or block they come from, by the same instructions.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.decode.hopper.base import Base
from warploom.decode.hopper.config import PAD
from warploom.kernels.cute.barriers import DecodeBarrier, arrive, wait
from warploom.kernels.cute.basics import LOG2_E, WARP
from warploom.kernels.cute.instructions import exp2, pack16, reciprocal, weighted_sum
from warploom.kernels.cute.memory import load_floats
from warploom.kernels.cute.softmax import finite, log_sum_exp, with_sink


class Results(Base):
    """The end of a split, of a sequence and of a cluster's work."""

    def clear(self, work: Any) -> None:
        """Nothing so far."""
        work.acc.fill(0.0)
        work.row_max.fill(-Float32.inf)
        work.row_sum.fill(0.0)

    # Warps of a block

    @cute.jit
    def merge_warps(self, work, shared, row_group, key_group, lane):
        """Of the warps with the same rows the upper half hands over what it has to the lower one, until the first has all."""
        for r in cutlass.range_constexpr(2):
            work.row_sum[r] = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
        half, pairs = self.key_groups // 2, 0
        while const_expr(half > 0):
            to = key_group % half
            pair = pairs + to * self.row_groups + row_group
            at = shared.exchange + (to * self.row_groups + row_group) * self.config.state_floats
            if key_group >= half and key_group < 2 * half:
                wait(DecodeBarrier.TURN, 2 * WARP, pair)
                self.store_state(work, at, lane)
                arrive(DecodeBarrier.HANDED, 2 * WARP, pair)
            if key_group < half:
                arrive(DecodeBarrier.TURN, 2 * WARP, pair)
                wait(DecodeBarrier.HANDED, 2 * WARP, pair)
                self.add_state(work, at, lane, True)
            pairs, half = pairs + half * self.row_groups, half // 2

    @cute.jit
    def add_split(self, work, shared, row_group, key_group, lane, done):
        """Add a split's part to those before it, of which there are ``done``."""
        if key_group == 0:
            at = shared.merged + row_group * self.config.state_floats
            if done > 0:
                self.add_state(work, at, lane, False)
            self.store_state(work, at, lane)

    @cute.jit
    def store_state(self, work, at, lane):
        """A warp's O, maxima and sums into shared memory, each lane's four and four, those of neighbours side by side."""
        four = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(self.dim // 8):
            for c in cutlass.range_constexpr(4):
                four[c] = work.acc[4 * i + c]
            cute.autovec_copy(four, self.lane_four(at, i, lane))
        for r in cutlass.range_constexpr(2):
            four[r], four[2 + r] = work.row_max[r], work.row_sum[r]
        cute.autovec_copy(four, self.lane_four(at, self.dim // 8, lane))

    @cute.jit
    def add_state(self, work, at, lane, after):
        """Put what ``store_state`` stored together with what the warp has; ``after``: as what comes behind that."""
        stats = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(self.lane_four(at, self.dim // 8, lane), stats)
        own, other = [None, None], [None, None]
        for r in cutlass.range_constexpr(2):
            own[r], other[r], new = weights_of(work.row_max[r], stats[r])
            work.row_sum[r] = in_order(after, own[r], work.row_sum[r], other[r], stats[2 + r])
            work.row_max[r] = new
        four = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(self.dim // 8):
            cute.autovec_copy(self.lane_four(at, i, lane), four)
            for c in cutlass.range_constexpr(4):
                work.acc[4 * i + c] = in_order(after, own[c // 2], work.acc[4 * i + c], other[c // 2], four[c])

    def lane_four(self, at: Any, i: int, lane: Any) -> Any:
        """Four floats of a lane."""
        return cute.make_tensor((at + (32 * i + lane) * 4).align(16), cute.make_layout(4))

    @cute.jit
    def finish_alone(self, work, call, place, row_group, key_group, lane, done):
        """The result of a block that has had all splits, which are in its first warps' registers."""
        if key_group == 0:
            if done == 0:
                self.clear(work)
            for r in cutlass.range_constexpr(2):
                row = place.base + row_group * 16 + lane // 4 + 8 * r
                if row < call.members:
                    head, token = self.head_and_token(call, place, row)
                    inverse = self.settle(call, place, head, token, work.row_max[r], work.row_sum[r], lane % 4 == 0)
                    for i in cutlass.range_constexpr(self.dim // 8):
                        pair = [work.acc[4 * i + 2 * r + c] * inverse for c in range(2)]
                        self.store(call, place, head, token, 8 * i + lane % 4 * 2, pair)

    # Blocks of a cluster

    @cute.jit
    def leave_part(self, work, shared, row_group, key_group, lane, done):
        """The part of the block's split behind those ``done``, row by row, for the others of its cluster."""
        pitch = self.dim + PAD
        part = shared.merged + done * self.config.part_floats
        if key_group == 0:
            for r in cutlass.range_constexpr(2):
                row = row_group * 16 + lane // 4 + 8 * r
                start = part + row * pitch
                for i in cutlass.range_constexpr(self.dim // 8):
                    two = cute.make_rmem_tensor(2, Float32)
                    two[0], two[1] = work.acc[4 * i + 2 * r], work.acc[4 * i + 2 * r + 1]
                    into = cute.make_tensor((start + (8 * i + lane % 4 * 2)).align(8), cute.make_layout(2))
                    cute.autovec_copy(two, into)
                if lane % 4 == 0:
                    stats = cute.make_tensor(part + (self.config.rows * pitch + 2 * row), cute.make_layout(2))
                    stats[0], stats[1] = work.row_max[r], work.row_sum[r]

    @cute.jit
    def merge_cluster(self, call, place, shared, warp):
        """Each block puts together some columns of some rows, 32 columns by eight threads, and stores them."""
        config, pitch, blocks = self.config, self.dim + PAD, call.cluster
        thread = warp * WARP + cute.arch.lane_idx()
        lane, chunks = thread % 8, self.dim // 32
        parts, each = config.splits, config.splits // blocks
        _, _, _, _, count = self.cut(call, place.batch)
        present = cutlass.min(call.members - place.base, config.rows)
        for chunk in cutlass.range(thread // 8 * blocks + place.rank, present * chunks, self.threads // 8 * blocks, unroll=1):
            row = chunk // chunks
            column = (chunk - row * chunks) * 32 + lane * 4
            own = shared.merged + (row * pitch + column)
            own_stats = shared.merged + (config.rows * pitch + 2 * row)
            read: list[Any] = [None] * parts
            for s in cutlass.range_constexpr(parts):
                block, at = s // each, s % each * config.part_floats
                read[s] = [*load_floats(own + at, 4, block), *load_floats(own_stats + at, 2, block)]
            acc = cute.make_rmem_tensor(4, Float32)
            acc.fill(0.0)
            top, total = -Float32.inf, Float32(0.0)
            if count > 0:
                for c in cutlass.range_constexpr(4):
                    acc[c] = read[0][c]
                top, total = read[0][4], read[0][5]
            for s in cutlass.range_constexpr(1, parts):
                if s < count:
                    mine, other, top = weights_of(top, read[s][4])
                    total = weighted_sum(mine, total, other, read[s][5])
                    for c in cutlass.range_constexpr(4):
                        acc[c] = weighted_sum(mine, acc[c], other, read[s][c])
            head, token = self.head_and_token(call, place, place.base + row)
            inverse = self.settle(call, place, head, token, top, total, column == 0)
            for c in cutlass.range_constexpr(2):
                self.store(call, place, head, token, column + 2 * c, [acc[2 * c] * inverse, acc[2 * c + 1] * inverse])

    # Rows of the result

    def head_and_token(self, call: Any, place: Any, row: Any) -> tuple[Any, Any]:
        """Query head and query of a row."""
        token = row // call.group
        return place.head * call.group + row - token * call.group, token

    @cute.jit
    def settle(self, call, place, head, token, top, total, stores):
        """What a row's O is multiplied by; one thread stores its lse."""
        shrink, lse = Float32(1.0), call.lse
        if const_expr(self.config.sink):
            top, total, shrink = with_sink(top, total, call.sink[head] * LOG2_E)
        if stores:
            lse[place.batch, head, token] = log_sum_exp(top, total)
        return 0.0 if total == 0.0 else shrink * reciprocal(total)

    @cute.jit
    def store(self, call, place, head, token, column, pair):
        """Two columns of a row."""
        if column < call.out.shape[3]:
            word = cute.make_rmem_tensor(1, Int32)
            word[0] = pack16(pair[0], pair[1], self.dtype)
            target = call.out.iterator + cute.crd2idx((place.batch, token, head, column), call.out.layout)
            cute.autovec_copy(word, cute.recast_tensor(cute.make_tensor(target.align(4), cute.make_layout(2)), Int32))


@cute.jit
def weights_of(first, second):
    """What two parts of these maxima are multiplied by when they are put together, and the larger one."""
    top = cute.arch.fmax(first, second)
    safe = finite(top)
    return exp2(first - safe), exp2(second - safe), top


def in_order(after: bool, own: Any, x: Any, other: Any, y: Any) -> Any:
    """own x + other y of two parts, as the one that comes first has it; ``after``: the other one comes behind the own."""
    return weighted_sum(own, x, other, y) if after else weighted_sum(other, y, own, x)
