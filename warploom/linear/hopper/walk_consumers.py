"""The consumer warpgroups of a walk: one computes scores, the others keep the state. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.kernels.cute.barriers import WalkBarrier, arrive, wait
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.instructions import exp2, from_bfloat16, ldmatrix_x4, pack16, store_matrices
from warploom.kernels.cute.rings import advance, release, release_everywhere
from warploom.kernels.cute.tiles import tma_views, transposed
from warploom.kernels.cute.wgmma import gemm, words
from warploom.linear.hopper.config import COLUMNS
from warploom.linear.hopper.walk_sums import SINCE, SUMS, UNTIL
from warploom.linear.hopper.walk_terms import Terms

OUT_BARRIERS = 2  # OUT_FREE and OUT_WRITTEN, which the next warpgroup's follow
SLICES = 4  # of 16 head dims of the state that are rounded together
AT_ONCE = 4  # states of segments that are loaded before they are added: each waits for memory as long as all of them


class Consumers(Terms):
    """What the warpgroups run."""

    @property
    def consumers(self) -> int:
        """Threads of the state and of scores."""
        return (1 + self.config.groups) * WARPGROUP

    # Scores

    @cute.jit
    def play_scores(self, given, mma, weights, bias, dots):
        """The products a_i . b_j of each chunk, less the bias and times the weight of j, or faded; 0 where i does not see j."""
        shared, config = given.shared, self.config
        part = mma.get_slice(0)
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, own // 32
        left = mma.make_fragment_A(part.partition_A(shared.a))
        right = mma.make_fragment_B(part.partition_B(shared.b))
        acc = mma.make_fragment_C(part.partition_shape_C((config.chunk, config.chunk)))
        if const_expr(config.meets):
            met = mma.make_fragment_C(part.partition_shape_C((config.chunk, config.chunk)))
            left_met = mma.make_fragment_A(part.partition_A(shared.x))
            right_met = mma.make_fragment_B(part.partition_B(shared.c_whole))
        row, column = warp * 16 + lane // 4, lane % 4 * 2
        matrix = lane // 8
        line = warp * 16 + matrix % 2 * 8 + lane % 8
        stage, phase = Int32(0), Int32(0)
        for t in cutlass.range(given.chunks, unroll=1):
            token = self.chunk_at(t, given) * config.chunk + lane
            weight, taken = [Float32(1.0), Float32(1.0)], [Float32(0.0), Float32(0.0)]
            if const_expr(config.weighted):
                weight = self.load_pair(given, weights, token)
            if const_expr(config.biased):
                taken = self.load_pair(given, bias, token)
            cute.arch.mbarrier_wait(shared.a_full + stage, phase)
            cute.arch.mbarrier_wait(shared.b_full + stage, phase)
            gemm(mma, acc, left[None, None, None, stage], right[None, None, None, stage], False)
            if const_expr(config.meets):
                cute.arch.mbarrier_wait(shared.x_full + stage, phase)
                cute.arch.mbarrier_wait(shared.c_full + stage, phase)
                gemm(mma, met, left_met[None, None, None, stage], right_met[None, None, None, stage], False)
            warpgroup.wait_group(0)
            if const_expr(config.fading):
                weight = self.of_chunk(shared, stage, SUMS, lane)
                own_sums = [self.of_one(shared, stage, SUMS, row + 8 * r) for r in range(2)]
            self.release_a(shared.a_empty + stage)
            release_everywhere(shared.b_empty + stage, config.cluster)
            if const_expr(config.meets):
                release(shared.c_empty + stage)
            for i in cutlass.range_constexpr(config.chunk // 4):  # this thread's columns
                place = i // 2 * 8 + i % 2
                less = self.of_token(taken, place, lane) if const_expr(config.biased) else Float32(0.0)
                times = self.of_token(weight, place, lane) if const_expr(config.weighs_rows) else Float32(1.0)
                for r in cutlass.range_constexpr(2):
                    at = i // 2 * 4 + r * 2 + i % 2
                    here, key = row + r * 8, column + place
                    seen = key >= here if const_expr(config.reverse) else key <= here
                    if const_expr(config.fading):
                        apart = times - own_sums[r] if const_expr(config.reverse) else own_sums[r] - times
                        acc[at] = acc[at] * exp2(apart) if seen else 0.0
                    else:
                        acc[at] = (acc[at] - less) * times if seen else 0.0
                    if const_expr(config.meets):
                        met[at] = met[at] * acc[at] if key < here else 0.0
            if const_expr(config.meets):
                self.leave_pairs(given, met, t, lane, warp)
            wait(WalkBarrier.P_TAKEN, self.consumers)
            for i in cutlass.range_constexpr(config.chunk // 16):
                target = shared.p_start + line * 64 + ((2 * i + matrix // 2) ^ lane % 8) * 8
                words = [pack16(acc[8 * i + 2 * n], acc[8 * i + 2 * n + 1], self.dtype) for n in range(4)]
                store_matrices(target, words)
            cute.arch.fence_view_async_shared()
            arrive(WalkBarrier.P_READY, self.consumers)
            if const_expr(config.meets):
                self.store_pairs(given, dots, t, lane, warp)
            stage, phase = advance(stage, phase, config.stages)
        wait(WalkBarrier.P_TAKEN, self.consumers)

    # The state

    @cute.jit
    def play_state(self, given, group, out, tma_out, products, weights, bias, states, fades, terms, scale):
        """out of each chunk, and the state after it, of the columns of warpgroup ``group``."""
        shared, config = given.shared, self.config
        mma_inter, mma_intra, mma_update = products
        inter, intra, update = (m.get_slice(0) for m in products)
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = own % 32, own // 32
        c_turned, b_turned = transposed(shared.c), transposed(shared.b)
        queries = mma_inter.make_fragment_B(inter.partition_B(shared.a))
        values = mma_intra.make_fragment_A(intra.partition_A(c_turned))
        if const_expr(config.weighs_rows):
            weighed = mma_update.make_fragment_A(update.partition_shape_A((COLUMNS, config.chunk)))
        p = mma_intra.make_fragment_B(intra.partition_B(shared.p))[None, None, None, 0]
        keys = mma_update.make_fragment_B(update.partition_B(b_turned))
        state = mma_update.make_fragment_C(update.partition_shape_C((COLUMNS, config.head_dim)))
        acc = mma_intra.make_fragment_C(intra.partition_shape_C((COLUMNS, config.chunk)))
        operands = [
            mma_inter.make_fragment_A(inter.partition_shape_A((COLUMNS, config.head_dim))) for _ in range(1 + config.terms)
        ]
        column = (given.block + group) * COLUMNS + warp * 16 + lane // 4  # of out, and that + 8
        matrix = lane // 8
        # Where this lane's row of the first four 8 x 8 tiles of this warp lies, in c and in out: tokens down, columns across.
        tiles = (matrix // 2 * 8 + lane % 8) * 64 + ((warp * 2 + matrix % 2) ^ lane % 8) * 8
        tiles += group * (config.chunk * COLUMNS)
        target = shared.out_start + tiles
        source = (shared.c_start + tiles).toint()
        rows = out[None, None, given.head, given.batch]
        if const_expr(not config.wide):
            tiles_out = cute.local_tile(rows, (config.chunk, COLUMNS), (None, given.block + group))
            store_out = tma_views(tma_out, shared.out, tiles_out)
        state.fill(0.0)
        if const_expr(config.cut):
            self.state_before(given, state, states, fades, column, lane)
        sums = cute.make_rmem_tensor(2, Float32)  # of bias * weight * c of the chunks before, this thread's tokens
        sums.fill(0.0)
        before = cute.make_rmem_tensor(2, Float32)  # the same of all tokens
        before.fill(0.0)
        stage, phase = Int32(0), Int32(0)
        c_stage, c_phase = Int32(0), Int32(0)
        # Of the rows of c, and of what they take of the state.
        weights_of, factors_of = (SINCE, UNTIL) if const_expr(config.reverse) else (UNTIL, SINCE)
        arrive(WalkBarrier.P_TAKEN, self.consumers)
        for t in cutlass.range(given.chunks, unroll=1):
            n = self.chunk_at(t, given)
            weight, taken = [Float32(1.0), Float32(1.0)], [Float32(0.0), Float32(0.0)]
            if const_expr(config.weighted):
                weight = self.load_pair(given, weights, n * config.chunk + lane)
            if const_expr(config.biased):
                taken = self.load_pair(given, bias, n * config.chunk + lane)
            cute.arch.mbarrier_wait(shared.a_full + stage, phase)
            if const_expr(config.fades_ahead):
                weight, factors = self.of_chunk(shared, stage, weights_of, lane), self.of_chunk(shared, stage, factors_of, lane)
            self.gemm_inter(mma_inter, acc, state, operands, queries[None, None, None, stage])
            address = source + c_stage * (2 * config.groups * config.chunk * COLUMNS)
            if const_expr(config.fading):  # under the product with the state
                warpgroup.commit_group()
                self.fade(given, state, stage)
                if const_expr(config.early_values):
                    cute.arch.mbarrier_wait(shared.c_full + c_stage, c_phase)
                    weight = self.of_chunk(shared, stage, weights_of, lane)
                    self.take_values(words(weighed), address, weight, taken, sums, lane)
                if const_expr(not config.fades_ahead):
                    factors = self.of_chunk(shared, stage, factors_of, lane)
                if const_expr(config.terms):
                    x_tile = tiles + stage * (config.groups * config.chunk * COLUMNS)
                    x_words = self.weigh_x(given, factors, (x_tile, stage, phase), lane)
                warpgroup.wait_group(0)
                if const_expr(config.terms):
                    factors = self.of_chunk(shared, stage, factors_of, lane)  # again: no registers are left to keep them
                    dots = self.dots(acc, x_words, lane)
                for i in cutlass.range_constexpr(cute.size(acc)):
                    acc[i] = acc[i] * factors[i // 4 * 2 + i % 2]
                if const_expr(not (config.early_values or config.fades_ahead)):
                    weight = self.of_chunk(shared, stage, weights_of, lane)
            if const_expr(not config.early_values):
                cute.arch.mbarrier_wait(shared.c_full + c_stage, c_phase)
            left = values[None, None, None, c_stage * config.groups + group]
            wait(WalkBarrier.P_READY, self.consumers)
            gemm(mma_intra, acc, left, p, True)
            if const_expr(config.biased):
                for r in cutlass.range_constexpr(2):
                    before[r] = cute.arch.warp_reduction_sum(sums[r], threads_in_group=4)
            if const_expr(config.weighs_rows):
                if const_expr(not config.early_values):
                    self.take_values(words(weighed), address, weight, taken, sums, lane)
                left = weighed
            cute.arch.mbarrier_wait(shared.b_full + stage, phase)
            gemm(mma_update, state, left, keys[None, None, None, stage], True)
            if const_expr(config.terms):
                self.leave_dots(given, dots, group, lane, warp)
            warpgroup.wait_group(1)
            arrive(WalkBarrier.P_TAKEN, self.consumers)
            self.release_a(shared.a_empty + stage)
            self.finish(acc, weight, before, scale, lane)
            if const_expr(config.wide):
                self.store_wide(acc, rows, n * config.chunk + lane % 4 * 2, column)
            else:
                self.store(given, acc, target, store_out, terms, warp, group, n)
            warpgroup.wait_group(0)
            release_everywhere(shared.b_empty + stage, config.cluster)
            release(shared.c_empty + c_stage)
            stage, phase = advance(stage, phase, config.stages)
            c_stage, c_phase = advance(c_stage, c_phase, config.c_stages)
        if const_expr(not config.wide):  # noqa: SIM102
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def state_before(self, given, state, states, fades, column, lane):
        """What the segments before leave, in reverse those behind: each one's own state, faded by those up to this one."""
        own, line = states[given.batch, given.head, None, None, None], fades[given.batch, given.head, None]
        loaded = cute.make_rmem_tensor((cute.size(state), AT_ONCE), Float32)
        last = states.shape[2] - 1
        count = last - given.segment if const_expr(self.config.reverse) else given.segment
        for s in cutlass.range(0, count, AT_ONCE, unroll=1):
            for j in cutlass.range_constexpr(AT_ONCE):
                at = cutlass.min(s + j, count - 1)
                if const_expr(self.config.reverse):
                    at = last - at
                for i in cutlass.range_constexpr(cute.size(state)):
                    loaded[i, j] = own[at, column + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2]
            for j in cutlass.range_constexpr(AT_ONCE):
                if s + j < count:
                    kept = exp2(line[last - (s + j) if const_expr(self.config.reverse) else s + j])
                    for i in cutlass.range_constexpr(cute.size(state)):
                        state[i] = state[i] * kept + loaded[i, j]

    @cute.jit
    def take_values(self, words, address, weights, bias, sums, lane):
        """c of the chunk, times its weights, as a left operand; its sums, times the bias too, are added to ``sums``."""
        for i in cutlass.range_constexpr(self.config.chunk // 16):
            four = ldmatrix_x4(address, i * (2 * 16 * COLUMNS), True)
            for half in cutlass.range_constexpr(2):
                place = 16 * i + 8 * half
                low, high = (self.of_token(weights, place + e, lane) for e in range(2))
                if const_expr(self.config.biased):
                    less = [self.of_token(bias, place + e, lane) for e in range(2)]
                for r in cutlass.range_constexpr(2):
                    word = four[2 * half + r]
                    values = from_bfloat16(word, 0) * low, from_bfloat16(word, 1) * high
                    words[4 * i + 2 * half + r] = pack16(*values, self.dtype)
                    if const_expr(self.config.biased):
                        sums[r] = sums[r] + values[0] * less[0] + values[1] * less[1]

    @cute.jit
    def gemm_inter(self, mma, acc, state, operands, queries):
        """Issue out = state · a of the chunk, the state rounded part by part: there is no room for all of it at once.

        With a second operand also what rounding took of it, in parts of half the length.
        """
        atom = cute.make_mma_atom(mma.op)
        slices, each = cute.size(queries, mode=[2]), SLICES // len(operands)
        taken = [words(operand) for operand in operands]
        for part in cutlass.range_constexpr(slices // each):
            if const_expr(part > 0):
                warpgroup.wait_group(1)  # for the part before the last one, whose registers the next takes
            for i in cutlass.range_constexpr(part * each * 4, (part + 1) * each * 4):
                taken[0][i] = pack16(state[2 * i], state[2 * i + 1], self.dtype)
                if const_expr(len(operands) > 1):
                    left = [state[2 * i + e] - from_bfloat16(taken[0][i], e) for e in range(2)]
                    taken[1][i] = pack16(*left, self.dtype)
            warpgroup.fence()
            for i in cutlass.range_constexpr(part * each, (part + 1) * each):
                for n in cutlass.range_constexpr(len(operands)):
                    atom.set(warpgroup.Field.ACCUMULATE, n > 0 or i > 0)
                    cute.gemm(atom, acc, operands[n][None, None, i], queries[None, None, i], acc)
            if const_expr((part + 1) * each < slices):
                warpgroup.commit_group()

    @cute.jit
    def fade(self, given, state, stage):
        """Fade the state over a chunk."""
        kept = self.of_one(given.shared, stage, SINCE, self.config.chunk - 1)
        for i in cutlass.range_constexpr(cute.size(state)):
            state[i] = state[i] * kept

    @cute.jit
    def finish(self, acc, weight, before, scale, lane):
        """What the bias takes from the chunks before, and factors of out."""
        for i in cutlass.range_constexpr(self.config.chunk // 4):  # this thread's tokens
            factor = scale
            if const_expr(self.config.weighted and not self.config.reverse):
                factor = scale * self.of_token(weight, i // 2 * 8 + i % 2, lane)
            for r in cutlass.range_constexpr(2):
                at = i // 2 * 4 + r * 2 + i % 2
                value = acc[at]
                if const_expr(self.config.biased):
                    value = value - before[r]
                acc[at] = value * factor

    @cute.jit
    def store(self, given, acc, target, tma, terms, warp, group, n):
        """out of a chunk, turned into rows of tokens, by way of shared memory; TMA leaves out what is past its end."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        wait(WalkBarrier.OUT_FREE, WARPGROUP, OUT_BARRIERS * group)
        if const_expr(self.config.terms):
            found = self.sum_dots(given, group, warp)
        for i in cutlass.range_constexpr(self.config.chunk // 16):
            words = [pack16(acc[8 * i + 2 * m], acc[8 * i + 2 * m + 1], self.dtype) for m in range(4)]
            store_matrices(target + i * (16 * 64), words, transposed=True)
        cute.arch.fence_view_async_shared()
        wait(WalkBarrier.OUT_WRITTEN, WARPGROUP, OUT_BARRIERS * group)
        if warp == 0:
            cute.copy(tma.atom, tma.shared[None, group], tma.tiles[None, n])
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(self.config.terms):
            self.store_dots(given, terms, found, group, warp, n)

    @cute.jit
    def store_wide(self, acc, rows, token, column):
        """As ``store``, in fp32: eight lanes write 32 bytes of a token."""
        base = rows.iterator + (Int64(token) * rows.stride[0] + column)
        last = self.config.chunk - 8 + 2
        if token + last <= rows.shape[0] and column + 8 < rows.shape[1]:
            for i in cutlass.range_constexpr(cute.size(acc)):
                (base + (i // 4 * 8 + i % 2) * rows.stride[0] + i // 2 % 2 * 8).store(acc[i])
        else:
            for i in cutlass.range_constexpr(cute.size(acc)):
                after, across = i // 4 * 8 + i % 2, i // 2 % 2 * 8
                if token + after < rows.shape[0] and column + across < rows.shape[1]:
                    (base + after * rows.stride[0] + across).store(acc[i])

    # For both

    @cute.jit
    def release_a(self, barrier):
        """This warp has read a stage of a. Where it fades each lane says so: `racecheck` follows who reads by lanes alone."""
        config = self.config
        if const_expr(not config.fading):
            release_everywhere(barrier, config.in_step)
        else:
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(config.in_step > 1):
                lane, rank = cute.arch.lane_idx(), cute.arch.block_idx_in_cluster()
                if lane < config.in_step and lane != rank:
                    cute.arch.mbarrier_arrive(barrier, lane)

    @cute.jit
    def load_pair(self, given, vectors, token):
        """A value of this lane's token and of the one 32 later; past the last 0."""
        found = []
        for i in cutlass.range_constexpr(2):
            value = Float32(0.0)
            if token + 32 * i < vectors.shape[2]:
                value = vectors[given.batch, given.head, token + 32 * i]
            found.append(value)
        return found

    def of_token(self, values: Any, place: int, lane: Any) -> Any:
        """The value of the chunk's token ``place`` past this thread's first column of an accumulator; ``place`` % 8 < 2.

        ``values``: a pair as of ``load_pair``, or one for each of this thread's columns.
        """
        if len(values) > 2:
            return values[place // 8 * 2 + place % 8]
        return cute.arch.shuffle_sync(values[place // 32], place % 32 + lane % 4 * 2)
