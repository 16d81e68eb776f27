"""The consumer warpgroups of column sums. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from enum import unique
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper.sums_base import ROUND, Call, Item, SumsBase, SumsShared
from warploom.attention.hopper.sums_config import CHUNKS, ROWS, WARPGROUPS
from warploom.kernels.cute.barriers import NamedBarriers, wait
from warploom.kernels.cute.basics import LOG2_E, WARPGROUP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, store_shared
from warploom.kernels.cute.powers import FLOOR, ROUNDER, add_power, at_most_zero, fused
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.softmax import capped
from warploom.kernels.cute.wgmma import gemm

# An lse of so many powers of two or more is rounded by enough that a score may seem past it: each is compared. So is that of
# a row that sees nothing, or has seen an infinite score.
LARGE = 4096.0
FAR = 1 << 30
HIDDEN, CUT, WHOLE = 0, 1, 2  # how much of a chunk of keys a tile's rows see


@unique
class SumsBarrier(NamedBarriers):
    """Of column sums."""

    PARTIAL = 1  # all warps' sums are in shared memory


class Rows(Fields):
    """What is to be known of a thread's two rows of a tile, 8 apart."""

    less: Any  # -lse in log2 units
    part: Any  # lse / FLOOR, likewise
    rounder: Any  # ROUNDER, NaN where lse is
    large: Any  # whether some row of the warp's has a LARGE lse


class Work(Fields):
    """What a warpgroup needs for a tile of keys."""

    call: Call
    shared: SumsShared
    group: Any  # which warpgroup
    row: Any  # the thread's first of a tile
    mma: Any
    q: Any  # operands
    k: Any
    acc: Any  # scores of each chunk
    found: Any  # sums of this thread's columns, of its rows
    raw: Any  # lse of the coming tile's rows
    line: Any  # address of the head's lse at ``row``, and of the next tile of keys'
    next_line: Any
    multiplier: Any
    cap_in: Any
    item: Item
    after: Item  # the next tile of keys
    more: Any  # whether there is one
    number: Any  # of the tile's first chunk in the ring of keys


class Consumers(SumsBase):
    """What every consumer warpgroup runs."""

    @cute.jit
    def compute(self, call, lse, sums, shared, mma, multiplier, cap_in):
        """Every other tile of queries of all of this block's tiles of keys."""
        config = self.config
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row = thread // 32 * 16 + thread % 32 // 4
        slices = mma.get_slice(0)
        q = mma.make_fragment_A(slices.partition_A(shared.q))
        k = mma.make_fragment_B(slices.partition_B(shared.k))
        acc = [mma.make_fragment_C(slices.partition_shape_C((ROWS, config.chunk))) for _ in range(CHUNKS)]
        found = cute.make_rmem_tensor(config.tile_n // 4, Float32)
        raw = cute.make_rmem_tensor(2, Float32)

        total = self.tiles(call)
        turn, number = Int32(0), Int32(0)
        position = self.position(turn, block, blocks)
        stage, phase = Int32(0), Int32(0)
        first = self.item(call, position)
        next_line = self.line(lse, first, row)
        self.fetch(raw, next_line, call, row, first.first * ROUND + group * ROWS)
        cute.arch.mbarrier_wait(shared.q_full + group, 0)
        cute.arch.mbarrier_wait(shared.k_full, 0)
        gemm(mma, acc[0], q[None, None, None, group], k, False, 0)
        warpgroup.wait_group(0)
        while position < total:
            item = self.item(call, position)
            position = self.position(turn + 1, block, blocks)
            after = self.item(call, position)
            line, next_line = next_line, self.line(lse, after, row)
            found.fill(0.0)
            second, lap = self.k_place(number, 1)
            cute.arch.mbarrier_wait(shared.k_full + second, lap)
            work = Work(
                call=call, shared=shared, group=group, row=row, mma=mma, q=q, k=k, acc=acc, found=found, raw=raw, line=line,
                next_line=next_line, multiplier=multiplier, cap_in=cap_in, item=item, after=after, more=position < total,
                number=number,
            )  # fmt: skip
            whole_first, whole_end = self.whole_rounds(work)
            i = Int32(0)
            for part in cutlass.range(2, unroll=1):
                for _ in cutlass.range(choose(part == 0, whole_first, item.rounds) - i, unroll=1):
                    stage, phase = self.step(work, i, stage, phase, False)
                    i += 1
                for _ in cutlass.range(choose(part == 0, whole_end - whole_first, 0), unroll=1):
                    stage, phase = self.step(work, i, stage, phase, True)
                    i += 1
            self.leave(found, sums, shared, turn, call, item)
            turn += 1
            number = self.k_ahead(number, CHUNKS)

    @cute.jit
    def whole_rounds(self, work):
        """Rounds [first, end) in which this warpgroup's rows all see all keys; never the last one."""
        call, item, config = work.call, work.item, self.config
        shift, origin = call.seqlen_k - call.seqlen_q, item.first * ROUND + work.group * ROWS
        least, most = Int32(0), call.seqlen_q - ROWS - origin  # the first row's place
        if const_expr(config.right):
            least = cutlass.max(cutlass.min(item.key + config.tile_n, call.seqlen_k) - 1 - shift - call.right - origin, 0)
        if const_expr(config.left):
            most = cutlass.min(most, item.key - shift + call.left - (ROWS - 1) - origin)
        first = cutlass.min(cute.ceil_div(least, ROUND), item.rounds - 1)
        end = cutlass.min(cutlass.max(most + ROUND, 0) // ROUND, item.rounds - 1)
        return first, cutlass.max(first, end)

    @cute.jit
    def step(self, work, i, stage, phase, whole):
        """A tile of queries, whose scores by the first chunk of keys are there; it leaves those of the next tile.

        ``whole``: its rows see all keys, and another tile by the same keys follows.
        """
        config, shared, item, call = self.config, work.shared, work.item, work.call
        q_slot = stage * WARPGROUPS + work.group
        (k_slot, _), (second, _), (coming, lap) = [self.k_place(work.number, chunk) for chunk in range(CHUNKS + 1)]
        gemm(work.mma, work.acc[1], work.q[None, None, None, q_slot], work.k, False, second)
        rows = self.rows(work.raw)
        top = (item.first + i) * ROUND + work.group * ROWS
        stage, phase = advance(stage, phase, config.stages)
        next_q_slot = stage * WARPGROUPS + work.group
        if const_expr(whole):
            self.fetch(work.raw, work.line, call, work.row, top + ROUND)
            self.add_seen(work, rows, 0)
            warpgroup.wait_group(0)
            release(shared.q_empty + q_slot)
            cute.arch.mbarrier_wait(shared.q_full + next_q_slot, phase)
            gemm(work.mma, work.acc[0], work.q[None, None, None, next_q_slot], work.k, False, k_slot)
            self.add_seen(work, rows, 1)
        else:
            last, after = i == item.rounds - 1, work.after
            following, changing = not last or work.more, last and work.more
            if changing:
                release(shared.k_empty + k_slot)
            next_top = choose(last, after.first * ROUND + work.group * ROWS, top + ROUND)
            if last:
                self.fetch(work.raw, work.next_line, call, work.row, next_top)
            else:
                self.fetch(work.raw, work.line, call, work.row, next_top)
            self.add(work, rows, 0, top, self.seen(call, item.key, top))
            warpgroup.wait_group(0)
            # Behind the last tile of all comes its own product again, which nobody reads.
            next_q_slot = choose(following, next_q_slot, q_slot)
            keys = choose(changing, coming, k_slot)
            if changing:
                release(shared.k_empty + second)
                cute.arch.mbarrier_wait(shared.k_full + keys, lap)
            if following:
                release(shared.q_empty + q_slot)
                cute.arch.mbarrier_wait(shared.q_full + next_q_slot, phase)
            gemm(work.mma, work.acc[0], work.q[None, None, None, next_q_slot], work.k, False, keys)
            self.add(work, rows, 1, top, self.seen(call, item.key + config.chunk, top))
        warpgroup.wait_group(0)
        return stage, phase

    # A tile of queries

    def line(self, lse: Any, item: Item, row: Any) -> Any:
        """Address of the lse of a head's ``row``."""
        return lse.iterator + (Int64(item.batch) * lse.stride[0] + Int64(item.head) * lse.stride[1] + row)

    @cute.jit
    def fetch(self, raw, line, call, row, top):
        """lse of this thread's two rows of the tile from ``top`` on; of the last one in place of those past it."""
        for r in cutlass.range_constexpr(2):
            raw[r] = cute.make_tensor(line + cutlass.min(top + 8 * r, call.seqlen_q - 1 - row), cute.make_layout(1))[0]

    @cute.jit
    def rows(self, raw):
        """What is to be known of rows whose lse has come."""
        value = [raw[r] * LOG2_E for r in range(2)]
        largest = cute.arch.fmax(cute.arch.fmax(value[0], -value[0]), cute.arch.fmax(value[1], -value[1]))
        return Rows(
            less=[-x for x in value],
            part=[x * (1.0 / FLOOR) for x in value],
            rounder=[x * 0.0 + ROUNDER for x in value],
            large=cute.arch.vote_any_sync(largest >= LARGE),
        )

    @cute.jit
    def add(self, work, rows, chunk, top, seen):
        """Exponentials of a tile's scores by a chunk's keys, of which so much is seen, to the sums."""
        if seen == WHOLE and not rows.large:
            self.add_whole(work, rows, chunk)
        elif seen != HIDDEN:
            self.add_cut(work, rows, chunk, self.limits(work, chunk, top))

    @cute.jit
    def add_seen(self, work, rows, chunk):
        """The same where all is seen."""
        if rows.large:
            self.add_cut(work, rows, chunk, None)
        else:
            self.add_whole(work, rows, chunk)

    @cute.jit
    def seen(self, call, start, top):
        """How much of a chunk of keys from ``start`` on rows from ``top`` on see; keys past the last one do not count."""
        config = self.config
        shift = call.seqlen_k - call.seqlen_q
        bottom, end = cutlass.min(top + ROWS, call.seqlen_q) - 1, cutlass.min(start + config.chunk, call.seqlen_k) - 1
        whole, some = top + ROWS <= call.seqlen_q, top < call.seqlen_q and start < call.seqlen_k
        if const_expr(config.right):
            whole = whole and end <= top + shift + call.right
            some = some and start <= bottom + shift + call.right
        if const_expr(config.left):
            whole = whole and start >= bottom + shift - call.left
            some = some and end >= top + shift - call.left
        return choose(some, choose(whole, WHOLE, CUT), HIDDEN)

    @cute.jit
    def add_whole(self, work, rows, chunk):
        """Of rows that see all keys."""
        config, found, acc, multiplier = self.config, work.found, work.acc[chunk], work.multiplier
        factor = multiplier * (-1.0 / FLOOR)
        for i in cutlass.range_constexpr(config.chunk // 2):
            r, column = i // 2 % 2, self.column(chunk, i)
            if const_expr(self.approximates(i)):
                found[column] = add_power(found[column], acc[i], factor, rows.part[r], rows.rounder[r])
            else:
                found[column] = found[column] + exp2(self.exponent(work, acc[i], rows.less[r]))

    @cute.jit
    def limits(self, work, chunk, top):
        """Of a thread's two rows its columns of a chunk from which on each sees none, and before which."""
        config, call = self.config, work.call
        row, start = top + work.row, work.item.key + chunk * config.chunk
        position = row + call.seqlen_k - call.seqlen_q - start - cute.arch.lane_idx() % 4 * 2
        past, before = [], []
        for r in cutlass.range_constexpr(2):
            end = Int32(FAR)
            if const_expr(config.right):
                end = position + (8 * r + 1) + call.right
            past.append(choose(row + 8 * r < call.seqlen_q, end, 0))
            before.append(position + 8 * r - call.left)
        return past, before

    @cute.jit
    def add_cut(self, work, rows, chunk, limits):
        """Of any rows, as ``limits`` has them if given: no exponential is more than 1, and what is hidden is 0."""
        config, found, acc = self.config, work.found, work.acc[chunk]
        less = [-Float32.inf if x == Float32.inf else x for x in rows.less]  # of a row that sees nothing
        for i in cutlass.range_constexpr(config.chunk // 2):
            r, place = i // 2 % 2, i // 4 * 8 + i % 2
            x = at_most_zero(self.exponent(work, acc[i], less[r]))
            if const_expr(limits is not None):
                x = x if limits[0][r] > place else -Float32.inf
                if const_expr(config.left):
                    x = x if limits[1][r] <= place else -Float32.inf
            found[self.column(chunk, i)] = found[self.column(chunk, i)] + exp2(x)

    @cute.jit
    def exponent(self, work, raw, less):
        """A score less lse, in log2 units."""
        if const_expr(self.config.softcap):
            return capped(raw, work.multiplier, work.cap_in) + less
        return fused(raw, work.multiplier, less)

    def column(self, chunk: int, i: int) -> int:
        """Which of a thread's columns an element of a chunk's accumulator is in."""
        return chunk * (self.config.chunk // 4) + i // 4 * 2 + i % 2

    def approximates(self, i: int) -> bool:
        """Whether an element's exponential is a polynomial: ``share`` of 16, spread evenly."""
        share = self.config.share
        return (i + 1) * share // 16 > i * share // 16

    # The sums

    @cute.jit
    def leave(self, found, sums, shared, turn, call, item):
        """Sums of all rows to global memory, added in one order: lanes, then warps of the first warpgroup and of the second."""
        config = self.config
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - 4
        count = config.tile_n // 4
        # Lanes with the same columns, 4 apart: each exchange halves how many columns a lane is left with.
        base = Int32(0)
        for step in (16, 8, 4):
            count //= 2
            upper = (lane & step) > 0
            for i in cutlass.range_constexpr(count):
                low, high = found[i], found[count + i]
                kept, given = (high, low) if upper else (low, high)
                found[i] = kept + cute.arch.shuffle_sync_bfly(given, offset=step)
            base += choose(upper, count, 0)
        turned = turn % 2 * (4 * WARPGROUPS * config.tile_n)
        place = turned + warp * config.tile_n + base * 4 + lane % 4 * 2
        target = shared.partial.toint() + place * 4
        for i in cutlass.range_constexpr(count // 2):
            store_shared(target, i * 32, [found[2 * i], found[2 * i + 1]])
        wait(SumsBarrier.PARTIAL, WARPGROUP * WARPGROUPS)
        column = cute.arch.thread_idx()[0] - WARPGROUP
        if column < config.tile_n and item.key + column < call.seqlen_k:
            total = Float32(0.0)
            for w in cutlass.range_constexpr(4 * WARPGROUPS):
                total = total + shared.partial[turned + w * config.tile_n + column]
            sums[item.batch, item.head, item.key + column] = total
