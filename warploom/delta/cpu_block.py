"""The work of the CPU implementation on one block of tokens, whose tiles stay in the processor's caches.

Tiles are (batch · heads, chunks, rows, dim). With D_ij = exp of the decays from token j to token i of a chunk, first_i of those
from its start to i, last_j of those after j, S the state before the chunk and A = beta · (k kT ∘ D) below its diagonal, the
tokens of a chunk write the solution X of

    (I + A) X = beta · (v - first · k S),       out = first · q S + (q kT ∘ D) X,       S <- whole · S + (last · k)T X.

A triangular system is solved where WY forms multiply by (I + A)^-1: nothing cancels, whatever the keys' norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from warploom.delta.problem import DeltaCall

# exp of it is 0 in fp64 too.
_FORGETS = -750.0


class Step(NamedTuple):
    """What backward reads again of a chunk."""

    state: Tensor  # before it, (batch · heads_v, E, M)
    rest: Tensor  # v - first · k S
    written: Tensor  # X


class Gradients(NamedTuple):
    """Of a call's tensors, to be written."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor | None


@dataclass(frozen=True)
class Block:
    """Tokens start to stop of a call that is not packed, in chunks of ``chunk``."""

    call: DeltaCall
    chunk: int
    start: int
    stop: int

    def walk(self, state: Tensor, out: Tensor | None = None, kept: list[Step] | None = None) -> Tensor:
        """The state after the block, from that before it; writes ``out`` and appends to ``kept`` where they are given."""
        k, v, system = self._group(self._keys), self._values, self._beta * self._inner
        read, written_by = self._first * k, self._last * k
        rows = torch.empty_like(v)
        for c in range(v.shape[1]):
            rest = torch.baddbmm(v[:, c], read[:, c], state, alpha=-1.0)
            written = _solve(system[:, c], self._beta[:, c] * rest)
            if out is not None:
                torch.bmm(self._queries[:, c], state, out=rows[:, c]).mul_(self._first[:, c])
                rows[:, c].baddbmm_(self._scores[:, c], written)
            if kept is not None:
                kept.append(Step(state, rest, written))
            state = torch.baddbmm(self._whole[:, c] * state, written_by[:, c].mT, written)
        if out is not None:
            self._store(out, rows.mul_(self.call.scale))
        return state

    def backward(self, state: Tensor, dstate: Tensor, dout: Tensor, into: Gradients) -> Tensor:
        """Write the block's gradients; the gradient of the state before it, from that of the state after it.

        Args:
            state: before the block.
        """
        kept: list[Step] = []
        self.walk(state, kept=kept)
        states, rest, written = (torch.stack(ts, 1) for ts in zip(*kept, strict=True))
        q, k = self._queries, self._group(self._keys)
        system, g = self._beta * self._inner, self._load(dout) * self.call.scale
        read_q, read_k, write_k = self._first * q, self._first * k, self._last * k
        dwritten = self._scores.mT @ g
        dstates, solved = torch.empty_like(states), torch.empty_like(written)
        for c in reversed(range(q.shape[1])):
            dstates[:, c] = dstate
            solved[:, c] = _solve(system[:, c].mT, dwritten[:, c].baddbmm_(write_k[:, c], dstate), upper=True)
            dstate = torch.baddbmm(self._whole[:, c] * dstate, read_q[:, c].mT, g[:, c])
            dstate.baddbmm_(read_k[:, c].mT, self._beta[:, c] * solved[:, c], alpha=-1.0)
        dv = self._beta * solved
        dinner = (solved @ written.mT).tril_(-1).neg_()
        dbeta = (solved * rest).sum(-1) + (dinner * self._inner).sum(-1)
        dinner *= self._beta
        dscores = (g @ written.mT).tril_()
        if into.decay is not None:
            self._put(into.decay, self._ddecay(dscores, dinner, g, dv, states, dstates, written))
        dscores *= self._pairs
        dinner *= self._pairs
        dq = (self._first * (g @ states.mT)) + dscores @ k
        dk = dscores.mT @ q + (dinner + dinner.mT) @ k
        dk += self._last * (written @ dstates.mT) - self._first * (dv @ states.mT)
        self._store(into.v, dv)
        self._put(into.beta, dbeta)
        for name, target, gradient in (("q", into.q, dq), ("k", into.k, dk)):
            self._store(target, self._through_norm(name, gradient.unflatten(0, (-1, self.call.group)).sum(1)))
        return dstate

    def _ddecay(
        self, dscores: Tensor, dinner: Tensor, g: Tensor, dv: Tensor, states: Tensor, dstates: Tensor, written: Tensor
    ) -> Tensor:
        """Sums over all that a token's decay lies between; what a decay of -inf cuts off is 0, so nothing has to cancel."""
        q, k = self._queries, self._group(self._keys)
        between = dscores * self._scores + dinner * self._inner
        ends = ((g @ states.mT) * q - (dv @ states.mT) * k).sum(-1, keepdim=True) * self._first
        starts = ((written @ dstates.mT) * k).sum(-1, keepdim=True) * self._last
        through = self._whole * (states * dstates).sum((-2, -1), keepdim=True)
        after = torch.ones_like(between[0, 0]).triu() @ between  # sums over queries from a token on
        from_here = ends.flip(2).cumsum(2).flip(2)
        return (after.tril(-1).sum(-1, keepdim=True) + from_here + (starts.cumsum(2) - starts) + through).squeeze(-1)

    @cached_property
    def _rows(self) -> tuple[int, int]:
        """Chunks, and the rows past the last token that fill them."""
        chunks = -(-(self.stop - self.start) // self.chunk)
        return chunks, chunks * self.chunk - (self.stop - self.start)

    @cached_property
    def _hidden(self) -> Tensor | None:
        """(batch, 1, tokens, 1): tokens that count for nothing."""
        if self.call.lengths is None:
            return None
        position = torch.arange(self.start, self.stop, device=self.call.q.device)
        return (position >= self.call.lengths[:, None])[:, None, :, None]

    def _load(self, x: Tensor) -> Tensor:
        """A tile of x (batch, seqlen, heads, dim) in the accumulator's dtype, 0 where nothing counts."""
        tile = x[:, self.start : self.stop].transpose(1, 2).to(self.call.accumulator)
        if self._hidden is not None:
            tile = tile.masked_fill(self._hidden, 0.0)
        chunks, missing = self._rows
        return F.pad(tile, (0, 0, 0, missing)).reshape(-1, chunks, self.chunk, x.shape[3])

    def _store(self, x: Tensor, tile: Tensor) -> None:
        """Write a tile to its tokens of x (batch, seqlen, heads, dim)."""
        rows = tile.reshape(x.shape[0], x.shape[2], -1, x.shape[3])[:, :, : self.stop - self.start]
        if self._hidden is not None:
            rows = rows.masked_fill(self._hidden, 0.0)
        x[:, self.start : self.stop] = rows.transpose(1, 2)

    def _put(self, x: Tensor, tile: Tensor) -> None:
        """As `_store`, of a number a token."""
        self._store(x.unsqueeze(-1), tile.unsqueeze(-1))

    def _group(self, tile: Tensor) -> Tensor:
        """A tile of keys' heads for value heads."""
        return tile if self.call.group == 1 else tile.repeat_interleave(self.call.group, 0)

    @cached_property
    def _raw(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Queries and keys as given, and what normalizes them."""
        found = {}
        for name, x in (("q", self.call.q), ("k", self.call.k)):
            tile = self._load(x)
            found[name] = tile, torch.rsqrt(tile.square().sum(-1, keepdim=True) + self.call.eps)
        return found

    def _normal(self, name: str) -> Tensor:
        tile, inverse = self._raw[name]
        return tile * inverse if self.call.normalize_qk else tile

    def _through_norm(self, name: str, gradient: Tensor) -> Tensor:
        if not self.call.normalize_qk:
            return gradient
        unit, inverse = self._normal(name), self._raw[name][1]
        return inverse * (gradient - unit * (unit * gradient).sum(-1, keepdim=True))

    @cached_property
    def _queries(self) -> Tensor:
        return self._group(self._normal("q"))

    @cached_property
    def _keys(self) -> Tensor:
        return self._normal("k")

    @cached_property
    def _values(self) -> Tensor:
        return self._load(self.call.v)

    @cached_property
    def _beta(self) -> Tensor:
        return self._load(self.call.beta.unsqueeze(-1))

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Decays summed from each chunk's start, in fp64, and what is taken off for those that forget all.

        Beside the latter a sum would lose its digits, and of two infinite ones there is no difference.
        """
        if self.call.decay is None:
            zeros = torch.zeros_like(self._beta, dtype=torch.float64)
            return zeros, zeros
        decay = self._load(self.call.decay.unsqueeze(-1)).double()
        forgets = decay < _FORGETS
        return decay.masked_fill(forgets, 0.0).cumsum(2), forgets.double().mul_(_FORGETS).cumsum(2)

    def _decays(self, to: slice, since: Tensor, forgotten: Tensor) -> Tensor:
        """The decays since some sums until those of the rows ``to``."""
        sums, lost = self._sums
        return ((sums[:, :, to] - since) + (lost[:, :, to] - forgotten)).to(self._beta.dtype)

    @cached_property
    def _pairs(self) -> Tensor:
        """D, 0 above its diagonal."""
        later = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=self._beta.device).triu(1)
        sums, lost = self._sums
        return self._decays(slice(None), sums.mT, lost.mT).masked_fill(later, float("-inf")).exp_()

    @cached_property
    def _first(self) -> Tensor:
        sums, lost = self._sums
        return (sums + lost).to(self._beta.dtype).exp()

    @cached_property
    def _last(self) -> Tensor:
        return self._decays(slice(-1, None), *self._sums).exp()

    @cached_property
    def _whole(self) -> Tensor:
        return self._first[:, :, -1:]

    @cached_property
    def _inner(self) -> Tensor:
        """k kT ∘ D below its diagonal."""
        return (self._group(self._keys @ self._keys.mT) * self._pairs).tril_(-1)

    @cached_property
    def _scores(self) -> Tensor:
        """q kT ∘ D; what a NaN or an infinity above the diagonal would leave there is no row's."""
        return (self._group(self._normal("q") @ self._keys.mT) * self._pairs).tril_()


def _solve(system: Tensor, rows: Tensor, upper: bool = False) -> Tensor:
    return torch.linalg.solve_triangular(system, rows, upper=upper, unitriangular=True)
