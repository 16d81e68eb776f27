"""The warpgroup of keys that write: what later tokens and the state give to what is written. Imports the CuTe DSL."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from warploom.delta.hopper.config import BETA, CHUNK, CLOSING, COLUMNS, NO_STATE, WHOLE, WRITES
from warploom.delta.hopper.gradients_base import (
    ALL_WROTE,
    LONE,
    OF_QUERIES,
    OF_READS,
    THROUGH,
    WROTE,
    GradientBase,
    beta_of,
    numbers_at,
    where,
)
from warploom.delta.hopper.walk_base import rows_of
from warploom.kernels.cute.barriers import DeltaBarrier, wait
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.instructions import load_shared
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.tiles import tma_views, transposed
from warploom.kernels.cute.wgmma import gemm, words

# From this beta on its gradient is a quotient of dV: it has the rounding error of one dV, what is written that of all later
# ones, which under equal keys do not cancel.
LARGE = 0.125


class Written(GradientBase):
    """dk, dbeta and the decay's gradient."""

    @cute.jit
    def write(
        self, shared, at, stage, phase, parity, turn, group, tiles, decays, normalize, eps, decay, dk, dbeta, ddecay, tma_dk,
        mmas,
    ):  # fmt: skip
        """A chunk."""
        config = self.config
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, cute.arch.make_warp_uniform(own // 32)
        _, mma_state, _, mma_turned = mmas
        state, turned = (m.get_slice(0) for m in (mma_state, mma_turned))
        states = mma_state.make_fragment_B(state.partition_B(shared.dstate))
        queries, keys = (mma_turned.make_fragment_B(turned.partition_B(transposed(t))) for t in (shared.q, shared.k))
        asked, read, rest = (
            mma_turned.make_fragment_A(turned.partition_A(transposed(t)))
            for t in (shared.asked, shared.read, shared.read_rest)
        )
        operand = mma_state.make_fragment_A(state.partition_shape_A((CHUNK, COLUMNS)))
        acc, whole = (mma_state.make_fragment_C(state.partition_shape_C((CHUNK, config.width))) for _ in range(2))
        whole.fill(0.0)
        address, values = shared.k_start.toint(), shared.y_start.toint()
        for g in cutlass.range(group, unroll=1):
            cute.arch.mbarrier_wait(shared.numbers_full + parity % 2, parity // 2)
            numbers = numbers_at(shared, parity % 2)
            until, betas = self.factors(numbers, WRITES, warp, lane), self.factors(numbers, BETA, warp, lane)
            of_rows = [until[r] * beta_of(betas[r]) for r in range(2)]
            acc.fill(0.0)
            for _ in cutlass.range(tiles, unroll=1):
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                self.scaled(values + stage * (2 * CHUNK * COLUMNS), words(operand), of_rows, warp, lane)
                gemm(mma_state, acc, operand, states[None, None, None, stage], True)
                warpgroup.wait_group(0)
                release(shared.empty + stage)
                stage, phase = advance(stage, phase, config.stages)
            cute.arch.mbarrier_wait(shared.qk_full, turn)
            part = self.dots(acc, address, warp, lane)
            cute.arch.mbarrier_wait(shared.asked_full, parity % 2)
            gemm(mma_turned, acc, asked[None, None, None, 0], queries[None, None, None, 0], True)
            cute.arch.mbarrier_wait(shared.read_full, parity % 2)
            gemm(mma_turned, acc, read[None, None, None, 0], keys[None, None, None, 0], True)
            gemm(mma_turned, acc, rest[None, None, None, 0], keys[None, None, None, 0], True)
            warpgroup.wait_group(0)
            release(shared.asked_empty)
            release(shared.read_empty)
            total = self.dots(acc, address, warp, lane)
            # Two heads' rows by turns: a warp may be a head ahead of the first one.
            lines = parity % 2 * (2 * CHUNK)
            self.put_rows(shared.sums + lines, WROTE, part, warp, lane)
            self.put_rows(shared.sums + lines, ALL_WROTE, total, warp, lane)
            for i in cutlass.range_constexpr(cute.size(acc)):
                whole[i] = whole[i] + acc[i]
            wait(DeltaBarrier.ROWS, WARPGROUP)
            if warp == 0:
                cute.arch.mbarrier_wait(shared.sums_full, parity % 2)
                self.finish(shared.sums, lines, numbers, at, tiles, decay, dbeta, ddecay, at.head * group + g, decays, lane)
                cute.arch.sync_warp()
                release(shared.sums_empty)
            release(shared.numbers_empty + parity % 2)
            parity = (parity + 1) % 4
        cute.arch.mbarrier_wait(shared.keys_full, turn)
        source = shared.keys.toint() + own * 16
        for i in cutlass.range_constexpr(config.width // 8):
            four = load_shared(source, i * (16 * WARPGROUP), 4)
            for j in cutlass.range_constexpr(4):
                whole[4 * i + j] = whole[4 * i + j] + four[j]
        factors = [Float32(0.0), Float32(0.0)]
        if normalize != 0:
            sums = self.squares(address, warp, lane)
            found = self.dots(whole, address, warp, lane)
            for r in cutlass.range_constexpr(2):
                factors[r] = found[r] / (sums[r] + eps)
        wait(DeltaBarrier.KEYS_TAKEN, WARPGROUP)
        self.put_gradient(whole, address, factors, cute.recast_ptr(shared.keys, dtype=self.dtype), warp, lane)
        release(shared.qk_empty)
        cute.arch.fence_view_async_shared()
        wait(DeltaBarrier.KEYS_WRITTEN, WARPGROUP)
        if warp == 0:
            rows = rows_of(dk, at.head, at.batch, at.start, at.live)
            store = tma_views(tma_dk, shared.dk, cute.local_tile(rows, (CHUNK, COLUMNS), (None, None)))
            for box in cutlass.range_constexpr(self.boxes):
                cute.copy(store.atom, store.shared[None, box], store.tiles[(None, at.first // CHUNK, box)])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            release(shared.keys_empty)
        return stage, phase, parity

    @cute.jit
    def finish(self, sums, lines, numbers, at, tiles, decay, dbeta, ddecay, head, decays, lane):
        """dbeta and the decay's gradient of a value head, by one warp, two tokens a lane.

        A token's decay stands between all before it and all from it on: what from it on is asked and read, less what is
        written there for them; and all that is written, and passes through, for what follows the chunk. At a sequence's end
        the last two are also known together in fp32, where what passes through is a sum of rounded states times rounded
        gradients. What is written has errors as well, of as large a part of the state as there are tokens: both sums are
        weighed by the variances of their errors. The first token's decay meets nothing where no state was given: what its sums
        leave there is their rounding.
        """
        start = sums.toint() + lane * 8
        asked, read, lone = (load_shared(start, line * CHUNK * 4, 2) for line in (OF_QUERIES, OF_READS, LONE))
        part, total = (load_shared(start + lines * 4, line * CHUNK * 4, 2) for line in (WROTE, ALL_WROTE))
        betas = load_shared(numbers + lane * 8, BETA * CHUNK * 4, 2)
        row = at.start + at.first + 2 * lane
        left = at.live - at.first - 2 * lane
        for e in cutlass.range_constexpr(2):
            beta = beta_of(betas[e])
            value = lone[e] / beta
            if beta < LARGE and beta > -LARGE:
                value = total[e] / beta
            if e < left:
                dbeta[at.batch, row + e, head] = value
        if decays != 0:
            own = [asked[e] + read[e] - total[e] for e in range(2)]
            behind, after = own[0] + own[1], part[0] + part[1]
            closing = where(lane < 4 * tiles, load_shared(numbers + lane * 4, (WHOLE * CHUNK + CLOSING) * 4, 1)[0])
            for i in cutlass.range_constexpr(5):
                more = cute.arch.shuffle_sync_down(behind, 1 << i)
                behind = behind + where(lane + (1 << i) < 32, more)
                after = after + cute.arch.shuffle_sync_bfly(after, 1 << i)
                closing = closing + cute.arch.shuffle_sync_bfly(closing, 1 << i)
            through = Float32(0.0)
            for i in cutlass.range_constexpr(2):
                for x in load_shared(sums.toint(), (THROUGH * CHUNK + 4 * i) * 4, 4):
                    through = through + x
            whole = load_shared(numbers, WHOLE * CHUNK * 4, 1)[0]
            after = after + through * whole
            count = at.live - at.first
            if count <= CHUNK:
                passed = whole * whole
                after = after + (closing - after) * (passed / (passed + Float32(count) * (0.5 / self.config.width)))
            values = [behind + after, behind - own[0] + after]
            for e in cutlass.range_constexpr(2):
                if e < left:
                    forgets = decay[at.batch, row + e, head] == -math.inf
                    if cutlass.const_expr(e == 0):
                        forgets = forgets or (decays == NO_STATE and at.first + lane == 0)
                    ddecay[at.batch, row + e, head] = Float32(0.0) if forgets else values[e]
