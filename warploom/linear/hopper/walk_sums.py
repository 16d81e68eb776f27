"""Sums of a decay's logs within each chunk, by a warp of the loader's warpgroup. Imports the CuTe DSL."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.basics import WARP
from warploom.kernels.cute.instructions import assembly, store_shared
from warploom.kernels.cute.rings import advance, release
from warploom.linear.hopper.walk_base import WalkBase
from warploom.linear.hopper.walk_consumers import held
from warploom.linear.hopper.walk_terms import pick


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


class Sums(WalkBase):
    """What the warp does that sums."""

    @cute.jit
    def sum_logs(self, given, logs):
        """Sums of the head's logs up to each token of a chunk, in log2: a stage of a is full once they are there too.

        Added in fp64: differences of sums are what fades.
        """
        shared, config = given.shared, self.config
        lane = cute.arch.lane_idx()
        line = logs[given.batch, None, given.head]
        ahead = cute.make_rmem_tensor(2, Float32)
        self.load_logs(given, line, ahead, 0, lane)
        stage, phase = Int32(0), Int32(1)
        for t in cutlass.range(given.chunks, unroll=1):
            pair = [held(ahead[i]).to(Float64) for i in range(2)]
            self.load_logs(given, line, ahead, t + 1, lane)
            for by in (1, 2, 4, 8, 16):
                for i in cutlass.range_constexpr(2):
                    other = self.from_lane(pair[i], lane - by)
                    pair[i] = pair[i] + (other if lane >= by else Float64(0.0))
            pair[1] = pair[1] + self.from_lane(pair[0], WARP - 1)
            cute.arch.mbarrier_wait(shared.a_empty + stage, phase)
            for i in cutlass.range_constexpr(2):
                total = (pair[i] * math.log2(math.e)).to(Float32)
                store_shared(shared.logs + stage * (4 * config.chunk) + 4 * lane, 4 * WARP * i, [total])
            cute.arch.sync_warp()
            release(shared.a_full + stage)
            stage, phase = advance(stage, phase, config.stages)

    @cute.jit
    def load_logs(self, given, line, pair, t, lane):
        """The logs of this lane's token of step ``t`` and of the one 32 later; past the sequence's end 0."""
        token = self.chunk_at(t, given) * self.config.chunk + lane
        last = line.shape[0] - 1
        for i in cutlass.range_constexpr(2):
            log = line[cutlass.max(cutlass.min(token + i * WARP, last), 0)]
            pair[i] = pick(token + i * WARP <= last, log, 0.0)

    def from_lane(self, x: Any, lane: Any) -> Any:
        """Another lane's ``x``, fp64."""
        return joined(*[cute.arch.shuffle_sync(word, lane % WARP) for word in split(x)])
