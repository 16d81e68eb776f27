"""Sums of a decay's logs within each chunk, and what fades by them, by a warp of the loader's warpgroup.

Consumers read both from shared memory: each of their threads needs those of sixteen tokens, which lie side by side there.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.basics import LOG2_E, WARP
from warploom.kernels.cute.instructions import assembly, exp2, load_shared, store_shared
from warploom.kernels.cute.rings import advance
from warploom.linear.hopper.walk_base import WalkBase


@dsl_user_op
def split(x: Float64, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """The low and the high word of a double, which shuffles take one by one."""
    both = llvm.StructType.get_literal([T.i32(), T.i32()])
    parts = assembly(both, [Float64(x).ir_value(loc=loc, ip=ip)], "mov.b64 {$0, $1}, $2;", "=r,=r,d")
    return [Int32(llvm.extractvalue(T.i32(), parts, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def joined(low: Int32, high: Int32, *, loc: Any = None, ip: Any = None) -> Float64:
    """The double of two words."""
    values = [Int32(word).ir_value(loc=loc, ip=ip) for word in (low, high)]
    return Float64(assembly(T.f64(), values, "mov.b64 $0, {$1, $2};", "=d,r,r"))


# What is kept of a chunk, an fp32 a token each: sums of logs up to the token in log2, 2 to their power, 2 to the power of what
# follows in the chunk.
SUMS, SINCE, UNTIL = 0, 1, 2
# Below it e^x is 0 in fp32: logs are held to it, -inf too, so that no difference of sums is inf - inf.
LEAST = -128.0
THREADS = 4  # that share a row of an accumulator, each with 16 columns of 64, two of every eight


@cute.jit
def pick(condition, a, b):
    """a if condition else b, of fp32."""
    return Float32(a) if condition else Float32(b)


@cute.jit
def held(log):
    """``log``, NaN too, or LEAST where it is less."""
    return Float32(LEAST) if log < LEAST else log


class Sums(WalkBase):
    """What the warp does that sums, and how others find what it leaves."""

    @cute.jit
    def sum_logs(self, given, logs, weights):
        """Leave SUMS, SINCE and UNTIL of each chunk: a stage of a is full once they are there too.

        Added in fp64: differences of sums are what fades.
        """
        shared, config = given.shared, self.config
        lane = cute.arch.lane_idx()
        own = self.place(lane)
        line = logs[given.batch, None, given.head] if const_expr(config.sums_logs) else None
        if const_expr(config.a_head):
            log = held(weights[given.head]) * LOG2_E
            same = [Float32(lane + (1 + WARP * i)) * log for i in range(2)]
        elif const_expr(config.cut):
            line = weights[given.batch, given.head, None]
        ahead = cute.make_rmem_tensor(2, Float32)
        if const_expr(not config.a_head):
            self.load_logs(given, line, ahead, 0, lane)
        stage, phase = Int32(0), Int32(1)
        for t in cutlass.range(given.chunks, unroll=1):
            if const_expr(config.a_head):
                sums = same
            elif const_expr(config.cut):
                sums = [ahead[i] for i in range(2)]
                self.load_logs(given, line, ahead, t + 1, lane)
            else:
                pair = [held(ahead[i]).to(Float64) for i in range(2)]
                self.load_logs(given, line, ahead, t + 1, lane)
                for by in (1, 2, 4, 8, 16):
                    for i in cutlass.range_constexpr(2):
                        other = self.from_lane(pair[i], lane - by)
                        pair[i] = pair[i] + (other if lane >= by else Float64(0.0))
                pair[1] = pair[1] + self.from_lane(pair[0], WARP - 1)
                sums = [(pair[i] * math.log2(math.e)).to(Float32) for i in range(2)]
            last = cute.arch.shuffle_sync(sums[1], WARP - 1)
            cute.arch.mbarrier_wait(shared.a_empty + stage, phase)
            address = self.table(shared, stage) + 4 * own
            for i in cutlass.range_constexpr(2):
                found = {SUMS: sums[i], SINCE: exp2(sums[i])}
                if const_expr(config.keeps_until):
                    found[UNTIL] = exp2(last - sums[i])
                for kind, value in found.items():
                    store_shared(address, 4 * (kind * config.chunk + WARP * i), [value])
            cute.arch.mbarrier_arrive(shared.a_full + stage)
            stage, phase = advance(stage, phase, config.stages)

    @cute.jit
    def load_logs(self, given, line, pair, t, lane):
        """What this lane's token of step ``t`` and the one 32 later have: logs, past the end 0; or sums, as at the ends."""
        token = self.chunk_at(t, given) * self.config.chunk + lane
        last = line.shape[0] - 1
        for i in cutlass.range_constexpr(2):
            found = line[cutlass.max(cutlass.min(token + i * WARP, last), 0)]
            pair[i] = found if const_expr(self.config.cut) else pick(token + i * WARP <= last, found, 0.0)

    def from_lane(self, x: Any, lane: Any) -> Any:
        """Another lane's ``x``, fp64."""
        return joined(*[cute.arch.shuffle_sync(word, lane % WARP) for word in split(x)])

    def table(self, shared: Any, stage: Any) -> Any:
        """Where what a stage of a has begins."""
        return shared.logs + stage * (4 * self.config.logs // self.config.stages)

    def place(self, token: Any) -> Any:
        """Where a token's number lies: those of a thread, two of each eight tokens, in groups of four."""
        return token // 16 * 16 + token % 8 // 2 * 4 + token // 8 % 2 * 2 + token % 2

    def of_chunk(self, shared: Any, stage: Any, kind: int, lane: Any) -> Any:
        """The numbers of this thread's 16 columns of an accumulator, in their order."""
        if kind == UNTIL and not self.config.keeps_until:
            last = self.of_one(shared, stage, SUMS, self.config.chunk - 1)
            return [exp2(last - x) for x in self.of_chunk(shared, stage, SUMS, lane)]
        address = self.table(shared, stage) + 16 * (lane % THREADS)
        at = 4 * kind * self.config.chunk
        return [x for j in range(self.config.chunk // 16) for x in load_shared(address, at + 64 * j, 4)]

    def of_one(self, shared: Any, stage: Any, kind: int, token: Any) -> Any:
        """The number of one token."""
        return load_shared(self.table(shared, stage) + 4 * self.place(token), 4 * kind * self.config.chunk, 1)[0]
