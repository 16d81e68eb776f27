"""Decode as its definition says: a few queries of each sequence over a long cache, in fp64, and a low-precision model of it.

Query t of T sits at position p = length - T + t and sees keys j with -right <= p - j <= left and 0 <= j < length, right never
positive. Under a tree of drafts the last T keys are the queries' own: each is seen by its token and those after it on a path,
and stands where its token does, at length - T + depth. A cache of FP8 holds e4m3 numbers times fp32 scales, of keys that may be
rotated. A bias is added behind the softcap by where query and key stand. A mutant is a subclass with one method changed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz.oracle.tf32 import product


class Attended(NamedTuple):
    """What a decode call returns."""

    out: Tensor  # (batch, T, heads_q, head_dim_v)
    lse: Tensor  # (batch, heads_q, T)


class Bias(NamedTuple):
    """What a bias is made of, by kind.

    "alibi": slopes (batch|1, heads_q); "relative": entries of distances from -reach to reach, (heads_q|1, 2 reach + 1);
    "one_side": of those from 0 to reach, (heads_q|1, reach + 1); "key": (batch|1, heads_q|1, keys).
    """

    kind: str
    leaf: Tensor


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
        tree: Tensor | None = None,
        bias: Bias | None = None,
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
        kin = None if tree is None else self.kin(tree)
        seen = self.visible(lengths, queries, count, window, kin)
        shown, added = seen.any(1), None
        if bias is not None:
            added = self.added(bias, *self.places(lengths, queries, count, kin), heads, wide)
            shown = (seen[:, None] & (added != float("-inf"))).any(2).any(1)
            added = added.unflatten(1, (heads_kv, heads // max(heads_kv, 1)))
        shown = shown[:, :, None, None]
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
        if added is not None:
            scores = self.biased(scores, added)
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
        out = self.weighted(weights, values.transpose(1, 2)[:, :, None], scores != float("-inf"), rounded)
        out = out / total.masked_fill(empty, 1.0)
        out = out.flatten(1, 2).transpose(1, 2)
        lse = lse.flatten(1, 2).squeeze(-1)
        return Attended(out.to(dtype), lse.float()) if low else Attended(out, lse)

    def weighted(self, weights: Tensor, values: Tensor, seen: Tensor, rounded: torch.dtype | None) -> Tensor:
        """P V. A NaN reaches the rows that see it alone: a page may be shared with a sequence that hides it from some."""
        nan = values.isnan()
        out = product(weights, values.masked_fill(nan, 0.0), rounded)
        return out.masked_fill((seen.to(out.dtype) @ nan.to(out.dtype)) > 0, float("nan")) if nan.any() else out

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

    def visible(
        self, lengths: Tensor, queries: int, keys: int, window: tuple[int | None, int | None] | None, kin: Tensor | None = None
    ) -> Tensor:
        """(batch, queries, keys) True where a query sees a key."""
        left, right = (None, None) if window is None else window
        j = torch.arange(keys, device=lengths.device)
        seen = j < lengths[:, None, None]
        tokens, place = self.places(lengths, queries, keys, kin)
        distance = tokens[:, :, None] - place[:, None]
        if kin is not None:
            own = j - (lengths.long() - queries)[:, None]
            related = kin.expand(len(lengths), -1, -1).gather(
                2, own.clamp(0, queries - 1)[:, None].expand(-1, queries, -1)
            )
            seen = seen & ((own < 0)[:, None] | related)
        seen = seen & (distance >= (0 if right is None else max(0, -right)))
        return seen if left is None else seen & (distance <= left)

    def places(self, lengths: Tensor, queries: int, keys: int, kin: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where queries (batch, T) and keys (batch, keys) stand."""
        j = torch.arange(keys, device=lengths.device).expand(len(lengths), -1)
        if kin is None:
            return self.position(lengths.long()[:, None], queries, torch.arange(queries, device=lengths.device)), j
        before = (lengths.long() - queries)[:, None]
        depth = self.depth(kin.expand(len(lengths), -1, -1))
        own = j - before  # which of the drafts a key is, negative of the text
        return before + depth, torch.where(own < 0, j, before + depth.gather(1, own.clamp(0, queries - 1)))

    def added(self, bias: Bias, tokens: Tensor, places: Tensor, heads: int, wide: torch.dtype) -> Tensor:
        """A bias as (batch, heads_q, T, keys)."""
        kind, leaf = bias.kind, bias.leaf.to(wide)
        distance = tokens[:, :, None] - places[:, None]
        shape = len(tokens), heads, *distance.shape[1:]
        if kind == "alibi":
            return (-leaf[:, :, None, None] * distance.abs()[:, None]).expand(shape)
        if kind == "key":
            leaf, at = leaf.expand(len(tokens), heads, -1), places.clamp(min=0)[:, None].expand(-1, heads, -1)
            return leaf.gather(2, at)[:, :, None].expand(shape)
        reach = leaf.shape[1] // 2 if kind == "relative" else leaf.shape[1] - 1
        at = distance.clamp(-reach, reach) + reach if kind == "relative" else distance.clamp(0, reach)
        return leaf[:, at].transpose(0, 1).expand(shape)

    def biased(self, scores: Tensor, added: Tensor) -> Tensor:
        """Scores with what is added, both (batch, heads_kv, group, T, keys)."""
        return scores + added

    def kin(self, tree: Tensor) -> Tensor:
        """(trees, T, T) True where the column's token is the row's own or an ancestor, of parents (trees, T)."""
        found = torch.zeros(*tree.shape, tree.shape[1], dtype=torch.bool)
        for n, parents in enumerate(tree.tolist()):
            for t, parent in enumerate(parents):
                if parent >= 0:
                    found[n, t] = found[n, parent]
                found[n, t, t] = True
        return found.to(tree.device)

    def depth(self, kin: Tensor) -> Tensor:
        """How many ancestors each token has, (trees, T)."""
        return kin.sum(-1) - 1

    def rotated(self, x: Tensor, seed: int) -> Tensor:
        """x (..., head_dim) by the random signs and the orthogonal matrix of a seed, in x's precision."""
        dim = x.shape[-1]
        power = dim & -dim
        odd, matrix = dim // power, torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < power:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        k = torch.arange(odd, dtype=torch.float64)
        waves = torch.cos(math.pi * (2 * k + 1) * k[:, None] / (2 * odd)) * math.sqrt(2 / odd)
        waves[0] = math.sqrt(1 / odd)
        both = torch.kron(matrix / math.sqrt(power), waves) * self.signs(dim, seed)
        return x @ both.mT.to(x.device, x.dtype)

    def signs(self, dim: int, seed: int) -> Tensor:
        """fp64 (dim,): -1 where an output of SplitMix64, started at the seed, has its top bit set."""
        found, state, mask = [], seed & (2**64 - 1), 2**64 - 1
        for _ in range(dim):
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            found.append(-1.0 if (z ^ (z >> 31)) >> 63 else 1.0)
        return torch.tensor(found, dtype=torch.float64)

    def quantized(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (..., heads, dim) as e4m3's numbers in fp32, and the scales: a row's own if none is given."""
        x = x.float()
        if scale is None:
            top = x.abs().amax(-1)
            # By a number in place of a tensor CUDA multiplies by the rounded reciprocal.
            scale = torch.where(top == 0, 1.0, top / torch.full_like(top, 448.0))
        near = (x / scale[..., None]).clamp(-448.0, 448.0)
        # Four bits of a significand, and of what is below 2^-6 multiples of 2^-9; to the nearest, halves to even.
        step = torch.exp2(torch.floor(torch.log2(near.abs().clamp_min(2.0**-6))) - 3)
        return torch.where(torch.isfinite(x), (near / step).round() * step, torch.nan), scale

    def widened(self, t: Tensor, scale: Tensor) -> Tensor:
        """Numbers of an FP8 cache in fp64."""
        return t.double() * scale.double()[..., None]

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
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write k and v (batch, T, heads_kv, ·) behind each sequence, in place, and advance the lengths.

        Every token has room. A negative slot leaves its token out, and the length does not count it. With ``scales`` of k and
        v they are written as FP8, and scales a token beside them.
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
        for n, (cache, new) in enumerate(((k_cache, k), (v_cache, v))):
            if scales is None:
                cache[page[kept], offset[kept]] = new[kept]
                continue
            of_tokens = scales[n].ndim > 1
            numbers, found = self.quantized(new, None if of_tokens else scales[n])
            # As bytes, since indexing knows no FP8.
            narrow = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
            cache.view(torch.uint8)[page[kept], offset[kept]] = narrow[kept]
            if of_tokens:
                scales[n][page[kept], offset[kept]] = found[kept]
        lengths += kept.sum(1, dtype=torch.int32)


class WindowOffByOne(Decode):
    """One key too many on the left."""

    def visible(
        self, lengths: Tensor, queries: int, keys: int, window: tuple[int | None, int | None] | None, kin: Tensor | None = None
    ) -> Tensor:
        if window is not None and window[0] is not None:
            window = (window[0] + 1, window[1])
        return super().visible(lengths, queries, keys, window, kin)


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

    def visible(
        self, lengths: Tensor, queries: int, keys: int, window: tuple[int | None, int | None] | None, kin: Tensor | None = None
    ) -> Tensor:
        return super().visible(torch.full_like(lengths, keys), queries, keys, window, kin)

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


class TreeIgnored(Decode):
    """A draft is a chain."""

    def kin(self, tree: Tensor) -> Tensor:
        return torch.ones(*tree.shape, tree.shape[1], dtype=torch.bool, device=tree.device).tril()


class GrandparentsHidden(Decode):
    """A token sees its parent, but none above it."""

    def kin(self, tree: Tensor) -> Tensor:
        eye = torch.eye(tree.shape[1], dtype=torch.bool, device=tree.device).expand(*tree.shape, -1)
        return eye | (tree[..., None] == torch.arange(tree.shape[1], device=tree.device))


class WindowsOfPlacesInTheDraft(Decode):
    """Under a tree windows count from a token's number, not from its depth."""

    def depth(self, kin: Tensor) -> Tensor:
        return torch.arange(kin.shape[-1], device=kin.device).expand(len(kin), -1)


class BiasIgnored(Decode):
    """Nothing is added, though what -inf hides stays hidden."""

    def biased(self, scores: Tensor, added: Tensor) -> Tensor:
        return scores.masked_fill(added == float("-inf"), float("-inf"))


class BiasOfTheKeyBefore(Decode):
    """Every key has the bias of the one before it."""

    def added(self, bias: Bias, tokens: Tensor, places: Tensor, heads: int, wide: torch.dtype) -> Tensor:
        return super().added(bias, tokens, places - 1, heads, wide)


class BiasOfPlacesInTheDraft(Decode):
    """Under a tree biases count from a token's number, not from its depth, but windows do not."""

    def added(self, bias: Bias, tokens: Tensor, places: Tensor, heads: int, wide: torch.dtype) -> Tensor:
        last = tokens[:, :1] + torch.arange(tokens.shape[1], device=tokens.device)
        keys = torch.arange(places.shape[1], device=places.device).expand_as(places)
        return super().added(bias, last, keys, heads, wide)


class SignsFromTheSecond(Decode):
    """SplitMix64's first output is left out."""

    def signs(self, dim: int, seed: int) -> Tensor:
        return super().signs(dim + 1, seed)[1:]


class ScalesForgotten(Decode):
    """The numbers of an FP8 cache are taken as they are."""

    def widened(self, t: Tensor, scale: Tensor) -> Tensor:
        return super().widened(t, torch.ones_like(scale))


MUTANTS: tuple[type[Decode], ...] = (
    WindowOffByOne,
    QueriesFromTheStart,
    QueryOneEarly,
    LengthsIgnored,
    SinkOfEverySplit,
    SinkScaled,
    ScaleForgotten,
    PageOffsetShifted,
    TreeIgnored,
    GrandparentsHidden,
    WindowsOfPlacesInTheDraft,
    BiasIgnored,
    BiasOfTheKeyBefore,
    BiasOfPlacesInTheDraft,
    SignsFromTheSecond,
    ScalesForgotten,
)
