"""The consumer warpgroups of the forward: S, P and O of 64 query rows each.

First the loop over a block's tiles, then what a warpgroup keeps in registers, then ``step``, which is one key tile, with its
products and its softmax, and the stores: of a whole tile, or of a piece of a split one for ``forward_merge``.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper.forward_base import MASK_STAGES, ForwardShared
from warploom.attention.hopper.forward_bias import BiasedScores
from warploom.attention.hopper.forward_distances import FAR_LEFT, FAR_RIGHT, NEAR, DistanceScores
from warploom.attention.hopper.forward_hidden import if_shown
from warploom.kernels.cute.band import key_tiles, whole_tiles
from warploom.kernels.cute.barriers import ForwardBarrier, arrive, wait
from warploom.kernels.cute.basics import LOG2_E, WARPGROUP, choose
from warploom.kernels.cute.dropout import COUNTED, draw_for_rows, drawn_for_rows, dropout_of, exchanged, kept_halves
from warploom.kernels.cute.epilogue import quad_words, store_words
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, pin
from warploom.kernels.cute.memory import raise_to
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.softmax import capped, finite, log_sum_exp, with_sink
from warploom.kernels.cute.tiles import transposed
from warploom.kernels.cute.wgmma import accumulator_rows, gemm, pack, words

# A row is exponentiated against an earlier maximum until its own is past it by so many powers of two: P stays far inside of
# what 16 bits hold, as precise as at 1, and O and the sums of most tiles need no rescaling.
HEADROOM = 8.0
LN_2 = 1.0 / LOG2_E
# Columns that a word of a mask covers: of 32, ptxas made no R2P.
MASK_BITS = 24


class Rows(Fields):
    """What a warpgroup keeps of its 64 rows: descriptors, accumulators and running values."""

    shared: ForwardShared
    group: Any  # which warpgroup
    q_slot: Any  # of its rows of Q
    multiplier: Any
    cap_in: Any
    mma_qk: Any
    mma_pv: Any
    every_q: Any  # of all slots, where a warpgroup has two
    q: Any  # operands
    k: Any
    v: Any
    p: Any
    acc_s: Any
    acc_o: Any
    rows_s: Any  # the accumulators by (row, column)
    rows_o: Any
    row_max: Any  # of the raw scores, or of log2 units under a softcap
    row_sum: Any  # of this thread's columns
    correction: Any  # what O is still to be multiplied by
    limits: Any  # (row, first hidden column on the right / first visible)
    mask_words: Any  # of each row the bits of this thread's columns, under a column mask
    mask_ring: Any  # stage and phase
    dropout: Any  # what the call says of it, or None
    tile: Any  # with dropout: head, batch, the row that this thread draws for, and under a column mask the key tile
    drawn: Any  # where this thread's words of a counter go, by rounds
    alibi: Any  # what is to be known of ALiBi, or None
    distances: Any  # or of a table of distances
    largest: Any  # each row's true maximum, which may be past ``row_max``, where it is asked for


class Consumers(BiasedScores, DistanceScores):
    """What every consumer warpgroup runs."""

    # The tiles of a block

    @cute.jit
    def compute(
        self, out, lse, sink, parts, k_shape, sequences, dropout, bias, shared, mma_qk, mma_pv, multiplier, cap_in, left, right,
        scales=None, largest=None,
    ):  # fmt: skip
        """64 rows of every query tile of this block; ``scales``: what FP8 needs of q, k and v besides."""
        config = self.config
        dense_seqlen_k = k_shape[0]
        members = 1  # heads of a group
        if const_expr(config.pack_gqa):
            members = (lse.shape[0] if const_expr(config.varlen) else lse.shape[1]) // k_shape[2]
        dense_seqlen_q = Int32(0) if const_expr(config.varlen) else lse.shape[2]
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_in_group = thread // 32 * 16 + thread % 32 // 4  # and that + 8
        warpgroup_rows = self.rows(shared, mma_qk, mma_pv, group, multiplier, cap_in, dropout, bias, scales)
        if group == self.warpgroups - 1:
            self.pass_ping_pong(group)  # the first one begins

        q_turn = Int32(0)
        stage, phase = Int32(0), Int32(0)
        tile_stage, tile_phase = Int32(0), Int32(0)
        m_block, head, batch, first, end, slot, q_start, seqlen_q, k_start, seqlen_k, shift = self.next_tile(
            shared, tile_stage, tile_phase, dense_seqlen_q, dense_seqlen_k
        )
        while head >= 0:
            local = group * 64 + row_in_group
            # The warpgroup's queries are [top, top + span), this thread's two of them.
            if const_expr(config.pack_gqa):
                top, span = m_block * config.pack_gqa, config.pack_gqa
                present = self.place(m_block, head, group * 64, members, seqlen_q)[0] < seqlen_q
            else:
                top, span = m_block * self.tile_m + group * 64, 64
                present = top < seqlen_q
            places = [self.place(m_block, head, local + 8 * r, members, seqlen_q) for r in range(2)]
            q_slot, q_phase = self.q_place(group, q_turn)
            work = self.with_queries(warpgroup_rows, q_slot)
            self.start(work, head, batch, places)
            self.find_scales(work, head, batch, top, q_start, k_start)
            if const_expr(self.biased):
                self.set_bias(work, batch, places, shift)
            if const_expr(self.reads_distances):
                self.set_distances(work, top, places, shift)
            if first < end:
                # Of the tile's keys, those that this warpgroup's rows see; none where they are past the last query.
                own_first, own_end = key_tiles(config, top, top + span, seqlen_q, seqlen_k, shift, left, right)
                own_first = cutlass.min(cutlass.max(own_first, first), end)
                own_end = cutlass.min(own_end, end) if present else own_first
                own_end = cutlass.max(own_end, own_first)
                for _ in cutlass.range(end - own_end, unroll=1):
                    stage, phase = self.skip(shared, group, stage, phase)
                cute.arch.mbarrier_wait(shared.q_full + q_slot, q_phase)
                if own_first < own_end:
                    self.set_limits(work.limits, places, seqlen_k, shift, left, right)
                    whole_first, whole_end = whole_tiles(
                        config, top, top + span, own_first, seqlen_q, seqlen_k, shift, left, right
                    )
                    if const_expr(self.begins):
                        left_end = self.left_tiles(work, (top, top + span), seqlen_q, shift)
                    n = own_end - 1
                    cute.arch.mbarrier_wait(shared.k_full + stage, phase)
                    self.wait_ping_pong(group)
                    if const_expr(self.begins):
                        self.begin_crossed(work, n)
                    if const_expr(self.reads_distances):
                        self.begin_near(work, n, True)
                    gemm(work.mma_qk, work.acc_s, work.q, work.k, self.begins or self.reads_distances, stage)
                    self.pass_ping_pong(group)
                    self.while_scoring(work, n)
                    warpgroup.wait_group(0)
                    release(shared.k_empty + stage)
                    if n == own_first:
                        release(shared.q_empty + q_slot)
                    self.softmax(work, n, True)
                    self.keep_scale(work)
                    self.pack(work, n)
                    extent = (m_block * self.tile_m, seqlen_q, shift, left, right)
                    if const_expr(self.reads_distances):
                        self.clear_unseen(work, n, stage, phase, extent)
                    if const_expr(self.begins and not config.right):
                        # Without a limit on the right only the first tile may be partial.
                        for _ in cutlass.range(n - cutlass.max(work.alibi.right_first[0], whole_first), unroll=1):
                            n -= 1
                            stage, phase = self.step(work, n, own_first, stage, phase, False)
                    if const_expr(self.begins):
                        whole_end = cutlass.min(whole_end, left_end)
                    near_first = Int32(0)
                    if const_expr(self.reads_distances):
                        near_first, right_first, hides = [work.distances.ends[i] for i in range(3)]
                        if const_expr(not config.right):
                            for _ in cutlass.range(n - cutlass.max(right_first, whole_first), unroll=1):
                                n -= 1
                                stage, phase = self.step(work, n, own_first, stage, phase, False, FAR_RIGHT)
                        near_first = cutlass.max(near_first, whole_first)
                        whole_end = cutlass.min(whole_end, near_first) if hides == 1 else whole_end
                    for _ in cutlass.range(n - cutlass.max(whole_end, own_first), unroll=1):
                        n -= 1
                        stage, phase = self.step(work, n, own_first, stage, phase, True, NEAR, extent)
                    if const_expr(self.reads_distances):
                        for _ in cutlass.range(n - near_first, unroll=1):
                            n -= 1
                            stage, phase = self.step(work, n, own_first, stage, phase, False, NEAR)
                    for _ in cutlass.range(n - whole_first, unroll=1):
                        n -= 1
                        stage, phase = self.step(work, n, own_first, stage, phase, False, FAR_LEFT)
                    if const_expr(config.left):
                        for _ in cutlass.range(n - own_first, unroll=1):
                            n -= 1
                            stage, phase = self.step(work, n, own_first, stage, phase, True, NEAR, extent)
                q_turn = self.next_q(q_turn)
                if own_first >= own_end:
                    release(shared.q_empty + q_slot)
                else:
                    stage, phase = self.finish(work, stage, phase)
                for _ in cutlass.range(own_first - first, unroll=1):
                    stage, phase = self.skip(shared, group, stage, phase)
            if const_expr(config.largest):
                self.tell_largest(work, largest, batch, places, seqlen_q, sequences)
            if const_expr(config.split):
                if slot >= 0:
                    self.leave(work, parts, slot, local)
                else:
                    self.epilogue(work, out, lse, sink, batch, places, q_start, seqlen_q, sequences)
            else:
                self.epilogue(work, out, lse, sink, batch, places, q_start, seqlen_q, sequences)
            tile_stage, tile_phase = advance(tile_stage, tile_phase, self.tile_stages)
            m_block, head, batch, first, end, slot, q_start, seqlen_q, k_start, seqlen_k, shift = self.next_tile(
                shared, tile_stage, tile_phase, dense_seqlen_q, dense_seqlen_k
            )

    @cute.jit
    def skip(self, shared, group, stage, phase):
        """Let K and V of a key tile go by that this warpgroup does not need."""
        self.wait_ping_pong(group)
        self.pass_ping_pong(group)
        cute.arch.mbarrier_wait(shared.k_full + stage, phase)
        release(shared.k_empty + stage)
        cute.arch.mbarrier_wait(shared.v_full + stage, phase)
        release(shared.v_empty + stage)
        return advance(stage, phase, self.stages)

    # What a warpgroup keeps

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
    ) -> Rows:
        """What warpgroup ``group`` keeps."""
        acc_o = mma_pv.make_fragment_C(mma_pv.get_slice(0).partition_shape_C((64, self.config.head_dim_v)))
        return Rows(
            **self.common_rows(shared, mma_qk, mma_pv, group, multiplier, cap_in, transposed(shared.v), acc_o),
            mask_words=cute.make_rmem_tensor(2, Int32),
            mask_ring=cute.make_rmem_tensor(2, Int32),
            dropout=dropout_of(dropout),
            tile=cute.make_rmem_tensor(4, Int32) if self.config.dropout else None,
            drawn=self.drawn(shared, group) if self.config.dropout else None,
            alibi=self.alibi(bias, shared),
            distances=self.distances(bias),
            largest=cute.make_rmem_tensor(2, Float32) if self.config.largest else None,
        )

    def common_rows(
        self, shared: Any, mma_qk: Any, mma_pv: Any, group: Any, multiplier: Any, cap_in: Any, v: Any, acc_o: Any
    ) -> dict[str, Any]:
        """What a warpgroup keeps of operands of any kind: ``v`` as PV takes it, and the accumulator of O."""
        thr_qk, thr_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        acc_s = mma_qk.make_fragment_C(thr_qk.partition_shape_C((64, self.tile_n)))
        every_q = mma_qk.make_fragment_A(thr_qk.partition_A(shared.q))
        return {
            "shared": shared,
            "group": group,
            "q_slot": group,
            "multiplier": multiplier,
            "cap_in": cap_in,
            "mma_qk": mma_qk,
            "mma_pv": mma_pv,
            "q": every_q[None, None, None, group],
            "every_q": every_q if self.q_stages > 1 else None,
            "k": mma_qk.make_fragment_B(thr_qk.partition_B(shared.k)),
            "v": mma_pv.make_fragment_B(thr_pv.partition_B(v)),
            "p": mma_pv.make_fragment_A(thr_pv.partition_shape_A((64, self.tile_n))),
            "acc_s": acc_s,
            "acc_o": acc_o,
            "rows_s": accumulator_rows(acc_s, self.tile_n),
            "rows_o": accumulator_rows(acc_o, self.config.head_dim_v),
            "row_max": cute.make_rmem_tensor(2, Float32),
            "row_sum": cute.make_rmem_tensor(2, Float32),
            "correction": cute.make_rmem_tensor(2, Float32),
            "limits": cute.make_rmem_tensor((2, 2), Int32),
        }

    def with_queries(self, work: Any, q_slot: Any) -> Any:
        """The same with the rows of Q in a slot."""
        return work if self.q_stages == 1 else work.but(q_slot=q_slot, q=work.every_q[None, None, None, q_slot])

    def start(self, work: Any, head: Any, batch: Any, places: Any) -> None:
        """Nothing seen yet of the tile's rows."""
        if self.config.dropout:
            lane = cute.arch.lane_idx()
            work.tile[0], work.tile[1], work.tile[2] = head, batch, places[0][0] - lane // 4 + lane % 16
        work.acc_o.fill(0.0)
        work.row_max.fill(-Float32.inf)
        work.row_sum.fill(0.0)
        if self.config.largest:
            work.largest.fill(-Float32.inf)

    def find_scales(self, work: Any, head: Any, batch: Any, top: Any, q_start: Any, k_start: Any) -> None:
        """Nothing: 16-bit operands have no scales."""

    def while_scoring(self, work: Any, n: Any) -> None:
        """What a tile's first scores are accompanied by."""
        self.drop(work, n)

    @cute.jit
    def set_limits(self, limits, places, seqlen_k, shift, left, right):
        """This thread's columns of each row: the first hidden one on the right, and the first visible one."""
        first_column = self.first_column(cute.arch.lane_idx())
        for r in cutlass.range_constexpr(2):
            hidden = seqlen_k
            if const_expr(self.config.right):
                hidden = cutlass.min(hidden, places[r][0] + shift + right + 1)
            limits[r, 0] = hidden - first_column
            if const_expr(self.config.left):
                limits[r, 1] = places[r][0] + shift - left - first_column

    # A key tile

    @cute.jit
    def step(self, work, n, last, stage, phase, masked, place=NEAR, rows=None):
        """QKᵀ of key tile ``n`` with the PV of the tile before behind it, then the softmax under that PV.

        ``place``: of the tile in a table of distances; ``rows``: as ``clear_unseen`` has them.
        """
        shared = work.shared
        v_stage, v_phase = stage, phase
        stage, phase = advance(stage, phase, self.stages)
        begins = const_expr(self.begins or (self.reads_distances and place == NEAR))
        if const_expr(begins and self.reads_distances):
            self.begin_near(work, n, masked)
        cute.arch.mbarrier_wait(shared.k_full + stage, phase)
        self.wait_ping_pong(work.group)
        if const_expr(self.begins and masked):
            self.begin_crossed(work, n)
        if const_expr(self.multiplies and not masked):
            self.gemm_alibi(work, n, stage)
        else:
            gemm(work.mma_qk, work.acc_s, work.q, work.k, begins, stage)
        self.rescale(work)
        cute.arch.mbarrier_wait(shared.v_full + v_stage, v_phase)
        gemm(work.mma_pv, work.acc_o, work.p, work.v, True, v_stage)
        self.pass_ping_pong(work.group)
        if const_expr(masked and self.config.columns):
            self.take_mask(work)
        self.drop(work, n)
        warpgroup.wait_group(1)
        release(shared.k_empty + stage)
        if n == last:
            release(shared.q_empty + work.q_slot)  # the next tile's Q arrives while this one ends
        self.softmax(work, n, masked, shared.v_empty + v_stage, place)
        self.pack(work, n)
        if const_expr(self.reads_distances and masked):
            self.clear_unseen(work, n, stage, phase, rows)
        return stage, phase

    def pack(self, work: Any, n: Any) -> None:
        """P of key tile ``n`` as an operand; with a bias the next tile's scores may begin in its place."""
        if self.begins and not self.multiplies:
            self.pack_and_begin(work, n - 1)
        else:
            pack(work.acc_s, work.p, self.dtype)
        if self.config.dropout:
            self.drop_packed(work)

    @cute.jit
    def finish(self, work, stage, phase):
        """The last PV of a tile; the stage and phase that follow."""
        shared = work.shared
        self.rescale(work)
        cute.arch.mbarrier_wait(shared.v_full + stage, phase)
        gemm(work.mma_pv, work.acc_o, work.p, work.v, True, stage)
        warpgroup.wait_group(0)
        release(shared.v_empty + stage)
        return advance(stage, phase, self.stages)

    @cute.jit
    def wait_ping_pong(self, group):
        """Wait until the warpgroup before has issued its products; every warpgroup takes a turn for each key tile."""
        if const_expr(self.config.pv_wait == "pingpong"):
            wait(ForwardBarrier.PING_PONG, 2 * WARPGROUP, group)

    @cute.jit
    def pass_ping_pong(self, group):
        """Let the next warpgroup issue its products."""
        if const_expr(self.config.pv_wait == "pingpong"):
            after = choose(group + 1 == self.warpgroups, 0, group + 1)
            arrive(ForwardBarrier.PING_PONG, 2 * WARPGROUP, after)

    def keep_scale(self, work: Any) -> None:
        """O is 0: no new maximum can change it."""
        work.correction.fill(1.0)

    @cute.jit
    def rescale(self, work):
        """Bring O to the maxima of the last softmax, if a row of this warp has a new one."""
        rows, correction = work.rows_o, work.correction
        if cute.arch.vote_any_sync((correction[0] != 1.0) | (correction[1] != 1.0)):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(self.config.head_dim_v // 4):
                    rows[r, c] = rows[r, c] * correction[r]

    @property
    def notes_tiles(self) -> bool:
        """Whether more of a key tile than its scores depends on its number."""
        return self.config.dropout

    def note_tile(self, work: Any, n: Any) -> None:
        """For dropout, the number of the key tile that is next, where steps do not count them."""
        if self.config.dropout:
            work.tile[3] = n

    @cute.jit
    def drop(self, work, n):
        """Draw what dropout drops of key tile ``n``, while the tensor cores compute their scores."""
        if const_expr(self.config.dropout):
            head, batch, row, tile = [work.tile[i] for i in range(4)]
            counter = (tile if const_expr(self.config.columns) else n) * (self.tile_n // COUNTED)
            draw_for_rows(
                work.dropout, head, batch, row, counter, self.tile_n, work.drawn, self.config.by_double
            )

    def drawn(self, shared: Any, group: Any) -> list[Any]:
        """Where this thread's words of a counter go: those of a warp's lanes lie together."""
        thread = group * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP
        start = shared.drops + (thread // 32 * self.rounds * 32 + thread % 32) * 4
        return [start + i * 32 * 4 for i in range(self.rounds)]

    @cute.jit
    def drop_packed(self, work):
        """Zeros in the operand P for what dropout drops."""
        packed, bound = words(work.p), work.dropout.bound
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(self.rounds):
            drawn = drawn_for_rows(work.drawn[i], i, self.tile_n)
            for n in cutlass.range_constexpr(len(drawn)):
                at = i * 8 + n // 2 * 4 + n % 2
                packed[at] = kept_halves(packed[at], drawn[n], bound)
                packed[at + 2] = kept_halves(packed[at + 2], exchanged(drawn[n]), bound)
        cute.arch.sync_warp()

    # The softmax

    @cute.jit
    def softmax(self, work, n, masked, v_empty=None, place=NEAR):
        """Exponentiate the scores of key tile ``n`` against a maximum that leaves them HEADROOM; O is left to ``rescale``.

        A PV under way, which releases ``v_empty``, is waited for as the configuration has it. After a quarter of the
        exponentials it has about ended, and the conversion of P can fill the issue slots that the others leave.
        """
        rows, columns, pv_wait = work.rows_s, self.tile_n // 4, self.config.pv_wait
        scale = Float32(1.0) if const_expr(self.config.softcap) else work.multiplier
        if const_expr(self.config.softcap):
            for i in cutlass.range_constexpr(2 * columns):
                work.acc_s[i] = capped(work.acc_s[i], work.multiplier, work.cap_in)
            if const_expr(self.biased):
                self.add_bias(work, n)
        apart = const_expr(self.begins or (self.reads_distances and place == FAR_RIGHT))
        if const_expr(self.begins):
            parts = self.row_parts(work, n, masked)
        elif const_expr(apart):
            parts = [work.distances.right[0]] * 2
        if const_expr(masked and self.config.columns):
            self.apply_mask(work)
        elif const_expr(masked):
            self.mask(rows, work.limits, n, work.mask_words if const_expr(self.reads_distances) else None)
        offsets = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            top = [work.row_max[r], rows[r, 0]]
            if const_expr(apart):
                top[0] = -Float32.inf
            for c in cutlass.range_constexpr(1, columns):
                top[c % 2] = cute.arch.fmax(top[c % 2], rows[r, c])
            new = cute.arch.fmax(top[0], top[1])
            if const_expr(apart):
                new = cute.arch.fmax(new + parts[r], work.row_max[r])
            new = cute.arch.warp_reduction_max(new, threads_in_group=4)
            if const_expr(self.config.largest):
                work.largest[r] = cute.arch.fmax(work.largest[r], new)
            grown = (new - work.row_max[r]) * scale
            outgrown = grown > HEADROOM  # not where both are -inf
            new = new if outgrown else work.row_max[r]
            work.correction[r] = exp2(-grown) if outgrown else 1.0
            work.row_max[r] = new
            offsets[r] = finite(new) * scale
            if const_expr(apart):
                offsets[r] = (finite(new) - parts[r]) * scale
        for r in cutlass.range_constexpr(2):
            sums = [work.row_sum[r] * work.correction[r], Float32(0.0)]
            for c in cutlass.range_constexpr(columns):
                p = exp2(rows[r, c] * scale - offsets[r])
                rows[r, c] = p
                sums[c % 2] = sums[c % 2] + p
                if const_expr(v_empty is not None and pv_wait == "early" and r == 0 and c == columns // 2):
                    self.finish_pv(sums[0] + sums[1], work.shared, v_empty)
            work.row_sum[r] = sums[0] + sums[1]
        if const_expr(v_empty is not None and pv_wait == "late"):
            self.finish_pv(work.row_sum[0] + work.row_sum[1], work.shared, v_empty)
        if const_expr(v_empty is not None and pv_wait == "pingpong"):
            warpgroup.wait_group(0)
            release(v_empty)

    @cute.jit
    def finish_pv(self, exponentials, shared, v_empty):
        """Wait for PV behind the exponentials that this is the sum of, and let its V go."""
        pin(exponentials, shared.scratch)
        warpgroup.wait_group(0)
        release(v_empty)

    @cute.jit
    def mask(self, rows, limits, n, words=None):
        """Hide columns of key tile ``n`` past the keys or outside the band, and those whose bits in ``words`` are 0.

        A thread's columns of a row are bits of words, of which ptxas makes several predicates in one instruction (R2P); a
        comparison for each column, and for each side of a window, took a fifth of a masked tile's time.
        """
        columns = self.tile_n // 4
        for r in cutlass.range_constexpr(2):
            hidden = self.own_columns(limits[r, 0] - n * self.tile_n)
            visible = self.own_columns(limits[r, 1] - n * self.tile_n) if const_expr(self.config.left) else Int32(0)
            for start in cutlass.range_constexpr(0, columns, MASK_BITS):
                shown = self.lowest_bits(hidden - start)
                if const_expr(self.config.left):
                    shown = shown & ~self.lowest_bits(visible - start)
                if const_expr(words is not None):
                    shown = shown & (words[r] >> start)
                for c in cutlass.range_constexpr(start, min(start + MASK_BITS, columns)):
                    at = self.element(c)
                    rows[r, at] = rows[r, at] if cutlass.Boolean(shown & (1 << (c - start))) else -Float32.inf

    @cute.jit
    def take_mask(self, work):
        """The bits that the producer has made for this thread's two rows of the next partial tile."""
        ring, shared = work.mask_ring, work.shared
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row = thread // 32 * 16 + thread % 32 // 4
        place = ring[0]
        if const_expr(self.owners > 1):
            place += work.group * MASK_STAGES
        else:
            row += work.group * 64
        cute.arch.mbarrier_wait(shared.mask_full + place, ring[1])
        source = shared.masks + (place * self.mask_rows + row) * 4 + thread % 4
        words = cute.make_tensor(source, cute.make_layout(2, stride=32))
        work.mask_words[0], work.mask_words[1] = words[0], words[1]
        cute.arch.mbarrier_arrive(shared.mask_empty + place)  # every lane, as in ``next_tile``
        ring[0], ring[1] = advance(ring[0], ring[1], MASK_STAGES)

    @cute.jit
    def apply_mask(self, work):
        """Hide the columns whose bits are 0."""
        rows, words, columns = work.rows_s, work.mask_words, self.tile_n // 4
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(columns):
                at = self.element(c)
                rows[r, at] = if_shown(rows[r, at], words[r], c, work.mask_ring[0], r * columns + c)

    def element(self, c: int) -> int:
        """Where the ``c``-th of a thread's columns stands in its row of the accumulator."""
        return c

    @cute.jit
    def own_columns(self, limit):
        """How many of this thread's columns, two in each eight, are below ``limit``, which counts from its first."""
        limit = cutlass.min(cutlass.max(limit, 0), self.tile_n)
        return (limit >> 3) * 2 + cutlass.min(limit & 7, 2)

    @cute.jit
    def lowest_bits(self, count):
        """A word with its lowest ``count`` bits set, none for a negative one, at most MASK_BITS."""
        return (Int32(1) << cutlass.max(cutlass.min(count, MASK_BITS), 0)) - 1

    # What a tile leaves

    @cute.jit
    def tell_largest(self, work, largest, batch, places, seqlen_q, sequences):
        """Raise the largest logit of the tile's head to those of this warp's rows; a row that saw NaN has a sum of NaN."""
        found = -Float32.inf
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            top = self.top_of(work.largest[r], work) * LN_2
            if (total != total) & (top < Float32.inf):
                top = total
            if places[r][0] < seqlen_q:
                found = top if (top > found) | (top != top) else found
        for lanes in cutlass.range_constexpr(2, 5):
            other = cute.arch.shuffle_sync_bfly(found, 1 << lanes)
            found = other if (other > found) | (other != other) else found
        inside = places[0][0] - cute.arch.lane_idx() // 4 < seqlen_q
        if const_expr(self.config.varlen):
            inside = inside & (batch < sequences)
        if inside & (cute.arch.lane_idx() == 0):
            raise_to(largest.iterator + (batch * largest.shape[1] + places[0][1]), found)

    def log2_units(self, work: Any) -> Any:
        """What a row's maximum is multiplied by to be one in log2 units."""
        return Float32(1.0) if self.config.softcap else work.multiplier

    def top_of(self, row_max: Any, work: Any) -> Any:
        """A row's maximum in log2 units."""
        top = row_max * self.log2_units(work)
        return top + work.distances.base[0] if self.reads_distances else top

    @cute.jit
    def leave(self, work, parts, slot, row):
        """Store a piece in the workspace: O, not normalised, then each row's maximum in log2 units and its sum."""
        dim = self.config.head_dim_v
        base = parts.iterator + cutlass.Int64(slot) * self.config.piece_floats
        word = cute.arch.lane_idx() % 4
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            here = row + 8 * r
            for c in cutlass.range_constexpr(dim // 8):
                self.store_pair(base + (here * dim + 8 * c + 2 * word), work.rows_o[r, 2 * c], work.rows_o[r, 2 * c + 1])
            if word == 0:
                self.store_pair(base + (self.tile_m * dim + 2 * here), self.top_of(work.row_max[r], work), total)

    @cute.jit
    def store_pair(self, target, a, b):
        """Two fp32 to an address of 8-byte steps."""
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = a, b
        cute.autovec_copy(pair, cute.make_tensor(target.align(8), cute.make_layout(2)))

    @cute.jit
    def row_targets(self, out, lse, sink, batch, head, q_start, sequences):
        """Where a tile's rows go, (seqlen_q, head_dim_v) and (seqlen_q,), and the sink's logit in log2 units."""
        if const_expr(self.config.varlen):
            rows_out = cute.domain_offset((q_start, 0), out[None, head, None])
            rows_lse = cute.domain_offset((q_start,), lse[head, None])
        else:
            rows_out, rows_lse = out[batch, None, head, None], lse[batch, head, None]
        logit = -Float32.inf
        if const_expr(self.config.sink):
            logit = sink[head] * LOG2_E
            if const_expr(self.config.varlen):
                logit = logit if batch < sequences else -Float32.inf  # a token of no sequence has no sink
        return rows_out, rows_lse, logit

    @cute.jit
    def epilogue(self, work, out, lse, sink, batch, places, q_start, seqlen_q, sequences):
        """Normalise and store: quads transpose their columns, so that each lane writes 16 bytes of a row."""
        lane = cute.arch.lane_idx()
        word = lane % 4
        for r in cutlass.range_constexpr(2):
            here, head = places[r]
            rows_out, rows_lse, logit = self.row_targets(out, lse, sink, batch, head, q_start, sequences)
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            top = self.top_of(work.row_max[r], work)
            shrink = Float32(1.0)
            if const_expr(self.config.sink):
                top, total, shrink = with_sink(top, total, logit)
            inverse = 0.0 if total == 0.0 else shrink / total
            if const_expr(self.config.dropout):
                inverse = inverse * work.dropout.scale
            if here < seqlen_q and word == 0:
                rows_lse[here] = log_sum_exp(top, total)
            base = rows_out.iterator + cutlass.Int64(here) * rows_out.stride[0]
            for chunk in cutlass.range_constexpr(self.config.head_dim_v // 32):
                pairs = [(work.rows_o[r, chunk * 8 + i], work.rows_o[r, chunk * 8 + i + 1]) for i in range(0, 8, 2)]
                words = quad_words(pairs, inverse, self.dtype, lane)
                column = chunk * 32 + word * 8
                if here < seqlen_q and column < rows_out.shape[1]:
                    store_words(base, words, column)
