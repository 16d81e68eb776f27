"""Dropout in the backward: the bits of a step, found while the tensor cores compute its scores, and what they keep.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.backward_base import LOADER, Work
from warploom.attention.hopper.backward_bias import BiasSteps
from warploom.attention.hopper.backward_distances import DistanceSteps
from warploom.kernels.cute.dropout import bits_of_columns, kept
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import pin_bits, reload


class Drops(Fields):
    """What a warpgroup keeps for dropout."""

    given: Any  # what the call says of it
    seed: Any  # its address in shared memory
    head: Any  # registers: query head, batch or packed sequence, the block's first key
    bits: Any  # registers: of a step


class DropoutSteps(BiasSteps, DistanceSteps):
    """Of accumulators whose rows are keys."""

    def drops(self, work: Any) -> Drops | None:
        """What a warpgroup keeps for dropout, of a block or of a call; None without."""
        if not self.config.dropout:
            return None
        given = work.given if isinstance(work, Work) else work
        return Drops(
            given=given.dropout,
            seed=given.shared.seed,
            head=cute.make_rmem_tensor(3, Int32),
            bits=cute.make_rmem_tensor(2, Int32),
        )

    @cute.jit
    def store_seed(self, warp, shared, dropout):
        """The seed in shared memory. Every step reads it there, so that its bits are found behind what is issued before."""
        if const_expr(self.config.dropout):  # noqa: SIM102
            if warp == LOADER:
                with cute.arch.elect_one():
                    seed = cute.make_tensor(shared.seed, cute.make_layout(2))
                    seed[0], seed[1] = dropout.seed

    def dropout(self, r: Any) -> Any:
        """What the call says of it, the seed read here."""
        return r.drops.given.but(seed=reload(r.drops.seed))

    def take_head(self, r: Any, work: Any, head: Any) -> None:
        """The steps that follow are of this query head, counted in the call."""
        if self.config.dropout:
            for i, number in enumerate((head, work.sequence, work.n_block * self.tile_n)):
                r.drops.head[i] = cute.arch.make_warp_uniform(number)

    def take_member(self, r: Any, work: Any, member: Any) -> None:
        """The steps that follow are of a head of the group: the ``member``-th, but in waves, as ``Producer.place`` has it."""
        if self.config.waves:
            member = (member + work.n_block) % work.group_size
        self.take_head(r, work, work.head * work.group_size + member)
        self.take_slope(r, work, work.head * work.group_size + member)
        if self.reads_distances:
            self.take_distances(r, work, work.head * work.group_size + member)

    def take_tile(self, r: Any, work: Any, step: Any) -> Any:
        """Query tile of a step, counted through all heads of the block; the step is of its head."""
        member = step // work.m_blocks
        self.take_member(r, work, member)
        return step - member * work.m_blocks

    @cute.jit
    def find_kept(self, r, m):
        """Bits of this thread's elements of query tile ``m``, before the wait that follows."""
        if const_expr(self.config.dropout):
            head, batch, key = [r.drops.head[i] for i in range(3)]
            read_seed = partial(reload, r.drops.seed)
            for n in cutlass.range_constexpr(self.tile_m // 64):
                row = m * self.tile_m + n * 64
                bits = bits_of_columns(r.drops.given, read_seed, head, batch, key + r.row, row)
                r.drops.bits[n] = bits
                pin_bits(bits, r.ds_target)

    def elements(self) -> list[tuple[int, int]]:
        """(First column, row) of an accumulator's pairs of columns, in the order of its registers, or of the bits."""
        columns = range(0, self.tile_m // 4, 2)
        if self.config.dropout and not self.config.pair:
            return [(c + n, i) for n in range(0, len(columns) * 2, 16) for i in range(2) for c in range(0, 16, 2)]
        return [(c, i) for c in columns for i in range(2)]

    def keep(self, r: Any, i: int, c: int, x: Any) -> Any:
        """Element (i, c) of an accumulator if dropout keeps it, else 0."""
        if not self.config.dropout:
            return x
        return kept(r.drops.bits[c // 16], 16 * i + c % 16, x)

    @cute.jit
    def differentiate_kept(self, r, delta):
        """dS / scale from P and dP, in dP's place."""
        for c, i in self.elements():
            for j in (0, 1):
                dp = self.keep(r, i, c + j, r.rows_dp[i, c + j])
                r.rows_dp[i, c + j] = r.rows_s[i, c + j] * (dp * r.drops.given.scale - delta[c + j])

    def marked(self, r: Any, i: int, c: int, weight: Any) -> Any:
        """P as dS takes it, whose bits are at hand there."""
        return weight

    def kept_scale(self, r: Any) -> Any:
        """What is kept of P counts so much."""
        return r.drops.given.scale if self.config.dropout else 1.0
