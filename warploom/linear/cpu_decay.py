"""The CPU implementation's work on one block where sums fade: `cpu_block` with decays.

Within a chunk c_i sums the logs up to token i, its own among them. What came before the chunk reaches token i times exp(c_i),
key j reaches it times exp(c_i - c_j), j <= i, and the end of the chunk times exp(c_end - c_j): no exponent is above 0. Sums of
logs are fp64, in which their differences lose nothing.

The gradient of the log at token t sums what every pair of a query i >= t and a key j < t gives: of what came before the chunk,
of what comes after it, of both, and within it, where sums over rows and columns of the strict lower triangle give all t at
once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.linear.cpu_block import Block, Sums

# exp() of it is 0 in every dtype, and many of it still add up to a finite sum.
LOWEST = -1000.0


class DecayBlock(Block):
    """A block whose tokens multiply the sums before their keys join; the last dimension of its logs is the chunk."""

    def causal(self, sums: Sums, out: Tensor, norm: Tensor) -> None:
        (s, z), tiles = sums, self.scratch
        q, k, v = self._scaled(self._queries()), self._keys(), self._values()
        logs = self._logs()
        p = self._seen(tiles.product("p", q, k.mT), logs)
        rows = tiles.product("rows", p, v)
        den = p.sum(-1)
        before = self._before_rows(logs)
        fading, left = self._fading(logs), self._left(logs)
        for c in range(len(q)):
            row = q[c] * before[c]
            rows[c].baddbmm_(row, s)
            den[c] += torch.bmm(row, z.unsqueeze(-1)).squeeze(-1)
            self._join(sums, k[c] * left[c], v[c], fading[c])
        self._finish(rows, den, out, norm)

    def accumulate(self, sums: Sums) -> None:
        k, v = self._keys(), self._values()
        logs = self._logs()
        fading, left = self._fading(logs), self._left(logs)
        for c in range(len(k)):
            self._join(sums, k[c] * left[c], v[c], fading[c])

    def causal_backward(
        self, sums: Sums, dsums: Sums, dout: Tensor, norm: Tensor | None, gradients: tuple[Tensor, ...]
    ) -> None:
        (s, z), (ds, dz), tiles = sums, dsums, self.scratch
        mapped, k, v = self._queries(), self._keys(), self._values()
        q = self._scaled(mapped)
        dn, den = self._dnum(dout, norm)
        logs = self._logs()
        before, fading, left = self._before_rows(logs), self._fading(logs), self._left(logs)
        p = self._seen(tiles.product("p", q, k.mT), logs)
        dp = tiles.product("dp", dn, v.mT)
        dq = tiles.tile("rows", tuple(q.shape), q)
        # Sums before each chunk, which the gradient of the logs multiplies with those of what comes after it.
        firsts = tiles.tile("firsts", (len(q), *s.shape), s)
        firsts_z = tiles.tile("firsts_z", (len(q), *z.shape), z)
        for c in range(len(q)):
            firsts[c], firsts_z[c] = s, z
            torch.bmm(dn[c] * before[c], s.mT, out=dq[c])
            self._join(sums, k[c] * left[c], v[c], fading[c])
        share = None
        if den is not None:
            share = (tiles.dot(p, dp) + tiles.dot(q, dq)).unsqueeze(-1).div_(den)
            dp -= share
            dq.addcmul_(share * before, firsts_z.unsqueeze(2), value=-1)
        if len(gradients) > 3:
            met = torch.mul(p, dp, out=tiles.tile("met", tuple(p.shape), p))
            met.unflatten(2, (-1, self.chunk)).tril_(-1)
            rows = (met.sum(-1) + tiles.dot(q, dq)).unflatten(2, (-1, self.chunk)).sum(2)
            from_queries = rows - met.sum(2)
        self._seen(dp, logs)
        dq.flatten(0, 1).baddbmm_(dp.flatten(0, 1), k.flatten(0, 1))
        dk, dv = tiles.product("dk", dp.mT, q), tiles.product("dv", p.mT, dn)
        met_keys = q.new_zeros((len(q), *k.shape[1:3]))
        across = q.new_zeros((len(q), k.shape[1]))
        for c in reversed(range(len(q))):
            after = (torch.bmm(v[c], ds.mT) + dz.unsqueeze(1)) * left[c]
            met_keys[c] = (k[c] * after).sum(-1)
            across[c] = ((ds * firsts[c]).sum((1, 2)) + (dz * firsts_z[c]).sum(1)) * fading[c]
            dk[c] += after
            dv[c] += torch.bmm(k[c], ds) * left[c]
            row = q[c] * before[c]
            ds.mul_(fading[c, :, None, None]).baddbmm_(row.mT, dn[c])
            dz.mul_(fading[c, :, None])
            if share is not None:
                dz -= (row * share[c]).sum(1)
        if len(gradients) > 3:
            self._put_logs(gradients[3], from_queries, met_keys, across)
        self._put_queries(gradients[0], dq, mapped)
        self._put_keys(gradients[1], gradients[2], dk, dv, k)

    def accumulate_backward(
        self, dsums: Sums, dk: Tensor, dv: Tensor, dlogs: Tensor | None = None, first: Sums | None = None
    ) -> None:
        """As of `Block`; ``first``, the sums before the block, goes with the gradient of the logs."""
        (ds, dz), k, v = dsums, self._keys(), self._values()
        logs = self._logs()
        fading, left = self._fading(logs), self._left(logs)
        rows = self.scratch.product("dk", v, ds.mT.unsqueeze(0)).add_(dz.unsqueeze(1)).mul_(left)
        if dlogs is not None and first is not None:
            across = ((ds * first[0]).sum((1, 2)) + (dz * first[1]).sum(1)) * fading
            met_keys = self.scratch.dot(k, rows)
            self._put_logs(dlogs, torch.zeros_like(met_keys), met_keys, across)
        self._put_keys(dk, dv, rows, self.scratch.product("dv", k, ds.unsqueeze(0)).mul_(left), k)
        ds.mul_(fading[0, :, None, None])
        dz.mul_(fading[0, :, None])

    def _logs(self) -> Tensor:
        """Sums of logs up to each token, its own among them: (chunks, batch · heads_kv, chunk) fp64, flat past what counts."""
        tile = self._hide(self._load("logs", self.call.decays().unsqueeze(-1))).squeeze(-1)
        return tile.double().clamp_min_(LOWEST).cumsum(-1)

    def _like(self, factors: Tensor) -> Tensor:
        return factors.to(self.call.accumulator)

    def _before_rows(self, logs: Tensor) -> Tensor:
        """What is left at each row of queries of the sums before its chunk, (…, group · chunk, 1)."""
        group = self.call.q.shape[2] // self.call.k.shape[2]
        return self._like(logs.exp()).repeat(1, 1, group).unsqueeze(-1)

    def _left(self, logs: Tensor) -> Tensor:
        """What is left of each key at the end of its chunk, (…, chunk, 1)."""
        return self._like((logs[..., -1:] - logs).exp()).unsqueeze(-1)

    def _fading(self, logs: Tensor) -> Tensor:
        """What a chunk leaves of the sums before it, (chunks, batch · heads_kv)."""
        return self._like(logs[..., -1].exp())

    def _seen(self, scores: Tensor, logs: Tensor) -> Tensor:
        """Scores (…, group · chunk, chunk) times what is left of each key at each query, 0 for later keys, in place."""
        lower = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=scores.device).tril_()
        apart = (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill_(~lower, -torch.inf)
        scores.unflatten(2, (-1, self.chunk)).mul_(self._like(apart.exp_()).unsqueeze(2))
        # A later key's score may be a NaN that nobody sees.
        return self._visible(scores)

    def _join(self, sums: Sums, keys: Tensor, values: Tensor, fading: Tensor) -> None:
        """Sums after a chunk, in place; ``keys`` are what is left of them at its end."""
        s, z = sums
        s.mul_(fading[:, None, None]).baddbmm_(keys.mT, values)
        z.mul_(fading[:, None]).add_(keys.sum(1))

    def _put_logs(self, target: Tensor, from_queries: Tensor, met_keys: Tensor, across: Tensor) -> None:
        """Write the gradients of the logs.

        At token t: ``from_queries`` of tokens from t on, ``met_keys`` of those before t, and ``across`` of the chunk; 0 where
        everything was forgotten, whatever rounding left of its terms.
        """
        later = from_queries.flip(-1).cumsum(-1).flip(-1)
        found = later + (met_keys.cumsum(-1) - met_keys) + across.unsqueeze(-1)
        forgets = self._load("logs", self.call.decays().unsqueeze(-1)).squeeze(-1).exp() == 0.0
        self._store(target.unsqueeze(-1), self._hide(found.masked_fill_(forgets, 0.0).unsqueeze(-1)))
