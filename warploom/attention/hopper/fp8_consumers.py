"""The consumer warpgroups of the FP8 forward: scales, P in e4m3, sums of PV in two levels.

The tensor cores keep few bits of an FP8 sum, so each key tile's PV begins at zero and is added to O in fp32, where V's scale
is multiplied in. Scores are multiplied by the scales of Q and K, so that maxima are in log2 units throughout.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper.forward_columns import ColumnConsumers
from warploom.attention.hopper.forward_consumers import Rows
from warploom.attention.hopper.fp8_base import SCALED, Scales, first_block
from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.kernels.cute.instructions import bits_of, exp2, largest_word, pack_e4m3, reciprocal
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.softmax import capped, finite
from warploom.kernels.cute.wgmma import gemm, part_of, words

# P is 2^(score - reference), at most 2^TOP: below 448, e4m3's largest. A row's reference is set TOP - HEADROOM, a whole number,
# below its maximum, whose P is then exact, and again where the maximum has grown by more than HEADROOM.
TOP, HEADROOM = 8.75, 2.75
# Of scores: a product of scales that is 0 in fp32 would make NaN of a hidden score, -inf.
LEAST = 2.0**-126
KEY_SCALE, VALUE_SCALE, PARTIAL_SCALE = 0, 1, 2


class Fp8Rows(Rows):
    """What a warpgroup keeps of its 64 rows besides."""

    scales: Scales
    partial: Any  # the accumulator of one PV; with one level that of all, O
    query_scale: Any  # of the rows, times what makes log2 units of scores
    bases: Any  # where the scales of K's and V's blocks start
    number: Any  # of the next key tile, under a column mask
    factors: Any  # scales: of the key tile's K, of its V, and of ``partial``'s V


class Fp8Consumers(ColumnConsumers):
    """What every consumer warpgroup runs. A row's maximum (``row_max``) is its reference, which all else is relative to."""

    config: Fp8ForwardConfig

    def rows(
        self,
        shared: Any,
        mma_qk: Any,
        mma_pv: Any,
        group: Any,
        multiplier: Any,
        cap_in: Any,
        dropout: Any = None,
        bias: Any = None,
        scales: Any = None,
    ) -> Fp8Rows:
        """What warpgroup ``group`` keeps."""
        partial = mma_pv.make_fragment_C(mma_pv.get_slice(0).partition_shape_C((64, self.pv_columns)))
        acc_o = partial
        if not self.config.fast:
            acc_o = cute.make_rmem_tensor(self.config.head_dim_v // 2, Float32)
        names = "dropout", "tile", "drawn", "alibi", "distances", "largest"
        absent: dict[str, Any] = dict.fromkeys(names)
        masked = self.config.columns
        return Fp8Rows(
            **self.common_rows(shared, mma_qk, mma_pv, group, multiplier, cap_in, shared.v, acc_o),
            **absent,
            mask_words=cute.make_rmem_tensor(2, Int32) if masked else None,
            mask_ring=cute.make_rmem_tensor(2, Int32) if masked else None,
            number=cute.make_rmem_tensor(1, Int32) if masked else None,
            scales=scales,
            partial=partial,
            query_scale=cute.make_rmem_tensor(1, Float32),
            bases=cute.make_rmem_tensor(2, Int32),
            factors=cute.make_rmem_tensor(3, Float32),
        )

    @property
    def pv_columns(self) -> int:
        """Columns of O of one PV."""
        return self.config.pv_columns or self.config.head_dim_v

    # Scales

    @cute.jit
    def find_scales(self, work, head, batch, top, q_start, k_start):
        """The scale of the warpgroup's rows, which lie in one block, and where those of its keys begin."""
        scales = work.scales
        block, first_key = top // SCALED, Int32(0)
        if const_expr(self.config.varlen):
            block += first_block(q_start, batch)
            first_key = first_block(k_start, batch)
            lead = []
        else:
            lead = [batch]
        block = cutlass.min(block, scales.q.shape[-2] - 1)  # rows past the last query
        scale = scales.q[(*lead, block, head)]
        work.query_scale[0] = scale if const_expr(self.config.softcap) else scale * work.multiplier
        head_kv = head // scales.members
        work.bases[0] = Int32(cute.crd2idx((*lead, first_key, head_kv), scales.k.layout))
        work.bases[1] = Int32(cute.crd2idx((*lead, first_key, head_kv), scales.v.layout))
        if const_expr(self.config.overlap and not self.config.fast):
            work.partial.fill(0.0)
            work.factors[PARTIAL_SCALE] = 0.0

    @cute.jit
    def take_scales(self, work, n):
        """The scales of key tile ``n``, under a column mask of the one noted: K's and V's."""
        if const_expr(self.config.columns):
            n = work.number[0]
        block = n // (SCALED // self.tile_n)
        found = []
        for i, t in ((0, work.scales.k), (1, work.scales.v)):
            at = work.bases[i] + block * Int32(t.stride[-2])
            found.append(cute.make_tensor(t.iterator + at, cute.make_layout(1))[0])
        return found[0], found[1]

    @cute.jit
    def while_scoring(self, work, n):
        """Ask for the scales of key tile ``n``."""
        work.factors[KEY_SCALE], work.factors[VALUE_SCALE] = self.take_scales(work, n)

    @property
    def notes_tiles(self) -> bool:
        """Its scales do."""
        return True

    def note_tile(self, work: Any, n: Any) -> None:
        """The number of the key tile that is next, where steps do not count them."""
        work.number[0] = n

    def log2_units(self, work: Any) -> Any:
        """References are in log2 units."""
        return Float32(1.0)

    # A key tile

    @cute.jit
    def step(self, work, n, last, stage, phase, masked, place=None, rows=None):
        """PV of the key tile before and QKᵀ of key tile ``n``, then the softmax; the last two are for tables of distances.

        What may be waited for or computed before is, as the other warpgroups wait for the end of this one's turn; with
        overlap O is added to and rescaled under QKᵀ.
        """
        shared = work.shared
        v_stage, v_phase = stage, phase
        stage, phase = advance(stage, phase, self.stages)
        if const_expr(self.config.overlap):
            cute.arch.mbarrier_wait(shared.k_full + stage, phase)
            self.wait_ping_pong(work.group)
            gemm(work.mma_qk, work.acc_s, work.q, work.k, False, stage)
            if const_expr(not self.config.fast):
                self.add_partial(work)
            self.rescale(work)
            cute.arch.mbarrier_wait(shared.v_full + v_stage, v_phase)
            gemm(work.mma_pv, work.partial, work.p, work.v, self.config.fast, v_stage)
            self.pass_ping_pong(work.group)
            work.factors[PARTIAL_SCALE] = work.factors[VALUE_SCALE]
            self.while_scoring(work, n)
            if const_expr(masked and self.config.columns):
                self.take_mask(work)
            warpgroup.wait_group(1)
            release(shared.k_empty + stage)
            if n == last:
                release(shared.q_empty + work.group)  # the next tile's Q arrives while this one ends
            self.softmax(work, n, masked, shared.v_empty + v_stage)
        else:
            key_scale, value_scale = self.take_scales(work, n)
            cute.arch.mbarrier_wait(shared.v_full + v_stage, v_phase)
            self.rescale(work)
            self.wait_ping_pong(work.group)
            self.add_values(work, v_stage)
            cute.arch.mbarrier_wait(shared.k_full + stage, phase)
            gemm(work.mma_qk, work.acc_s, work.q, work.k, False, stage)
            self.pass_ping_pong(work.group)
            work.factors[KEY_SCALE], work.factors[VALUE_SCALE] = key_scale, value_scale
            if const_expr(masked and self.config.columns):
                self.take_mask(work)
            warpgroup.wait_group(0)
            release(shared.k_empty + stage)
            if n == last:
                release(shared.q_empty + work.group)
            self.softmax(work, n, masked)
        self.pack(work, n)
        return stage, phase

    @cute.jit
    def finish(self, work, stage, phase):
        """The last PV of a tile; the stage and phase that follow."""
        shared = work.shared
        if const_expr(self.config.overlap and not self.config.fast):
            self.add_partial(work)
        self.rescale(work)
        cute.arch.mbarrier_wait(shared.v_full + stage, phase)
        if const_expr(self.config.overlap and not self.config.fast):
            gemm(work.mma_pv, work.partial, work.p, work.v, False, stage)
            warpgroup.wait_group(0)
            release(shared.v_empty + stage)
            work.factors[PARTIAL_SCALE] = work.factors[VALUE_SCALE]
            self.add_partial(work)
        else:
            self.add_values(work, stage)
        return advance(stage, phase, self.stages)

    @cute.jit
    def add_partial(self, work):
        """O += the last PV, times its V's scale."""
        for i in cutlass.range_constexpr(cute.size(work.partial)):
            work.acc_o[i] = work.acc_o[i] + work.partial[i] * work.factors[PARTIAL_SCALE]

    @cute.jit
    def add_values(self, work, stage):
        """O += PV of the last P, times V's scale where P has it not: some columns after the others, each awaited."""
        registers = self.pv_columns // 2
        for part in cutlass.range_constexpr(self.config.head_dim_v // self.pv_columns):
            gemm(work.mma_pv, work.partial, work.p, part_of(work.v, part), self.config.fast, stage)
            warpgroup.wait_group(0)
            if const_expr((part + 1) * self.pv_columns == self.config.head_dim_v):
                release(work.shared.v_empty + stage)
            for i in cutlass.range_constexpr(0 if self.config.fast else registers):
                at = part * registers + i
                work.acc_o[at] = work.acc_o[at] + work.partial[i] * work.factors[VALUE_SCALE]

    # The softmax

    @cute.jit
    def softmax(self, work, n, masked, v_empty=None):
        """Exponentiate the scores of key tile ``n`` against a reference that leaves them 2^TOP; O is left to ``rescale``."""
        rows, columns, pv_wait = work.rows_s, self.tile_n // 4, self.config.pv_wait
        scale = work.factors[KEY_SCALE] * work.query_scale[0]
        scale = LEAST if scale < LEAST else scale
        if const_expr(self.config.softcap):
            cap_in = work.cap_in * scale
            for i in cutlass.range_constexpr(2 * columns):
                work.acc_s[i] = capped(work.acc_s[i], work.multiplier, cap_in)
            scale = Float32(1.0)
        if const_expr(masked and self.config.columns):
            self.apply_mask(work)
        elif const_expr(masked):
            self.mask(rows, work.limits, n)
        # With one level V's scale cannot be multiplied in behind a PV: it is part of P.
        level, share = Float32(0.0), Float32(1.0)
        if const_expr(self.config.fast):
            level = cute.math.log2(work.factors[VALUE_SCALE])
            share = reciprocal(work.factors[VALUE_SCALE])
        offsets = cute.make_rmem_tensor(2, Float32)
        tops = self.largest(rows, masked)
        for r in cutlass.range_constexpr(2):
            new = cute.arch.warp_reduction_max(tops[r], threads_in_group=4) * scale
            if const_expr(self.config.fast):
                new = new + level
            outgrown = new > work.row_max[r] + TOP  # not where both are -inf
            new = new - (TOP - HEADROOM) if outgrown else work.row_max[r]
            work.correction[r] = exp2(work.row_max[r] - new) if outgrown else 1.0
            work.row_max[r] = new
            offsets[r] = finite(new) - level if const_expr(self.config.fast) else finite(new)
        for r in cutlass.range_constexpr(2):
            before = work.row_sum[r] * work.correction[r]
            sums = [Float32(0.0) if const_expr(self.config.fast) else before, Float32(0.0)]
            for c in cutlass.range_constexpr(columns):
                p = exp2(rows[r, c] * scale - offsets[r])
                rows[r, c] = p
                sums[c % 2] = sums[c % 2] + p
                if const_expr(v_empty is not None and pv_wait == "early" and r == 0 and c == columns // 2):
                    self.finish_pv(sums[0] + sums[1], work.shared, v_empty)
            work.row_sum[r] = sums[0] + sums[1]
            if const_expr(self.config.fast):
                work.row_sum[r] = before + work.row_sum[r] * share
        if const_expr(v_empty is not None and pv_wait == "late"):
            self.finish_pv(work.row_sum[0] + work.row_sum[1], work.shared, v_empty)
        if const_expr(v_empty is not None and pv_wait == "pingpong"):
            warpgroup.wait_group(0)
            release(v_empty)

    @cute.jit
    def largest(self, rows, masked):
        """The largest of a thread's scores of each row.

        Words are compared three at a time, numbers two. Of words as integers the largest is the largest number's, unless all
        are negative. Beside a PV under way and with sums of one level that was slower, and with windows there are spills.
        """
        tops = cute.make_rmem_tensor(2, Float32)
        config = self.config
        if const_expr(masked or config.overlap or config.fast or config.left):
            for r in cutlass.range_constexpr(2):
                tops[r] = self.largest_of_row(rows, r)
        else:
            for r in cutlass.range_constexpr(2):
                tops[r] = self.largest_by_words(rows, r)
            if cute.arch.vote_any_sync((bits_of(tops[0]) | bits_of(tops[1])) < 0):
                for r in cutlass.range_constexpr(2):
                    tops[r] = self.largest_of_row(rows, r)
        return tops

    def largest_of_row(self, rows: Any, r: int) -> Any:
        """The largest of a thread's scores of a row."""
        tops = [rows[r, 0], rows[r, 1]]
        for c in range(2, self.tile_n // 4):
            tops[c % 2] = cute.arch.fmax(tops[c % 2], rows[r, c])
        return cute.arch.fmax(tops[0], tops[1])

    def largest_by_words(self, rows: Any, r: int) -> Any:
        """The same, or any where all are negative; NaN where one is, whose row is NaN."""
        tops, columns = [rows[r, 0], rows[r, 1]], self.tile_n // 4
        for c in range(2, columns - 2, 4):
            for i in range(2):
                tops[i] = largest_word(tops[i], rows[r, c + i], rows[r, c + 2 + i])
        rest = largest_word(rows[r, columns - 2], rows[r, columns - 1], tops[0])
        return largest_word(tops[1], rest, rest)

    def pack(self, work: Any, n: Any) -> None:
        """P in e4m3: the bytes of a word are four neighbouring keys, two of either half of a tile's columns."""
        packed, rows, pairs = words(work.p), work.rows_s, self.tile_n // 16
        for pair in range(pairs):
            for r in range(2):
                columns = (2 * pair, 2 * pair + 1, 2 * (pairs + pair), 2 * (pairs + pair) + 1)
                packed[2 * pair + r] = pack_e4m3([rows[r, c] for c in columns])

    # Masks: a thread has keys 4t to 4t + 3 of each sixteen

    def first_column(self, lane: Any) -> Any:
        """The first of a lane's keys."""
        return lane % 4 * 4

    def element(self, c: int) -> int:
        """Where the ``c``-th of a thread's keys stands in its row of the accumulator."""
        pairs = self.tile_n // 16
        return 2 * (c // 2 % 2 * pairs + c // 4) + c % 2

    @cute.jit
    def own_columns(self, limit):
        """How many of this thread's keys, four in each sixteen, are below ``limit``, which counts from its first."""
        limit = cutlass.min(cutlass.max(limit, 0), self.tile_n)
        return (limit >> 4) * 4 + cutlass.min(limit & 15, 4)
