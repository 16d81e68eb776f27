"""What the parts of the backward share: constants, what a block works on, addresses in tensors and in packed sequences.

The kernels before and after stand in ``backward_rows``, the producer's warps in ``backward_producer``, the consumer warpgroups
in ``backward_consumers``; ``backward`` joins them.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import BackwardConfig
from warploom.attention.hopper.near import Near
from warploom.kernels.cute.barriers import BackwardBarrier
from warploom.kernels.cute.basics import DTYPES, WARP, WARPGROUP, choose
from warploom.kernels.cute.columns import query_offset
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.packed import bounds, first_tile, locate, seen_keys
from warploom.kernels.cute.rings import Mbarriers, init_rings
from warploom.kernels.cute.tiles import placed

WARPGROUPS = 2  # consumers
# Together 504 a thread of each, which is what 168 at the start leave: with more, warps would wait for registers for ever.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
LONG_REGISTERS = 232, 40  # of steps of 128 queries under a column mask, beside which ptxas gives the producer few uniform ones
# Where a warpgroup draws what dropout drops, whose share comes last. Together 512, which is what 128 at the start leave.
DRAWING_REGISTERS = 232, 24, 24
TURNS_REGISTERS = 224, 56  # where the loader looks for whose turn comes before its block's
FAR_LEVEL = 3e38  # an lse that makes P 0, as infinity does
# Warps of the producer warpgroup; writer i drains dQ of consumer warpgroup i.
LOADER, WRITERS, SCHEDULER = 0, (1, 2), 3
ROW_THREADS = 256  # of a block of the kernels before and after
# Threads that come to a named barrier: both consumer warpgroups, or one and its writer warp.
BOTH, DQ_THREADS = WARPGROUPS * WARPGROUP, WARPGROUP + WARP
DQ_ODD = BackwardBarrier.DQ_FULL_ODD - BackwardBarrier.DQ_FULL
# A key block as the scheduler hands it out: its number (below 0: no more), head, batch, the four bounds of its query tiles and
# whether they rise; for packed sequences also where queries and keys start, how many there are, the shift and the first tile.
# With query offsets the shift comes last.
# Where the last blocks are shared out, the bounds are those of a piece in steps, and its block's number among them comes last.
DENSE_WORDS, PACKED_WORDS = 8, 14
TURN_BIT = 29  # in the number of a step, the parity of its block, where those are numbered so
# Under a column mask at head_dim 64 the next block is asked for when so many steps of a block are still to be loaded: they hide
# what it takes to find out what that one sees. Measured: +1 to 4 %; at 128 -3 to 2 %.
AHEAD = 2
SEED_WORDS = 2  # of dropout, behind all others


class BackwardShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of a ring's."""

    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    block_full: Any
    block_empty: Any
    stats: Any  # addresses
    ds_start: Any
    dq: Any
    seed: Any  # of dropout, else None
    q: Any  # (row, head_dim, stage)
    dout: Any
    k: Any
    v: Any
    ds: Any  # (query, key, slot)


class Call(Fields):
    """What all blocks of a call have in common."""

    shared: Any
    q_shape: Any
    k_shape: Any
    cu_q: Any  # of packed sequences, else None
    cu_k: Any
    used: Any
    seqlen_q: Any
    m_blocks: Any  # query tiles of a head
    n_blocks: Any  # key blocks of a head, or pairs of them
    slices: Any  # key heads of all batches
    section: Any
    left: Any
    right: Any
    columns: Any  # of the mask, or None
    dropout: Any  # what the call says of it, or None
    slopes: Any  # ALiBi's, or None
    distances: Any  # a table of them, or None
    near: Any  # of ALiBi what says how far keys count, and what makes log2 units of scores; or None


class Work(Fields):
    """What a block works on: 128 keys, or fewer, of a key head, and the queries of its group."""

    given: Any
    shared: Any
    group_size: Any  # query heads
    batch: Any
    sequence: Any  # its number: the batch, or that of a packed one where dropout asks for it
    head: Any  # of the keys
    n_block: Any
    q_start: Any  # of a packed sequence
    k_start: Any
    seqlen_q: Any
    seqlen_k: Any
    shift: Any
    heads_q: Any
    m_blocks: Any
    first_tile: Any
    rising: Any  # 1 if it walks its query tiles from the first one on
    slot: Any  # of a block whose steps are shared out
    # Its query tiles: first, whole_first, whole_end, end. Under a column mask in steps, those before the piece, 1 if keys may
    # be dead, those of the block, those to the piece's end.
    bounds: Any
    whole: Any  # keys of the sequence, and how many of them no query sees, where the block is described
    hidden: Any
    turn: Any  # how many blocks came before on this processor,
    base: Any  # and how many steps


class Operands(Fields):
    """Descriptors, accumulators and constants of one consumer warpgroup, in every form of the backward."""

    shared: Any
    group: Any  # which warpgroup
    multiplier: Any
    cap_in: Any
    mma_scores: Any
    mma_queries: Any
    acc_s: Any
    acc_dq: Any
    rows_s: Any  # accumulators by (row, column)
    rows_dp: Any
    limits: Any
    dq_target: Any
    drops: Any  # what dropout keeps, or None
    row: Any  # this thread's first, and that + 8
    column: Any


class BackwardBase(Near):
    """Sizes and shares of one configuration, and what all its kernels and warps need of a block."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.biased = config.bias == "alibi"
        self.reads_distances = config.bias == "distance"
        self.dtype = DTYPES[config.dtype]
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.span = config.tile_n * (2 if config.pair else 1)  # keys of blocks that walk the same query tiles
        self.stages, self.dout_stages = config.stages, config.dout_stages
        self.part = config.tile_m * config.head_dim // WARPGROUPS  # elements of dQ of a tile and warpgroup
        # A warpgroup's share of dQ: 64 rows of it, or 64 rows by half of the columns.
        self.by_rows = config.tile_m == 64 * WARPGROUPS
        self.columns = self.part // 64
        # Or, transposed, half of the head dims by all queries.
        self.swapped = config.tile_m % 64 != 0
        # Tiles rise or fall as ``schedule.in_turns`` has it.
        self.mixed = config.deterministic and config.right and not config.columns
        self.abreast = config.deterministic or config.waves  # all heads of the group pass a query tile before the next one
        self.both_ways = self.mixed or config.waves  # tiles rise or fall
        self.slots = 2  # tiles of dS
        self.lanes = next(n for n in (8, 16, 32) if 8 * n >= config.head_dim_v)  # of the kernel before, which have a row
        self.row_statistics = config.row_statistics
        self.stage_statistics = config.row_statistics * config.tile_m  # of a query tile
        # Warpgroups issue S and dP one after the other, and dP begins at minus its rows' delta. Measured: +2 to 5 % at 96 and
        # 128, to -6 % at 64. A softcap leaves no registers for the latter; dropout comes between dP and them.
        self.ping_pong = config.head_dim > 64
        self.fold = self.ping_pong and not (config.softcap or config.dropout)
        # A step's end looks at the next one under a column mask; past 128 a step waits for its products itself.
        self.looks_ahead = config.columns and not (config.roles or config.pair)
        # So many fours of exponentials are computed before the wait for dP: half of them, which leaves others to run beside
        # what follows it. Measured: of 64, 16384 keys full in 10.1 ms without, half 9.5, all 9.8; 128 8.39, all 8.53; 96 equal.
        self.held = 0 if config.softcap else config.tile_m // (8 if config.head_dim == 96 else 16)
        self.dims = config.head_dim_v, config.head_dim  # columns of dV and dK
        # P is computed times 2^lift: it passes as fp16, which has eleven bits between 2^-14 and 2^16. It may exceed 1 where
        # scores are so large that they differ by rounding from those that lse was computed from.
        self.lift = 10 if config.pair else 0
        self.consumer_registers, self.producer_registers = CONSUMER_REGISTERS, PRODUCER_REGISTERS
        if config.columns and config.tile_m == 128:
            self.consumer_registers, self.producer_registers = LONG_REGISTERS
        if config.columns and config.deterministic:
            self.consumer_registers, self.producer_registers = TURNS_REGISTERS
        self.drawers = int(config.draws_ahead)  # warpgroups
        if config.draws_ahead:
            self.consumer_registers, self.producer_registers, self.drawer_registers = DRAWING_REGISTERS
        self.drop_stages = config.stages if config.draws_ahead else 0
        self.ahead = AHEAD if config.columns and config.persistent and config.head_dim == 64 else 0
        self.keys_first = not config.persistent  # the loops over query tiles wait for K and V
        # A block is described again when its steps have ended: registers hold no more.
        self.reads_again = config.stream_k or (config.persistent and config.dropout)
        # A block's words have its sequence where its batch, 0, stands else.
        self.numbered = config.varlen and (config.dropout or config.columns or self.biased)
        # The scheduler says what consumers' registers have no room for beside a long step: the group's size, how many steps
        # came before a block, modulo the rings, and in TURN_BIT whether its words are the first or the second.
        self.numbers_steps = config.columns and config.tile_m == 128 and not config.dealt
        # Two words more for one: ptxas would read those of a writer warp, were they aligned, and of the other by one load.
        self.block_words = PACKED_WORDS if config.varlen else DENSE_WORDS + 2 * config.q_offset

    def init_both(self, shared: Any, releases: int) -> None:
        """The barriers of the rings of Q and dO, whose stages are free after so many releases."""
        init_rings(self.stages, (shared.q_full, shared.q_empty, releases))
        init_rings(self.dout_stages, (shared.do_full, shared.do_empty, releases))

    def shared_rings(self, storage: Any, barriers: Mbarriers, layouts: tuple[Any, ...]) -> dict[str, Any]:
        """What every form of the backward has in shared memory."""
        layout_q, layout_do, layout_k, layout_v, layout_ds = layouts
        return {
            "q_full": barriers.take(self.stages),
            "q_empty": barriers.take(self.stages),
            "do_full": barriers.take(self.dout_stages),
            "do_empty": barriers.take(self.dout_stages),
            "stats": storage.stats.data_ptr(),
            "ds_start": storage.ds.data_ptr(),
            "dq": storage.dq.data_ptr(),
            "q": placed(storage.q, layout_q),
            "dout": placed(storage.dout, layout_do),
            "k": placed(storage.k, layout_k),
            "v": placed(storage.v, layout_v),
            "ds": placed(storage.ds, layout_ds),
        }

    def ds_rows(self, shared: Any, group: Any, warp: Any, lane: Any) -> Any:
        """Where a lane of a warp of a consumer warpgroup stores dS of its first 16 queries.

        A warp's 16 keys × 16 queries go out as four transposed 8 × 8 tiles; lane l addresses row l % 8 of tile l // 8, a query,
        in the half of the tile whose rows hold the warpgroup's 64 keys as eight swizzled chunks of 16 bytes.
        """
        chunk = warp * 2 + lane // 8 % 2
        return shared.ds_start + group * (self.tile_m * 64) + (lane // 16 * 8 + lane % 8) * 64 + (chunk ^ lane % 8) * 8

    # What a block works on

    def describe(self, given: Any, index: Any) -> Work:
        """What a block works on, by its number in the order of blocks."""
        q_shape, k_shape, cu_q, cu_k, left, right = (
            given.q_shape, given.k_shape, given.cu_q, given.cu_k, given.left, given.right,
        )  # fmt: skip
        heads_kv, n_blocks, seqlen_q = k_shape[2], given.n_blocks, given.seqlen_q
        if self.config.stream_k:  # a section is one head
            n_block, slice_ = index % n_blocks, index // n_blocks
        elif not (self.config.waves or self.mixed):
            n_block, slice_ = schedule.sections(index, n_blocks, given.slices, given.section, choose)
        rising = Int32(0)
        if self.config.waves:
            n_block, slice_, rising = schedule.in_waves(index, n_blocks, given.slices, given.section, given.deal[2])
        if self.mixed:
            wave = schedule.PROCESSORS * self.tile_n // self.span
            n_block, slice_, rising = schedule.in_turns(index, n_blocks, given.slices, given.section, wave, choose)
        batch, head = slice_ // heads_kv, slice_ % heads_kv
        q_start, k_start, seqlen_k, tile = Int32(0), Int32(0), k_shape[0], Int32(0)
        if self.config.varlen:
            total_q, total_k = q_shape[3] - 1, k_shape[3] - 1
            sequence, k_start, seqlen_k, n_block = locate(cu_k, n_block, self.span, total_k)
            if given.used is not None:
                seqlen_k = cutlass.max(cutlass.min(seqlen_k, given.used[sequence]), 0)
            q_start, seqlen_q = bounds(cu_q, sequence, total_q)
            tile = first_tile(cu_q, sequence, self.tile_m, total_q)
        shift = query_offset(given.columns, batch) if self.config.q_offset else seqlen_k - seqlen_q
        whole, hidden = seqlen_k, Int32(0)
        if self.config.varlen:
            if given.used is not None:
                _, whole = bounds(cu_k, sequence, total_k)
            if not self.config.columns:  # whose extrema are of blocks counted from the sequence's first key
                k_start, seqlen_k, shift, hidden = seen_keys(self.config, k_start, seqlen_k, shift, left, right)
        group_size = q_shape[2] // heads_kv
        lengths = (q_start, k_start, seqlen_q, seqlen_k, shift, tile)
        query_tiles: tuple[Any, ...] = (Int32(0),) * 4
        if not self.config.columns:
            origin = given.slopes.origin if self.biased else None
            query_tiles = self.query_tiles(n_block, seqlen_q, seqlen_k, shift, left, right, origin)
            if const_expr(self.config.reaches):
                block = n_block * self.span, (n_block + 1) * self.span
                keys = self.farthest(given, batch, head, group_size)
                query_tiles = self.near_queries(query_tiles, block, keys, (seqlen_k, shift))
        work = self.work(given, group_size, n_block, head, batch, lengths, query_tiles, rising)
        return work.but(whole=whole, hidden=hidden, sequence=sequence if self.config.varlen else batch)

    @cute.jit
    def farthest(self, given, batch, head, group_size):
        """``reach`` of the head of a key head's group that reaches farthest."""
        bias, multiplier = given.near
        keys = Int32(0)
        for member in cutlass.range(group_size, unroll=1):
            keys = cutlass.max(keys, self.reach(bias, batch, head * group_size + member, group_size, multiplier))
        return keys

    def work(
        self, given: Any, group_size: Any, n_block: Any, head: Any, batch: Any, lengths: Any, query_tiles: Any, rising: Any
    ) -> Work:
        """What a block works on, the first on its processor."""
        q_start, k_start, seqlen_q, seqlen_k, shift, tile = lengths
        return Work(
            given=given,
            shared=given.shared,
            group_size=group_size,
            batch=batch,
            sequence=batch,
            head=head,
            n_block=n_block,
            q_start=q_start,
            k_start=k_start,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            shift=shift,
            heads_q=given.q_shape[2],
            m_blocks=given.m_blocks,
            first_tile=tile,
            rising=rising,
            slot=rising,
            bounds=query_tiles,
            whole=None,
            hidden=None,
            turn=Int32(0),
            base=Int32(0),
        )

    @cute.jit
    def query_tiles(self, n_block, seqlen_q, seqlen_k, shift, left, right, origin=None):
        """Query tiles [first, end) that some key of the block sees, and [whole_first, whole_end) that all of them see.

        With a bias, whose distances have an ``origin``, the latter have all keys on the left of their queries.
        """
        key, past = n_block * self.span, (n_block + 1) * self.span
        first, end = Int32(0), cute.ceil_div(seqlen_q, self.tile_m)
        if const_expr(self.config.left):
            last_row = cutlass.min(past, seqlen_k) - 1 + left - shift
            end = cutlass.min(end, cutlass.max(last_row + self.tile_m, 0) // self.tile_m)
        if const_expr(self.config.right):
            first = cutlass.min(cutlass.max(key - shift - right, 0) // self.tile_m, end)
        whole_first, whole_end = first, end
        if const_expr(self.config.right):
            whole_first = cute.ceil_div(cutlass.max(past - 1 - shift - right, 0), self.tile_m)
            whole_first = cutlass.min(cutlass.max(whole_first, first), end)
        if const_expr(self.biased):
            aside = cute.ceil_div(cutlass.max(past - 1 - shift - origin, 0), self.tile_m)
            whole_first = cutlass.min(cutlass.max(whole_first, aside), end)
        if const_expr(self.config.left):
            whole_end = cutlass.max(key + left - shift + 1, 0) // self.tile_m
            whole_end = cutlass.max(cutlass.min(whole_end, end), whole_first)
        if key >= seqlen_k:  # no such block: tiles of packed sequences are counted generously
            first = end
        if past > seqlen_k:  # keys past the last one are masked in every tile
            whole_first, whole_end = end, end
        return first, whole_first, whole_end, end

    @cute.jit
    def next_block(self, given, turn):
        """Number of the block that is handed out next, below 0: none."""
        cute.arch.mbarrier_wait(given.shared.block_full, turn & 1)
        return self.block_word(given, turn)

    def block_word(self, given: Any, turn: Any) -> Any:
        return cute.arch.make_warp_uniform(given.shared.words[self.words_at(turn)])

    def read_block(self, given: Any, n_block: Any, turn: Any, base: Any) -> Work:
        """As ``describe``, from what the scheduler wrote; ``base``: steps of the blocks before.

        Afterwards every lane arrives at ``block_empty``: ptxas drops a barrier of the warp before the arrival of one, whose
        reads alone were ordered.
        """
        at = self.words_at(turn)
        words = [cute.arch.make_warp_uniform(given.shared.words[at + i]) for i in range(1, self.block_words)]
        head, batch, *tiles, rising = words[: DENSE_WORDS - 1]
        sequence = batch
        if self.numbered:
            batch = Int32(0)
        seqlen_q, seqlen_k = given.seqlen_q, given.k_shape[0]
        lengths = [Int32(0), Int32(0), seqlen_q, seqlen_k, seqlen_k - seqlen_q, Int32(0)]
        if self.config.varlen:
            lengths = words[DENSE_WORDS - 1 :]
        if self.config.q_offset:
            lengths[4] = words[DENSE_WORDS - 1]
        group_size = given.q_shape[2] // given.k_shape[2]
        if self.numbers_steps:
            group_size = tiles[1] >> 2
        return self.work(given, group_size, n_block, head, batch, lengths, tuple(tiles), rising).but(
            turn=turn, base=base, sequence=sequence
        )

    def words_at(self, turn: Any) -> Any:
        """Where the words of a block lie; some may be read again while the next block's are there."""
        if self.config.columns:
            return (turn & 1) * self.block_words
        return (turn & 1) * PACKED_WORDS if self.reads_again else 0

    def again(self, work: Any) -> Work:
        """The same, read again: what is needed seldom is not to stay in registers from step to step."""
        return self.read_block(work.given, self.block_word(work.given, work.turn), work.turn, work.base)

    @cute.jit
    def steps_of(self, work):
        """How many steps a block, or its piece, has."""
        first, _, _, end = work.bounds
        if const_expr(self.config.stream_k or self.config.columns):
            return end - first
        return work.group_size * (end - first)

    # Rows of tensors and of packed sequences

    def element(self, t: Any, batch: Any, row: Any, head: Any, column: Any) -> Any:
        """Address of eight elements of a row, which packed tensors count through all sequences."""
        *outer, along_rows, along_heads, _ = t.stride
        offset = Int64(row) * along_rows + Int64(head) * along_heads + column
        if const_expr(len(outer) > 0):
            offset += Int64(batch) * outer[0]
        return (t.iterator + offset).align(16)
