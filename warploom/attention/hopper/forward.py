"""The forward kernel: one producer warpgroup feeds K and V through TMA rings, consumer warpgroups own 64 query rows each.

A consumer issues the QKᵀ of the next key tile before the PV of the last one, so that its softmax runs under its own PV and
under the products of the others (Shah et al., FlashAttention-3, arXiv 2407.08608). Blocks are
persistent: K, V and Q of the next tile arrive while this one ends. A warp of the producer's decides which tile is next.
O is rescaled only where a row's maximum has grown by much: on this chip long calls are bound by power, and an instruction less
is a faster clock.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import ForwardConfig
from warploom.attention.hopper.primitives import pin
from warploom.runtime.instructions import exp2, pack16, reciprocal, transpose_quad

WARPGROUP = 128
LOG2_E = math.log2(math.e)
DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
# Registers a thread (consumer, producer): a warpgroup's share of 64 Ki, in steps of 8, by number of consumers.
REGISTERS = {1: (256, 56), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
# A row is exponentiated against an earlier maximum until its own is past it by so many powers of two: P stays far inside of
# what 16 bits hold, as precise as at 1, and O and the sums of most tiles need no rescaling.
HEADROOM = 8.0
# Columns that a word of a mask covers: of 32, ptxas made no R2P.
MASK_BITS = 24
# Rows of split tiles that a block of the merging kernel puts together, one a warp.
MERGED_ROWS = 8
# The named barrier of the first warpgroup's turn, the others' after it; 0 is the block's.
FIRST_TURN = 1
# Warps of the producer warpgroup.
LOADER, SCHEDULER = 0, 1
# A tile as the scheduler hands it out: query tile, head (below 0: no more), batch, key tiles [first, end), and the slot of
# the workspace if those are not all (below 0: they are); for packed sequences also where queries and keys start, how
# many there are, and by how much a query's position is past its row.
TILE_STAGES, TILE_WORDS = 2, 12
DENSE_WORDS, PACKED_WORDS = 6, 11
# A packed sequence is read by TMA as the end of a dimension of so many rows, past which TMA fills in zeros.
RAGGED = 1 << 24


class Names:
    """What a role of the kernel works on. A plain class: the DSL would carry the fields of a namespace through every loop."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class HopperForward:
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.stages = config.stages
        self.warpgroups = config.warpgroups
        self.load_rows = 8 if config.grouped else 64  # of Q, of one head
        self.threads = WARPGROUP * (config.warpgroups + 1)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32, or packed (heads_q, total_q)
        sink: cute.Tensor | None,  # (heads_q,) fp32
        cu_q: cute.Tensor | None,  # (sequences + 1,) int32, of packed calls
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,  # (sequences,) int32
        counter: cute.Tensor | None,  # (1,) int32, 0: tiles handed out in a packed call
        parts: cute.Tensor | None,  # fp32 workspace of 2 · blocks pieces where ``split`` > 0, else any
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        pair_heads: Int32,
        split: Int32,
        blocks: Int32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch ``blocks`` persistent blocks."""
        config = self.config
        # (seqlen, head_dim, heads, batch): a tile is the first two modes.
        modes = [0, 2, 1] if const_expr(config.varlen) else [1, 3, 2, 0]
        q, k, v = [cute.make_tensor(t.iterator, cute.select(t.layout, mode=modes)) for t in (q, k, v)]
        if const_expr(config.varlen):
            k, v = self.ragged(k), self.ragged(v)
        box, box_v = config.boxes
        layout_q = self.tile_layout((64, config.head_dim), self.warpgroups, box)
        loads_q = self.tile_layout((self.load_rows, config.head_dim), self.warpgroups * 64 // self.load_rows, box)
        if const_expr(config.grouped):
            layout_q = self.tile_layout((64, config.head_dim), self.warpgroups, box, order=(1, 0, 2))  # load after load
        layout_k = self.tile_layout((self.tile_n, config.head_dim), self.stages, box)
        layout_v = self.tile_layout((self.tile_n, config.head_dim_v), self.stages, box_v)
        tma_q, q = self.tma(q, loads_q, (self.load_rows, config.head_dim))
        tma_k, k = self.tma(k, layout_k, (self.tile_n, config.head_dim))
        tma_v, v = self.tma(v, layout_v, (self.tile_n, config.head_dim_v))
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        by_k, by_n = OperandMajorMode.K, OperandMajorMode.MN
        qk = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, self.tile_n, 16), smem, by_k, by_k)
        pv = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, config.head_dim_v, 16), rmem, by_k, by_n)

        # exp2 takes scores times this; under a softcap the scores become log2 units before.
        multiplier = scale * LOG2_E
        cap_in = Float32(0.0)
        if const_expr(config.softcap):
            cap_in = 2 * LOG2_E * scale / softcap
            multiplier = softcap * LOG2_E
        heads = Int32(0)
        if const_expr(not config.varlen):
            heads = self.tile_heads(lse.shape[1], k.shape[2])
        self.kernel(
            q, k, v, out, lse, sink, cu_q, cu_k, used_k, counter, parts,
            tma_q, tma_k, tma_v, cute.make_tiled_mma(qk), cute.make_tiled_mma(pv),
            layout_q, loads_q, layout_k, layout_v, multiplier, cap_in, left, right, heads, pair_heads, split,
        ).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip
        if const_expr(config.split):
            self.launch_merge(parts, out, lse, sink, k.shape[0], k.shape[2], heads, split, blocks, stream)

    @cute.jit
    def launch_merge(self, parts, out, lse, sink, seqlen_k, heads_kv, heads, split, blocks, stream):
        """Put the pieces of split tiles together, if there are any."""
        if split > 0:
            n_blocks = cute.ceil_div(seqlen_k, self.tile_n)
            self.merge(parts, out, lse, sink, lse.shape[1] // heads_kv, heads, n_blocks, split, blocks).launch(
                grid=[split * (self.tile_m // MERGED_ROWS), 1, 1], block=[32 * MERGED_ROWS, 1, 1], stream=stream
            )

    def tile_layout(self, tile: tuple[int, int], stages: int, box: int, order: tuple[int, int, int] = (0, 1, 2)) -> Any:
        """Row-major tiles, one after the other, with a swizzle of ``box`` columns."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {64: kinds.K_SW128, 32: kinds.K_SW64}[box]
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.dtype), (*tile, stages), order=order)

    def ragged(self, t: Any) -> Any:
        """A packed tensor (tokens, head_dim, heads) as (RAGGED, head_dim, heads, end): tile row RAGGED - n + i of end e
        is token e - n + i, and rows of a sequence of n tokens that ends at e stop where its keys do.
        """
        layout = cute.make_layout((RAGGED, t.shape[1], t.shape[2], t.shape[0] + 1), stride=(*t.stride, t.stride[0]))
        return cute.make_tensor(cute.domain_offset((-RAGGED, 0, 0), t).iterator, layout)

    def tma(self, tensor: Any, layout: Any, tile: tuple[int, int]) -> Any:
        """The TMA load of one tile, and the tensor of its coordinates."""
        one_stage = cute.select(layout, mode=[0, 1])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, one_stage, tile)

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_k: cute.Tensor | None,
        counter: cute.Tensor | None,
        parts: cute.Tensor | None,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        layout_q: cute.ComposedLayout,
        loads_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        multiplier: Float32,
        cap_in: Float32,
        left: Int32,
        right: Int32,
        heads: Int32,
        pair_heads: Int32,
        split: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v):
                cpasync.prefetch_descriptor(atom)

        stages, warpgroups = self.stages, self.warpgroups

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * warpgroups + 4 * stages + 2 * TILE_STAGES]
            tiles: cute.struct.Align[cute.struct.MemRange[Int32, TILE_STAGES * TILE_WORDS], 16]
            scratch: cute.struct.MemRange[Int32, 1]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_v)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = storage.barriers.data_ptr()
        consumers = 4 * warpgroups  # warps
        shared = Names(
            q_full=barriers,  # one of each warpgroup's rows
            q_empty=barriers + warpgroups,
            k_full=barriers + 2 * warpgroups,
            k_empty=barriers + 2 * warpgroups + stages,
            v_full=barriers + 2 * warpgroups + 2 * stages,
            v_empty=barriers + 2 * warpgroups + 3 * stages,
            tile_full=barriers + 2 * warpgroups + 4 * stages,
            tile_empty=barriers + 2 * warpgroups + 4 * stages + TILE_STAGES,
            tiles=storage.tiles.get_tensor(cute.make_layout((TILE_WORDS, TILE_STAGES))),
            scratch=storage.scratch.data_ptr(),
            q=storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner),
            loads_q=storage.q.get_tensor(loads_q.outer, swizzle=loads_q.inner),  # the same as TMA fills it
            k=storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner),
            v=storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner),
        )
        if warp == LOADER:
            with cute.arch.elect_one():
                for full, empty, count, readers in (
                    (shared.q_full, shared.q_empty, warpgroups, 4),
                    (shared.k_full, shared.k_empty, stages, consumers),
                    (shared.v_full, shared.v_empty, stages, consumers),
                    (shared.tile_full, shared.tile_empty, TILE_STAGES, 32 * (consumers + 1)),  # lanes
                ):
                    for i in cutlass.range_constexpr(count):
                        cute.arch.mbarrier_init(full + i, 1)
                        cute.arch.mbarrier_init(empty + i, readers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        consumer_registers, producer_registers = REGISTERS[warpgroups]
        if warp < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == LOADER:
                self.load(q, k, v, lse, shared, tma_q, tma_k, tma_v)
            if warp == SCHEDULER:
                if const_expr(self.config.varlen):
                    self.schedule_packed(k.shape[3] - 1, lse.shape, shared, cu_q, cu_k, used_k, counter, left, right)
                else:
                    self.schedule(k.shape[0], lse.shape, heads, shared, left, right, pair_heads, split)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            sequences = 0 if const_expr(cu_q is None) else cu_q.shape[0] - 1  # type: ignore[union-attr]
            self.compute(out, lse, sink, parts, k.shape, sequences, shared, mma_qk, mma_pv, multiplier, cap_in, left, right)

    # The scheduler warp

    @cute.jit
    def schedule(self, seqlen_k, lse_shape, heads_q, shared, left, right, pair_heads, split):
        """Hand out this block's tiles, one ahead of who works on them; a head below 0 ends the work."""
        queries = self.config.queries
        batch_size, _, seqlen_q = lse_shape
        heads = heads_q * batch_size
        m_blocks = cute.ceil_div(seqlen_q, queries)
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        stage, phase = Int32(0), Int32(1)
        turn, head = Int32(0), Int32(0)
        while head >= 0:
            if const_expr(self.config.right and not self.config.left):
                m_block, head = schedule.paired(turn, block, blocks, m_blocks, heads, pair_heads, self.choose)
            else:
                m_block, head = schedule.in_order(turn, block, blocks, m_blocks, self.choose)
            slot, piece_first, piece_end = Int32(-1), Int32(0), Int32(0)
            if const_expr(self.config.split):
                rounds = self.choose(split > 0, (m_blocks * heads - split) // blocks, 1 << 30)
                if turn >= rounds:
                    part = turn - rounds
                    n_blocks = cute.ceil_div(seqlen_k, self.tile_n)
                    tile, piece_first, piece_end = schedule.piece(part, block, blocks, split, n_blocks, self.choose)
                    m_block, head = schedule.in_order(rounds, tile, blocks, m_blocks, self.choose)
                    slot = 2 * block + part
                    if piece_first == piece_end:
                        m_block, head = Int32(schedule.NOTHING), Int32(0)
                    if part == 2:
                        m_block, head = Int32(0), heads
            turn += 1
            if m_block != schedule.NOTHING:
                first, end = self.key_tiles(m_block * queries, queries, seqlen_q, seqlen_k, seqlen_k - seqlen_q, left, right)
                if slot >= 0:
                    first, end = cutlass.max(first, piece_first), cutlass.min(end, piece_end)
                batch = head // heads_q
                head = head - batch * heads_q if batch < batch_size else Int32(-1)
                cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
                self.hand_out(shared, stage, (m_block, head, batch, first, end, slot))
                stage, phase = self.advance(stage, phase, TILE_STAGES)

    def tile_heads(self, heads_q: Any, heads_kv: Any) -> Any:
        """Heads of a batch as tiles count them: a tile may hold several of a group."""
        if not self.config.grouped:
            return heads_q
        return heads_kv * schedule.tile_heads(heads_q // heads_kv, self.config.abreast)

    @cute.jit
    def schedule_packed(self, total_k, lse_shape, shared, cu_q, cu_k, used_k, counter, left, right):
        """Hand out tiles of packed sequences in the order in which blocks ask for them: lengths differ too much to plan.

        Tiles count sequence after sequence, their last rows first. The tokens past the last sequence are one more
        sequence, without keys.
        """
        heads_q, total_q = lse_shape
        sequences = cu_q.shape[0] - 1
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(1)
        base, before, head = Int32(0), Int32(0), Int32(0)  # sequences of the lanes start at base, their tiles at before
        while head >= 0:
            index = Int32(0)
            if lane == 0:
                index = cute.arch.atomic_add(counter.iterator, Int32(1))
            index = cute.arch.shuffle_sync(index, 0)
            start, length, tiles, through = self.lane_tiles(base + lane, cu_q, sequences, total_q, heads_q)
            while before + cute.arch.shuffle_sync(through, 31) <= index and base <= sequences:
                before += cute.arch.shuffle_sync(through, 31)
                base += 32
                start, length, tiles, through = self.lane_tiles(base + lane, cu_q, sequences, total_q, heads_q)
            head = Int32(-1)
            m_block, sequence, first, end = Int32(0), Int32(0), Int32(0), Int32(0)
            seqlen_q, k_start, seqlen_k, shift = Int32(0), Int32(0), Int32(0), Int32(0)
            if base <= sequences:
                # The first lane whose tiles reach past index.
                owner = cute.arch.popc(~cute.arch.vote_ballot_sync(before + through > index))
                within = index - before - cute.arch.shuffle_sync(through - tiles, owner)
                start = cute.arch.shuffle_sync(start, owner)
                seqlen_q = cute.arch.shuffle_sync(length, owner)
                sequence = base + owner
                row = within // heads_q
                head = within - row * heads_q
                m_block = cute.ceil_div(seqlen_q, self.tile_m) - 1 - row
                if sequence < sequences:
                    k_start, seqlen_k = self.bounds(cu_k, sequence, total_k)
                    if const_expr(self.config.used):
                        seqlen_k = cutlass.max(cutlass.min(seqlen_k, used_k[sequence]), 0)
                    shift = seqlen_k - seqlen_q
                    # Keys that no query of the sequence sees stay outside of what TMA reads.
                    if const_expr(self.config.right):
                        seqlen_k = cutlass.max(cutlass.min(seqlen_k, seqlen_k + right), 0)
                    if const_expr(self.config.left):
                        hidden = cutlass.min(cutlass.max(shift - left, 0), seqlen_k)
                        k_start += hidden
                        seqlen_k -= hidden
                        shift -= hidden
                    first, end = self.key_tiles(m_block * self.tile_m, self.tile_m, seqlen_q, seqlen_k, shift, left, right)
            cute.arch.mbarrier_wait(shared.tile_empty + stage, phase)
            words = (m_block, head, sequence, first, end, Int32(-1), start, seqlen_q, k_start, seqlen_k, shift)
            self.hand_out(shared, stage, words)
            stage, phase = self.advance(stage, phase, TILE_STAGES)

    @cute.jit
    def lane_tiles(self, sequence, cu_q, sequences, total_q, heads_q):
        """Start, queries and tiles of a lane's sequence, and the tiles of the lanes up to it."""
        start, length = Int32(0), Int32(0)
        if sequence < sequences:
            start, length = self.bounds(cu_q, sequence, total_q)
        if sequence == sequences:
            start = cutlass.min(cutlass.max(cu_q[sequence], 0), total_q)
            length = total_q - start
        tiles = cute.ceil_div(length, self.tile_m) * heads_q
        through = tiles
        for distance in (1, 2, 4, 8, 16):
            lower = cute.arch.shuffle_sync_up(through, distance)
            through = through + lower if cute.arch.lane_idx() >= distance else through
        return start, length, tiles, through

    @cute.jit
    def bounds(self, cu, sequence, total):
        """Start and length of a sequence, inside of the packed tokens whatever the contents say."""
        start = cutlass.min(cutlass.max(cu[sequence], 0), total)
        return start, cutlass.max(cutlass.min(cu[sequence + 1], total) - start, 0)

    @cute.jit
    def hand_out(self, shared, stage, words):
        """Publish a tile in the ring's stage."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(words)):
                shared.tiles[i, stage] = words[i]
            cute.arch.mbarrier_arrive(shared.tile_full + stage)

    @cute.jit
    def choose(self, condition, a, b):
        """a if condition else b, of run-time values."""
        return Int32(a) if condition else Int32(b)

    @cute.jit
    def key_tiles(self, row, rows, seqlen_q, seqlen_k, shift, left, right):
        """First and past-the-end key tile that some query of [row, row + rows) sees."""
        first = Int32(0)
        end = cute.ceil_div(seqlen_k, self.tile_n)
        if const_expr(self.config.right):
            last_row = cutlass.min(row + rows, seqlen_q) - 1
            end = cutlass.min(end, cute.ceil_div(cutlass.max(last_row + shift + right + 1, 0), self.tile_n))
        if const_expr(self.config.left):
            first = cutlass.max(row + shift - left, 0) // self.tile_n
        return first, end

    @cute.jit
    def next_tile(self, shared, stage, phase, seqlen_q, seqlen_k):
        """The words of the tile in the ring's stage; of dense calls, whose lengths are given, the last five are known."""
        count = PACKED_WORDS if const_expr(self.config.varlen) else DENSE_WORDS
        cute.arch.mbarrier_wait(shared.tile_full + stage, phase)
        words = [cute.arch.make_warp_uniform(shared.tiles[i, stage]) for i in range(count)]
        # Every lane says so: ptxas drops a barrier of the warp before the arrival of one lane, whose reads alone were ordered.
        cute.arch.mbarrier_arrive(shared.tile_empty + stage)
        if const_expr(not self.config.varlen):
            words += [Int32(0), seqlen_q, Int32(0), seqlen_k, seqlen_k - seqlen_q]
        return tuple(words)

    # The loader warp

    @cute.jit
    def load(self, q, k, v, lse, shared, tma_q, tma_k, tma_v):
        """Q of each warpgroup once a tile, then K one tile ahead of V."""
        config, loads = self.config, 64 // self.load_rows
        packed = config.varlen
        group = (lse.shape[0] if const_expr(packed) else lse.shape[1]) // k.shape[2]
        bytes_q = 64 * config.head_dim * 2
        q_phase = Int32(1)
        k_stage, k_phase = Int32(0), Int32(1)
        v_stage, v_phase = Int32(0), Int32(1)
        tile_stage, tile_phase = Int32(0), Int32(0)
        m_block, head, batch, first, end, _, q_start, _, k_start, seqlen_k, _ = self.next_tile(
            shared, tile_stage, tile_phase, Int32(0), Int32(0)
        )
        while head >= 0:
            head_kv = head // group
            if const_expr(config.grouped):
                head_kv = head // schedule.tile_heads(group, config.abreast)
            if const_expr(packed):
                k_end = k_start + seqlen_k
                tq = cute.domain_offset((q_start, 0), q[None, None, head])
                tk = cute.domain_offset((RAGGED - seqlen_k, 0), k[None, None, head_kv, k_end])
                tv = cute.domain_offset((RAGGED - seqlen_k, 0), v[None, None, head_kv, k_end])
            else:
                tq, tk, tv = q[None, None, head, batch], k[None, None, head_kv, batch], v[None, None, head_kv, batch]
            gk = cute.local_tile(tk, (self.tile_n, config.head_dim), (None, 0))
            gv = cute.local_tile(tv, (self.tile_n, config.head_dim_v), (None, 0))
            keys = self.ring(tma_k, shared.k, gk, shared.k_full, shared.k_empty, config.head_dim)
            values = self.ring(tma_v, shared.v, gv, shared.v_full, shared.v_empty, config.head_dim_v)
            if first < end:
                k_stage, k_phase = self.push(keys, end - 1, k_stage, k_phase)
                for i in cutlass.range_constexpr(self.warpgroups):
                    cute.arch.mbarrier_wait(shared.q_empty + i, q_phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(shared.q_full + i, bytes_q)
                    if const_expr(config.grouped):
                        for j in cutlass.range(i * loads, (i + 1) * loads, unroll=1):
                            at, member = self.place(0, head, j * self.load_rows, group, 0)
                            n = (m_block * config.grouped + at) // self.load_rows
                            self.load_queries(tma_q, q[None, None, member, batch], shared, n, j, shared.q_full + i)
                    else:
                        self.load_queries(tma_q, tq, shared, m_block * self.warpgroups + i, i, shared.q_full + i)
                q_phase ^= 1
                for j in cutlass.range(end - first - 1, unroll=1):
                    k_stage, k_phase = self.push(keys, end - 2 - j, k_stage, k_phase)
                    v_stage, v_phase = self.push(values, end - 1 - j, v_stage, v_phase)
                v_stage, v_phase = self.push(values, first, v_stage, v_phase)
            tile_stage, tile_phase = self.advance(tile_stage, tile_phase, TILE_STAGES)
            m_block, head, batch, first, end, _, q_start, _, k_start, seqlen_k, _ = self.next_tile(
                shared, tile_stage, tile_phase, Int32(0), Int32(0)
            )

    @cute.jit
    def load_queries(self, atom, queries, shared, n, j, barrier):
        """Load the ``n``-th ``load_rows`` queries of a head as the ``j``-th of the tile."""
        rows = cute.local_tile(queries, (self.load_rows, self.config.head_dim), (None, 0))
        into, out_of = self.tma_views(atom, shared.loads_q, rows)
        cute.copy(atom, out_of[None, n], into[None, j], tma_bar_ptr=barrier)

    def tma_views(self, atom: Any, shared: Any, tiles: Any) -> tuple[Any, Any]:
        """Shared and global tiles as the TMA copy takes them: (copy, stage) and (copy, tile)."""
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def ring(self, atom: Any, shared: Any, tiles: Any, full: Any, empty: Any, head_dim: int) -> Names:
        """What ``push`` needs to load a tile of K or V."""
        into, out_of = self.tma_views(atom, shared, tiles)
        size = self.tile_n * head_dim * 2
        return Names(atom=atom, into=into, out_of=out_of, full=full, empty=empty, bytes=size)

    @cute.jit
    def push(self, ring, n, stage, phase):
        """Load key tile ``n`` into the ring once its stage is free; the stage and phase that follow."""
        cute.arch.mbarrier_wait(ring.empty + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, ring.bytes)
        cute.copy(ring.atom, ring.out_of[None, n], ring.into[None, stage], tma_bar_ptr=ring.full + stage)
        return self.advance(stage, phase, self.stages)

    @cute.jit
    def advance(self, stage, phase, stages):
        """The next stage of a ring; the phase flips when it wraps."""
        stage += 1
        if stage == stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    # The consumer warpgroups

    @cute.jit
    def compute(self, out, lse, sink, parts, k_shape, sequences, shared, mma_qk, mma_pv, multiplier, cap_in, left, right):
        """64 rows of every query tile of this block."""
        config = self.config
        dense_seqlen_k = k_shape[0]
        members = 1  # heads of a group
        if const_expr(config.grouped):
            members = lse.shape[1] // k_shape[2]
        dense_seqlen_q = Int32(0) if const_expr(config.varlen) else lse.shape[2]
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_in_group = thread // 32 * 16 + thread % 32 // 4  # and that + 8
        work = self.registers(shared, mma_qk, mma_pv, group, multiplier, cap_in)
        if group == self.warpgroups - 1:
            self.pass_turn(group)  # the first one begins

        q_phase = Int32(0)
        stage, phase = Int32(0), Int32(0)
        tile_stage, tile_phase = Int32(0), Int32(0)
        m_block, head, batch, first, end, slot, q_start, seqlen_q, _, seqlen_k, shift = self.next_tile(
            shared, tile_stage, tile_phase, dense_seqlen_q, dense_seqlen_k
        )
        while head >= 0:
            local = group * 64 + row_in_group
            # The warpgroup's queries are [top, top + span), this thread's two of them.
            if const_expr(config.grouped):
                top, span = m_block * config.grouped, config.grouped
                present = self.place(m_block, head, group * 64, members, seqlen_q)[0] < seqlen_q
            else:
                top, span = m_block * self.tile_m + group * 64, 64
                present = top < seqlen_q
            places = [self.place(m_block, head, local + 8 * r, members, seqlen_q) for r in range(2)]
            self.start(work)
            if first < end:
                # Of the tile's keys, those that this warpgroup's rows see; none where they are past the last query.
                own_first, own_end = self.key_tiles(top, span, seqlen_q, seqlen_k, shift, left, right)
                own_first = cutlass.min(cutlass.max(own_first, first), end)
                own_end = cutlass.min(own_end, end) if present else own_first
                own_end = cutlass.max(own_end, own_first)
                for _ in cutlass.range(end - own_end, unroll=1):
                    stage, phase = self.skip(shared, group, stage, phase)
                cute.arch.mbarrier_wait(shared.q_full + group, q_phase)
                if own_first < own_end:
                    whole_first, whole_end = self.limit(
                        work.limits, places, top, span, own_first, seqlen_q, seqlen_k, shift, left, right
                    )
                    n = own_end - 1
                    cute.arch.mbarrier_wait(shared.k_full + stage, phase)
                    self.take_turn(group)
                    self.gemm_qk(work, stage)
                    self.pass_turn(group)
                    warpgroup.wait_group(0)
                    self.release(shared.k_empty + stage)
                    if n == own_first:
                        self.release(shared.q_empty + group)
                    self.softmax(work, n, True)
                    self.keep_scale(work)
                    self.convert(work)
                    for _ in cutlass.range(n - cutlass.max(whole_end, own_first), unroll=1):
                        n -= 1
                        stage, phase = self.step(work, n, own_first, stage, phase, True)
                    for _ in cutlass.range(n - whole_first, unroll=1):
                        n -= 1
                        stage, phase = self.step(work, n, own_first, stage, phase, False)
                    if const_expr(config.left):
                        for _ in cutlass.range(n - own_first, unroll=1):
                            n -= 1
                            stage, phase = self.step(work, n, own_first, stage, phase, True)
                q_phase ^= 1
                if own_first >= own_end:
                    self.release(shared.q_empty + group)
                else:
                    self.rescale(work)
                    cute.arch.mbarrier_wait(shared.v_full + stage, phase)
                    self.gemm_pv(work, stage)
                    warpgroup.wait_group(0)
                    self.release(shared.v_empty + stage)
                    stage, phase = self.advance(stage, phase, self.stages)
                for _ in cutlass.range(own_first - first, unroll=1):
                    stage, phase = self.skip(shared, group, stage, phase)
            if const_expr(config.split):
                if slot >= 0:
                    self.leave(work, parts, slot, local)
                else:
                    self.epilogue(work, out, lse, sink, batch, places, q_start, seqlen_q, sequences)
            else:
                self.epilogue(work, out, lse, sink, batch, places, q_start, seqlen_q, sequences)
            tile_stage, tile_phase = self.advance(tile_stage, tile_phase, TILE_STAGES)
            m_block, head, batch, first, end, slot, q_start, seqlen_q, _, seqlen_k, shift = self.next_tile(
                shared, tile_stage, tile_phase, dense_seqlen_q, dense_seqlen_k
            )

    @cute.jit
    def place(self, m_block, head, local, members, seqlen_q):
        """Query and head of a tile's row; a query past the last one where the row has none."""
        query = m_block * self.config.queries + local
        if const_expr(self.config.grouped):
            past = seqlen_q - m_block * self.config.grouped
            query, head = schedule.grouped(head, local, self.config.grouped, self.config.abreast, members, past, self.choose)
            query += m_block * self.config.grouped
        return query, head

    @cute.jit
    def skip(self, shared, group, stage, phase):
        """Let K and V of a key tile go by that this warpgroup does not need."""
        self.take_turn(group)
        self.pass_turn(group)
        cute.arch.mbarrier_wait(shared.k_full + stage, phase)
        self.release(shared.k_empty + stage)
        cute.arch.mbarrier_wait(shared.v_full + stage, phase)
        self.release(shared.v_empty + stage)
        return self.advance(stage, phase, self.stages)

    @cute.jit
    def targets(self, out, lse, sink, batch, head, q_start, sequences):
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

    def registers(self, shared: Any, mma_qk: Any, mma_pv: Any, group: Any, multiplier: Any, cap_in: Any) -> Names:
        """Descriptors, accumulators and running values of one warpgroup."""
        thr_qk, thr_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        values = cute.make_tensor(shared.v.iterator, cute.select(shared.v.layout, mode=[1, 0, 2]))
        acc_s = mma_qk.make_fragment_C(thr_qk.partition_shape_C((64, self.tile_n)))
        acc_o = mma_pv.make_fragment_C(thr_pv.partition_shape_C((64, self.config.head_dim_v)))
        return Names(
            shared=shared,
            group=group,
            multiplier=multiplier,
            cap_in=cap_in,
            mma_qk=mma_qk,
            mma_pv=mma_pv,
            q=mma_qk.make_fragment_A(thr_qk.partition_A(shared.q))[None, None, None, group],
            k=mma_qk.make_fragment_B(thr_qk.partition_B(shared.k)),
            v=mma_pv.make_fragment_B(thr_pv.partition_B(values)),
            p=mma_pv.make_fragment_A(thr_pv.partition_shape_A((64, self.tile_n))),
            acc_s=acc_s,
            acc_o=acc_o,
            rows_s=cute.make_tensor(acc_s.iterator, self.row_view(self.tile_n)),
            rows_o=cute.make_tensor(acc_o.iterator, self.row_view(self.config.head_dim_v)),
            row_max=cute.make_rmem_tensor(2, Float32),  # of the raw scores, or of log2 units under a softcap
            row_sum=cute.make_rmem_tensor(2, Float32),  # of this thread's columns
            correction=cute.make_rmem_tensor(2, Float32),  # what O is still to be multiplied by
            limits=cute.make_rmem_tensor((2, 2), Int32),  # (row, first hidden column on the right / first visible)
        )

    def row_view(self, columns: int) -> Any:
        """An accumulator as (row, (column pair, group of 8 columns)): rows 0 and 1 are 8 apart."""
        return cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4)))

    def start(self, work: Any) -> None:
        """Nothing seen yet."""
        work.acc_o.fill(0.0)
        work.row_max.fill(-Float32.inf)
        work.row_sum.fill(0.0)

    @cute.jit
    def limit(self, limits, places, top, span, first, seqlen_q, seqlen_k, shift, left, right):
        """This thread's columns of each row; key tiles [first, end) that queries [top, top + span) all see whole."""
        first_column = cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(2):
            hidden = seqlen_k
            if const_expr(self.config.right):
                hidden = cutlass.min(hidden, places[r][0] + shift + right + 1)
            limits[r, 0] = hidden - first_column
            if const_expr(self.config.left):
                limits[r, 1] = places[r][0] + shift - left - first_column
        whole_first, whole_end = first, seqlen_k // self.tile_n
        if const_expr(self.config.right):
            whole_end = cutlass.min(whole_end, cutlass.max(top + shift + right + 1, 0) // self.tile_n)
        if const_expr(self.config.left):
            last_row = cutlass.min(top + span, seqlen_q) - 1
            whole_first = cutlass.max(cute.ceil_div(cutlass.max(last_row + shift - left, 0), self.tile_n), first)
        return whole_first, whole_end

    @cute.jit
    def step(self, work, n, last, stage, phase, masked):
        """QKᵀ of key tile ``n`` with the PV of the tile before behind it, then the softmax under that PV."""
        shared = work.shared
        v_stage, v_phase = stage, phase
        stage, phase = self.advance(stage, phase, self.stages)
        cute.arch.mbarrier_wait(shared.k_full + stage, phase)
        self.take_turn(work.group)
        self.gemm_qk(work, stage)
        self.rescale(work)
        cute.arch.mbarrier_wait(shared.v_full + v_stage, v_phase)
        self.gemm_pv(work, v_stage)
        self.pass_turn(work.group)
        warpgroup.wait_group(1)
        self.release(shared.k_empty + stage)
        if n == last:
            self.release(shared.q_empty + work.group)  # the next tile's Q arrives while this one ends
        self.softmax(work, n, masked, shared.v_empty + v_stage)
        self.convert(work)
        return stage, phase

    @cute.jit
    def take_turn(self, group):
        """Wait until the warpgroup before has issued its products; every warpgroup takes a turn for each key tile."""
        if const_expr(self.config.pv_wait == "turns"):
            cute.arch.barrier(barrier_id=FIRST_TURN + group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, group):
        """Let the next warpgroup issue its products."""
        if const_expr(self.config.pv_wait == "turns"):
            after = self.choose(group + 1 == self.warpgroups, 0, group + 1)
            cute.arch.barrier_arrive(barrier_id=FIRST_TURN + after, number_of_threads=2 * WARPGROUP)

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

    @cute.jit
    def gemm_qk(self, work, stage):
        """Issue S = Q Kᵀ as one group."""
        atom = cute.make_mma_atom(work.mma_qk.op)
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(work.q, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, i > 0)
            cute.gemm(atom, work.acc_s, work.q[None, None, i], work.k[None, None, i, stage], work.acc_s)
        warpgroup.commit_group()

    @cute.jit
    def gemm_pv(self, work, stage):
        """Issue O += P V as one group."""
        atom = cute.make_mma_atom(work.mma_pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(work.p, mode=[2])):
            cute.gemm(atom, work.acc_o, work.p[None, None, i], work.v[None, None, i, stage], work.acc_o)
        warpgroup.commit_group()

    @cute.jit
    def release(self, barrier):
        """This warp has read what the barrier guards."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def softmax(self, work, n, masked, v_empty=None):
        """Exponentiate the scores of key tile ``n`` against a maximum that leaves them HEADROOM; O is left to ``rescale``.

        A PV under way, which releases ``v_empty``, is waited for as the configuration has it. After a quarter of the
        exponentials it has about ended, and the conversion of P can fill the issue slots that the others leave.
        """
        rows, columns, pv_wait = work.rows_s, self.tile_n // 4, self.config.pv_wait
        scale = Float32(1.0) if const_expr(self.config.softcap) else work.multiplier
        if const_expr(self.config.softcap):
            # softcap · tanh(x / softcap) by exp2, in log2 units: tanh.approx is no better than a 16-bit P.
            for i in cutlass.range_constexpr(2 * columns):
                grown = exp2(work.acc_s[i] * work.cap_in)
                work.acc_s[i] = work.multiplier - 2 * work.multiplier * reciprocal(grown + 1)
        if const_expr(masked):
            self.mask(rows, work.limits, n)
        offsets = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            top = [work.row_max[r], rows[r, 0]]
            for c in cutlass.range_constexpr(1, columns):
                top[c % 2] = cute.arch.fmax(top[c % 2], rows[r, c])
            new = cute.arch.warp_reduction_max(cute.arch.fmax(top[0], top[1]), threads_in_group=4)
            grown = (new - work.row_max[r]) * scale
            outgrown = grown > HEADROOM  # not where both are -inf
            new = new if outgrown else work.row_max[r]
            work.correction[r] = exp2(-grown) if outgrown else 1.0
            work.row_max[r] = new
            # A row that has seen nothing yet: exponentiate against 0, so that -inf gives 0 and not NaN.
            safe = 0.0 if new == -Float32.inf else new
            offsets[r] = safe * scale
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
        if const_expr(v_empty is not None and pv_wait == "turns"):
            warpgroup.wait_group(0)
            self.release(v_empty)

    @cute.jit
    def finish_pv(self, exponentials, shared, v_empty):
        """Wait for PV behind the exponentials that this is the sum of, and let its V go."""
        pin(exponentials, shared.scratch)
        warpgroup.wait_group(0)
        self.release(v_empty)

    @cute.jit
    def mask(self, rows, limits, n):
        """Hide columns of key tile ``n`` past the keys or outside the band.

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
                for c in cutlass.range_constexpr(start, min(start + MASK_BITS, columns)):
                    rows[r, c] = rows[r, c] if cutlass.Boolean(shown & (1 << (c - start))) else -Float32.inf

    @cute.jit
    def own_columns(self, limit):
        """How many of this thread's columns, two in each eight, are below ``limit``, which counts from its first."""
        limit = cutlass.min(cutlass.max(limit, 0), self.tile_n)
        return (limit >> 3) * 2 + cutlass.min(limit & 7, 2)

    @cute.jit
    def lowest_bits(self, count):
        """A word with its lowest ``count`` bits set, none for a negative one, at most MASK_BITS."""
        return (Int32(1) << cutlass.max(cutlass.min(count, MASK_BITS), 0)) - 1

    @cute.jit
    def convert(self, work):
        """P in the input dtype: accumulator and A operand hold the same elements in the same order."""
        packed = cute.recast_tensor(cute.make_tensor(work.p.iterator, cute.make_layout(cute.size(work.p))), Int32)
        for i in cutlass.range_constexpr(cute.size(packed)):
            packed[i] = pack16(work.acc_s[2 * i], work.acc_s[2 * i + 1], self.dtype)

    @cute.jit
    def leave(self, work, parts, slot, row):
        """Store a piece in the workspace: O, not normalised, then each row's maximum in log2 units and its sum."""
        dim = self.config.head_dim_v
        scale = Float32(1.0) if const_expr(self.config.softcap) else work.multiplier
        base = parts.iterator + cutlass.Int64(slot) * self.config.piece_floats
        word = cute.arch.lane_idx() % 4
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            here = row + 8 * r
            for c in cutlass.range_constexpr(dim // 8):
                self.store_pair(base + (here * dim + 8 * c + 2 * word), work.rows_o[r, 2 * c], work.rows_o[r, 2 * c + 1])
            if word == 0:
                self.store_pair(base + (self.tile_m * dim + 2 * here), work.row_max[r] * scale, total)

    @cute.jit
    def store_pair(self, target, a, b):
        """Two fp32 to an address of 8-byte steps."""
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = a, b
        cute.autovec_copy(pair, cute.make_tensor(target.align(8), cute.make_layout(2)))

    @cute.kernel
    def merge(
        self,
        parts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        members: Int32,
        heads: Int32,
        n_blocks: Int32,
        split: Int32,
        blocks: Int32,
    ):
        """Rows of the split tiles, one a warp: the pieces' O, weighted by what their maxima are from the largest."""
        dim = self.config.head_dim_v
        batch_size, _, seqlen_q = lse.shape
        m_blocks = cute.ceil_div(seqlen_q, self.config.queries)
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * MERGED_ROWS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = row // self.tile_m
        row = row - tile * self.tile_m
        rounds = (m_blocks * heads * batch_size - split) // blocks
        m_block, head = schedule.in_order(rounds, tile, blocks, m_blocks, self.choose)
        batch = head // heads
        here, head = self.place(m_block, head - batch * heads, row, members, seqlen_q)
        if here < seqlen_q:
            block, last, part = schedule.pieces(tile, blocks, split, n_blocks)
            # The largest maximum, each lane's of other pieces, then pieces that do not wait for one another.
            top = -Float32.inf
            for b in cutlass.range(block + lane, last + 1, 32, unroll=1):
                top = cute.arch.fmax(top, self.piece_stats(parts, b, part if b == block else Int32(0), row)[0])
            top = cute.arch.warp_reduction_max(top)
            total = Float32(0.0)
            if const_expr(self.config.sink):
                logit = sink[head] * LOG2_E  # type: ignore[index]
                top = cute.arch.fmax(top, logit)
            safe = 0.0 if top == -Float32.inf else top
            if const_expr(self.config.sink):
                total = exp2(logit - safe)
            spans = -(-dim // 64)  # a lane has two columns of each 64
            acc = cute.make_rmem_tensor((2, spans), Float32)
            acc.fill(0.0)
            for b in cutlass.range(block, last + 1, unroll=4):
                slot_part = part if b == block else Int32(0)
                stats = self.piece_stats(parts, b, slot_part, row)
                weight = exp2(stats[0] - safe)
                total = total + stats[1] * weight
                base = parts.iterator + cutlass.Int64(2 * b + slot_part) * self.config.piece_floats
                for i in cutlass.range_constexpr(spans):
                    column = 64 * i + 2 * lane
                    if column < dim:
                        source = cute.make_tensor((base + (row * dim + column)).align(8), cute.make_layout(2))
                        acc[0, i] = acc[0, i] + source[0] * weight
                        acc[1, i] = acc[1, i] + source[1] * weight
            empty = total == 0.0
            inverse = 0.0 if empty else 1.0 / total
            if lane == 0:
                lse[batch, head, here] = -Float32.inf if empty else (top + cute.math.log2(total)) * math.log(2)
            for i in cutlass.range_constexpr(spans):
                column = 64 * i + 2 * lane
                if column < out.shape[3]:
                    word = cute.make_rmem_tensor(1, Int32)
                    word[0] = pack16(acc[0, i] * inverse, acc[1, i] * inverse, self.dtype)
                    target = out.iterator + cute.crd2idx((batch, here, head, column), out.layout)
                    cute.autovec_copy(word, cute.recast_tensor(cute.make_tensor(target.align(4), cute.make_layout(2)), Int32))

    @cute.jit
    def piece_stats(self, parts, block, part, row):
        """The maximum of a piece's row in log2 units, and its sum."""
        base = parts.iterator + cutlass.Int64(2 * block + part) * self.config.piece_floats
        at = base + (self.tile_m * self.config.head_dim_v + 2 * row)
        return cute.make_tensor(at.align(8), cute.make_layout(2))

    @cute.jit
    def epilogue(self, work, out, lse, sink, batch, places, q_start, seqlen_q, sequences):
        """Normalise and store: quads transpose their columns, so that each lane writes 16 bytes of a row."""
        lane = cute.arch.lane_idx()
        word = lane % 4
        scale = Float32(1.0) if const_expr(self.config.softcap) else work.multiplier
        for r in cutlass.range_constexpr(2):
            here, head = places[r]
            rows_out, rows_lse, logit = self.targets(out, lse, sink, batch, head, q_start, sequences)
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            top = work.row_max[r] * scale  # log2 units
            shrink = Float32(1.0)
            if const_expr(self.config.sink):
                new = cute.arch.fmax(top, logit)
                safe = 0.0 if new == -Float32.inf else new
                shrink = exp2(top - safe)
                total = total * shrink + exp2(logit - safe)
                top = new
            empty = total == 0.0
            inverse = 0.0 if empty else shrink / total
            if here < seqlen_q and word == 0:
                rows_lse[here] = -Float32.inf if empty else (top + cute.math.log2(total)) * math.log(2)
            base = rows_out.iterator + cutlass.Int64(here) * rows_out.stride[0]
            for chunk in cutlass.range_constexpr(self.config.head_dim_v // 32):
                pairs = [(work.rows_o[r, chunk * 8 + i], work.rows_o[r, chunk * 8 + i + 1]) for i in range(0, 8, 2)]
                words = [pack16(low * inverse, high * inverse, self.dtype) for low, high in pairs]
                words = transpose_quad(words, lane)
                column = chunk * 32 + word * 8
                if here < seqlen_q and column < rows_out.shape[1]:
                    row_words = cute.make_rmem_tensor(4, Int32)
                    for i in cutlass.range_constexpr(4):
                        row_words[i] = words[i]
                    target = cute.make_tensor((base + column).align(16), cute.make_layout(8))
                    cute.autovec_copy(row_words, cute.recast_tensor(target, Int32))
