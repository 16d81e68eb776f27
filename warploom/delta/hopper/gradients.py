"""Gradients of queries, keys, beta and decay, chunk by chunk, from what the walks left of a range of chunks.

In the terms of `prepare`, with S0 the state before the chunk and dS the gradient of the one after it, and Q and N products of
tokens times their decay and the beta of the column:

    Q = D beta . scale dout Yᵀ  for j <= i,    N = D beta . dV Yᵀ  for j < i,
    dq = Q k + scale e^G dout S0ᵀ,
    dk = Qᵀ q + e^(G_last - G) beta Y dSᵀ - Nᵀ k    of what is written
         - N k - e^G dV S0ᵀ                         of what is read,
    dbeta_j = dV_j . Y_j / beta_j = k_j . (dk of what is written)_j / beta_j,

and the gradient of G_i is q_i . dq_i, and of k_i . dk_i what is read less what is written: of each pair of tokens both ends
have the same number, up to fp32's sums. Under equal keys these numbers are far larger than what their sums leave, so N comes in
two parts of bf16. A block stays and takes one chunk of a key head after the other, whose value heads it sums; one warp loads,
three warpgroups have a sum each: `gradients_asked`, `gradients_read` and `gradients_written`.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from warploom.delta.hopper.config import ALL_NUMBERS, BACK_ITEM, CHUNK, COLUMNS, MATRIX
from warploom.delta.hopper.gradients_asked import Asked
from warploom.delta.hopper.gradients_base import SUMS, Chunk, GradientShared
from warploom.delta.hopper.gradients_read import Read
from warploom.delta.hopper.gradients_written import Written
from warploom.delta.hopper.walk_base import missed, place_of_y, ragged, rows_of
from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.memory import bulk_load
from warploom.kernels.cute.rings import Mbarriers, advance, expect
from warploom.kernels.cute.tiles import load_tile, placed, tile_layout, tma_load, tma_store, tma_views
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, IN_SHARED, product

LOADER = 0
ROLES = 3  # warpgroups
# Registers of a thread: of the loader's warpgroup, of those with one sum, of the one with two.
FEW, SOME, MANY = 24, 152, 184


class Gradients(Asked, Read, Written):
    """The kernel of one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen, heads, E)
        k: cute.Tensor,
        dout: cute.Tensor,  # (batch, seqlen, heads_v, M)
        dv: cute.Tensor,
        decay: cute.Tensor,  # (batch, seqlen, heads_v) fp32; not read without `decays`
        prepared: cute.Tensor,  # (slots * heads_v, BACK_ITEM) fp32
        states: cute.Tensor,  # (entries * heads_v * tiles, width * COLUMNS), before chunks
        dstates: cute.Tensor,  # the same, gradients after chunks
        missing: cute.Tensor,  # Y, as `keep` has it: dq and dk may be the same memory
        missing_odd: cute.Tensor,
        dq: cute.Tensor,  # where tokens count, as all that is written
        dk: cute.Tensor,
        dbeta: cute.Tensor,  # (batch, seqlen, heads_v) fp32
        ddecay: cute.Tensor,  # as dbeta; not written without `decays`
        lengths: cute.Tensor,  # (batch,) int32, or empty
        cu: cute.Tensor,  # (sequences + 1,) int32, or empty
        eps: Float32,
        normalize: Int32,
        decays: Int32,  # 0: none; NO_STATE: some, and no initial state
        size: Int32,  # chunks of a range
        current: Int32,  # the range
        per_sequence: Int32,
        entries: Int32,  # of the range
        processors: Int32,
        stream: Any,
    ):
        """Lay out shared memory, describe the TMA copies and launch as many blocks as run at once."""
        config = self.config
        heads, seqlen = k.shape[2], k.shape[1]
        slots = prepared.shape[0] // dv.shape[2]
        q, k, dout, dv, missing, missing_odd, dq, dk = [
            ragged(cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])))
            for t in (q, k, dout, dv, missing, missing_odd, dq, dk)
        ]
        tile = (CHUNK, COLUMNS)
        box = tile_layout(self.dtype, tile, 1, COLUMNS)
        tma_q, q = tma_load(q, box, tile)
        tma_k, k = tma_load(k, box, tile)
        tma_dout, dout = tma_load(dout, box, tile)
        tma_dv, dv = tma_load(dv, box, tile)
        tma_missing, missing = tma_load(missing, box, tile)
        tma_odd, missing_odd = tma_load(missing_odd, box, tile)
        tma_dq, dq = tma_store(dq, box, tile)
        tma_dk, dk = tma_store(dk, box, tile)
        self.kernel(
            q, k, dout, dv, decay, prepared, states, dstates, missing, missing_odd, dq, dk, dbeta, ddecay, lengths, cu,
            tma_q, tma_k, tma_dout, tma_dv, tma_missing, tma_odd, tma_dq, tma_dk,
            product(self.dtype, (64, CHUNK, 16), IN_SHARED, BY_K, BY_K),
            product(self.dtype, (64, config.width, 16), IN_REGISTERS, BY_K, BY_K),
            product(self.dtype, (64, config.width, 16), IN_REGISTERS, BY_K, BY_MN),
            product(self.dtype, (64, config.width, 16), IN_SHARED, BY_MN, BY_MN),
            tile_layout(self.dtype, (CHUNK, config.width), 1, COLUMNS),
            tile_layout(self.dtype, tile, self.boxes, COLUMNS),
            tile_layout(self.dtype, (config.width, COLUMNS), config.stages, COLUMNS),
            tile_layout(self.dtype, tile, config.stages, COLUMNS),
            tile_layout(self.dtype, (CHUNK, CHUNK), 1, COLUMNS),
            eps, normalize, decays, size, current, per_sequence, entries * heads, slots, heads, seqlen,
        ).launch(
            grid=[cutlass.min(entries * heads, processors), 1, 1],
            block=[(1 + ROLES) * WARPGROUP, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        dout: cute.Tensor,
        dv: cute.Tensor,
        decay: cute.Tensor,
        prepared: cute.Tensor,
        states: cute.Tensor,
        dstates: cute.Tensor,
        missing: cute.Tensor,
        missing_odd: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dbeta: cute.Tensor,
        ddecay: cute.Tensor,
        lengths: cute.Tensor,
        cu: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_dout: cute.CopyAtom,
        tma_dv: cute.CopyAtom,
        tma_missing: cute.CopyAtom,
        tma_odd: cute.CopyAtom,
        tma_dq: cute.CopyAtom,
        tma_dk: cute.CopyAtom,
        mma_square: cute.TiledMma,
        mma_state: cute.TiledMma,
        mma_tokens: cute.TiledMma,
        mma_turned: cute.TiledMma,
        layout_qk: cute.ComposedLayout,
        layout_boxes: cute.ComposedLayout,
        layout_states: cute.ComposedLayout,
        layout_values: cute.ComposedLayout,
        layout_square: cute.ComposedLayout,
        eps: Float32,
        normalize: Int32,
        decays: Int32,
        size: Int32,
        current: Int32,
        per_sequence: Int32,
        total: Int32,
        slots: Int32,
        heads: Int32,
        seqlen: Int32,
    ):
        config = self.config
        stages = config.stages
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_dout, tma_dv, tma_missing, tma_odd, tma_dq, tma_dk):
                cpasync.prefetch_descriptor(atom)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * stages + 14]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_qk)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_qk)], 1024]
            state: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_states)], 1024]
            dstate: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_states)], 1024]
            y: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_values)], 1024]
            dv: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_values)], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_values)], 1024]
            asked: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_square)], 1024]
            read: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_square)], 1024]
            read_rest: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_square)], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_boxes)], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, 2 * cute.cosize(layout_boxes)], 1024]
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, 2 * ALL_NUMBERS], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, SUMS], 128]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barriers = Mbarriers(storage.barriers.data_ptr())
        keys = storage.keys.data_ptr()
        shared = GradientShared(
            full=barriers.take(stages),
            empty=barriers.take(stages),
            numbers_full=barriers.take(2),
            numbers_empty=barriers.take(2),
            qk_full=barriers.take(),
            qk_empty=barriers.take(),
            asked_full=barriers.take(),
            asked_empty=barriers.take(),
            read_full=barriers.take(),
            read_empty=barriers.take(),
            sums_full=barriers.take(),
            sums_empty=barriers.take(),
            keys_full=barriers.take(),
            keys_empty=barriers.take(),
            q=placed(storage.q, layout_qk),
            k=placed(storage.k, layout_qk),
            boxes_q=placed(storage.q, layout_boxes),
            boxes_k=placed(storage.k, layout_boxes),
            q_start=storage.q.data_ptr(),
            k_start=storage.k.data_ptr(),
            state=placed(storage.state, layout_states),
            dstate=placed(storage.dstate, layout_states),
            state_start=storage.state.data_ptr(),
            dstate_start=storage.dstate.data_ptr(),
            y=placed(storage.y, layout_values),
            dv=placed(storage.dv, layout_values),
            dout=placed(storage.dout, layout_values),
            y_start=storage.y.data_ptr(),
            dv_start=storage.dv.data_ptr(),
            dout_start=storage.dout.data_ptr(),
            asked=placed(storage.asked, layout_square),
            read=placed(storage.read, layout_square),
            read_rest=placed(storage.read_rest, layout_square),
            asked_start=storage.asked.data_ptr(),
            read_start=storage.read.data_ptr(),
            read_rest_start=storage.read_rest.data_ptr(),
            numbers=storage.numbers.data_ptr(),
            sums=storage.sums.data_ptr(),
            dq=placed(storage.dq, layout_boxes),
            dq_start=storage.dq.data_ptr(),
            dk=cute.make_tensor(cute.recast_ptr(keys, layout_boxes.inner, dtype=self.dtype), layout_boxes.outer),
            keys=keys,
        )
        if warp == LOADER:
            with cute.arch.elect_one():
                self.init(shared)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        tiles = cute.ceil_div(dv.shape[1], COLUMNS)
        group = dv.shape[2] // heads
        index, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        mmas = mma_square, mma_state, mma_tokens, mma_turned
        origin = current * size - missed(seqlen, slots, size, per_sequence)
        ranged = heads, slots, seqlen, lengths, cu, size, origin, per_sequence
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        if warp < 4:
            cute.arch.setmaxregister_decrease(FEW)
            if warp == LOADER:
                phase = Int32(1)
                for item in cutlass.range(index, total, step, unroll=1):
                    at = self.chunk(item, *ranged)
                    if at.inside == 1:
                        stage, phase, parity = self.load(
                            shared, at, stage, phase, parity, turn, group, tiles, q, k, dout, dv, prepared, states, dstates,
                            missing, missing_odd, tma_q, tma_k, tma_dout, tma_dv, tma_missing, tma_odd, origin, size,
                            per_sequence, seqlen,
                        )  # fmt: skip
                        turn = turn ^ 1
        elif warp < 8:
            cute.arch.setmaxregister_increase(SOME)
            phase = Int32(0)
            for item in cutlass.range(index, total, step, unroll=1):
                at = self.chunk(item, *ranged)
                if at.inside == 1:
                    stage, phase, parity = self.ask(
                        shared, at, stage, phase, parity, turn, group, tiles, decays, normalize, eps, dq, tma_dq, mmas
                    )
                    turn = turn ^ 1
            if warp == 4:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
        elif warp < 12:
            cute.arch.setmaxregister_increase(SOME)
            phase = Int32(0)
            for item in cutlass.range(index, total, step, unroll=1):
                at = self.chunk(item, *ranged)
                if at.inside == 1:
                    stage, phase, parity = self.read(shared, stage, phase, parity, turn, group, tiles, decays, mmas)
                    turn = turn ^ 1
        else:
            cute.arch.setmaxregister_increase(MANY)
            phase = Int32(0)
            for item in cutlass.range(index, total, step, unroll=1):
                at = self.chunk(item, *ranged)
                if at.inside == 1:
                    stage, phase, parity = self.write(
                        shared, at, stage, phase, parity, turn, group, tiles, decays, normalize, eps, decay, dk, dbeta, ddecay,
                        tma_dk, mmas,
                    )  # fmt: skip
                    turn = turn ^ 1
            if warp == 12:
                cute.arch.cp_async_bulk_wait_group(0, read=False)

    def init(self, shared: GradientShared) -> None:
        """Barriers, and how many warps, or copies, come to each."""
        for i in range(self.config.stages):
            cute.arch.mbarrier_init(shared.full + i, 1)
            cute.arch.mbarrier_init(shared.empty + i, 4 * ROLES)
        for i in range(2):
            cute.arch.mbarrier_init(shared.numbers_full + i, 1)
            cute.arch.mbarrier_init(shared.numbers_empty + i, 4 * ROLES)
        for barrier, count in (
            (shared.qk_full, 1),
            (shared.qk_empty, 4 * ROLES),
            (shared.asked_full, 4),
            (shared.asked_empty, 4),
            (shared.read_full, 4),
            (shared.read_empty, 4),
            (shared.sums_full, 8),
            (shared.sums_empty, 1),
            (shared.keys_full, 4),
            (shared.keys_empty, 1),
        ):
            cute.arch.mbarrier_init(barrier, count)

    def chunk(self, item: Any, *ranged: Any) -> Chunk:
        """The chunk with this number; called by whole warps."""
        inside, entry, head, batch, start, first, live = self.place(item, *ranged)
        return Chunk(inside=inside, entry=entry, head=head, batch=batch, start=start, first=first, live=live)

    @cute.jit
    def load(
        self, shared, at, stage, phase, parity, turn, group, tiles, q, k, dout, dv, prepared, states, dstates, missing,
        missing_odd, tma_q, tma_k, tma_dout, tma_dv, tma_missing, tma_odd, origin, size, per_sequence, seqlen,
    ):  # fmt: skip
        """What a chunk needs; its queries and keys after the first value head's values, which are waited for first."""
        config = self.config
        tile = (CHUNK, COLUMNS)
        of = at.batch, at.start, at.live
        number = at.first // CHUNK
        slot = origin + at.entry
        if per_sequence != 0:
            sequence = at.entry // size
            slot = sequence * cute.ceil_div(seqlen, CHUNK) + slot - sequence * size
        gq, gk = (cute.local_tile(rows_of(t, at.head, *of), tile, (None, None)) for t in (q, k))
        load_q, load_k = tma_views(tma_q, shared.boxes_q, gq), tma_views(tma_k, shared.boxes_k, gk)
        heads = dv.shape[2]
        for g in cutlass.range(group, unroll=1):
            head = at.head * group + g
            place = parity % 2
            cute.arch.mbarrier_wait(shared.numbers_empty + place, (parity // 2) ^ 1)
            expect(shared.numbers_full, 4 * ALL_NUMBERS, place)
            with cute.arch.elect_one():
                source = prepared.iterator + ((Int64(slot) * heads + head) * BACK_ITEM + 2 * MATRIX)
                bulk_load(shared.numbers + place * ALL_NUMBERS, source, 4 * ALL_NUMBERS, shared.numbers_full + place)
            gout, gv = (cute.local_tile(rows_of(t, head, *of), tile, (None, None)) for t in (dout, dv))
            load_dout, load_dv = tma_views(tma_dout, shared.dout, gout), tma_views(tma_dv, shared.dv, gv)
            which, head_y = place_of_y(head, heads, missing)
            gy, gy_odd = (cute.local_tile(rows_of(t, head_y, *of), tile, (None, None)) for t in (missing, missing_odd))
            load_y, load_odd = tma_views(tma_missing, shared.y, gy), tma_views(tma_odd, shared.y, gy_odd)
            for m in cutlass.range(tiles, unroll=1):
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                expect(shared.full + stage, config.stage_bytes)
                with cute.arch.elect_one():
                    entry = (Int64(at.entry) * heads + head) * tiles + m
                    elements = config.width * COLUMNS
                    for kept, to in ((states, shared.state_start), (dstates, shared.dstate_start)):
                        bulk_load(to + stage * elements, kept.iterator + entry * elements, 2 * elements, shared.full + stage)
                load_tile(load_dout, (number, m), stage, shared.full, stage)
                load_tile(load_dv, (number, m), stage, shared.full, stage)
                if which == 0:
                    load_tile(load_y, (number, m), stage, shared.full, stage)
                else:
                    load_tile(load_odd, (number, m), stage, shared.full, stage)
                stage, phase = advance(stage, phase, config.stages)
            if g == 0:
                cute.arch.mbarrier_wait(shared.qk_empty, turn ^ 1)
                expect(shared.qk_full, 2 * 2 * CHUNK * config.width)
                for box in cutlass.range_constexpr(self.boxes):
                    load_tile(load_k, (number, box), box, shared.qk_full)
                    load_tile(load_q, (number, box), box, shared.qk_full)
            parity = (parity + 1) % 4
        return stage, phase, parity
