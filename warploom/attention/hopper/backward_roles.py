"""The backward of head dims past 128: a block owns up to 112 keys; one warpgroup keeps their dV, the other their dK.

Registers hold dV or dK of more keys than both, and each product reads shared memory less often when it is not cut in two.
S, dP and dQ are shared out: S and dP by keys, dQ by columns. P and dS pass through shared memory. dV and dK are kept
transposed, head dims down and keys across, so that the number of keys need not be a multiple of 64.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward import HopperBackward
from warploom.attention.hopper.backward_base import BOTH, WARPGROUPS, Operands
from warploom.attention.hopper.config import BackwardConfig, box_columns
from warploom.kernels.cute.barriers import BackwardBarrier, RolesBarrier, wait
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.columns import in_tile, intervals
from warploom.kernels.cute.dropout import (
    COUNTED,
    draw_for_rows,
    drawn_for_rows,
    exchanged,
    kept,
    kept_halves,
    rounds_of,
)
from warploom.kernels.cute.instructions import pack16, shifted, store_matrices
from warploom.kernels.cute.rings import release
from warploom.kernels.cute.softmax import multipliers
from warploom.kernels.cute.tiles import transposed
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_SHARED, accumulator_rows, gemm, part_of, product

VALUES, KEYS = 0, 1  # the warpgroup of dV, and that of dK
P_SLOT, DS_SLOT = 0, 1
QUERIES = 16  # of a tile, in a warp's rows


class RolesOperands(Operands):
    """Of a warpgroup that keeps one gradient."""

    role: int  # VALUES or KEYS
    past: Any  # the step past a block's last
    mma_gradient: Any
    q: Any
    dout: Any
    k: Any
    v: Any
    left: Any  # operand of the gradient: dO or Q
    tile: Any  # P or dS
    dq_a: Any
    dq_b: Any
    acc_dp: Any
    acc: Any
    slopes: Any  # of the softcap
    hidden_bits: Any  # of the warp's queries, which this lane's keys hide under a column mask
    tile_rows: Any  # where a lane's rows of P and dS go


class RolesBackward(HopperBackward):
    """As ``HopperBackward``, for 64 queries by 80, 96 or 112 keys."""

    def __init__(self, config: BackwardConfig):
        super().__init__(config)
        self.keys_each = config.tile_n // WARPGROUPS
        # Of VALUES and KEYS; no more than 504 with the producer's, which is what the block starts with.
        self.registers_each = (224, 256) if config.head_dim_v < config.head_dim else (240, 240)
        if config.columns and config.deterministic:
            self.registers_each = (208, 256) if config.head_dim_v < config.head_dim else (232, 232)
            self.producer_registers = 40
        self.width = box_columns(config.tile_n)  # of a swizzled row of P and dS

    def products(self) -> tuple[Any, Any, Any, Any]:
        scores = product(self.dtype, (64, self.keys_each, 16), IN_SHARED, BY_K, BY_K)
        gradient = product(self.dtype, (64, self.config.tile_n, 16), IN_SHARED, BY_MN, BY_MN)
        return scores, gradient, gradient, product(self.dtype, (64, self.columns, 16), IN_SHARED, BY_K, BY_MN)

    @cute.jit
    def compute(self, work, dk, dv, products, scale, softcap, left, right):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 8:
            cute.arch.setmaxregister_increase(self.registers_each[VALUES])
            self.play(VALUES, work, dv, products, scale, softcap, left, right)
        else:
            cute.arch.setmaxregister_increase(self.registers_each[KEYS])
            self.play(KEYS, work, dk, products, scale, softcap, left, right)

    @cute.jit
    def play(self, role, work, target, products, scale, softcap, left, right):
        """All steps of one warpgroup, and its gradient."""
        r = self.operands(work, products, scale, softcap, role)
        if const_expr(not self.config.columns):
            self.set_limits(r, work, left, right)
        r.acc.fill(0.0)
        self.steps(r, work)
        warpgroup.wait_group(0)
        wait(BackwardBarrier.DS_READY, BOTH)  # nobody reads K and V any more
        start, factor = work.shared.k_start, scale
        if const_expr(role == VALUES):
            start, factor = work.shared.v_start, Float32(self.kept_scale(r))
        self.stage(r, start, factor)
        wait(RolesBarrier.STAGED, WARPGROUP, role)
        self.copy_out(start, self.dims[role], work, target)

    @cute.jit
    def set_limits(self, r, work, left, right):
        """Keys of this thread, counted from its first one: past the last, and by a row's number behind and before its band."""
        key = work.n_block * self.tile_n + r.column + r.group * self.keys_each
        r.limits[0, 0] = work.seqlen_k - key
        r.limits[0, 1] = work.shift + right + 1 - key
        r.limits[1, 0] = work.shift - left - key

    def operands(self, work: Any, products: Any, scale: Any, softcap: Any, role: int = VALUES) -> RolesOperands:  # type: ignore[override]
        mma_scores, mma_gradient, _, mma_queries = products
        scores, gradient, queries = (m.get_slice(0) for m in (mma_scores, mma_gradient, mma_queries))
        shared = work.shared
        own = cute.arch.thread_idx()[0] % WARPGROUP
        lane = own % 32
        left_operand = shared.dout if role == VALUES else shared.q
        left_turned, k_turned, tiles_turned = (transposed(t) for t in (left_operand, shared.k, shared.ds))
        acc_s = mma_scores.make_fragment_C(scores.partition_shape_C((64, self.keys_each)))
        acc_dp = mma_scores.make_fragment_C(scores.partition_shape_C((64, self.keys_each)))
        multiplier, cap_in = multipliers(self.config, scale, softcap)
        slot = P_SLOT if role == VALUES else DS_SLOT
        return RolesOperands(
            role=role,
            past=work.base + self.steps_of(work),
            shared=shared,
            group=role,
            multiplier=multiplier,
            cap_in=cap_in,
            mma_scores=mma_scores,
            mma_gradient=mma_gradient,
            mma_queries=mma_queries,
            q=part_of(mma_scores.make_fragment_A(scores.partition_A(shared.q)), 0),
            dout=part_of(mma_scores.make_fragment_A(scores.partition_A(shared.dout)), 0),
            k=part_of(mma_scores.make_fragment_B(scores.partition_B(shared.k)), role)[None, None, None, 0],
            v=part_of(mma_scores.make_fragment_B(scores.partition_B(shared.v)), role)[None, None, None, 0],
            left=mma_gradient.make_fragment_A(gradient.partition_A(left_turned)),
            tile=mma_gradient.make_fragment_B(gradient.partition_B(tiles_turned))[None, None, None, slot],
            dq_a=part_of(mma_queries.make_fragment_A(queries.partition_A(shared.ds)), 0)[None, None, None, DS_SLOT],
            dq_b=part_of(mma_queries.make_fragment_B(queries.partition_B(k_turned)), role)[None, None, None, 0],
            acc_s=acc_s,
            acc_dp=acc_dp,
            acc_dq=mma_queries.make_fragment_C(queries.partition_shape_C((64, self.columns))),
            acc=mma_gradient.make_fragment_C(gradient.partition_shape_C((self.dims[role], self.config.tile_n))),
            rows_s=accumulator_rows(acc_s, self.keys_each),
            rows_dp=accumulator_rows(acc_dp, self.keys_each),
            limits=cute.make_rmem_tensor((2, 2), Int32),
            drops=self.drops(work),
            slopes=cute.make_rmem_tensor((2, self.keys_each // 4), Float32),
            hidden_bits=cute.make_rmem_tensor(1, Int32) if self.config.columns else None,
            tile_rows=self.tile_rows(shared.ds_start, own // 32, lane, role),
            dq_target=(shared.dq + role * self.part + own * 4).align(16),
            row=own // 32 * 16 + lane // 4,  # of the query tile, and that + 8
            column=own % 4 * 2,
        )

    def tile_rows(self, start: Any, warp: Any, lane: Any, role: int) -> list[Any]:
        """Where a lane's rows of P go.

        Each 16 keys are four 8 × 8 tiles, those of the first 8 keys first; eight last keys are two tiles. Lane l addresses
        row l % 8 of tile l // 8. Rows of ``width`` keys hold swizzled chunks of 16 bytes.
        """
        row = warp * 16 + lane // 8 % 2 * 8 + lane % 8
        chunks = self.width // 8
        flips = row // (64 // self.width) % chunks
        found = []
        for i in range(-(-self.keys_each // 16)):
            chunk = (role * self.keys_each + 16 * i) // 8 + (lane // 16 if 16 * i + 8 < self.keys_each else 0)
            found.append(start + chunk // chunks * (64 * self.width) + row * self.width + (chunk % chunks ^ flips) * 8)
        return found

    @cute.jit
    def step(self, r, m, j, masked, work=None):
        """One query tile.

        P and dS have one slot each. The writer of P knows that dV has read the last one, because dO is there, which has one
        stage. The writer of dS has met the other warpgroup after all reads of the last dS.

        Under a column mask the first wait is over, and ``work`` is the block's. A stage of Q is let go at the step's end, until
        when what the loader said of the step is read.
        """
        shared, columns = r.shared, const_expr(self.config.columns)
        stage, phase = schedule.ring(j, self.stages)
        dout_stage, dout_phase = schedule.ring(j, self.dout_stages)
        if const_expr(not columns):
            cute.arch.mbarrier_wait(shared.q_full + stage, phase)
        if const_expr(columns and masked):
            self.find_hidden(r, work, m, stage)
        gemm(r.mma_scores, r.acc_s, r.q[None, None, None, stage], r.k, False)
        level, delta = self.statistics(r, stage, 0), self.statistics(r, stage, 1)
        cute.arch.mbarrier_wait(shared.do_full + dout_stage, dout_phase)
        gemm(r.mma_scores, r.acc_dp, r.dout[None, None, None, dout_stage], r.v, False)
        self.draw(r, m)
        warpgroup.wait_group(1)
        if const_expr(not columns):
            if const_expr(r.role == VALUES):
                release(shared.q_empty + stage)
            else:
                if j > 0:  # dK of the step before has ended
                    release(shared.q_empty + (stage ^ 1))
        if const_expr(columns and masked):
            self.hide(r)
        self.probabilities(r, m, level, masked)
        self.share(r, r.acc_s, P_SLOT)
        cute.arch.fence_view_async_shared()
        wait(RolesBarrier.P_READY, BOTH)
        if const_expr(r.role == VALUES):
            gemm(r.mma_gradient, r.acc, r.left[None, None, None, dout_stage], r.tile, True)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
            release(shared.do_empty + dout_stage)
        self.differentiate(r, delta)
        self.share(r, r.acc_dp, DS_SLOT)
        cute.arch.fence_view_async_shared()
        wait(BackwardBarrier.DS_READY, BOTH)
        gemm(r.mma_queries, r.acc_dq, r.dq_a, r.dq_b, False)
        if const_expr(r.role == VALUES):
            warpgroup.wait_group(1)
            release(shared.do_empty + dout_stage)
            warpgroup.wait_group(0)
        else:
            self.gemm_keys(r, r.left[None, None, None, stage])
            warpgroup.wait_group(1)
        self.hand_over(r, j)
        # ptxas would serialise all products were dK running where such loops begin anew.
        if const_expr((self.config.deterministic or columns) and r.role == KEYS):
            warpgroup.wait_group(0)
        if const_expr(columns):
            release(shared.q_empty + stage)

    # Column masks

    @cute.jit
    def find_hidden(self, r, work, m, stage):
        """Which of the warp's 16 queries this lane's keys hide, or the band: bits of two of the warpgroup's keys, 32 apart.

        The numbers are read anew in each such step, from L1 but for a block's first: registers have no room for them.
        """
        given, at, words = work.given, self.step_word(stage), work.shared.words
        n_block, mask = words[at + 3], words[at + 1]
        lane, columns = cute.arch.lane_idx(), given.columns
        top = m * self.tile_m + r.row - lane // 4
        length, found = columns.vectors[0].shape[2], Int32(0)
        for i in cutlass.range_constexpr(2):
            own = 32 * i + lane
            key, bits = n_block * self.tile_n + r.role * self.keys_each + own, Int32(-1)
            if own < self.keys_each and key < work.seqlen_k:
                first = top + work.shift if const_expr(self.config.q_offset) else top
                limits = [in_tile(row, first, QUERIES) for row in intervals(columns, Int64(mask) * length + key)]
                bits = (shifted(-1, limits[0]) & ~shifted(-1, limits[1])) | (shifted(-1, limits[2]) & ~shifted(-1, limits[3]))
                diagonal = key - work.shift
                if const_expr(self.config.right):
                    bits |= ~shifted(-1, in_tile(diagonal - given.right, top, QUERIES))
                if const_expr(self.config.left):
                    bits |= shifted(-1, in_tile(diagonal + given.left + 1, top, QUERIES))
            found |= (bits & ((1 << QUERIES) - 1)) << (QUERIES * i)
        r.hidden_bits[0] = found

    @cute.jit
    def hide(self, r):
        """-inf for scores of hidden elements, whose bits the lanes of a warp have by keys."""
        lane = cute.arch.lane_idx()
        for c in cutlass.range_constexpr(8):
            bits = cute.arch.shuffle_sync(r.hidden_bits[0], c // 2 * 8 + lane % 4 * 2 + c % 2) >> (lane // 4)
            for n in cutlass.range_constexpr(c, self.keys_each // 4, 8):
                for i in cutlass.range_constexpr(2):
                    bit = 1 << (n // 8 * QUERIES + 8 * i)
                    r.rows_s[i, n] = r.rows_s[i, n] if bits & bit == 0 else -Float32.inf

    def quad_rows(self, r: Any) -> list[Any]:
        quad = cute.arch.thread_idx()[0] // 4 - WARPGROUP // 4
        return [quad, quad + BOTH // 4]

    @cute.jit
    def gemm_keys(self, r, left):
        """dK += dSᵀ Q: for each 16 queries all tiles of 64 head dims."""
        atom = cute.make_mma_atom(r.mma_gradient.op)
        warpgroup.fence()
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for i in cutlass.range_constexpr(cute.size(r.tile, mode=[2])):
            for t in cutlass.range_constexpr(cute.size(r.acc, mode=[1])):
                own = self.one(r.acc, t)
                cute.gemm(atom, own, self.one(left, t)[None, None, i], r.tile[None, None, i], own)
        warpgroup.commit_group()

    def one(self, operand: Any, index: int) -> Any:
        """An operand's or accumulator's tile of 64 rows, its mode kept."""
        own = operand[None, index, None]
        shape, stride = own.shape, own.stride
        return cute.make_tensor(own.iterator, cute.make_layout((shape[0], 1, shape[1]), stride=(stride[0], 0, stride[1])))

    @cute.jit
    def statistics(self, r, stage, which):
        """A row statistic of this thread's two queries."""
        source = r.shared.stats + stage * (2 * self.tile_m) + which * self.tile_m + r.row
        rows = cute.make_tensor(source, cute.make_layout(2, stride=8))
        return [rows[0], rows[1]]

    @cute.jit
    def probabilities(self, r, m, level, masked):
        """P from the raw scores and lse; with a softcap its derivative too, times which dS takes P."""
        for i in cutlass.range_constexpr(2):
            row = m * self.tile_m + r.row + 8 * i
            past, first = r.limits[0, 0], row + r.limits[1, 0]
            if const_expr(self.config.right):
                past = cutlass.min(past, row + r.limits[0, 1])
            for c in cutlass.range_constexpr(self.keys_each // 4):
                raw, at = r.rows_s[i, c], c // 2 * 8 + c % 2
                if const_expr(masked and not self.config.columns):
                    raw = raw if at < past else -Float32.inf
                    if const_expr(self.config.left):
                        raw = raw if at >= first else -Float32.inf
                weight, slope = self.weigh(r, raw, level[i], masked)
                r.rows_s[i, c] = weight
                if const_expr(self.config.softcap):
                    r.slopes[i, c] = slope

    @cute.jit
    def differentiate(self, r, delta):
        """dS / scale from P and dP, in dP's place."""
        dp = self.kept_dp(r) if const_expr(self.config.dropout) else {}
        for i in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(self.keys_each // 4):
                weight = r.rows_s[i, c] * r.slopes[i, c] if const_expr(self.config.softcap) else r.rows_s[i, c]
                if const_expr(self.config.dropout):
                    r.rows_dp[i, c] = weight * (dp[i, c] * r.drops.given.scale - delta[i])
                else:
                    r.rows_dp[i, c] = weight * (r.rows_dp[i, c] - delta[i])

    def drops(self, work: Any) -> Any:
        """As of other warpgroups, and what was drawn for a step, in registers: P comes where its words were."""
        found = super().drops(work)
        return found and found.but(drawn=cute.make_rmem_tensor(self.keys_each // 8, Int32))

    @cute.jit
    def draw(self, r, m):
        """Draw what dropout drops of query tile ``m``, before the wait that follows."""
        if const_expr(self.config.dropout):
            head, batch, key = [r.drops.head[i] for i in range(3)]
            counter = (key + r.role * self.keys_each) // COUNTED
            lane = cute.arch.lane_idx()
            row = m * self.tile_m + r.row - lane // 4 + lane % 16
            targets, columns = [rows.align(16) for rows in r.tile_rows], self.keys_each
            draw_for_rows(self.dropout(r), head, batch, row, counter, columns, targets)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(rounds_of(16, columns)):
                for n, pair in enumerate(drawn_for_rows(targets[i], i, columns)):
                    r.drops.drawn[4 * i + n] = pair
            cute.arch.sync_warp()

    def pair(self, r: Any, i: int, c: int) -> Any:
        """What was drawn for elements (i, c) and (i, c + 1)."""
        found = r.drops.drawn[c // 4 * 2 + i]
        return exchanged(found) if c // 2 % 2 else found

    def kept_dp(self, r: Any) -> dict[tuple[int, int], Any]:
        """dP where dropout keeps it, else 0."""
        found: dict[tuple[int, int], Any] = {}
        for i in range(2):
            for c in range(0, self.keys_each // 4, 2):
                two = [r.rows_dp[i, c + j] for j in (0, 1)]
                two = kept(self.pair(r, i, c), r.drops.given.bound, two, [Float32(0.0)] * 2)
                found |= {(i, c + j): two[j] for j in (0, 1)}
        return found

    @cute.jit
    def share(self, r, acc, slot):
        """P or dS, in the input dtype, where both warpgroups read it; of P what dropout keeps."""
        for i in cutlass.range_constexpr(len(r.tile_rows)):
            count = min(4, self.keys_each // 4 - 4 * i)
            pairs = [(acc[2 * j], acc[2 * j + 1]) for j in range(4 * i, 4 * i + count)]
            words = [pack16(a, b, self.dtype) for a, b in pairs]
            if const_expr(self.config.dropout and slot == P_SLOT):
                at = [self.pair(r, j % 2, j // 2 * 2) for j in range(4 * i, 4 * i + count)]
                words = [kept_halves(two, pair, r.drops.given.bound) for two, pair in zip(words, at, strict=True)]
            store_matrices(r.tile_rows[i] + slot * (self.tile_m * self.tile_n), words)

    @cute.jit
    def stage(self, r, start, factor):
        """dV or dK in the input dtype in shared memory, rows now keys: blocks of 64 columns, chunks of 16 bytes swizzled."""
        own, tile_n = cute.arch.thread_idx()[0] % WARPGROUP, self.tile_n
        lane = own % 32
        chunk = own // 32 * 2 + lane // 8 % 2
        target = start + (lane // 16 * 8 + lane % 8) * 64 + (chunk ^ lane % 8) * 8
        for block in cutlass.range_constexpr(self.dims[r.role] // 64):
            for i in cutlass.range_constexpr(tile_n // 16):
                at = block * (tile_n // 2) + 8 * i
                words = [pack16(r.acc[at + 2 * j] * factor, r.acc[at + 2 * j + 1] * factor, self.dtype) for j in range(4)]
                store_matrices(target + block * (tile_n * 64) + i * (16 * 64), words, transposed=True)

    @cute.jit
    def copy_out(self, start, columns, work, target):
        """Store staged rows of dV or dK, 16 bytes a thread, neighbours next to each other."""
        own, chunks = cute.arch.thread_idx()[0] % WARPGROUP, columns // 8
        for i in cutlass.range_constexpr(self.tile_n * chunks // WARPGROUP):
            index = i * WARPGROUP + own
            key, chunk = index // chunks, index % chunks
            row, column = work.n_block * self.tile_n + key, chunk * 8
            if row < work.seqlen_k and column < target.shape[-1]:
                source = start + chunk // 8 * (self.tile_n * 64) + key * 64 + (chunk % 8 ^ key % 8) * 8
                eight = cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(8)), eight)
                into = self.element(target, work.batch, work.k_start + row, work.head, column)
                cute.autovec_copy(eight, cute.make_tensor(into, cute.make_layout(8)))
