"""What the warps of column sums share: sizes, shared memory, and which tiles a block takes in which order.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.sums_config import ROWS, WARPGROUPS, SumsConfig
from warploom.kernels.cute.basics import DTYPES, WARPGROUP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.rings import next_in_ring, place_in_ring

ROUND = ROWS * WARPGROUPS  # queries that the warpgroups take together


class SumsShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of a ring's."""

    q_full: Any  # one of each warpgroup's tile, of each stage
    q_empty: Any
    k_full: Any  # one of each slot, which holds a chunk of keys
    k_empty: Any
    q: Any  # (row, head_dim, stage and warpgroup)
    k: Any  # (key, head_dim, slot)
    partial: Any  # address of the sums of all warps, twice


class Call(Fields):
    """What there is of queries and keys."""

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    group: Any  # heads that share their keys
    batch: Any
    left: Any
    right: Any


class Item(Fields):
    """A tile of keys of one head, and the rounds of queries that see some of it; at least one, whoever sees it."""

    head: Any
    batch: Any
    key: Any  # the first
    first: Any  # round
    rounds: Any


class SumsBase:
    """Sizes of one configuration, and what all its warps need."""

    def __init__(self, config: SumsConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.q_slots = config.stages * WARPGROUPS
        self.threads = WARPGROUP * (WARPGROUPS + 1)

    @cute.jit
    def position(self, turn, block, blocks):
        """Which tile a block takes in a turn: under a causal mask, where they shrink, the way back in every other one."""
        if const_expr(self.config.right and not self.config.left):
            block = choose(turn % 2 == 1, blocks - 1 - block, block)
        return turn * blocks + block

    @cute.jit
    def tiles(self, call):
        """How many tiles there are."""
        return cute.ceil_div(call.seqlen_k, self.config.tile_n) * (call.heads * call.batch)

    @cute.jit
    def item(self, call, position):
        """The tile of that number: head after head, or under a causal mask first those of all heads that most queries see."""
        config = self.config
        heads = call.heads * call.batch
        tiles = cute.ceil_div(call.seqlen_k, config.tile_n)
        position = cutlass.min(position, tiles * heads - 1)
        if const_expr(config.right and not config.left):
            n = position // heads
            row = position - n * heads
        else:
            row = position // tiles
            n = position - row * tiles
        batch = row // call.heads
        key = n * config.tile_n
        shift = call.seqlen_k - call.seqlen_q
        begin, end = Int32(0), Int32(call.seqlen_q)
        if const_expr(config.right):
            begin = cutlass.min(cutlass.max(key - shift - call.right, 0), call.seqlen_q - 1)
        if const_expr(config.left):
            past = cutlass.min(key + config.tile_n, call.seqlen_k)
            end = cutlass.max(cutlass.min(end, past + call.left - shift), 1)
        first = begin // ROUND
        rounds = cutlass.max(cute.ceil_div(end, ROUND) - first, 1)
        return Item(head=row - batch * call.heads, batch=batch, key=key, first=first, rounds=rounds)

    def k_ahead(self, number: Any, chunks: int) -> Any:
        """The number in the ring of keys of the chunk so many behind that of ``number``, as ``next_in_ring`` counts."""
        for _ in range(chunks):
            number = next_in_ring(number, self.config.k_slots)
        return number

    def k_place(self, number: Any, chunk: int) -> tuple[Any, Any]:
        """Slot and phase of a chunk of the keys whose first one has this number; ``chunk`` CHUNKS: of the keys that follow."""
        return place_in_ring(self.k_ahead(number, chunk), self.config.k_slots)
