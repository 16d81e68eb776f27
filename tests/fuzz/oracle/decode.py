"""Decode as its definition says: a few queries of each sequence over a long cache, in fp64, and a low-precision model of it.

Query t of T sits at position p = length - T + t and sees keys j with -right <= p - j <= left and 0 <= j < length, right never
positive. A mutant is a subclass with one method changed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz.oracle.tf32 import product


class Attended(NamedTuple):
    """What a decode call returns."""

    out: Tensor  # (batch, T, heads_q, head_dim_v)
    lse: Tensor  # (batch, heads_q, T)


class Decode:
    """The oracle; shapes as the package's: q (batch, T, heads_q, head_dim), caches (batch, capacity, heads_kv, ·) or pages."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        table: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window: tuple[int | None, int | None] | None = None,
        sink: Tensor | None = None,
        low: bool = False,
        turn: int = 0,
    ) -> Attended:
        """Out and lse of a call in fp64; with ``low`` those of a correct kernel of q's dtype.

        The model has fp32 scores and softmax, P unnormalised and rounded to the dtype, fp32 sums, and rounds out once. Each
        ``turn`` of it sums in another order and rounds P at another scale.
        """
        dtype = q.dtype
        wide = torch.promote_types(dtype, torch.float32) if low else torch.float64
        _, queries, heads, dim = q.shape
        keys, values = self.rows(k, v, lengths, table)
        count, heads_kv = keys.shape[1:3]
        seen = self.visible(lengths, queries, count, window)
        shown = seen.any(1)[:, :, None, None]
        keys = keys.to(wide).masked_fill(~shown, 0.0)
        values = values.to(wide).masked_fill(~shown, 0.0)
        # A query that sees nothing may hold anything too.
        blind = ~seen.any(2)
        keys, q = keys.roll(5 * turn, -1), q.roll(5 * turn, -1)
        rows = q.to(wide).masked_fill(blind[:, :, None, None], 0.0).unflatten(2, (heads_kv, heads // max(heads_kv, 1)))
        rounded = dtype if low else None
        scores = product(rows.permute(0, 2, 3, 1, 4), keys.permute(0, 2, 3, 1)[:, :, None], rounded) * self.scale(scale, dim)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        sinks = None if sink is None else self.sinks(sink.to(wide), scale, dim).view(1, heads_kv, -1, 1, 1)
        top = scores.amax(-1, keepdim=True) if count else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
        if sinks is not None:
            top = torch.maximum(top, sinks)
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + self.sink_share(sinks, top, seen)
        empty = total == 0
        lse = (top + torch.log(total.masked_fill(empty, 1.0))).masked_fill(empty, float("-inf"))
        if low:
            weights = (weights * 2.0 ** (0.37 * turn)).to(dtype).to(wide)
            total = total * 2.0 ** (0.37 * turn)
        out = product(weights, values.transpose(1, 2)[:, :, None], rounded) / total.masked_fill(empty, 1.0)
        out = out.flatten(1, 2).transpose(1, 2)
        lse = lse.flatten(1, 2).squeeze(-1)
        return Attended(out.to(dtype), lse.float()) if low else Attended(out, lse)

    def rows(self, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of every sequence by position, (batch, longest length, heads_kv, ·)."""
        longest = int(lengths.max()) if lengths.numel() else 0
        if table is None:
            return k[:, :longest], v[:, :longest]
        position = torch.arange(longest, device=k.device)
        page, offset = self.page(position, k.shape[1])
        used = position[None] < lengths[:, None]
        # Entries past a sequence's keys are not read: they may hold anything.
        entry = torch.where(used, table[:, page].long(), 0) if longest else table.new_zeros((len(table), 0)).long()
        if k.shape[0] == 0:
            return tuple(t.new_zeros((len(table), longest, *t.shape[2:])) for t in (k, v))  # type: ignore[return-value]
        return k[entry, offset[None]], v[entry, offset[None]]

    def page(self, position: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """Column of the table, and place in the page, of positions."""
        return position // page_size, position % page_size

    def visible(self, lengths: Tensor, queries: int, keys: int, window: tuple[int | None, int | None] | None) -> Tensor:
        """(batch, queries, keys) True where a query sees a key."""
        left, right = (None, None) if window is None else window
        position = self.position(lengths.long()[:, None], queries, torch.arange(queries, device=lengths.device))
        j = torch.arange(keys, device=lengths.device)
        distance = position[:, :, None] - j
        seen = (j < lengths[:, None, None]) & (distance >= (0 if right is None else max(0, -right)))
        return seen if left is None else seen & (distance <= left)

    def position(self, length: Tensor, queries: int, t: Tensor) -> Tensor:
        """Where query t of ``queries`` sits."""
        return length - queries + t

    def scale(self, scale: float | None, dim: int) -> float:
        return dim**-0.5 if scale is None else scale

    def sinks(self, sink: Tensor, scale: float | None, dim: int) -> Tensor:
        """The logit that joins the denominator."""
        return sink

    def sink_share(self, sinks: Tensor, top: Tensor, seen: Tensor) -> Tensor:
        """What the sink adds to the denominator of weights that are relative to ``top``."""
        return torch.exp(sinks - top)

    def append(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        lengths: Tensor,
        table: Tensor | None,
        slots: Tensor | None,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Write k and v (batch, T, heads_kv, ·) behind each sequence, in place, and advance the lengths.

        Every token has room. A negative slot leaves its token out, and the length does not count it.
        """
        tokens, page_size = k.shape[1], k_cache.shape[1]
        steps = torch.arange(tokens, device=k.device)
        kept = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if slots is None else slots >= 0
        position = lengths.long()[:, None] + steps
        if slots is not None:
            page, offset = self.page(slots.long(), page_size)
        elif table is None:
            page, offset = torch.arange(len(k), device=k.device)[:, None].expand_as(position), position
        else:
            column, offset = self.page(position, page_size)
            page = table.gather(1, column).long() if tokens else column
        k_cache[page[kept], offset[kept]] = k[kept]
        v_cache[page[kept], offset[kept]] = v[kept]
        lengths += kept.sum(1, dtype=torch.int32)


class WindowOffByOne(Decode):
    """One key too many on the left."""

    def visible(self, lengths: Tensor, queries: int, keys: int, window: tuple[int | None, int | None] | None) -> Tensor:
        if window is not None and window[0] is not None:
            window = (window[0] + 1, window[1])
        return super().visible(lengths, queries, keys, window)


class QueriesFromTheStart(Decode):
    """Query t sits at position t in a sequence that is longer than the queries: top-left alignment."""

    def position(self, length: Tensor, queries: int, t: Tensor) -> Tensor:
        return t.expand(length.shape[0], -1)


class QueryOneEarly(Decode):
    """Query t sits one position before its place."""

    def position(self, length: Tensor, queries: int, t: Tensor) -> Tensor:
        return super().position(length, queries, t) - 1


class LengthsIgnored(Decode):
    """Every sequence is as long as the longest."""

    def visible(self, lengths: Tensor, queries: int, keys: int, window: tuple[int | None, int | None] | None) -> Tensor:
        return super().visible(torch.full_like(lengths, keys), queries, keys, window)

    def rows(self, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        found = super().rows(k, v, lengths, table)
        return tuple(torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in found)  # type: ignore[return-value]


class SinkOfEverySplit(Decode):
    """The sink joins each split of 512 keys rather than once."""

    def sink_share(self, sinks: Tensor, top: Tensor, seen: Tensor) -> Tensor:
        splits = seen.any(1).sum(-1).div(512).ceil().clamp(min=1)
        return super().sink_share(sinks, top, seen) * splits[:, None, None, None, None].to(sinks.dtype)


class SinkScaled(Decode):
    """The sink is scaled as scores are."""

    def sinks(self, sink: Tensor, scale: float | None, dim: int) -> Tensor:
        return sink * self.scale(scale, dim)


class ScaleForgotten(Decode):
    """The default scale whatever was asked for."""

    def scale(self, scale: float | None, dim: int) -> float:
        return dim**-0.5


class PageOffsetShifted(Decode):
    """Keys of a page begin at its second slot."""

    def page(self, position: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        return position // page_size, (position + 1) % page_size


MUTANTS: tuple[type[Decode], ...] = (
    WindowOffByOne,
    QueriesFromTheStart,
    QueryOneEarly,
    LengthsIgnored,
    SinkOfEverySplit,
    SinkScaled,
    ScaleForgotten,
    PageOffsetShifted,
)
