"""Dropout in the backward: the bits of a step, found while the tensor cores compute its scores, and what they keep.

Where rows of accumulators are keys, a thread keeps what Philox makes of its keys and the query head: only queries change from
step to step.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.backward_base import BackwardBase, Work
from warploom.kernels.cute.dropout import bits_of_columns, kept, keys_of_columns
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import pin_bits


class Drops(Fields):
    """What a warpgroup keeps for dropout."""

    given: Any  # what the call says of it
    head: Any  # registers: the high word of its product, then of this thread's keys, all for a query head
    bits: Any  # registers: of a step


class DropoutSteps(BackwardBase):
    """Of accumulators whose rows are keys."""

    def drops(self, work: Any) -> Drops | None:
        """What a warpgroup keeps for dropout, of a block or of a call; None without."""
        if not self.config.dropout:
            return None
        given = work.given if isinstance(work, Work) else work
        return Drops(given=given.dropout, head=cute.make_rmem_tensor(5, Int32), bits=cute.make_rmem_tensor(2, Int32))

    def take_head(self, r: Any, work: Any, head: Any) -> None:
        """The steps that follow are of this query head, counted in the call."""
        if self.config.dropout:
            key = work.n_block * self.tile_n + r.row
            high, keys = keys_of_columns(r.drops.given, head, work.sequence, key)
            for i, part in enumerate((high, *keys)):
                r.drops.head[i] = part

    def take_member(self, r: Any, work: Any, member: Any) -> None:
        """The steps that follow are of a head of the group: the ``member``-th, but in waves, as ``Producer.place`` has it."""
        if self.config.waves:
            member = (member + work.n_block) % work.group_size
        self.take_head(r, work, work.head * work.group_size + member)

    def take_tile(self, r: Any, work: Any, step: Any) -> Any:
        """Query tile of a step, counted through all heads of the block; the step is of its head."""
        member = step // work.m_blocks
        self.take_member(r, work, member)
        return step - member * work.m_blocks

    @cute.jit
    def find_kept(self, r, m):
        """Bits of this thread's elements of query tile ``m``, before the wait that follows."""
        if const_expr(self.config.dropout):
            high, *keys = [r.drops.head[i] for i in range(5)]
            even, odd = bits_of_columns(r.drops.given, keys, high, m * self.tile_m, self.tile_m)
            r.drops.bits[0], r.drops.bits[1] = even, odd
            pin_bits(even ^ odd, r.ds_target)

    def keep(self, r: Any, i: int, c: int, x: Any) -> Any:
        """Element (i, c) of an accumulator if dropout keeps it, else 0."""
        if not self.config.dropout:
            return x
        return kept(r.drops.bits[c % 2], 16 * i + c // 2, x)

    def marked(self, r: Any, i: int, c: int, weight: Any) -> Any:
        """P as dS takes it, whose bits are at hand there."""
        return weight

    def kept_scale(self, r: Any) -> Any:
        """What is kept of P counts so much."""
        return r.drops.given.scale if self.config.dropout else 1.0
