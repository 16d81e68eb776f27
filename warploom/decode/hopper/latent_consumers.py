"""The two warpgroups that compute. Imports the CuTe DSL; only what compiles kernels imports this module.

Each keeps half of O's columns of all rows. One scores the even tiles of a split and the other one the odd ones, from all
columns of the keys, and each P is multiplied by both: by who made it out of registers, by the other one out of shared memory.
P is relative to a reference for each row, which P's maker hands over with it and which changes only where a maximum has
outgrown it by HEADROOM.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.decode.hopper.latent_base import EVEN, ODD, OTHER, OWN, Cut
from warploom.decode.hopper.latent_config import HALF, PIECE, PIECE_BYTES, PIECES, ROWS, THREADS, TILE
from warploom.decode.hopper.latent_results import NOTHING, LatentResults
from warploom.kernels.cute.barriers import LatentBarrier, arrive, wait
from warploom.kernels.cute.basics import WARP, WARPGROUP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, hidden, store_matrices
from warploom.kernels.cute.rings import release, release_everywhere
from warploom.kernels.cute.softmax import finite
from warploom.kernels.cute.wgmma import accumulator_rows, gemm, pack, words

HEADROOM = 8.0  # P is at most 2^this
STEPS = 4  # of wgmma, 16 deep, in a piece


class Work(Fields):
    """What a thread works on, and what it keeps."""

    role: Any  # EVEN or ODD
    mma_scores: Any
    mma_own: Any
    mma_other: Any
    q: Any
    k: Any
    v: Any
    p: Any
    p_other: Any
    acc_s: Any
    acc: Any  # O: (8 columns, 4)
    reference: Any  # of its two rows, 8 apart, in log2 units
    row_sum: Any  # of this thread's columns of the warpgroup's own tiles
    correction: Any
    row: Any  # the first of the two, in the block
    lane: Any
    warp: Any  # of the warpgroup
    ends: Any  # of the sequence: the end of its keys, and of those that some row sees
    call: Any
    multiplier: Any


class LatentConsumers(LatentResults):
    """What a warpgroup runs."""

    @cute.jit
    def consume(self, role, call, outputs, shared, mmas, multiplier, items):
        """All that the block works on."""
        work = self.work(role, call, shared, mmas, multiplier)
        q_phase, even, odd = Int32(0), Int32(0), Int32(0)
        for item in cutlass.range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0], unroll=1):
            place = self.place(call, item)
            cut = self.cut(call, place.batch)
            self.set_ends(work, cut)
            # Of a warp without rows nothing is kept or stored. A warp's number is uniform, or ptxas runs products one by one.
            there = choose(place.row_block * ROWS + work.warp * 16 < call.rows, 1, 0)
            if self.has_part(cut, place) > 0:
                if cut.tiles > 0:
                    cute.arch.mbarrier_wait(shared.q_full, q_phase)
                    q_phase ^= 1
                first = self.first_split(cut, place)
                waits = Int32(NOTHING)
                for n in cutlass.range(first, first + (Int32(1) << cut.each_log), unroll=1):
                    begin, end = self.split(cut, n)
                    if end - begin < 2:
                        self.begin_split(work, outputs, waits)
                        if end - begin < 1:
                            self.clear(work)  # a sequence without keys
                    if role == EVEN:
                        self.add_tiles(self.score_first, work, outputs, shared, place.row_block, begin, end, even, odd, waits)
                    else:
                        self.add_tiles(self.score_second, work, outputs, shared, place.row_block, begin, end, even, odd, waits)
                    even ^= end - begin + 1 >> 1 & 1
                    odd ^= end - begin >> 1 & 1
                    # Computed here, or they would take registers all along.
                    each_log, part_log = self.logs(call, hidden(cut.log))
                    if ((n + 1 & (Int32(1) << each_log) - 1) == 0) & (cut.tiles > 0):
                        release(shared.q_empty)
                    # No warp waits for another one here: what is next runs on.
                    self.add_quads(work)
                    count = Int32(1) << part_log
                    index = n & count - 1
                    waits = Int32(NOTHING)
                    if there > 0:
                        waits = self.end_split(work, outputs, shared, index, count)
                    if index + 1 == count:
                        if (call.blocks_log == 0) & (cut.tiles > 0):
                            self.add_sums(work, shared, q_phase)
                        if there > 0:
                            self.finish(work, call, outputs, place, n >> part_log)

    @cute.jit
    def add_tiles(self, score, work, outputs, shared, row_block, begin, end, even, odd, waits):
        """Add a split's tiles, in pairs and the last one alone; ``score``: what this warpgroup does of each."""
        for pair in cutlass.range((end - begin) // 2, unroll=1):
            turns, fresh = pair & 1, choose(pair == 0, 1, 0)
            score(work, shared, row_block, begin + 2 * pair, True, even ^ turns, odd ^ turns, fresh, (outputs, waits))
        if (end - begin) % 2 == 1:
            turns = end - begin >> 1 & 1
            score(work, shared, row_block, end - 1, False, even ^ turns, odd ^ turns, choose(end - begin < 2, 1, 0))

    def work(self, role: Any, call: Any, shared: Any, mmas: Any, multiplier: Any) -> Work:
        """What a thread keeps of all."""
        mma_scores, mma_own, mma_other = mmas
        scores, own, other = (m.get_slice(0) for m in mmas)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % WARP
        half = cute.make_layout(((PIECE, HALF // PIECE), *shared.v.shape[1:]), stride=shared.v.stride)
        values = [own.partition_B(cute.make_tensor(shared.v.iterator + r * (HALF * TILE), half)) for r in (EVEN, ODD)]
        return Work(
            role=role,
            mma_scores=mma_scores,
            mma_own=mma_own,
            mma_other=mma_other,
            q=mma_scores.make_fragment_A(scores.partition_A(shared.q))[None, None, None, 0],
            k=mma_scores.make_fragment_B(scores.partition_B(shared.k)),
            v=[mma_own.make_fragment_B(v) for v in values],
            p=mma_own.make_fragment_A(own.partition_shape_A((ROWS, TILE))),
            p_other=mma_other.make_fragment_A(other.partition_A(shared.p)),
            acc_s=mma_scores.make_fragment_C(scores.partition_shape_C((ROWS, TILE))),
            acc=mma_own.make_fragment_C(own.partition_shape_C((ROWS, HALF))),
            reference=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            correction=cute.make_rmem_tensor(2, Float32),
            row=thread // WARP * 16 + lane // 4,
            lane=lane,
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4,
            ends=cute.make_rmem_tensor(2, Int32),
            call=call,
            multiplier=multiplier,
        )

    def set_ends(self, work: Any, cut: Cut) -> None:
        """What masks are made from."""
        work.ends[0], work.ends[1] = cut.length, cut.last

    @cute.jit
    def is_whole(self, work, tile):
        """Whether all rows see all keys of a tile."""
        call, length, last = work.call, work.ends[0], work.ends[1]
        key = tile * TILE
        return (key >= length - 1 - call.left) & (key + TILE <= cutlass.min(last, length - call.queries + call.right + 1))

    @cute.jit
    def hide(self, work, rows, tile, row_block):
        """Hide keys that a row does not see."""
        call, length, last = work.call, work.ends[0], work.ends[1]
        offset = tile * TILE + work.lane % 4 * 2
        for r in cutlass.range_constexpr(2):
            row = row_block * ROWS + work.row + 8 * r
            position = length - call.queries + cutlass.min(row // call.heads, call.queries - 1)
            past = cutlass.min(last, position + call.right + 1) - offset
            first = position - call.left - offset
            for c in cutlass.range_constexpr(TILE // 4):
                column = c // 2 * 8 + c % 2
                x = rows[r, c] if column < past else -Float32.inf
                rows[r, c] = x if column >= first else -Float32.inf

    # A pair of tiles

    @cute.jit
    def score_first(self, work, shared, row_block, tile, both, even, odd, fresh, before=None):
        """The even tile is this warpgroup's; then the other one's, if there are both. ``fresh``: they are a split's first."""
        self.scores(work, shared, even, EVEN)
        if const_expr(both):
            self.begin_if(work, fresh, *before)
        warpgroup.wait_group(0)
        self.softmax(work, row_block, tile)
        self.publish(work, shared, tile, EVEN)
        self.rescale(work)
        gemm(work.mma_own, work.acc, work.p, work.v[EVEN], fresh == 0, EVEN)
        warpgroup.wait_group(0)
        self.release(shared.empty + (2 * EVEN + OWN))
        if const_expr(both):
            self.adopt(work, shared, tile + 1, EVEN)
            gemm(work.mma_other, work.acc, work.p_other[None, None, None, ODD], work.v[EVEN], True, ODD)
            warpgroup.wait_group(0)
            self.release(shared.empty + (2 * ODD + OTHER))

    @cute.jit
    def score_second(self, work, shared, row_block, tile, both, even, odd, fresh, before=None):
        """The odd tile is this warpgroup's, if there are both: it is scored before the other one is added."""
        if const_expr(both):
            self.scores(work, shared, odd, ODD)
            self.begin_if(work, fresh, *before)
        self.adopt(work, shared, tile, ODD)
        gemm(work.mma_other, work.acc, work.p_other[None, None, None, EVEN], work.v[ODD], fresh == 0, EVEN)
        if const_expr(both):
            warpgroup.wait_group(1)
            self.softmax(work, row_block, tile + 1)
            self.publish(work, shared, tile + 1, ODD)
        warpgroup.wait_group(0)
        self.release(shared.empty + (2 * EVEN + OTHER))
        if const_expr(both):
            self.rescale(work)
            gemm(work.mma_own, work.acc, work.p, work.v[ODD], True, ODD)
            warpgroup.wait_group(0)
            self.release(shared.empty + (2 * ODD + OWN))

    @cute.jit
    def begin_if(self, work, fresh, outputs, waits):
        if fresh > 0:
            self.begin_split(work, outputs, waits)

    def release(self, barrier: Any) -> None:
        """This warp has read a part of a tile, which whoever asks for the next one is to know."""
        release_everywhere(barrier, self.config.cluster)

    def factors(self, work: Any, role: int) -> tuple[Any, Any]:
        """Of S = Q Kᵀ."""
        return work.q, work.k[None, None, None, role]

    @cute.jit
    def scores(self, work, shared, phase, role):
        """Issue the scores of the warpgroup's tile, piece by piece as they land: its own half first."""
        atom = cute.make_mma_atom(work.mma_scores.op)
        first, second = self.factors(work, role)
        warpgroup.fence()
        for n in cutlass.range_constexpr(PIECES):
            piece = (n + 4 * role) % 8 if const_expr(n < 8) else n
            cute.arch.mbarrier_wait(shared.full + (role * PIECES + piece), phase)
            for step in cutlass.range_constexpr(STEPS):
                at = piece * STEPS + step
                atom.set(warpgroup.Field.ACCUMULATE, n + step > 0)
                cute.gemm(atom, work.acc_s, first[None, None, at], second[None, None, at], work.acc_s)
        warpgroup.commit_group()

    @cute.jit
    def softmax(self, work, row_block, tile):
        """P of the warpgroup's scores, and what O is to be multiplied by; P's sums are of what is not rounded yet."""
        rows = accumulator_rows(work.acc_s, TILE)
        for i in cutlass.range_constexpr(TILE // 2):
            work.acc_s[i] = work.acc_s[i] * work.multiplier
        if not self.is_whole(work, tile):
            self.hide(work, rows, tile, row_block)
        for r in cutlass.range_constexpr(2):
            tops = [rows[r, 0], rows[r, 1]]
            for c in cutlass.range_constexpr(2, TILE // 4):
                tops[c % 2] = cute.arch.fmax(tops[c % 2], rows[r, c])
            top = cute.arch.warp_reduction_max(cute.arch.fmax(tops[0], tops[1]), threads_in_group=4)
            new = top if top > work.reference[r] + HEADROOM else work.reference[r]
            work.correction[r] = correction_of(work.reference[r], new)
            work.reference[r] = new
            offset = finite(new)
            sums = [work.row_sum[r] * work.correction[r], Float32(0.0)]
            for c in cutlass.range_constexpr(TILE // 4):
                p = exp2(rows[r, c] - offset)
                rows[r, c] = p
                sums[c % 2] = sums[c % 2] + p
            work.row_sum[r] = sums[0] + sums[1]
        pack(work.acc_s, work.p, self.dtype)

    @cute.jit
    def publish(self, work, shared, tile, role):
        """Hand P to the other warpgroup, over columns that only the scores needed; clear values that nobody sees."""
        lane = work.lane
        wait(LatentBarrier.SCORED, WARPGROUP, role)  # all four warps have their scores: those columns are free
        packed = words(work.p)
        row = work.row // 16 * 16 + lane % 16
        for i in cutlass.range_constexpr(TILE // 16):
            chunk = (2 * i + lane // 16) ^ (lane % 8)
            at = (role * PIECES + PIECES - 1) * (PIECE_BYTES // 2) + row * 64 + chunk * 8
            store_matrices(shared.start + at, [packed[4 * i + n] for n in range(4)])
        references = shared.references
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                references[role * ROWS + work.row + 8 * r] = work.reference[r]
        self.clear_hidden(work, shared, tile, role, role)
        arrive(LatentBarrier.P_READY, THREADS, role)

    @cute.jit
    def clear_hidden(self, work, shared, tile, slot, role):
        """Of a tile's values, this warpgroup's half, zeros for keys that no row sees, whatever they hold."""
        if not self.is_whole(work, tile):
            first = work.ends[0] - work.call.queries - work.call.left - tile * TILE
            past = work.ends[1] - tile * TILE
            thread = work.row // 16 * WARP + work.lane
            zeros = cute.make_rmem_tensor(4, Int32)
            zeros.fill(0)
            for i in cutlass.range_constexpr(16):
                key = i % 4 * 16 + thread // 8
                if (key < first) | (key >= past):
                    at = (slot * PIECES + 4 * role + i // 4) * (PIECE_BYTES // 2) + key * 64 + thread % 8 * 8
                    into = cute.make_tensor((shared.start + at).align(16), cute.make_layout(8))
                    cute.autovec_copy(zeros, cute.recast_tensor(into, Int32))
            cute.arch.fence_view_async_shared()
            wait(LatentBarrier.SCORED, WARPGROUP, role)
        else:
            cute.arch.fence_view_async_shared()

    @cute.jit
    def adopt(self, work, shared, tile, role):
        """Wait for the other warpgroup's P of a tile, and take over its references."""
        other = 1 - role
        wait(LatentBarrier.P_READY, THREADS, other)
        for r in cutlass.range_constexpr(2):
            new = shared.references[other * ROWS + work.row + 8 * r]
            work.correction[r] = correction_of(work.reference[r], new)
            work.reference[r] = new
            work.row_sum[r] = work.row_sum[r] * work.correction[r]
        self.rescale(work)
        self.clear_hidden(work, shared, tile, other, role)

    @cute.jit
    def rescale(self, work):
        """Multiply O by the corrections, if some row of the warp has one."""
        grown = (work.correction[0] != 1.0) | (work.correction[1] != 1.0)
        # A loop of one round or none: the compiler would execute the body of an if under a predicate.
        rounds = choose(cute.arch.vote_any_sync(grown), 1, 0)
        for _ in cutlass.range(hidden(rounds), unroll=1):
            self.correct(work)

    def correct(self, work: Work) -> None:
        """Multiply O by the corrections."""
        for i in range(HALF // 2):
            work.acc[i] = work.acc[i] * work.correction[i // 2 % 2]


@cute.jit
def correction_of(before, after):
    """What O is multiplied by when its reference changes; 1 where there is no O yet, and nothing to multiply."""
    return 1.0 if before == -Float32.inf else exp2(before - finite(after))
