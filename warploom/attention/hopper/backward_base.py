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
from warploom.kernels.cute.basics import DTYPES, KernelBase, Names

WARPGROUPS = 2  # consumers
# Together 504 a thread of each, which is what 168 at the start leave: with more, warps would wait for registers for ever.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# Warps of the producer warpgroup; writer i drains dQ of consumer warpgroup i.
LOADER, WRITERS, SCHEDULER = 0, (1, 2), 3
# Named barriers; 0 is the block's.
DS_READY = 1  # both warpgroups have written their dS
DQ_EMPTY, DQ_FULL = 2, 4  # and + 1: a warpgroup's dQ buffer may be written, may be read
SCORES_TURN = 6  # and + 1: a warpgroup's turn to issue S and dP
DQ_ODD = 8  # added to DQ_FULL in odd steps when deterministic
# A key block as the scheduler hands it out: its number (below 0: no more), head, batch, the four bounds of its query tiles and
# whether they rise; for packed sequences also where queries and keys start, how many there are, the shift and the first tile.
# Where the last blocks are shared out, the bounds are those of a piece in steps, and its block's number among them comes last.
DENSE_WORDS, PACKED_WORDS = 8, 14


class BackwardBase(KernelBase):
    """Sizes and shares of one configuration, and the helpers of all its kernels and warps."""

    def __init__(self, config: BackwardConfig):
        self.config = config
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
        self.mixed = config.deterministic and config.right  # sections but the last begin with the last key block
        self.abreast = config.deterministic or config.waves  # all heads of the group pass a query tile before the next one
        self.both_ways = self.mixed or config.waves  # tiles rise or fall
        self.slots = 2  # tiles of dS
        # Warpgroups issue S and dP one after the other, and dP begins at minus its rows' means. Measured: +2 to 5 % at 96 and
        # 128, to -6 % at 64. A softcap leaves no registers for the latter.
        self.in_turns = config.head_dim > 64
        self.fold = self.in_turns and not config.softcap
        # So many fours of exponentials are computed before the wait for dP: half of them, which leaves others to run beside
        # what follows it. Measured: of 64, 16384 keys full in 10.1 ms without, half 9.5, all 9.8; 128 8.39, all 8.53; 96 equal.
        self.held = 0 if config.softcap else config.tile_m // (8 if config.head_dim == 96 else 16)
        self.dims = config.head_dim_v, config.head_dim  # columns of dV and dK
        # P is computed times 2^lift: it passes as fp16, which has eleven bits between 2^-14 and 2^16. It may exceed 1 where
        # scores are so large that they differ by rounding from those that lse was computed from.
        self.lift = 10 if config.pair else 0
        self.keys_first = not config.persistent  # the loops over query tiles wait for K and V

    def init_rings(self, shared: Any, releases: int) -> None:
        """The barriers of the rings of Q and dO, whose stages are free after so many releases."""
        for full, empty, count in (
            (shared.q_full, shared.q_empty, self.stages),
            (shared.do_full, shared.do_empty, self.dout_stages),
        ):
            for i in range(count):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, releases)

    # What a block works on

    def describe(self, given: Any, index: Any) -> Names:
        """What a block works on, by its number in the order of blocks."""
        q_shape, k_shape, cu_q, cu_k, left, right = (
            given.q_shape, given.k_shape, given.cu_q, given.cu_k, given.left, given.right,
        )  # fmt: skip
        heads_kv, n_blocks, seqlen_q = k_shape[2], given.n_blocks, given.seqlen_q
        if self.config.parted:  # a section is one head
            n_block, slice_ = index % n_blocks, index // n_blocks
        elif not self.config.waves:
            n_block, slice_ = schedule.sections(index, n_blocks, given.slices, given.section, self.choose)
        rising = Int32(0)
        if self.config.waves:
            n_block, slice_, rising = schedule.in_waves(index, n_blocks, given.slices, given.section, given.deal[2])
        if self.mixed:
            rising = self.choose((index // (given.section * n_blocks) + 1) * given.section < given.slices, 1, 0)
            n_block = self.choose(rising == 1, n_blocks - 1 - n_block, n_block)
        batch, head = slice_ // heads_kv, slice_ % heads_kv
        q_start, k_start, seqlen_k, first_tile = Int32(0), Int32(0), k_shape[0], Int32(0)
        if self.config.varlen:
            total_q, total_k = q_shape[3] - 1, k_shape[3] - 1
            sequence, k_start, seqlen_k, n_block = self.locate(cu_k, n_block, self.span, total_k)
            if given.used is not None:
                seqlen_k = cutlass.max(cutlass.min(seqlen_k, given.used[sequence]), 0)
            q_start, seqlen_q = self.bounds(cu_q, sequence, total_q)
            first_tile = self.first_tile(cu_q, sequence, self.tile_m, total_q)
        shift = seqlen_k - seqlen_q
        whole, hidden = seqlen_k, Int32(0)
        if self.config.varlen:
            if given.used is not None:
                _, whole = self.bounds(cu_k, sequence, total_k)
            # Keys that no query of the sequence sees stay outside of what TMA reads.
            if self.config.right:
                seqlen_k = cutlass.max(cutlass.min(seqlen_k, seqlen_k + right), 0)
            if self.config.left:
                hidden = cutlass.min(cutlass.max(shift - left, 0), seqlen_k)
                k_start += hidden
                seqlen_k -= hidden
                shift -= hidden
        return Names(
            shared=given.shared,
            group_size=q_shape[2] // heads_kv,
            batch=batch,
            head=head,
            n_block=n_block,
            q_start=q_start,
            k_start=k_start,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            shift=shift,
            heads_q=q_shape[2],
            m_blocks=given.m_blocks,
            first_tile=first_tile,
            rising=rising,
            bounds=self.query_tiles(n_block, seqlen_q, seqlen_k, shift, left, right),
            whole=whole,
            hidden=hidden,
            turn=Int32(0),
            base=Int32(0),
        )

    @cute.jit
    def query_tiles(self, n_block, seqlen_q, seqlen_k, shift, left, right):
        """Query tiles [first, end) that some key of the block sees, and [whole_first, whole_end) that all of them see."""
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

    def read_block(self, given: Any, n_block: Any, turn: Any, base: Any) -> Names:
        """As ``describe``, from what the scheduler wrote; ``base``: steps of the blocks before.

        Afterwards every lane arrives at ``block_empty``: ptxas drops a barrier of the warp before the arrival of one, whose
        reads alone were ordered.
        """
        count = PACKED_WORDS if self.config.varlen else DENSE_WORDS
        at = self.words_at(turn)
        words = [cute.arch.make_warp_uniform(given.shared.words[at + i]) for i in range(1, count)]
        head, batch, *bounds, rising = words[: DENSE_WORDS - 1]
        seqlen_q, seqlen_k = given.seqlen_q, given.k_shape[0]
        lengths = [Int32(0), Int32(0), seqlen_q, seqlen_k, seqlen_k - seqlen_q, Int32(0)]
        if self.config.varlen:
            lengths = words[DENSE_WORDS - 1 :]
        q_start, k_start, seqlen_q, seqlen_k, shift, first_tile = lengths
        return Names(
            given=given,
            shared=given.shared,
            group_size=given.q_shape[2] // given.k_shape[2],
            batch=batch,
            head=head,
            n_block=n_block,
            q_start=q_start,
            k_start=k_start,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            shift=shift,
            heads_q=given.q_shape[2],
            m_blocks=given.m_blocks,
            first_tile=first_tile,
            rising=rising,
            slot=rising,
            bounds=tuple(bounds),
            turn=turn,
            base=base,
        )

    def words_at(self, turn: Any) -> Any:
        """Where the words of a block lie; shared out ones may be read again while the next block's are there."""
        return (turn & 1) * PACKED_WORDS if self.config.parted else 0

    @cute.jit
    def steps_of(self, work):
        """How many steps a block, or its piece, has."""
        first, _, _, end = work.bounds
        if const_expr(self.config.parted):
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

    def store_words(self, target: Any, words: list[Any]) -> None:
        """Eight 16-bit elements by one store."""
        four = cute.make_rmem_tensor(4, Int32)
        for i in range(4):
            four[i] = words[i]
        cute.autovec_copy(four, cute.recast_tensor(cute.make_tensor(target, cute.make_layout(8)), Int32))

    @cute.jit
    def locate(self, cu, tile, size, total):
        """Number, start and length of the packed sequence that a tile belongs to, and the tile's number in it.

        The lanes of a warp look at 32 sequences at a time, evenly spread: of up to 1024 a tile's is found by two loads.
        """
        last = Int32(cu.shape[0] - 2)
        lower, count = Int32(0), last + 1
        while count > 1:
            apart = (count + 31) // 32
            probe = lower + cute.arch.lane_idx() * apart
            begins = self.first_tile(cu, cutlass.min(probe, last), size, total) <= tile
            before = cute.arch.popc(cute.arch.vote_ballot_sync(begins and probe < lower + count))
            found = lower + cutlass.max(before - 1, 0) * apart
            count = cutlass.min(apart, lower + count - found)
            lower = found
        start, length = self.bounds(cu, lower, total)
        block = tile - self.first_tile(cu, lower, size, total)
        return lower, start, length, self.choose(block < 0, length // size + 1, block)

    @cute.jit
    def first_tile(self, cu, sequence, size, total):
        return cutlass.min(cutlass.max(cu[sequence], 0), total) // size + sequence
