"""Dropout in the backward: drawn for a step while the tensor cores compute its scores, read where P and dS are there.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.attention.hopper.backward_base import LOADER, Work
from warploom.attention.hopper.backward_bias import BiasSteps
from warploom.attention.hopper.backward_distances import DistanceSteps
from warploom.kernels.cute.dropout import (
    COUNTED,
    draw_for_columns,
    drawn_for_columns,
    exchanged,
    kept,
    kept_halves,
    rounds_of,
)
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import reload


class Drops(Fields):
    """What a warpgroup keeps for dropout."""

    given: Any  # what the call says of it
    seed: Any  # its address in shared memory
    head: Any  # registers: query head, batch or packed sequence, the block's first key
    slot: Any  # of dS, of a step


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
            slot=None,
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

    def at_slot(self, r: Any, slot: Any) -> Any:
        """The same, of a step whose dS goes there."""
        return r.but(drops=r.drops.but(slot=slot)) if self.config.dropout else r

    def drawn(self, r: Any) -> list[Any]:
        """Where this thread's words of a counter go, by rounds: where its dS goes later in the step."""
        tile = r.ds_target + r.drops.slot * (self.tile_m * self.tile_n)
        return [tile + i * (16 * 64) for i in range(rounds_of(self.tile_m, 16))]

    @cute.jit
    def draw(self, r, m):
        """Draw what dropout drops of query tile ``m``, before the wait that follows."""
        if const_expr(self.config.dropout):
            head, batch, key = [r.drops.head[i] for i in range(3)]
            counter = (key + r.row) // COUNTED
            read_seed = partial(reload, r.drops.seed)
            given, row, columns = r.drops.given, m * self.tile_m, self.tile_m
            draw_for_columns(given, read_seed, head, batch, row, counter, columns, self.drawn(r))
            cute.arch.sync_warp()

    def pairs(self, r: Any, half: int = -1) -> list[tuple[int, int, Any]]:
        """(Row, first column, what was drawn) of an accumulator's pairs of columns; ``half`` as ``probabilities`` has it."""
        found, targets = [], self.drawn(r)
        rounds = range(len(targets))
        if half >= 0:
            rounds = rounds[half * len(targets) // 2 : (half + 1) * len(targets) // 2]
        for i in rounds:
            for n, pair in enumerate(drawn_for_columns(targets[i], i, self.tile_m)):
                found += [(0, 8 * i + 2 * n, pair), (1, 8 * i + 2 * n, exchanged(pair))]
        return found

    @cute.jit
    def drop(self, r, p_words, half):
        """Zeros in the operand P for what dropout drops."""
        if const_expr(self.config.dropout):
            for i, c, pair in self.pairs(r, half):
                p_words[i + c] = kept_halves(p_words[i + c], pair, r.drops.given.bound)

    @cute.jit
    def differentiate_kept(self, r, delta):
        """dS / scale from P and dP, in dP's place."""
        scale, bound = r.drops.given.scale, r.drops.given.bound
        for i, c, pair in self.pairs(r):
            dp = kept(pair, bound, [r.rows_dp[i, c + j] for j in (0, 1)], [Float32(0.0)] * 2)
            for j in (0, 1):
                r.rows_dp[i, c + j] = r.rows_s[i, c + j] * (dp[j] * scale - delta[c + j])

    def kept_scale(self, r: Any) -> Any:
        """What is kept of P counts so much."""
        return r.drops.given.scale if self.config.dropout else 1.0
