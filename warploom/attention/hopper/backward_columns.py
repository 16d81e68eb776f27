"""Column masks in the backward: which query tiles a block walks, what of them it hides, and keys that nobody sees.

What the columns of a block hide of all rows are two intervals, so the query tiles that it sees are three runs, which follow
from the extrema of its columns. The scheduler's warp counts a block's steps, the loader's finds them by arithmetic: from the
last tile back, and where the heads of the group share a mask, all of them at a tile before the next. The loader leaves word
of every step in shared memory: its query tile, whether elements of it are to be tested, its head and its number. A consumer
warpgroup passes that number on to its writer warp. So one warp alone decides what comes next, and there is no list of tiles
anywhere.

When deterministic, a tile's counter names the last key block that has added to its dQ, and a block waits for the last one
before it that sees the tile. Its loader finds that one by the arithmetic of that block's own walk, a lane for each of 32
blocks; blocks are handed out in their order, so none waits for one that has not begun.

A thread of Sᵀ has two keys, and so have the other three of its quad: each keeps one of their four numbers. Past head_dim 128
blocks that keep one gradient a warpgroup find their elements otherwise, as ``backward_roles`` has it. Both blocks of a pair
walk the tiles that either sees: the block whose tiles these are is the pair.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.backward_base import BOTH, PACKED_WORDS, SEED_WORDS, WARPGROUPS, BackwardBase
from warploom.kernels.cute.barriers import BackwardBarrier, wait
from warploom.kernels.cute.basics import WARP, WARPGROUP, choose
from warploom.kernels.cute.columns import (
    BLOCK,
    FAR,
    extrema_by_lanes,
    extrema_of,
    first_block,
    hides_all,
    hides_some,
    mask_row,
    may_hold_dead,
    sees_none,
)
from warploom.kernels.cute.instructions import hidden as unknown
from warploom.kernels.cute.instructions import shifted
from warploom.kernels.cute.row_tiles import elements_before, hidden_elements, hidden_runs

DEAD, APART = 1, 2  # bits of a block: keys of it may be dead; heads of the group go one after the other

# Behind the words of two blocks those of the steps in the ring of Q (query tile and a bit; row of the mask; the tile's number
# in the workspaces; key block; when deterministic the turn), and of each warpgroup's dQ the number of its tile, and its turn.
STEP_WORDS = 5
RUNS = 12  # numbers of what ``ColumnWalk.runs`` says of a head, which the loader keeps behind those


class ColumnWalk(BackwardBase):
    """What the warps of a block need of its column mask."""

    @property
    def words_count(self) -> int:
        """Words that warps leave each other in shared memory."""
        count = self.runs_at + RUNS if self.config.columns else 2 * PACKED_WORDS
        return count + SEED_WORDS if self.config.dropout else count

    # The walk

    @cute.jit
    def runs(self, work, member):
        """As ``runs_of`` for a query head of the group."""
        extrema = self.extrema(work, work.head * work.group_size + member)
        return self.runs_of(work, self.walker(work), extrema)

    def walker(self, work: Any) -> Any:
        """Number of the block that walks the query tiles, or of the pair of blocks."""
        return work.n_block // (self.span // self.tile_n)

    @cute.jit
    def runs_of(self, work, walker, extrema):
        """Of a head's query tiles: which the block may see, two runs of them that it does not, and what its tests need."""
        given = work.given
        first, whole_first, whole_end, end = self.query_tiles(
            walker, work.seqlen_q, work.seqlen_k, work.shift, given.left, given.right
        )
        gaps = hidden_runs(extrema, work.seqlen_q, self.tile_m)
        gaps = [cutlass.min(cutlass.max(gap, first), end) for gap in gaps]
        lts_min, _, _, lte_max, uts_min, _, _, ute_max = extrema
        return [first, end, *gaps, whole_first, whole_end, lts_min, lte_max, uts_min, ute_max]

    @cute.jit
    def keep_runs(self, work, member):
        """Runs of a head for ``kept_runs``, as registers have no room for them; how many tiles they are."""
        runs = self.runs(work, member)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(RUNS):
                work.shared.words[self.runs_at + i] = runs[i]
        cute.arch.sync_warp()
        return self.tiles_of(runs)

    def kept_runs(self, words: Any) -> list[Any]:
        return [cute.arch.make_warp_uniform(words[self.runs_at + i]) for i in range(RUNS)]

    def tiles_of(self, runs: Any) -> Any:
        """How many query tiles of a head the block sees."""
        first, end, gap, past, other, other_past, *_ = runs
        return end - first - (past - gap) - (other_past - other)

    def tile_at(self, runs: Any, i: Any) -> Any:
        """The i-th of them."""
        first, _, gap, past, other, other_past, *_ = runs
        m = first + i
        m = choose(m >= gap, m + past - gap, m)
        return choose(m >= other, m + other_past - other, m)

    @cute.jit
    def is_tested(self, runs, m, seqlen_q):
        """1 if elements of a tile are to be tested."""
        *_, whole_first, whole_end, lts_min, lte_max, uts_min, ute_max = runs
        row, past = m * self.tile_m, cutlass.min((m + 1) * self.tile_m, seqlen_q)
        tested = Int32(0)
        if m < whole_first or m >= whole_end or hides_some((lts_min, 0, 0, lte_max, uts_min, 0, 0, ute_max), row, past):
            tested = Int32(1)
        return tested

    def extrema(self, work: Any, head: Any) -> Any:
        """Of the block's or pair's columns, for a query head; all lanes of a warp ask for the same."""
        bounds = work.given.columns.bounds
        row = mask_row(work.batch, head, work.heads_q, bounds)
        return extrema_by_lanes(bounds, row, *self.columns_of(work, self.walker(work)), self.span)

    @cute.jit
    def columns_of(self, work, walker):
        """First column of a key block, or of a pair of them, and the one past its last, as the extrema count them.

        They count blocks of columns from each sequence's first key, and between two sequences they leave room.
        """
        key, first = walker * self.span, Int32(0)
        past = cutlass.min(key + self.span, work.seqlen_k)
        if const_expr(self.config.varlen):
            first = first_block(work.sequence, work.k_start) * BLOCK
        return first + key, first + past

    @cute.jit
    def heads_abreast(self, work):
        """How many heads pass a query tile before the next one: those of the group if they have one mask, else one.

        Blocks of neighbouring keys then read one tile at about one time, unless they are APART. Those that come to it together
        begin with other heads, but not where they take turns.
        """
        first = work.head * work.group_size
        alike = self.mask_of(work, first) == self.mask_of(work, first + work.group_size - 1)
        return choose(alike, work.group_size, 1)

    @cute.jit
    def walk_on(self, work, abreast, turned, member, at, beside, place):
        """The next step: head, query tile, its number in the workspaces, whether elements are tested; and how the walk stands.

        That is the first of the heads abreast, how many of their tiles are still to come, the place among the heads, and the
        tile's turn. Those that go abreast have one mask.
        """
        while at == 0:
            member += abreast
            at = self.keep_runs(work, member)
        runs = self.kept_runs(work.shared.words)
        m = self.tile_at(runs, at - 1)
        tested = self.is_tested(runs, m, work.seqlen_q)
        if const_expr(self.config.deterministic):  # noqa: SIM102
            if beside == 0:
                place = self.turn_of(work, work.head * work.group_size + member, m)
        other = beside + turned
        head = work.head * work.group_size + member + choose(other >= abreast, other - abreast, other)
        beside = choose(beside + 1 == abreast, 0, beside + 1)
        at = choose(beside == 0, at - 1, at)
        tile = (work.batch * work.heads_q + head) * work.m_blocks + work.first_tile + m
        return head, m, tile, tested, member, at, beside, place

    @cute.jit
    def count_steps(self, work):
        """Steps of a block, and 1 if it may hold keys that no query of the group sees."""
        steps, dead, abreast, members = Int32(0), Int32(1), self.heads_abreast(work), work.group_size
        if const_expr(self.config.varlen):  # blocks of packed sequences are counted generously
            members = choose(work.n_block * self.tile_n < work.seqlen_k, members, 0)
        for member in cutlass.range(0, members, abreast, unroll=1):
            steps += abreast * self.tiles_of(self.runs(work, member))
            if not may_hold_dead(self.extrema(work, work.head * work.group_size + member), work.seqlen_q):
                dead = Int32(0)
        return steps, dead

    @cute.jit
    def turn_of(self, work, head, m):
        """The last key block before this one that sees a query tile of a head, counted from 1; 0: none does."""
        mask = mask_row(work.batch, head, work.heads_q, work.given.columns.bounds)
        found, past, begin = Int32(0), Int32(0) + self.walker(work), Int32(0)
        if const_expr(self.config.left):
            begin = cutlass.max(m * self.tile_m + work.shift - work.given.left, 0) // self.span
        while past > begin:
            n_block = past - 1 - cute.arch.lane_idx()
            found = cute.arch.warp_reduction_max(self.sees(work, n_block, mask, m) * (n_block + 1))
            past = choose(found > 0, 0, past - WARP)
        return found

    @cute.jit
    def sees(self, work, n_block, mask, m):
        """1 if a key block, not below 0, walks a query tile by a mask's row of the extrema; a lane asks for its own."""
        given, there, seen = work.given, cutlass.max(n_block, 0), Int32(0)
        first, _, _, end = self.query_tiles(there, work.seqlen_q, work.seqlen_k, work.shift, given.left, given.right)
        row, row_past = m * self.tile_m, cutlass.min((m + 1) * self.tile_m, work.seqlen_q)
        extrema = extrema_of(given.columns.bounds, mask, *self.columns_of(work, there), self.span)
        if n_block >= 0 and m >= first and m < end and not hides_all(extrema, row, row_past):
            seen = Int32(1)
        return seen

    # What a step's loads and its warps tell each other

    def step_word(self, stage: Any) -> Any:
        """Where the words of a stage of the ring of Q begin."""
        return 2 * self.block_words + STEP_WORDS * stage

    def tile_word(self, group: Any) -> Any:
        """Where the number of the tile of a warpgroup's dQ stands."""
        return self.step_word(self.stages) + group

    def turn_word(self, group: Any) -> Any:
        """Where that tile's turn stands."""
        return self.tile_word(group) + WARPGROUPS

    @property
    def runs_at(self) -> int:
        """Where the loader keeps the runs of a head."""
        return self.tile_word(2 * WARPGROUPS)

    @cute.jit
    def announce(self, work, stage, m, tested, head, tile, turn, size):
        """As ``expect`` for a stage of Q, which will hold this step."""
        words, at = work.shared.words, self.step_word(stage)
        with cute.arch.elect_one():
            words[at] = 2 * m + tested
            words[at + 1] = self.mask_of(work, head)
            words[at + 2] = tile
            words[at + 3] = work.n_block
            if const_expr(self.config.deterministic):
                words[at + 4] = turn
            cute.arch.mbarrier_arrive_and_expect_tx(work.shared.q_full + stage, size)

    def announced(self, words: Any, stage: Any) -> tuple[Any, Any]:
        """Query tile, and 1 or 0: elements are tested, of the step in a stage."""
        word = cute.arch.make_warp_uniform(words[self.step_word(stage)])
        return word >> 1, word & 1

    @cute.jit
    def name_tile(self, words, stage, group):
        """Leave the number of a step's tile, and its turn, to the warp that writes the warpgroup's dQ."""
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            words[self.tile_word(group)] = words[self.step_word(stage) + 2]
            if const_expr(self.config.deterministic):
                words[self.turn_word(group)] = words[self.step_word(stage) + 4]

    # What a consumer warpgroup hides

    def mask_of(self, work: Any, head: Any) -> Any:
        """The row of the vectors that a query head has."""
        return mask_row(work.batch, head, work.heads_q, work.given.columns.vectors[0])

    def own_columns(self, r: Any, work: Any, row: Any, n_block: Any) -> list[Any]:
        """This thread's number of each of its keys in a mask's row."""
        return self.numbers_of(work, row, [n_block * self.tile_n + r.row + 8 * i for i in range(2)])

    @cute.jit
    def numbers_of(self, work, row, keys):
        """This thread's number of two keys of its quad in a mask's row: lts, lte, uts or ute, by the lane in it.

        Past the last key they hide all. With query offsets they count from the batch entry's first row, too.
        """
        columns, which = work.given.columns, cute.arch.lane_idx() % 4
        length = columns.vectors[0].shape[2]
        address = columns.vectors[0].iterator.toint()
        for n in cutlass.range_constexpr(1, 4):
            if which == n:
                address = columns.vectors[n].iterator.toint()
        absent = choose(which < 2, FAR, 0)
        beyond = choose(which % 2 == 0, 0, FAR)
        own = []
        for i in cutlass.range_constexpr(2):
            key, found = keys[i], beyond
            if key < work.seqlen_k:
                found = absent
                if (columns.present >> which) & 1 == 1:
                    at = address + 4 * (Int64(row) * length + work.k_start + key)
                    source = cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=4)
                    found = cute.make_tensor(source, cute.make_layout(1))[0]
                    found = cutlass.min(cutlass.max(found, 0), FAR)
            if const_expr(self.config.q_offset):
                found = found - work.shift
            own.append(found)
        return own

    def interval(self, number: Any) -> list[Any]:
        """lts, lte, uts and ute of a key, from the lanes of its quad."""
        quad = cute.arch.lane_idx() // 4 * 4
        return [cute.arch.shuffle_sync(number, quad + n) for n in range(4)]

    @cute.jit
    def find_hidden(self, r, work, m, stage):
        """Bits of this thread's elements of a query tile that its keys hide, or the band.

        The keys' numbers are read anew in each such step, from L1 but for a block's first: the others' registers are short.
        """
        at, words = self.step_word(stage), work.shared.words
        if const_expr(self.config.varlen or (self.config.q_offset and not self.config.pair)):
            work = self.again(work)
        n_block = words[at + 3]
        own = self.own_columns(r, work, words[at + 1], n_block)
        diagonal = n_block * self.tile_n + r.row - work.shift - r.column - m * self.tile_m
        for i in cutlass.range_constexpr(2):
            row = m * self.tile_m + r.column
            lts, lte, uts, ute = self.interval(own[i])
            bits = hidden_elements(lts - row, lte - row, self.tile_m) | hidden_elements(uts - row, ute - row, self.tile_m)
            if const_expr(self.config.right):
                bits |= ~shifted(-1, elements_before(diagonal + 8 * i - work.given.right, self.tile_m))
            if const_expr(self.config.left):
                bits |= shifted(-1, elements_before(diagonal + 8 * i + work.given.left + 1, self.tile_m))
            r.hidden_bits[i] = bits

    @cute.jit
    def hide(self, r):
        """-inf for scores of hidden elements."""
        for i in cutlass.range_constexpr(2):
            bits = r.hidden_bits[i]
            for c in cutlass.range_constexpr(self.tile_m // 4):
                r.rows_s[i, c] = r.rows_s[i, c] if bits & (1 << c) == 0 else -Float32.inf

    # Keys that nobody sees

    def quad_rows(self, r: Any) -> list[Any]:
        """The two keys of the block that this thread's quad looks after, or rows past its last one."""
        return [r.row, r.row + 8]

    @cute.jit
    def find_dead(self, work, keys):
        """Of two keys of this thread's quad: 1 where no query of the group sees them."""
        dead = cute.make_rmem_tensor(2, Int32)
        dead.fill(1)
        for member in cutlass.range(work.group_size, unroll=1):
            own = self.numbers_of(work, self.mask_of(work, work.head * work.group_size + member), keys)
            for i in cutlass.range_constexpr(2):
                first, end = self.band_rows(work, keys[i])
                if not sees_none(first, end, *self.interval(own[i])):
                    dead[i] = Int32(0)
        return dead

    @cute.jit
    def clear_dead(self, r, work):
        """Zeros for keys and values that no query of the group sees: what they hold must not come into a product, even by zero.

        Both warpgroups do it, each in its rows, before the first product that reads them.
        """
        rows = self.quad_rows(r)
        self.clear_keys(r, rows, self.find_dead(work, [work.n_block * self.tile_n + row for row in rows]))

    @cute.jit
    def clear_keys(self, r, rows, dead):
        """Zeros for the keys and values in two rows of the block, by each quad for its own, where ``dead`` is 1."""
        shared, config = r.shared, self.config
        _, box_k, box_v, _ = config.boxes
        for i in cutlass.range_constexpr(2):
            if dead[i] == 1 and rows[i] < self.tile_n:
                self.clear_row(shared.k_start, rows[i], self.tile_n, config.head_dim, box_k)
                self.clear_row(shared.v_start, rows[i], self.tile_n, config.head_dim_v, box_v)
        cute.arch.fence_view_async_shared()
        wait(BackwardBarrier.CLEARED, BOTH)

    # Queries that see nothing

    @cute.jit
    def clear_unseeing(self, r, j):
        """Zeros in a step's tiles for queries that see nothing and hold anything but numbers, or whose dO does.

        Each warp looks at all of them, so both warpgroups come to the same; no product of the step has begun.
        """
        shared, tile_m = r.shared, self.tile_m
        stage, _ = schedule.ring(j, self.stages)
        levels = cute.make_tensor(shared.stats + stage * self.stage_statistics, cute.make_layout(tile_m))
        odd = Int32(0)
        for i in cutlass.range_constexpr(-(-tile_m // WARP)):
            row = i * WARP + cute.arch.lane_idx()
            if levels[cutlass.min(row, tile_m - 1)] == Float32.inf:
                odd = Int32(1)
        if cute.arch.vote_any_sync(odd == 1):
            self.clear_queries(r, levels, j)

    @cute.jit
    def clear_queries(self, r, levels, j):
        """Zeros for the queries, and in dO, whose level is +inf, once both have arrived."""
        shared, config, tile_m = r.shared, self.config, self.tile_m
        stage, _ = schedule.ring(j, self.stages)
        do_stage, phase = schedule.ring(j, self.dout_stages)
        cute.arch.mbarrier_wait(shared.do_full + do_stage, phase)
        box_q, _, _, box_do = config.boxes
        own = unknown(cute.arch.thread_idx()[0]) - WARPGROUP  # what is computed of it out of the loop would be spilled
        for i in cutlass.range_constexpr(-(-tile_m // (BOTH // 4))):
            row = i * (BOTH // 4) + own // 4
            if row < tile_m:  # noqa: SIM102
                if levels[row] == Float32.inf:
                    q_start = shared.q_start + stage * (tile_m * config.head_dim)
                    do_start = shared.do_start + do_stage * (tile_m * config.head_dim_v)
                    self.clear_row(q_start, row, tile_m, config.head_dim, box_q)
                    self.clear_row(do_start, row, tile_m, config.head_dim_v, box_do)
        cute.arch.fence_view_async_shared()
        wait(BackwardBarrier.CLEARED, BOTH)

    @cute.jit
    def band_rows(self, work, key):
        """Rows [first, end) that the band leaves to a key."""
        given = work.given
        first, end = Int32(0), Int32(0) + work.seqlen_q
        if const_expr(self.config.right):
            first = cutlass.max(key - work.shift - given.right, 0)
        if const_expr(self.config.left):
            end = cutlass.min(end, key - work.shift + given.left + 1)
        return first, end

    @cute.jit
    def clear_row(self, start, row, rows, columns, box):
        """Zeros in a row of a shared tile of ``rows`` by ``columns``, a fourth of it by each lane of a quad.

        A swizzle moves chunks of 16 bytes inside of a row of a box, which lie together.
        """
        zeros = cute.make_rmem_tensor(8, self.dtype)
        zeros.fill(0.0)
        lane = cute.arch.lane_idx() % 4
        for i in cutlass.range_constexpr(columns // 32):
            chunk = i * 4 + lane
            at = chunk // (box // 8) * (rows * box) + row * box + chunk % (box // 8) * 8
            cute.autovec_copy(zeros, cute.make_tensor((start + at).align(16), cute.make_layout(8)))
