"""The two warpgroups that compute where a sequence has few rows: keys, and columns of values, are wgmma's 64 rows.

Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ, whose 16 columns are queries × heads, so that no row of a product is there for nothing. Each warpgroup
has every other tile of a split by itself, with a running softmax of its own. Where a split ends they exchange halves of O, and
each goes on with the sum of 256 columns, which is small enough to keep totals of all levels in registers.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.decode.hopper.latent_base import EVEN, LEVELS, ODD, OTHER, OWN, RADIX_LOG
from warploom.decode.hopper.latent_config import FEW_ROWS, HEAD_DIM_V, PIECE_BYTES, PIECES, STATS, THREADS, TILE
from warploom.decode.hopper.latent_consumers import HEADROOM, correction_of
from warploom.decode.hopper.latent_kernel import HopperLatent
from warploom.decode.hopper.latent_results import inverse_of, joined, joined_sum
from warploom.kernels.cute.barriers import LatentBarrier, wait
from warploom.kernels.cute.basics import WARP, WARPGROUP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, hidden, pack16, store_matrices
from warploom.kernels.cute.rings import release
from warploom.kernels.cute.softmax import finite, log_sum_exp
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_SHARED, product

OWNED = 4  # a thread's rows: two neighbours, and those 8 further on
PER_TILE = FEW_ROWS // 2  # a thread's numbers of a product of 64 rows
COLUMN_TILES = HEAD_DIM_V // 64
NUMBERS = COLUMN_TILES * PER_TILE  # a thread's of O
HALF_NUMBERS = NUMBERS // 2
WARPS = THREADS // WARP


class FewWork(Fields):
    """What a thread works on, and what it keeps."""

    role: Any  # EVEN or ODD: all but products, whose addresses are constants, are the same instructions, fetched once
    mma_scores: Any
    mma_values: Any
    k: Any
    q: Any
    v: Any
    p: Any
    acc_s: Any
    acc: Any  # Oᵀ: (4, 2), of each 64 columns, those that this warpgroup keeps first
    reference: Any  # of its four rows, in log2 units
    row_sum: Any  # of this thread's keys
    correction: Any
    half: Any  # of both warpgroups' O the columns that this one keeps
    total: Any  # its numbers of totals, of each level
    total_rows: Any  # of each level's total the warp's references and sums, in shared memory
    thread: Any  # of the warpgroup
    lane: Any
    warp: Any
    ends: Any  # of the sequence: the end of its keys, and of those that some row sees
    call: Any
    multiplier: Any


def owner(i: int) -> int:
    """Which of the thread's rows its i-th number of a product is of."""
    return i % 2 + i // 4 % 2 * 2


class HopperLatentFew(HopperLatent):
    """softmax(scale · q kᵀ + band) v of up to 16 rows a sequence."""

    def products(self) -> tuple[Any, Any, Any]:
        """Of scores and of values."""
        scores = product(self.dtype, (TILE, FEW_ROWS, 16), IN_SHARED, BY_K, BY_K)
        values = product(self.dtype, (64, FEW_ROWS, 16), IN_SHARED, BY_MN, BY_K)
        return scores, values, values

    @cute.jit
    def consume(self, role, call, outputs, shared, mmas, multiplier, items):
        """All that the block works on."""
        work = self.few_work(role, call, shared, mmas, multiplier)
        q_phase, phase = Int32(0), Int32(0)
        for item in cutlass.range(cute.arch.block_idx()[0], items, cute.arch.grid_dim()[0], unroll=1):
            place = self.place(call, item)
            cut = self.cut(call, place.batch)
            self.set_ends(work, cut)
            if self.has_part(cut, place) > 0:
                if cut.tiles > 0:
                    cute.arch.mbarrier_wait(shared.q_full, q_phase)
                    q_phase ^= 1
                first = self.first_split(cut, place)
                for n in cutlass.range(first, first + (Int32(1) << cut.each_log), unroll=1):
                    begin, end = self.split(cut, n)
                    self.begin(work)
                    if end - begin <= role:
                        self.clear(work)
                    for tile in cutlass.range(begin + role, end, 2, unroll=1):
                        self.add_tile(work, shared, tile, choose(tile > begin + role, 1, 0), phase)
                        phase ^= 1
                    # Computed here, or they would take registers all along.
                    each_log, part_log = self.logs(call, hidden(cut.log))
                    if ((n + 1 & (Int32(1) << each_log) - 1) == 0) & (cut.tiles > 0):
                        release(shared.q_empty)
                    self.exchange_halves(work, shared)
                    count = Int32(1) << part_log
                    index = n & count - 1
                    self.fold_totals(work, index, count)
                    if index + 1 == count:
                        self.store_half(work, call, outputs, place, n >> part_log)

    def few_work(self, role: Any, call: Any, shared: Any, mmas: Any, multiplier: Any) -> FewWork:
        """What a thread keeps of all."""
        mma_scores, mma_values, _ = mmas
        scores, values = mma_scores.get_slice(0), mma_values.get_slice(0)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        return FewWork(
            role=role,
            mma_scores=mma_scores,
            mma_values=mma_values,
            k=mma_scores.make_fragment_A(scores.partition_A(shared.k)),
            q=mma_scores.make_fragment_B(scores.partition_B(shared.q))[None, None, None, 0],
            v=mma_values.make_fragment_A(values.partition_A(shared.v)),
            p=mma_values.make_fragment_B(values.partition_B(shared.p)),
            acc_s=mma_scores.make_fragment_C(scores.partition_shape_C((TILE, FEW_ROWS))),
            acc=mma_values.make_fragment_C(values.partition_shape_C((HEAD_DIM_V, FEW_ROWS))),
            reference=cute.make_rmem_tensor(OWNED, Float32),
            row_sum=cute.make_rmem_tensor(OWNED, Float32),
            correction=cute.make_rmem_tensor(OWNED, Float32),
            half=cute.make_rmem_tensor(HALF_NUMBERS, Float32),
            total=[cute.make_rmem_tensor(HALF_NUMBERS, Float32) for _ in range(LEVELS)],
            total_rows=shared.totals.iterator + (4 * role + thread // WARP) * (2 * LEVELS * FEW_ROWS),
            thread=thread,
            lane=thread % WARP,
            warp=thread // WARP,
            ends=cute.make_rmem_tensor(2, Int32),
            call=call,
            multiplier=multiplier,
        )

    def begin(self, work: FewWork) -> None:
        """Nothing seen."""
        work.reference.fill(-Float32.inf)
        work.row_sum.fill(0.0)

    # A tile

    @cute.jit
    def add_tile(self, work, shared, tile, more, phase):
        """Add a tile's keys; ``more``: they are not the first ones of the warpgroup's in this split."""
        if work.role == EVEN:
            self.scores(work, shared, phase, EVEN)
            warpgroup.wait_group(0)
        else:
            self.scores(work, shared, phase, ODD)
            warpgroup.wait_group(0)
        self.weigh(work, shared, tile)
        self.rescale_columns(work)
        if work.role == EVEN:
            self.add_values(work, shared, more, EVEN)
        else:
            self.add_values(work, shared, more, ODD)

    def factors(self, work: Any, role: int) -> tuple[Any, Any]:
        """Of Sᵀ = K Qᵀ."""
        return work.k[None, None, None, role], work.q

    @cute.jit
    def weigh(self, work, shared, tile):
        """P of the scores into shared memory, and what O is to be multiplied by; P's sums are of what is not rounded yet."""
        acc, lane, role = work.acc_s, work.lane, work.role
        for i in cutlass.range_constexpr(PER_TILE):
            acc[i] = acc[i] * work.multiplier
        whole = self.is_whole(work, tile)
        if not whole:
            self.hide_keys(work, tile)
        tops = shared.references.iterator + role * (4 * FEW_ROWS)
        for u in cutlass.range_constexpr(OWNED):
            i = u % 2 + u // 2 * 4
            work.correction[u] = warp_top(cute.arch.fmax(acc[i], acc[i + 2]))
        if lane < 4:
            for j in cutlass.range_constexpr(2):
                store(tops + (work.warp * FEW_ROWS + 2 * lane + 8 * j), work.correction[2 * j], work.correction[2 * j + 1])
        wait(LatentBarrier.SCORED, WARPGROUP, role)
        for j in cutlass.range_constexpr(2):
            found = [load(tops + (w * FEW_ROWS + lane % 4 * 2 + 8 * j), 2) for w in range(4)]
            for c in cutlass.range_constexpr(2):
                u = 2 * j + c
                top = cute.arch.fmax(cute.arch.fmax(found[0][c], found[1][c]), cute.arch.fmax(found[2][c], found[3][c]))
                new = top if top > work.reference[u] + HEADROOM else work.reference[u]
                work.correction[u] = correction_of(work.reference[u], new)
                work.reference[u] = new
                offset = finite(new)
                i = c + 4 * j
                acc[i], acc[i + 2] = exp2(acc[i] - offset), exp2(acc[i + 2] - offset)
                work.row_sum[u] = work.row_sum[u] * work.correction[u] + (acc[i] + acc[i + 2])
        row = lane % 8 + lane // 16 * 8
        chunk = (2 * work.warp + lane // 8 % 2) ^ (lane % 8)
        packed = [pack16(acc[2 * i], acc[2 * i + 1], self.dtype) for i in range(4)]
        store_matrices(shared.weights + (role * FEW_ROWS * TILE + row * 64 + chunk * 8), packed, True)
        if not whole:
            self.clear_values(work, shared, tile)
        cute.arch.fence_view_async_shared()
        wait(LatentBarrier.SCORED, WARPGROUP, role)

    @cute.jit
    def hide_keys(self, work, tile):
        """Hide keys that a row does not see."""
        call, length, last = work.call, work.ends[0], work.ends[1]
        key = tile * TILE + work.warp * 16 + work.lane // 4
        for u in cutlass.range_constexpr(OWNED):
            row = work.lane % 4 * 2 + u % 2 + u // 2 * 8
            position = length - call.queries + cutlass.min(row // call.heads, call.queries - 1)
            past = cutlass.min(last, position + call.right + 1) - key
            first = position - call.left - key
            for r in cutlass.range_constexpr(2):
                i = u % 2 + u // 2 * 4 + 2 * r
                x = work.acc_s[i] if past > 8 * r else -Float32.inf
                work.acc_s[i] = x if first <= 8 * r else -Float32.inf

    @cute.jit
    def clear_values(self, work, shared, tile):
        """Of a tile's values zeros for keys that no row sees, whatever they hold."""
        first = work.ends[0] - work.call.queries - work.call.left - tile * TILE
        past = work.ends[1] - tile * TILE
        zeros = cute.make_rmem_tensor(4, Int32)
        zeros.fill(0)
        for i in cutlass.range_constexpr(4):
            key = i * 16 + work.thread // 8
            if (key < first) | (key >= past):
                for piece in cutlass.range_constexpr(COLUMN_TILES):
                    at = (work.role * PIECES + piece) * (PIECE_BYTES // 2) + key * 64 + work.thread % 8 * 8
                    into = cute.make_tensor((shared.start + at).align(16), cute.make_layout(8))
                    cute.autovec_copy(zeros, cute.recast_tensor(into, Int32))

    @cute.jit
    def rescale_columns(self, work):
        """Multiply O by the corrections, if some row has one."""
        grown = (work.correction[0] != 1.0) | (work.correction[1] != 1.0)
        grown |= (work.correction[2] != 1.0) | (work.correction[3] != 1.0)
        # A loop of one round or none: the compiler would execute the body of an if under a predicate.
        rounds = choose(cute.arch.vote_any_sync(grown), 1, 0)
        for _ in cutlass.range(hidden(rounds), unroll=1):
            self.correct_columns(work)

    def correct_columns(self, work: FewWork) -> None:
        """Multiply O by the corrections."""
        for i in range(NUMBERS):
            work.acc[i] = work.acc[i] * work.correction[owner(i)]

    @cute.jit
    def add_values(self, work, shared, more, role):
        """Oᵀ += Vᵀ Pᵀ; half of the tile is free for the next one before the other half is."""
        atom = cute.make_mma_atom(work.mma_values.op)
        warpgroup.fence()
        for side in cutlass.range_constexpr(2):
            for step in cutlass.range_constexpr(TILE // 16):
                atom.set(warpgroup.Field.ACCUMULATE, (more > 0) if const_expr(step == 0) else True)
                for n in cutlass.range_constexpr(4):
                    acc = one_tile(work.acc[None, 4 * side + n, 0], 2)
                    values = one_tile(work.v[None, 4 * (role ^ side) + n, step, role], 1)
                    cute.gemm(atom, acc, values, work.p[None, None, step, role], acc)
            warpgroup.commit_group()
        warpgroup.wait_group(1)
        release(shared.empty + (2 * role + OWN))
        warpgroup.wait_group(0)
        release(shared.empty + (2 * role + OTHER))

    # The end of a split

    @cute.jit
    def exchange_halves(self, work, shared):
        """Both warpgroups' O together, of the columns that this one keeps, and their references and sums."""
        role, lane = work.role, work.lane
        other = 1 - role
        sums = shared.sums.iterator
        references = sums + WARPS * FEW_ROWS
        for u in cutlass.range_constexpr(OWNED):
            for step in cutlass.range_constexpr(3):
                work.row_sum[u] = work.row_sum[u] + cute.arch.shuffle_sync_bfly(work.row_sum[u], 4 << step)
        if lane < 4:
            for j in cutlass.range_constexpr(2):
                at = 2 * lane + 8 * j
                store(sums + ((4 * role + work.warp) * FEW_ROWS + at), work.row_sum[2 * j], work.row_sum[2 * j + 1])
                if work.warp == 0:
                    store(references + (role * FEW_ROWS + at), work.reference[2 * j], work.reference[2 * j + 1])
        mine = shared.exchange + (role * HALF_NUMBERS * WARPGROUP + work.thread * 4)
        for i in cutlass.range_constexpr(HALF_NUMBERS // 4):
            store(mine + i * (4 * WARPGROUP), *(work.acc[HALF_NUMBERS + 4 * i + c] for c in range(4)))
        wait(LatentBarrier.SUMMED, THREADS)
        own = cute.make_rmem_tensor(OWNED, Float32)  # what both O are multiplied by
        for j in cutlass.range_constexpr(2):
            at = lane % 4 * 2 + 8 * j
            before = load(references + (EVEN * FEW_ROWS + at), 2)
            after = load(references + (ODD * FEW_ROWS + at), 2)
            found = [load(sums + (w * FEW_ROWS + at), 2) for w in range(WARPS)]
            for c in cutlass.range_constexpr(2):
                u = 2 * j + c
                new = cute.arch.fmax(before[c], after[c])
                safe = finite(new)
                first, second = exp2(before[c] - safe), exp2(after[c] - safe)
                even = (found[0][c] + found[1][c]) + (found[2][c] + found[3][c])
                odd = (found[4][c] + found[5][c]) + (found[6][c] + found[7][c])
                work.reference[u] = new
                work.row_sum[u] = joined_sum(first, even, second, odd)
                own[u] = first if role == EVEN else second
                work.correction[u] = second if role == EVEN else first
        theirs = shared.exchange + (other * HALF_NUMBERS * WARPGROUP + work.thread * 4)
        for i in cutlass.range_constexpr(HALF_NUMBERS // 4):
            four = load(theirs + i * (4 * WARPGROUP), 4)
            for c in cutlass.range_constexpr(4):
                n, u = 4 * i + c, owner(4 * i + c)
                work.half[n] = joined_sum(own[u], work.acc[n], work.correction[u], four[c])
        wait(LatentBarrier.SUMMED, THREADS)  # all is read, and may be overwritten

    @cute.jit
    def fold_totals(self, work, index, count):
        """Add the ``index``-th of ``count`` splits to the total of those before it; the last one leaves all in ``half``."""
        going = choose(count > 1, 1, 0)
        for level in cutlass.range_constexpr(LEVELS):
            if going > 0:
                digit = (index >> RADIX_LOG * level) & (1 << RADIX_LOG) - 1
                if digit > 0:
                    self.add_total(work, level)
                last = choose((digit == (1 << RADIX_LOG) - 1) | (index + 1 == count), 1, 0)
                if last == 0:
                    self.keep_total(work, level)
                going = choose((last > 0) & ((1 << RADIX_LOG * (level + 1)) < count), 1, 0)

    @cute.jit
    def keep_total(self, work, level):
        """What is at hand becomes a level's total."""
        reference, row_sum, lane = work.reference, work.row_sum, work.lane
        cute.arch.sync_warp()  # all lanes of a row have read what was there
        if lane < 4:
            for j in cutlass.range_constexpr(2):
                at = work.total_rows + (level * 2 * FEW_ROWS + 2 * lane + 8 * j)
                store(at, reference[2 * j], reference[2 * j + 1])
                store(at + FEW_ROWS, row_sum[2 * j], row_sum[2 * j + 1])
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(HALF_NUMBERS):
            work.total[level][i] = work.half[i]

    @cute.jit
    def add_total(self, work, level):
        """Add a level's total to what is at hand, as `latent_merge` does."""
        before, own = cute.make_rmem_tensor(OWNED, Float32), cute.make_rmem_tensor(OWNED, Float32)
        for j in cutlass.range_constexpr(2):
            at = work.total_rows + (level * 2 * FEW_ROWS + work.lane % 4 * 2 + 8 * j)
            references, sums = load(at, 2), load(at + FEW_ROWS, 2)
            for c in cutlass.range_constexpr(2):
                u = 2 * j + c
                new, before[u], own[u] = joined(references[c], work.reference[u])
                work.reference[u] = new
                work.row_sum[u] = joined_sum(before[u], sums[c], own[u], work.row_sum[u])
        for i in cutlass.range_constexpr(HALF_NUMBERS):
            u = owner(i)
            work.half[i] = joined_sum(before[u], work.total[level][i], own[u], work.half[i])

    @cute.jit
    def store_half(self, work, call, outputs, place, index):
        """Store the result of a block that has a sequence alone, or else its ``index``-th part."""
        lane, out, lse, parts, stats = work.lane, outputs.out, outputs.lse, outputs.parts, outputs.stats
        first = work.role * (HEAD_DIM_V // 2) + work.warp * 16 + lane // 4
        speaks = choose((work.role == EVEN) & (work.warp == 0) & (lane < 4), 1, 0)
        unit = (place.batch * call.row_blocks + place.row_block << call.parts_log) + index
        for u in cutlass.range_constexpr(OWNED):
            row = lane % 4 * 2 + u % 2 + u // 2 * 8
            if row < call.rows:
                total = work.row_sum[u]
                if call.blocks_log == 0:
                    inverse = inverse_of(total)
                    for i in cutlass.range_constexpr(HALF_NUMBERS):
                        if const_expr(owner(i) == u):
                            column = first + i // PER_TILE * 64 + i // 2 % 2 * 8
                            out[place.batch, row, column] = (work.half[i] * inverse).to(self.dtype)
                    if speaks > 0:
                        token = row // call.heads
                        lse[place.batch, row - token * call.heads, token] = log_sum_exp(work.reference[u], total)
                else:
                    part = Int64(unit * FEW_ROWS + row)
                    for i in cutlass.range_constexpr(HALF_NUMBERS):
                        if const_expr(owner(i) == u):
                            column = first + i // PER_TILE * 64 + i // 2 % 2 * 8
                            parts[part * HEAD_DIM_V + column] = work.half[i]
                    if speaks > 0:
                        stats[part * STATS] = work.reference[u]
                        stats[part * STATS + 1], stats[part * STATS + 2] = total, Float32(0.0)


def one_tile(part: Any, modes: int) -> Any:
    """An operand or accumulator of one product as `cute.gemm` takes it, with so many modes of tiles."""
    layout = part.layout
    more = cute.make_layout((layout.shape[0], *[1] * modes), stride=(layout.stride[0], *[0] * modes))
    return cute.make_tensor(part.iterator, more)


@cute.jit
def warp_top(x):
    """The greatest of the eight lanes that have the same rows."""
    for step in cutlass.range_constexpr(3):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 4 << step))
    return x


def store(to: Any, *values: Any) -> None:
    """Two or four fp32 that lie together, to shared memory."""
    own = cute.make_rmem_tensor(len(values), Float32)
    for i, x in enumerate(values):
        own[i] = x
    cute.autovec_copy(own, cute.make_tensor(to.align(4 * len(values)), cute.make_layout(len(values))))


def load(source: Any, count: int) -> Any:
    """Two or four fp32 that lie together in shared memory."""
    own = cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(cute.make_tensor(source.align(4 * count), cute.make_layout(count)), own)
    return own
