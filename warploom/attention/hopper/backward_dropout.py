"""Dropout in the backward: drawn for a step while the tensor cores compute its scores, read where P and dS are there.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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
)
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import pack16, reload
from warploom.kernels.cute.wgmma import words


class Drops(Fields):
    """What a warpgroup keeps for dropout."""

    given: Any  # what the call says of it
    seed: Any  # its address in shared memory
    head: Any  # registers: query head, batch or packed sequence, the block's first key
    slot: Any  # of dS, of a step
    phase: Any  # of the step's words, where they are drawn ahead
    drawn: Any  # of pairs of blocks: registers, what was drawn for a step


class DropoutSteps(BiasSteps, DistanceSteps):
    """Of accumulators whose rows are keys."""

    drawn_from: Any  # of the warps that draw
    statistics: Any  # the consumers' methods
    share: Any

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
            phase=None,
            drawn=None,
        )

    @cute.jit
    def store_seed(self, warp, shared, dropout):
        """The seed in shared memory. Every step reads it there, so that its bits are found behind what is issued before."""
        if const_expr(self.config.dropout and not self.config.draws_ahead):  # noqa: SIM102
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

    def at_slot(self, r: Any, slot: Any, phase: Any) -> Any:
        """The same, of a step whose dS goes there, with the phase of its ring."""
        return r.but(drops=r.drops.but(slot=slot, phase=phase)) if self.config.dropout else r

    def drawn(self, r: Any) -> list[Any]:
        """Where this thread's words of a counter go, by rounds: where its last dS goes later in the step."""
        return self.drawn_from(r.ds_target + r.drops.slot * (self.tile_m * self.tile_n))

    @cute.jit
    def draw(self, r, m):
        """Draw what dropout drops of query tile ``m``, before the wait that follows."""
        if const_expr(self.config.dropout and not self.config.draws_ahead):
            head, batch, key = [r.drops.head[i] for i in range(3)]
            counter = (key + r.row) // COUNTED
            read_seed = partial(reload, r.drops.seed)
            given, row, columns = r.drops.given, m * self.tile_m, self.tile_m
            draw_for_columns(given, read_seed, head, batch, row, counter, columns, self.drawn(r))
            cute.arch.sync_warp()

    def pairs(self, target: Any, i: int) -> list[tuple[int, int, Any]]:
        """(Row, first column, what was drawn) of an accumulator's pairs of columns in round ``i``."""
        found = []
        for n, pair in enumerate(drawn_for_columns(target, i, self.tile_m)):
            found += [(0, 8 * i + 2 * n, pair), (1, 8 * i + 2 * n, exchanged(pair))]
        return found

    @cute.jit
    def share_kept(self, r):
        """dS as an operand and where both warpgroups read it, from P and dP, and zeros in the operand P for what is dropped.

        Round by round: none is read before the last one's dS is stored, else ptxas would have no registers for them.
        """
        if const_expr(self.config.draws_ahead):
            cute.arch.mbarrier_wait(r.shared.drop_full + r.drops.slot, r.drops.phase)
        scale, bound, p_words, ds_words = r.drops.given.scale, r.drops.given.bound, words(r.p), words(r.ds)
        for n, target in enumerate(self.drawn(r)):
            delta = self.statistics(r, r.drops.slot, 1, 32 * n, min(32, self.tile_m - 32 * n))
            for i, c, pair in self.pairs(target, n):
                p_words[i + c] = kept_halves(p_words[i + c], pair, bound)
                dp = kept(pair, bound, [r.rows_dp[i, c + j] for j in (0, 1)], [Float32(0.0)] * 2)
                two = [r.rows_s[i, c + j] * (dp[j] * scale - delta[c - 8 * n + j]) for j in (0, 1)]
                ds_words[i + c] = pack16(two[0], two[1], self.dtype)
            self.share(r, r.drops.slot, range(2 * n, min(2 * n + 2, self.tile_m // 16)))

    def kept_scale(self, r: Any) -> Any:
        """What is kept of P counts so much."""
        return r.drops.given.scale if self.config.dropout else 1.0
