"""The forward kernel: one producer warpgroup feeds K and V through TMA rings, consumer warpgroups own 64 query rows each.

A consumer issues the QKᵀ of the next key tile before the PV of the last one, so that its softmax runs under its own PV and,
with two of them taking turns, under the other's GEMMs (Shah et al., FlashAttention-3, 2024). Blocks are persistent: K, V and Q
of the next tile arrive while this one ends. Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import ForwardConfig
from warploom.attention.hopper.primitives import exp2, pack16, pin, transpose_quad

WARPGROUP = 128
LOG2_E = math.log2(math.e)
DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
# Registers a thread (consumer, producer): a warpgroup's share of 64 Ki, in steps of 8, by number of consumers.
REGISTERS = {1: (256, 56), 2: (240, 24), 3: (160, 32)}
# Named barriers 1, 2, ...: consumer warpgroup i issues GEMMs when barrier 1 + i completes. 0 is the block's.
TURN = 1


class HopperForward:
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile_n = config.tile_n
        self.stages = config.stages
        self.warpgroups = config.warpgroups
        self.consumer_warps = 4 * config.warpgroups
        self.threads = WARPGROUP * (config.warpgroups + 1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32
        scale: Float32,
        left: Int32,
        right: Int32,
        pair_heads: Int32,
        blocks: Int32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch ``blocks`` persistent blocks."""
        config = self.config
        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        q, k, v = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (q, k, v)]

        layout_q = self._tile_layout((64, config.head_dim), self.warpgroups)
        layout_k = self._tile_layout((self.tile_n, config.head_dim), self.stages)
        layout_v = self._tile_layout((self.tile_n, config.head_dim_v), self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_q, q_tma = cpasync.make_tiled_tma_atom(load, q, cute.select(layout_q, mode=[0, 1]), (64, config.head_dim))
        tma_k, k_tma = cpasync.make_tiled_tma_atom(
            load, k, cute.select(layout_k, mode=[0, 1]), (self.tile_n, config.head_dim)
        )
        tma_v, v_tma = cpasync.make_tiled_tma_atom(
            load, v, cute.select(layout_v, mode=[0, 1]), (self.tile_n, config.head_dim_v)
        )

        qk = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (64, self.tile_n, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
        )
        pv = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (64, config.head_dim_v, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.MN,
        )

        self.kernel(
            q_tma,
            k_tma,
            v_tma,
            out,
            lse,
            tma_q,
            tma_k,
            tma_v,
            cute.make_tiled_mma(qk),
            cute.make_tiled_mma(pv),
            layout_q,
            layout_k,
            layout_v,
            scale * LOG2_E,
            left,
            right,
            pair_heads,
        ).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    def _tile_layout(self, tile: tuple[int, int], stages: int) -> Any:
        """Row-major tiles with the widest swizzle that the row allows, one after the other."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if tile[1] % 64 == 0 else kinds.K_SW64
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.dtype), (*tile, stages), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        scale_log2: Float32,
        left: Int32,
        right: Int32,
        pair_heads: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (tma_q, tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.warpgroups + 4 * self.stages + 1]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        q_full = storage.barriers.data_ptr()
        q_empty = q_full + self.warpgroups
        k_full = q_empty + self.warpgroups
        k_empty = k_full + self.stages
        v_full = k_empty + self.stages
        v_empty = v_full + self.stages
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.warpgroups):
                    cute.arch.mbarrier_init(q_full + i, 1)
                    cute.arch.mbarrier_init(q_empty + i, 4)
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(k_full + i, 1)
                    cute.arch.mbarrier_init(k_empty + i, self.consumer_warps)
                    cute.arch.mbarrier_init(v_full + i, 1)
                    cute.arch.mbarrier_init(v_empty + i, self.consumer_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        sq = storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        sk = storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        sv = storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        consumer_registers, producer_registers = REGISTERS[self.warpgroups]
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                self.load(
                    q, k, v, sq, sk, sv, tma_q, tma_k, tma_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    lse, left, right, pair_heads,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.compute(
                k, out, lse, sq, sk, sv, mma_qk, mma_pv, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                scale_log2, left, right, pair_heads,
            )  # fmt: skip

    @cute.jit
    def tile(self, turn: Int32, m_blocks: Int32, heads: Int32, pair_heads: Int32):
        """Query tile and head (batch × query heads) of this block's ``turn``-th tile."""
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if const_expr(self.config.right and not self.config.left):
            m_block, head = schedule.paired(turn, block, blocks, m_blocks, heads, pair_heads, self.choose)
        else:
            m_block, head = schedule.in_order(turn, block, blocks, m_blocks)
        return m_block, head

    @cute.jit
    def choose(self, condition: cutlass.Boolean, a: Int32, b: Int32):
        """a if condition else b, of run-time values."""
        return Int32(a) if condition else Int32(b)

    @cute.jit
    def key_tiles(self, m_block: Int32, seqlen_q: Int32, seqlen_k: Int32, left: Int32, right: Int32):
        """First and past-the-end key tile that some row of the query tile sees."""
        first = Int32(0)
        end = cute.ceil_div(seqlen_k, self.tile_n)
        shift = seqlen_k - seqlen_q
        if const_expr(self.config.right):
            last_row = cutlass.min((m_block + 1) * self.config.tile_m, seqlen_q) - 1
            end = cutlass.min(end, cute.ceil_div(cutlass.max(last_row + shift + right + 1, 0), self.tile_n))
        if const_expr(self.config.left):
            first = cutlass.max(m_block * self.config.tile_m + shift - left, 0) // self.tile_n
        return first, end

    @cute.jit
    def load(
        self, q, k, v, sq, sk, sv, tma_q, tma_k, tma_v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        lse, left, right, pair_heads,
    ):  # fmt: skip
        """The producer warp: Q of each warpgroup once a tile, then K one tile ahead of V."""
        config = self.config
        batch_size, heads_q, seqlen_q = lse.shape
        seqlen_k, group = k.shape[0], heads_q // k.shape[2]
        m_blocks = cute.ceil_div(seqlen_q, config.tile_m)
        heads = heads_q * batch_size
        bytes_q = 64 * config.head_dim * 2
        bytes_k = self.tile_n * config.head_dim * 2
        bytes_v = self.tile_n * config.head_dim_v * 2

        q_phase = Int32(1)
        k_stage, k_phase = Int32(0), Int32(1)
        v_stage, v_phase = Int32(0), Int32(1)
        turn = Int32(0)
        m_block, pair_head = self.tile(turn, m_blocks, heads, pair_heads)
        while pair_head < heads:
            batch = pair_head // heads_q
            head = pair_head - batch * heads_q
            head_kv = head // group
            gq = cute.local_tile(q[None, None, head, batch], (64, config.head_dim), (None, 0))
            gk = cute.local_tile(k[None, None, head_kv, batch], (self.tile_n, config.head_dim), (None, 0))
            gv = cute.local_tile(v[None, None, head_kv, batch], (self.tile_n, config.head_dim_v), (None, 0))
            tqs, tqg = self.tma_views(tma_q, sq, gq)
            tks, tkg = self.tma_views(tma_k, sk, gk)
            tvs, tvg = self.tma_views(tma_v, sv, gv)

            first, end = self.key_tiles(m_block, seqlen_q, seqlen_k, left, right)
            if m_block != schedule.NOTHING and first < end:
                for i in cutlass.range_constexpr(self.warpgroups):
                    cute.arch.mbarrier_wait(q_empty + i, q_phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(q_full + i, bytes_q)
                    cute.copy(tma_q, tqg[None, m_block * self.warpgroups + i], tqs[None, i], tma_bar_ptr=q_full + i)
                    if const_expr(i == 0):
                        k_stage, k_phase = self.push(tma_k, tkg, tks, end - 1, k_full, k_empty, k_stage, k_phase, bytes_k)
                q_phase ^= 1
                for j in cutlass.range(end - first - 1, unroll=1):
                    n = end - 2 - j
                    k_stage, k_phase = self.push(tma_k, tkg, tks, n, k_full, k_empty, k_stage, k_phase, bytes_k)
                    v_stage, v_phase = self.push(tma_v, tvg, tvs, n + 1, v_full, v_empty, v_stage, v_phase, bytes_v)
                v_stage, v_phase = self.push(tma_v, tvg, tvs, first, v_full, v_empty, v_stage, v_phase, bytes_v)
            turn += 1
            m_block, pair_head = self.tile(turn, m_blocks, heads, pair_heads)

    def tma_views(self, atom: Any, shared: Any, tiles: Any) -> tuple[Any, Any]:
        """Shared and global tiles as the TMA copy takes them: (copy, stage) and (copy, tile)."""
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def push(self, atom, tiles, shared, n, full, empty, stage, phase, size):
        """Load tile ``n`` into the ring once its stage is free; the stage and phase that follow."""
        cute.arch.mbarrier_wait(empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
        cute.copy(atom, tiles[None, n], shared[None, stage], tma_bar_ptr=full + stage)
        return self.advance(stage, phase)

    @cute.jit
    def advance(self, stage, phase):
        """The next stage of a ring; the phase flips when it wraps."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def compute(
        self, k, out, lse, sq, sk, sv, mma_qk, mma_pv, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        scale_log2, left, right, pair_heads,
    ):  # fmt: skip
        """A consumer warpgroup: 64 rows of every query tile of this block."""
        config = self.config
        batch_size, heads_q, seqlen_q = lse.shape
        seqlen_k = k.shape[0]
        m_blocks = cute.ceil_div(seqlen_q, config.tile_m)
        heads = heads_q * batch_size
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % 32
        row_in_group = thread // 32 * 16 + lane // 4  # and that + 8

        thr_qk, thr_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        svt = cute.make_tensor(sv.iterator, cute.select(sv.layout, mode=[1, 0, 2]))
        frag_q = mma_qk.make_fragment_A(thr_qk.partition_A(sq))[None, None, None, group]
        frag_k = mma_qk.make_fragment_B(thr_qk.partition_B(sk))
        frag_v = mma_pv.make_fragment_B(thr_pv.partition_B(svt))
        acc_s = mma_qk.make_fragment_C(thr_qk.partition_shape_C((64, self.tile_n)))
        acc_o = mma_pv.make_fragment_C(thr_pv.partition_shape_C((64, config.head_dim_v)))
        frag_p = mma_pv.make_fragment_A(thr_pv.partition_shape_A((64, self.tile_n)))
        rows_s = cute.make_tensor(acc_s.iterator, self.row_view(self.tile_n))
        rows_o = cute.make_tensor(acc_o.iterator, self.row_view(config.head_dim_v))
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        limits = cute.make_rmem_tensor((2, 2), Int32)  # (row, first hidden column on the right / first visible)

        if const_expr(config.ping_pong and self.warpgroups > 1):
            if group == self.warpgroups - 1:  # the first turn is warpgroup 0's
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)

        q_phase = Int32(0)
        stage, phase = Int32(0), Int32(0)
        turn = Int32(0)
        m_block, pair_head = self.tile(turn, m_blocks, heads, pair_heads)
        while pair_head < heads:
            batch = pair_head // heads_q
            head = pair_head - batch * heads_q
            first, end = self.key_tiles(m_block, seqlen_q, seqlen_k, left, right)
            first_row = m_block * config.tile_m
            row = first_row + group * 64 + row_in_group
            shift = seqlen_k - seqlen_q
            for r in cutlass.range_constexpr(2):
                hidden = seqlen_k
                if const_expr(config.right):
                    hidden = cutlass.min(hidden, row + 8 * r + shift + right + 1)
                limits[r, 0] = hidden - lane % 4 * 2
                if const_expr(config.left):
                    limits[r, 1] = row + 8 * r + shift - left - lane % 4 * 2
            # Tiles in [whole_first, whole_end) need no mask: every row sees all of them.
            whole_end = seqlen_k // self.tile_n
            if const_expr(config.right):
                whole_end = cutlass.min(whole_end, cutlass.max(first_row + shift + right + 1, 0) // self.tile_n)
            whole_first = first
            if const_expr(config.left):
                last_row = cutlass.min(first_row + config.tile_m, seqlen_q) - 1
                whole_first = cute.ceil_div(cutlass.max(last_row + shift - left, 0), self.tile_n)

            acc_o.fill(0.0)
            row_max.fill(-Float32.inf)
            row_sum.fill(0.0)
            if m_block != schedule.NOTHING and first < end:
                cute.arch.mbarrier_wait(q_full + group, q_phase)
                cute.arch.mbarrier_wait(k_full + stage, phase)
                self.gemm_qk(mma_qk, acc_s, frag_q, frag_k, stage)
                warpgroup.wait_group(0)
                self.release(k_empty + stage, lane)
                self.mask(rows_s, limits, end - 1)
                self.softmax(rows_s, row_max, row_sum, scale_log2)
                self.convert(acc_s, frag_p)

                n = end - 1
                masked = cutlass.max(n - cutlass.max(whole_end, first), 0)
                for _ in cutlass.range(masked, unroll=1):
                    n -= 1
                    stage, phase = self.step(
                        mma_qk, mma_pv, acc_s, acc_o, rows_s, rows_o, frag_q, frag_k, frag_v, frag_p, row_max, row_sum,
                        limits, k_full, k_empty, v_full, v_empty, stage, phase, n, scale_log2, group, lane, True,
                    )  # fmt: skip
                for _ in cutlass.range(n - cutlass.max(whole_first, first), unroll=1):
                    n -= 1
                    stage, phase = self.step(
                        mma_qk, mma_pv, acc_s, acc_o, rows_s, rows_o, frag_q, frag_k, frag_v, frag_p, row_max, row_sum,
                        limits, k_full, k_empty, v_full, v_empty, stage, phase, n, scale_log2, group, lane, False,
                    )  # fmt: skip
                if const_expr(config.left):
                    for _ in cutlass.range(n - first, unroll=1):
                        n -= 1
                        stage, phase = self.step(
                            mma_qk, mma_pv, acc_s, acc_o, rows_s, rows_o, frag_q, frag_k, frag_v, frag_p, row_max, row_sum,
                            limits, k_full, k_empty, v_full, v_empty, stage, phase, n, scale_log2, group, lane, True,
                        )  # fmt: skip
                self.release(q_empty + group, lane)
                q_phase ^= 1
                cute.arch.mbarrier_wait(v_full + stage, phase)
                self.gemm_pv(mma_pv, acc_o, frag_p, frag_v, stage)
                warpgroup.wait_group(0)
                self.release(v_empty + stage, lane)
                stage, phase = self.advance(stage, phase)
            if m_block != schedule.NOTHING:
                self.epilogue(out, lse, rows_o, row_max, row_sum, scale_log2, batch, head, row, seqlen_q, lane)
            turn += 1
            m_block, pair_head = self.tile(turn, m_blocks, heads, pair_heads)

    def row_view(self, columns: int) -> Any:
        """An accumulator as (row, (column pair, group of 8 columns)): rows 0 and 1 are 8 apart."""
        return cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4)))

    @cute.jit
    def step(
        self, mma_qk, mma_pv, acc_s, acc_o, rows_s, rows_o, frag_q, frag_k, frag_v, frag_p, row_max, row_sum,
        limits, k_full, k_empty, v_full, v_empty, stage, phase, n, scale_log2, group, lane, masked,
    ):  # fmt: skip
        """QKᵀ of key tile ``n`` with the PV of the tile before behind it, then the softmax under that PV."""
        v_stage, v_phase = stage, phase
        stage, phase = self.advance(stage, phase)
        cute.arch.mbarrier_wait(k_full + stage, phase)
        self.take_turn(group)
        self.gemm_qk(mma_qk, acc_s, frag_q, frag_k, stage)
        cute.arch.mbarrier_wait(v_full + v_stage, v_phase)
        self.gemm_pv(mma_pv, acc_o, frag_p, frag_v, v_stage)
        self.give_turn(group)
        warpgroup.wait_group(1)
        self.release(k_empty + stage, lane)
        if const_expr(masked):
            self.mask(rows_s, limits, n)
        correction = self.softmax(rows_s, row_max, row_sum, scale_log2)
        pin(row_sum[0] + row_sum[1], v_empty + self.stages)  # the exponentials belong under this PV
        warpgroup.wait_group(0)
        self.release(v_empty + v_stage, lane)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(cute.size(rows_o, mode=[1])):
                rows_o[r, c] = rows_o[r, c] * correction[r]
        self.convert(acc_s, frag_p)
        return stage, phase

    @cute.jit
    def gemm_qk(self, mma, acc, frag_q, frag_k, stage):
        """Issue S = Q Kᵀ as one group."""
        atom = cute.make_mma_atom(mma.op)
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(frag_q, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0)
            cute.gemm(atom, acc, frag_q[None, None, i], frag_k[None, None, i, stage], acc)
        warpgroup.commit_group()

    @cute.jit
    def gemm_pv(self, mma, acc, frag_p, frag_v, stage):
        """Issue O += P V as one group."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(frag_p, mode=[2])):
            cute.gemm(atom, acc, frag_p[None, None, i], frag_v[None, None, i, stage], acc)
        warpgroup.commit_group()

    @cute.jit
    def release(self, barrier, lane):
        """This warp has read what the barrier guards."""
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def take_turn(self, group):
        """Wait until the warpgroup before has issued its GEMMs."""
        if const_expr(self.config.ping_pong and self.warpgroups > 1):
            cute.arch.barrier(barrier_id=TURN + group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def give_turn(self, group):
        """Let the next warpgroup issue its GEMMs."""
        if const_expr(self.config.ping_pong and self.warpgroups > 1):
            after = (group + 1) % self.warpgroups
            cute.arch.barrier_arrive(barrier_id=TURN + after, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def mask(self, rows_s, limits, n):
        """Hide columns of key tile ``n`` past the keys or outside the band."""
        for r in cutlass.range_constexpr(2):
            hidden = limits[r, 0] - n * self.tile_n
            visible = limits[r, 1] - n * self.tile_n if const_expr(self.config.left) else None
            for c in cutlass.range_constexpr(self.tile_n // 4):
                column = c // 2 * 8 + c % 2
                keep = column < hidden
                if const_expr(self.config.left):
                    keep = keep and column >= visible
                rows_s[r, c] = rows_s[r, c] if keep else -Float32.inf

    @cute.jit
    def softmax(self, rows_s, row_max, row_sum, scale_log2):
        """Exponentiate a score tile in place against the running maximum; what the sums and O so far shrink by."""
        correction = cute.make_rmem_tensor(2, Float32)
        columns = self.tile_n // 4
        for r in cutlass.range_constexpr(2):
            top = [row_max[r], rows_s[r, 0]]
            for c in cutlass.range_constexpr(1, columns):
                top[c % 2] = cute.arch.fmax(top[c % 2], rows_s[r, c])
            new = cute.arch.warp_reduction_max(cute.arch.fmax(top[0], top[1]), threads_in_group=4)
            # A row that has seen nothing yet: exponentiate against 0, so that -inf gives 0 and not NaN.
            safe = 0.0 if new == -Float32.inf else new
            correction[r] = exp2((row_max[r] - safe) * scale_log2)
            row_max[r] = new
            offset = safe * scale_log2
            sums = [row_sum[r] * correction[r], Float32(0.0)]
            for c in cutlass.range_constexpr(columns):
                p = exp2(rows_s[r, c] * scale_log2 - offset)
                rows_s[r, c] = p
                sums[c % 2] = sums[c % 2] + p
            row_sum[r] = sums[0] + sums[1]
        return correction

    @cute.jit
    def convert(self, acc_s, frag_p):
        """P in the input dtype: accumulator and A operand hold the same elements in the same order."""
        packed = cute.recast_tensor(cute.make_tensor(frag_p.iterator, cute.make_layout(cute.size(frag_p))), Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            packed[i] = pack16(acc_s[2 * i], acc_s[2 * i + 1], self.dtype)

    @cute.jit
    def epilogue(self, out, lse, rows_o, row_max, row_sum, scale_log2, batch, head, row, seqlen_q, lane):
        """Normalise and store: quads transpose their columns, so that each lane writes 16 bytes of a row."""
        head_dim_v = out.shape[3]
        word = lane % 4
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            empty = total == 0.0
            inverse = 0.0 if empty else 1.0 / total
            here = row + 8 * r
            if here < seqlen_q:
                if word == 0:
                    value = (row_max[r] * scale_log2 + cute.math.log2(total)) * math.log(2)
                    lse[batch, head, here] = -Float32.inf if empty else value
            base = out[batch, None, head, None].iterator + cutlass.Int64(here) * out.stride[1]
            for chunk in cutlass.range_constexpr(self.config.head_dim_v // 32):
                words = [
                    pack16(
                        rows_o[r, chunk * 8 + 2 * i] * inverse, rows_o[r, chunk * 8 + 2 * i + 1] * inverse, self.dtype
                    )
                    for i in range(4)
                ]
                words = transpose_quad(words, lane)
                column = chunk * 32 + word * 8
                if here < seqlen_q and column < head_dim_v:
                    row16 = cute.make_rmem_tensor(4, Int32)
                    for i in cutlass.range_constexpr(4):
                        row16[i] = words[i]
                    target = cute.make_tensor((base + column).align(16), cute.make_layout(8))
                    cute.autovec_copy(row16, cute.recast_tensor(target, Int32))
