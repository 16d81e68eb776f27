"""What the parts of the forward share: constants, tiles and their key tiles, rings, lengths of packed sequences.

The producer's warps stand in ``forward_producer``, the consumer warpgroups in ``forward_consumers``, the kernel that puts split
tiles together in ``forward_merge``; ``forward`` joins them.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import ForwardConfig
from warploom.kernels.cute.basics import DTYPES, WARPGROUP, choose
from warploom.kernels.cute.dropout import rounds_of
from warploom.kernels.cute.fields import Fields

# A tile as the scheduler hands it out: query tile, head (below 0: no more), batch, key tiles [first, end), and the slot of
# the workspace if those are not all (below 0: they are); for packed sequences also where queries and keys start, how
# many there are, and by how much a query's position is past its row.
TILE_WORDS = 12
DENSE_WORDS, PACKED_WORDS = 6, 11
# Words of a list: query tile, head (below 0: no more), batch, its first key tile, then bits of 32 key tiles from there on:
# those that are visible, whole, or hold columns that no row sees; and whether the query tile has more lists. For packed
# sequences, whose number is in the place of batch, also where queries and keys start, and how many there are of each. Where
# warpgroups go apart, the visible ones are those of any, whole those that are partial for none, and behind all these words
# come those that each warpgroup sees, then those that are whole for it; with query offsets the batch entry's before those.
LIST_WORDS, PACKED_LIST_WORDS = 8, 12
OFFSET = LIST_WORDS
QUERIES, HEAD, BATCH, BASE, WHOLE, EDGE = 0, 1, 2, 3, 5, 6
Q_START, SEQLEN_Q, K_START, SEQLEN_K = 8, 9, 10, 11
MASK_STAGES = 2  # of the ring of bits of partial tiles, under a column mask


class ForwardShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of a ring's."""

    q_full: Any  # one of each warpgroup's rows, of each stage of Q
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_landed: Any  # under a column mask: V is there, and values that no row sees are to be cleared
    v_empty: Any
    tile_full: Any
    tile_empty: Any
    tile_wanted: Any  # where tiles are claimed: K of one is about loaded, and the next one may be
    tiles: Any  # (word, stage)
    mask_full: Any  # under a column mask
    mask_empty: Any
    masks: Any  # a word for each (owner, stage, row, quarter of a quad's columns)
    scratch: Any  # an address that nothing is ever stored at
    drops: Any  # with dropout, a counter's words for each (lane, round, warp)
    q: Any  # (row, head_dim, warpgroup and stage)
    loads_q: Any  # the same as TMA fills it
    k: Any  # (key, head_dim, stage)
    v: Any
    alibi: Any  # (key, 16) where ALiBi is a product


class ForwardBase:
    """Sizes of one configuration, and what all its kernels and warps need of a tile."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.stages = config.stages
        self.warpgroups = config.warpgroups
        self.tile_stages = 2
        self.owners = config.warpgroups if config.apart else 1  # of lists and of masks
        self.own_at = PACKED_LIST_WORDS if config.varlen else LIST_WORDS + config.q_offset
        self.tile_words = TILE_WORDS if self.owners == 1 else self.own_at + 2 * self.owners
        self.mask_rows = self.tile_m // self.owners  # of an owner's mask
        self.q_stages = config.q_stages
        self.q_slots = config.q_stages * config.warpgroups
        self.biased = config.bias == "alibi"
        self.begins = self.biased and not config.softcap  # scores begin at the bias
        self.reads_distances = config.bias == "distance"
        self.multiplies = config.bias_product
        self.load_rows = 8 if config.pack_gqa else 64  # of Q, of one head
        self.threads = WARPGROUP * (config.warpgroups + 1)
        self.rounds = rounds_of(16, config.tile_n)  # of dropout's exchange

    @property
    def claims_late(self) -> bool:
        """Whether the loader says when the next query tile may be claimed from the counter."""
        return self.config.columns or (self.config.varlen and not self.config.paged)

    # Tiles

    def tile_heads(self, heads_q: Any, heads_kv: Any) -> Any:
        """Heads of a batch as tiles count them: a tile may hold several of a group."""
        if not self.config.pack_gqa:
            return heads_q
        return heads_kv * schedule.tile_heads(heads_q // heads_kv, self.config.heads_per_tile)

    @cute.jit
    def place(self, m_block, head, local, members, seqlen_q):
        """Query and head of a tile's row; a query past the last one where the row has none."""
        query = m_block * self.config.queries + local
        if const_expr(self.config.pack_gqa):
            past = seqlen_q - m_block * self.config.pack_gqa
            queries, heads = self.config.pack_gqa, self.config.heads_per_tile
            query, head = schedule.pack_gqa_row(head, local, queries, heads, members, past, choose)
            query += m_block * self.config.pack_gqa
        return query, head

    def q_place(self, group: Any, turn: Any) -> tuple[Any, Any]:
        """Slot of a warpgroup's rows of Q, and phase of its barriers; ``turn`` counts tiles, with one stage modulo 2.

        The loader's begins a turn of all stages later.
        """
        if self.q_stages == 1:
            return group, turn
        return group + (turn & 1) * self.warpgroups, turn >> 1 & 1

    def next_q(self, turn: Any) -> Any:
        """The turn that follows."""
        return turn ^ 1 if self.q_stages == 1 else turn + 1

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

    @cute.jit
    def next_list(self, shared, stage, phase, seqlen_q):
        """The words of the list in the ring's stage, as many as packed sequences have; a dense call's length is given."""
        words = list(self.see_list(shared, stage, phase))
        if const_expr(self.config.varlen):
            words += [cute.arch.make_warp_uniform(shared.tiles[i, stage]) for i in range(LIST_WORDS, PACKED_LIST_WORDS)]
        else:
            words += [Int32(0), seqlen_q, Int32(0), Int32(0)]
        self.leave_list(shared, stage)
        return tuple(words)

    @cute.jit
    def see_list(self, shared, stage, phase):
        """The words that all lists have, of one that stays there until this warp leaves it."""
        cute.arch.mbarrier_wait(shared.tile_full + stage, phase)
        return tuple([cute.arch.make_warp_uniform(shared.tiles[i, stage]) for i in range(LIST_WORDS)])

    @cute.jit
    def next_own_list(self, shared, stage, phase, group, seqlen_q):
        """Of the list in the ring's stage: tile, head, batch, base, visible to any, seen and whole for ``group``, more.

        Then where the queries of a packed sequence start, and how many there are; a dense call's length is given.
        """
        m_block, head, batch, base, visible, _, _, more = self.see_list(shared, stage, phase)
        places = [self.own_at + group, self.own_at + self.owners + group]
        if const_expr(self.config.varlen):
            places += [Q_START, SEQLEN_Q]
        own = [cute.arch.make_warp_uniform(shared.tiles[i, stage]) for i in places]
        if const_expr(not self.config.varlen):
            own += [Int32(0), seqlen_q]
        self.leave_list(shared, stage)
        seen, whole, q_start, seqlen_q = own
        return m_block, head, batch, base, visible, seen, whole, more, q_start, seqlen_q

    def leave_list(self, shared: Any, stage: Any) -> None:
        """Every lane says so, as in ``next_tile``."""
        cute.arch.mbarrier_arrive(shared.tile_empty + stage)

    def first_column(self, lane: Any) -> Any:
        """The first of a lane's columns."""
        return lane % 4 * 2
