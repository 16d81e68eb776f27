"""The work of the CPU implementation on one block of positions, whose tiles stay in the processor's caches.

Tiles are (chunks, batch · heads_kv, rows, dim). The query heads of a group are rows of one product with their key head, so
rows are chunk for keys and group · chunk for queries. In the adjoints, with den the saved denominators and dO the gradient:
dN = dO / den, delta_i = dO_i · o_i, and dP_ij = dN_i · v_j - delta_i / den_i is the gradient of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from warploom.linear.feature_maps import map_in_place, through_map_in_place
from warploom.linear.problem import LinearCall

Sums = tuple[Tensor, Tensor]  # s (batch · heads_kv, E, M) and z (batch · heads_kv, E), or their gradients


class Scratch:
    """Tiles that all blocks of a call use again: new ones would be unmapped pages, dearer than the work done on them."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def tile(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory called ``name`` as a tensor of any contents; what an earlier block had under that name is lost."""
        size = math.prod(shape)
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._held[name][:size].view(shape)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, tile by tile."""
        result = self.tile(name, (*a.shape[:-1], b.shape[-1]), a)
        torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=result.flatten(0, 1))
        return result

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Sums over the last dimension of a · b."""
        return torch.mul(a, b, out=self.tile("dot", tuple(a.shape), a)).sum(-1)

    def map(self, name: str, x: Tensor) -> Tensor:
        """A feature map, in place."""
        return map_in_place(name, x, self.tile("dot", tuple(x.shape), x))

    def through_map(self, name: str, gradient: Tensor, mapped: Tensor) -> Tensor:
        """The gradient through a feature map, in place."""
        return through_map_in_place(name, gradient, mapped, self.tile("dot", tuple(mapped.shape), mapped))


@dataclass(frozen=True)
class Block:
    """Positions start to stop of a dense call; methods write into the tensors and sums that they are given."""

    call: LinearCall
    scratch: Scratch
    chunk: int
    start: int
    stop: int

    def causal(self, sums: Sums, out: Tensor, norm: Tensor) -> None:
        """Out and norm of the block's queries; ``sums`` goes from before its first key to after its last."""
        (s, z), tiles = sums, self.scratch
        q, k, v = self._scaled(self._queries()), self._keys(), self._values()
        p = self._visible(tiles.product("p", q, k.mT))
        rows = tiles.product("rows", p, v)
        den, added = p.sum(-1), k.sum(2)
        if self.call.normalize:
            den += tiles.dot(q, _before(z, added).unsqueeze(2))
        z += added.sum(0)
        for row, query, key, value in zip(rows, q, k, v, strict=True):
            row.baddbmm_(query, s)
            s.baddbmm_(key.mT, value)
        self._finish(rows, den, out, norm)

    def read(self, sums: Sums, out: Tensor, norm: Tensor) -> None:
        """Out and norm of the block's queries, which see exactly what is in ``sums``; the block is one chunk."""
        q = self._scaled(self._queries())
        den = self.scratch.dot(q, sums[1].unsqueeze(1))
        self._finish(self.scratch.product("rows", q, sums[0].unsqueeze(0)), den, out, norm)

    def accumulate(self, sums: Sums) -> None:
        """Add the block's keys to ``sums``."""
        k, v = self._keys(), self._values()
        for key, value in zip(k, v, strict=True):
            sums[0].baddbmm_(key.mT, value)
            sums[1].add_(key.sum(1))

    def causal_backward(
        self, sums: Sums, dsums: Sums, dout: Tensor, norm: Tensor | None, gradients: tuple[Tensor, ...]
    ) -> None:
        """Adjoint of `causal`: ``sums`` is what it began with (consumed), ``dsums`` goes from after it to before it."""
        (s, z), (ds, dz), tiles = sums, dsums, self.scratch
        mapped, k, v = self._queries(), self._keys(), self._values()
        q = self._scaled(mapped)
        dn, den = self._dnum(dout, norm)
        p = self._visible(tiles.product("p", q, k.mT))
        dp = tiles.product("dp", dn, v.mT)
        dq = tiles.tile("rows", tuple(q.shape), q)
        for row, grad, key, value in zip(dq, dn, k, v, strict=True):
            torch.bmm(grad, s.mT, out=row)
            s.baddbmm_(key.mT, value)
        if den is not None:
            # Where a score is hidden p is 0, so dp need not be.
            share = (tiles.dot(p, dp) + tiles.dot(q, dq)).unsqueeze(-1).div_(den)
            dp -= share
            dq.addcmul_(share, _before(z, k.sum(2)).unsqueeze(2), value=-1)
        self._visible(dp)
        dq.flatten(0, 1).baddbmm_(dp.flatten(0, 1), k.flatten(0, 1))
        dk, dv = tiles.product("dk", dp.mT, q), tiles.product("dv", p.mT, dn)
        if den is None:
            dk += dz.unsqueeze(1)
        else:
            ends = torch.mul(q, share, out=tiles.tile("dot", tuple(q.shape), q)).sum(2).neg_()
            dk += _before(dz, ends.flip(0)).flip(0).unsqueeze(2)
            dz += ends.sum(0)
        for c in reversed(range(len(q))):
            dk[c].baddbmm_(v[c], ds.mT)
            dv[c].baddbmm_(k[c], ds)
            ds.baddbmm_(q[c].mT, dn[c])
        self._put_queries(gradients[0], dq, mapped)
        self._put_keys(gradients[1], gradients[2], dk, dv, k)

    def read_backward(self, sums: Sums, dsums: Sums, dout: Tensor, norm: Tensor | None, dq: Tensor) -> None:
        """Adjoint of `read`: adds to ``dsums``."""
        mapped = self._queries()
        q = self._scaled(mapped)
        dn, den = self._dnum(dout, norm)
        rows = self.scratch.product("rows", dn, sums[0].mT.unsqueeze(0))
        dsums[0].baddbmm_(q[0].mT, dn[0])
        if den is not None:
            share = self.scratch.dot(q, rows).unsqueeze(-1).div_(den)
            rows.addcmul_(share, sums[1].unsqueeze(1), value=-1)
            dsums[1].sub_((q * share).sum((0, 2)))
        self._put_queries(dq, rows, mapped)

    def accumulate_backward(self, dsums: Sums, dk: Tensor, dv: Tensor) -> None:
        """Adjoint of `accumulate`; the block is one chunk."""
        k, v = self._keys(), self._values()
        rows = self.scratch.product("dk", v, dsums[0].mT.unsqueeze(0)).add_(dsums[1].unsqueeze(1))
        self._put_keys(dk, dv, rows, self.scratch.product("dv", k, dsums[0].unsqueeze(0)), k)

    def _queries(self) -> Tensor:
        return self.scratch.map(self.call.map_q, self._load("q", self.call.q))

    def _keys(self) -> Tensor:
        """Mapped keys, 0 where hidden."""
        return self._hide(self.scratch.map(self.call.map_k, self._load("k", self.call.k)))

    def _values(self) -> Tensor:
        """Values, 0 where hidden."""
        return self._hide(self._load("v", self.call.v))

    def _scaled(self, mapped: Tensor) -> Tensor:
        """Mapped queries times the scale, in memory of their own."""
        if self.call.scale == 1.0:
            return mapped
        return torch.mul(mapped, self.call.scale, out=self.scratch.tile("scaled", tuple(mapped.shape), mapped))

    def _dnum(self, dout: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """dN, and the denominators (…, 1), 1 past the last query."""
        dn = self._load("dn", dout)
        if norm is None:
            return dn, None
        den = self._load("den", norm.transpose(1, 2).unsqueeze(-1), fill=1.0)
        return dn.div_(den), den

    def _finish(self, rows: Tensor, den: Tensor, out: Tensor, norm: Tensor) -> None:
        if self.call.normalize:
            den += self.call.eps
            rows.div_(den.unsqueeze(-1))
            self._store(norm.transpose(1, 2).unsqueeze(-1), den.unsqueeze(-1))
        self._store(out, rows)

    def _put_queries(self, target: Tensor, gradient: Tensor, mapped: Tensor) -> None:
        if self.call.scale != 1.0:
            gradient.mul_(self.call.scale)
        self._store(target, self.scratch.through_map(self.call.map_q, gradient, mapped))

    def _put_keys(self, dk: Tensor, dv: Tensor, gradient_k: Tensor, gradient_v: Tensor, mapped: Tensor) -> None:
        self._store(dk, self._hide(self.scratch.through_map(self.call.map_k, gradient_k, mapped)))
        self._store(dv, self._hide(gradient_v))

    def _visible(self, scores: Tensor) -> Tensor:
        """Scores (…, group · chunk, chunk) with those of later keys made 0, in place."""
        scores.unflatten(2, (-1, self.chunk)).tril_()
        return scores

    def _hide(self, tile: Tensor) -> Tensor:
        """A tile of keys with rows from the key length on made 0, in place, whatever they hold."""
        chunks, heads, chunk, _ = tile.shape
        if self.call.lengths is not None:
            batch = self.call.k.shape[0]
            position = torch.arange(self.start, self.start + chunks * chunk, device=tile.device)
            hidden = position >= self.call.lengths.clamp(max=self.stop).unsqueeze(1)
            hidden = hidden.view(batch, chunks, 1, chunk).transpose(0, 1).expand(-1, -1, heads // batch, -1)
            tile.masked_fill_(hidden.reshape(chunks, heads, chunk, 1), 0.0)
        elif (self.stop - self.start) % chunk:
            tile[-1, :, (self.stop - self.start) % chunk :] = 0.0
        return tile

    def _load(self, name: str, x: Tensor, fill: float = 0.0) -> Tensor:
        """A tile of x (batch, seqlen, heads, dim) in the accumulator's dtype, ``fill`` past the block's end."""
        chunks = -(-(self.stop - self.start) // self.chunk)
        batch, _, heads, dim = x.shape
        heads_kv = self.call.k.shape[2]
        shape = (chunks, batch, heads_kv, heads // heads_kv, self.chunk, dim)
        tile = self.scratch.tile(name, shape, x.new_empty(0, dtype=self.call.accumulator))
        if (self.stop - self.start) % self.chunk:
            tile[-1].fill_(fill)
        for part, source in self._pieces(tile, x):
            part.copy_(source)
        return tile.view(chunks, batch * heads_kv, -1, dim)

    def _store(self, x: Tensor, tile: Tensor) -> None:
        """Write a tile to its positions of x (batch, seqlen, heads, dim)."""
        batch, _, heads, dim = x.shape
        heads_kv = self.call.k.shape[2]
        for part, target in self._pieces(tile.view(-1, batch, heads_kv, heads // heads_kv, self.chunk, dim), x):
            target.copy_(part)

    def _pieces(self, tile: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a tile and of x that belong together: the whole chunks, then what is left."""
        heads_kv, whole = self.call.k.shape[2], (self.stop - self.start) // self.chunk
        middle = self.start + whole * self.chunk
        for part, rows in ((tile[:whole], x[:, self.start : middle]), (tile[whole:], x[:, middle : self.stop])):
            if rows.shape[1]:
                size = min(self.chunk, rows.shape[1])
                split = rows.unflatten(1, (-1, size)).unflatten(3, (heads_kv, -1))
                yield part[..., :size, :], split.permute(1, 0, 3, 4, 2, 5)


def _before(first: Tensor, added: Tensor) -> Tensor:
    """Running sums before each entry of ``added`` (chunks, …), beginning with ``first``."""
    return torch.cat([first.unsqueeze(0), added[:-1]]).cumsum(0)
