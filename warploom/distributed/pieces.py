"""What one rank computes against a block of keys: few dense calls, each of rows and keys that lie together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.attention.problem import AttentionArgs
from warploom.distributed.collectives import Exchange, sums_of
from warploom.distributed.layout import Layout, Run, joined, length_of
from warploom.distributed.layout import whole as whole_layout
from warploom.distributed.whole import Whole
from warploom.masks.intervals import ResolvedMask, finish, visible_per_column

# Up to so many runs of queries are calls of their own, under their band: kernels know a band better than its columns.
MOST_RUNS = 2
_FEW = 16  # pairs of runs that are worth looking at for that
# Keys of all heads of a causal call, from which on its blocks of 128 fill a device's processors (132 of an H200) three times:
# the longest does not outlast the others.
MANY_KEYS = 3 * 132 * 128
_NO_MASK = ResolvedMask(None, None, None, None, None, None)


class Sequences(NamedTuple):
    """Packed sequences within a piece's rows and keys: where they start and the last one ends, int32, and the longest."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class Piece:
    """One dense call: these rows of a rank's queries, these keys of a block, under this mask.

    ``offset``, if there is one, is the number of the first row in the whole; rows of the mask count from the whole's first
    then, and so do the elements of dropout (`AttentionArgs.q_offset`). ``head`` is the number of the first query head in the
    whole. With ``among``, (first, count), the call has count rows: these from the first on, and others that nobody reads.
    With ``sequences`` it is a packed call, of one batch entry.
    """

    rows: Run
    keys: Run
    mask: ResolvedMask
    offset: int | None = None
    head: int = 0
    among: Run | None = None
    sequences: Sequences | None = None

    def heads(self, kv: Run, q: Run, heads_kv: int) -> Piece:
        """Of some heads: of vectors that tell them apart theirs."""

        def cut(t: Tensor | None) -> Tensor | None:
            if t is None or t.shape[1] == 1:
                return t
            return t[:, slice(*kv) if t.shape[1] == heads_kv else slice(*q)].contiguous()

        mask = ResolvedMask(self.mask.left, self.mask.right, *[cut(t) for t in self.mask.vectors])
        return replace(self, mask=mask, head=q[0])

    def to(self, device: torch.device) -> Piece:
        """With the vectors on a device."""
        vectors = [None if t is None else t.to(device) for t in self.mask.vectors]
        sequences = self.sequences
        if sequences is not None:
            starts = [t.to(device) for t in sequences[:2]]
            sequences = sequences._replace(starts_q=starts[0], starts_k=starts[1])
        return replace(self, mask=ResolvedMask(self.mask.left, self.mask.right, *vectors), sequences=sequences)

    def packed(self, args: AttentionArgs) -> AttentionArgs:
        """The call, whose q, k and v have a batch dimension, as one of the piece's sequences, if it has them."""
        if self.sequences is None:
            return args
        starts_q, starts_k, longest_q, longest_k = self.sequences
        args = args._replace(q=args.q[0], k=args.k[0], v=args.v[0], cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
        return args._replace(max_seqlen_q=longest_q, max_seqlen_k=longest_k)


def pieces(whole: Whole, layout: Layout, rank: int, keys: Sequence[Run]) -> list[Piece]:
    """Of a rank's queries against keys.

    Together they hold each visible element once. Where keys are one run, no row is in two of them; rows that are in none see
    nothing.

    Args:
        layout: of the queries.
        keys: runs of the whole's keys, ascending, which the block holds in this order.
    """
    if not keys:
        return []
    if whole.starts is None and len(layout.runs[rank]) * len(keys) <= _FEW:
        runs = list(islice(_by_runs(whole, layout, rank, keys), MOST_RUNS + 1))
        if len(runs) <= MOST_RUNS:
            return runs
    piece = column_piece(whole, layout, rank, keys)
    return list(_by_runs(whole, layout, rank, keys)) if piece is None else [piece]


def column_piece(whole: Whole, layout: Layout, rank: int, keys: Sequence[Run]) -> Piece | None:
    """One call of all of a rank's queries against runs of keys in any order; None where vectors cannot say the mask."""
    mask = whole.of_rows(layout, rank)
    if mask is None:
        return None
    columns = torch.cat([torch.arange(a, b) for a, b in keys])
    vectors = [None if t is None else t[..., columns].contiguous() for t in mask.vectors]
    return Piece((0, layout.counts[rank]), (0, len(columns)), ResolvedMask(None, None, *vectors))


def offset_pieces(whole: Whole, layout: Layout, rank: int) -> list[Piece]:
    """Of a rank's queries against all keys from the first on, with what dropout's elements are counted by."""
    shift = whole.seqlen_k - whole.seqlen_q
    left, right, *vectors = whole.mask
    left, right = None if left is None else left - shift, None if right is None else right + shift
    found, row = [], 0
    for a, b in layout.runs[rank]:
        _, end = _within_band(whole, (a, b), (0, whole.seqlen_k))
        if end > 0:
            cut = [None if t is None else t[..., :end].contiguous() for t in vectors]
            found.append(Piece((row, row + b - a), (0, end), ResolvedMask(left, right, *cut), a))
        row += b - a
    return found


def fixed_pieces(whole: Whole, layout: Layout, rank: int, unit: int, dropout: bool) -> list[Piece]:
    """Of a rank's queries against all keys: calls in which a row's bits do not depend on who holds which other rows.

    Keys begin at the first of all, or of the packed sequence, and every call has the whole's kind of mask, whether or not its
    rows meet all of it.

    Args:
        unit: 0 for kernels in which a row's bits depend on no other row: a run of queries is a call. Otherwise calls are the
            same whoever makes them: of so many rows, counted from the sequence's first, with zeros for those of other ranks.
        dropout: rows are numbered as the whole's.
    """
    found, row = [], 0
    sequences = [((0, whole.seqlen_q), (0, whole.seqlen_k))]
    if whole.starts is not None:
        sequences = [(sequence, sequence) for sequence in pairwise(whole.starts)]
    for a, b in layout.runs[rank]:
        for (start, last), keys in sequences:
            first, end = max(a, start), min(b, last)
            if first >= end or keys[0] == keys[1]:
                continue
            for at in range(first - (first - start) % unit, end, unit) if unit else (first,):
                rows = (at, min(at + unit, last)) if unit else (first, end)
                own = max(first, rows[0]), min(end, rows[1])
                among = (own[0] - rows[0], rows[1] - rows[0]) if unit else None
                mask, high = _fixed_mask(whole, rows, keys, dropout)
                place = row + own[0] - a, row + own[1] - a
                found.append(Piece(place, (keys[0], high), mask, rows[0] if dropout else None, among=among))
        row += b - a
    return found


def _fixed_mask(whole: Whole, rows: Run, keys: Run, dropout: bool) -> tuple[ResolvedMask, int]:
    """The mask of rows and of keys up to the last one that the band shows them, and where these end."""
    (a, b), (low, high), shift = rows, keys, whole.seqlen_k - whole.seqlen_q
    left, right, *vectors = whole.mask
    if right is not None:
        high = max(min(high, b + shift + right), low + 1)  # a kernel says what rows have that see nothing
    off = shift if dropout else b + shift - high
    cut = [None if t is None else t[..., low:high] for t in vectors]
    if not dropout:
        cut = [None if t is None else t.clamp(a, b) - a for t in cut]
    band = None if left is None else left - off, None if right is None else right + off
    return finish(ResolvedMask(*band, *cut)), high


def _by_runs(whole: Whole, layout: Layout, rank: int, keys: Sequence[Run]) -> Iterator[Piece]:
    """Each run of queries with each run of keys, cut where packed sequences begin; without those that show nothing."""
    row = 0
    sequences: Sequence[Run | None] = [None]
    if whole.starts is not None:
        sequences = list(pairwise(whole.starts))
    for a, b in layout.runs[rank]:
        for sequence in sequences:
            first, end = (a, b) if sequence is None else (max(a, sequence[0]), min(b, sequence[1]))
            if first >= end:
                continue
            at = 0
            for c, d in keys:
                low, high = (c, d) if sequence is None else (max(c, sequence[0]), min(d, sequence[1]))
                low, high = _within_band(whole, (first, end), (low, high))
                mask = _cut(whole, (first, end), (low, high)) if low < high else None
                if mask is not None:
                    yield Piece((row + first - a, row + end - a), (at + low - c, at + high - c), mask)
                at += d - c
        row += b - a


def _within_band(whole: Whole, rows: Run, keys: Run) -> Run:
    """Of the keys those that the band shows to some row."""
    shift, (low, high) = whole.seqlen_k - whole.seqlen_q, keys
    if whole.mask.left is not None:
        low = max(low, rows[0] + shift - whole.mask.left)
    if whole.mask.right is not None:
        high = min(high, rows[1] + shift + whole.mask.right)
    return low, high


def _cut(whole: Whole, rows: Run, keys: Run) -> ResolvedMask | None:
    """The mask of rows [a, b) and keys [c, d) as a call of their own has it; None where it shows nothing."""
    (a, b), (c, d) = rows, keys
    # A call aligns its last row with its last key.
    off = b + whole.seqlen_k - whole.seqlen_q - d
    left, right, *vectors = whole.mask
    left, right = None if left is None else left - off, None if right is None else right + off
    # A side of the band that the corners of this call do not reach hides nothing: its kernel need not know of it. Beside a left
    # one that does, though, it would be another kernel than that of the whole call, and a rarer one.
    left = None if left is not None and left >= d - c - 1 else left
    right = None if left is None and right is not None and right >= b - a - 1 else right
    cut = [None if t is None else t[..., c:d].clamp(a, b) - a for t in vectors]
    mask = finish(ResolvedMask(left, right, *cut))
    if any([t is not None for t in mask.vectors]) and not bool(visible_per_column(mask, b - a, d - c, "cpu").any()):
        return None
    return mask


class Sharded:
    """A mask as one rank of a plan needs it, each part worked out once: pieces on one device, what ranks need of each other."""

    def __init__(self, whole: Whole, queries: Layout, keys: Layout, rank: int, chunk: int, device: torch.device) -> None:
        self.whole, self.queries, self.keys, self.rank, self.device = whole, queries, keys, rank, device
        self._chunk = chunk
        self._all: tuple[Run, ...] = ((0, whole.seqlen_k),) if whole.seqlen_k else ()
        self._made: dict[tuple[object, ...], tuple[Piece, ...]] = {}
        self._seen: dict[int, Tensor] = {}
        self._needed: dict[tuple[int, int], tuple[Run, ...]] = {}
        self._rows: dict[int, Tensor] = {}
        self._runs: dict[int, list[Run]] = {}
        self._idle: dict[int, bool] = {}
        self.launchers: dict[Hashable, Any] = {}  # of its pieces, as `local.Run` has them
        self.kept: dict[str, Any] = {}  # what others work out of it once

    def gathered(self, dropout: bool, unit: int | None = None) -> tuple[Piece, ...]:
        """This rank's queries against all keys in order; ``unit``: those of ``fixed_pieces``."""
        make = offset_pieces if dropout else partial(pieces, keys=self._all)
        make = make if unit is None else partial(fixed_pieces, unit=unit, dropout=dropout)
        return self._placed(("gathered", dropout, unit), lambda: make(self.whole, self.queries, self.rank))

    def exchanged(self) -> tuple[Piece, ...] | None:
        """This rank's queries against the keys that it sees, as `Exchanging` brings them; None: vectors cannot say it."""
        if self.whole.as_columns is None:
            return None

        def make() -> list[Piece]:
            runs = [run for source in (*self.others, self.rank) for run in self.needed(self.rank, source)]
            piece = column_piece(self.whole, self.queries, self.rank, runs) if runs else None
            return [] if piece is None else [piece]

        return self._placed(("exchanged",), make)

    @cached_property
    def causal(self) -> bool:
        """Whether rows are those of the keys and see all before them: so a rank's own are a causal call again."""
        left, right, *vectors = self.whole.mask
        alone = self.whole.starts is None and left is None and right == 0 and all([t is None for t in vectors])
        return alone and self.queries == self.keys

    def against_others(self) -> tuple[Piece, ...]:
        """This rank's queries against the keys that come from others, as `Exchanging` brings them, of a causal call.

        Those that lie between the same two of its runs are all seen by the same rows.
        """

        def make() -> list[Piece]:
            runs = [run for source in self.others for run in self.needed(self.rank, source)]
            if not runs:
                return []
            before, rows = self.queries.before(self.rank), self.queries.counts[self.rank]
            firsts = {int(before[end]) for _, end in runs}
            if len(firsts) == 1:
                return [Piece((firsts.pop(), rows), (0, length_of(runs)), _NO_MASK)]
            piece = column_piece(self.whole, self.queries, self.rank, runs)
            return [] if piece is None else [piece]

        return self._placed(("others",), make)

    @cached_property
    def exchange(self) -> Exchange:
        """Which keys go where for ``exchanged``."""
        ranks = range(len(self.keys.counts))
        given = [self.held(reader) if reader != self.rank else [] for reader in ranks]
        rows, runs = [self.rows(reader) for reader in self.others], [run for runs in given for run in runs]
        return Exchange(
            runs,
            torch.cat(rows) if rows else self.rows(self.rank)[:0],
            [length_of(runs) for runs in given],
            [length_of(self.needed(self.rank, source)) if source != self.rank else 0 for source in ranks],
            self.held(self.rank),
            sums_of(self.keys.counts[self.rank], self.held(self.rank), runs),
            self.most_taken == 0,
        )

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self.keys.counts)) if rank != self.rank]

    def held(self, reader: int) -> list[Run]:
        """Runs of this rank's keys that ``reader`` sees something of, as it holds them."""
        if reader not in self._runs:
            before = self.keys.before(self.rank)
            self._runs[reader] = list(joined([(int(before[a]), int(before[b])) for a, b in self.needed(reader, self.rank)]))
        return self._runs[reader]

    @cached_property
    def most_taken(self) -> int:
        """Keys that the rank gets from others that gets most, in a call that need not have them in order."""
        ranks = range(len(self.keys.counts))
        if self.whole.as_columns is None:
            return (len(ranks) - 1) * self.keys.longest
        others = [[self.needed(reader, source) for source in ranks if source != reader] for reader in ranks]
        return max([sum(map(length_of, each)) for each in others])

    @cached_property
    def visible(self) -> float:
        """Elements that the mask shows, of all queries; on average of what batch entries and heads it has."""
        vectors = [t.shape[0] * t.shape[1] for t in self.whole.mask.vectors if t is not None]
        return int(self.whole.work().of_chunks(max(self.whole.seqlen_q, 1)).sum()) / max([1, *vectors])

    def of_all(self, dropout: bool) -> tuple[Piece, ...]:
        """All queries against all keys."""
        make = offset_pieces if dropout else partial(pieces, keys=self._all)
        return self._placed(("all", dropout), lambda: make(self.whole, whole_layout(self.whole.seqlen_q), 0))

    def against(self, source: int) -> tuple[Piece, ...]:
        """This rank's queries against what it needs of another's keys, or of its own."""
        needed = self.needed(self.rank, source)
        return self._placed(("against", source), lambda: pieces(self.whole, self.queries, self.rank, needed))

    def against_own(self, heads_kv: int | None = None) -> tuple[Piece, ...]:
        """This rank's queries against its own keys; in a backward pass of so many heads.

        Of a causal call these are one again; few blocks of keys are columns backward, whose long ones kernels cut.
        """
        needed, count = self.needed(self.rank, self.rank), self.queries.counts[self.rank]
        if not self.causal or not needed:
            return self.against(self.rank)
        few = heads_kv is not None and heads_kv * count < MANY_KEYS

        def make() -> list[Piece]:
            cut = column_piece(self.whole, self.queries, self.rank, needed) if few else None
            return [cut or Piece((0, count), (0, count), _NO_MASK._replace(right=0))]

        return self._placed(("own", few), make)

    def idle(self, step: int) -> bool:
        """Whether no rank needs any key of the one ``step`` before."""
        ranks = len(self.keys.counts)
        if step not in self._idle:
            self._idle[step] = not any([self.needed(rank, (rank - step) % ranks) for rank in range(ranks)])
        return self._idle[step]

    @cached_property
    def most_blocks(self) -> int:
        """Ranks whose keys one rank needs, or that need the keys of one, its own too: of the rank that has most."""
        ranks = range(len(self.keys.counts))
        pairs = [(reader, source) for reader in ranks for source in ranks if self.needed(reader, source)]
        return max([0, *Counter([reader for reader, _ in pairs]).values(), *Counter([source for _, source in pairs]).values()])

    def needed(self, rank: int, source: int) -> tuple[Run, ...]:
        """The keys of ``source`` that ``rank`` sees something of: runs of the whole, in steps of a chunk."""
        if (rank, source) not in self._needed:
            if rank not in self._seen:
                self._seen[rank] = torch.nn.functional.pad(self.whole.seen_by(self.queries, rank).cumsum(0), (1, 0))
            steps = [(at, min(at + self._chunk, b)) for a, b in self.keys.runs[source] for at in range(a, b, self._chunk)]
            edges = torch.tensor(steps, dtype=torch.int64).view(-1, 2)
            some = (self._seen[rank][edges[:, 1]] > self._seen[rank][edges[:, 0]]).tolist()
            self._needed[rank, source] = joined([step for step, wanted in zip(steps, some, strict=True) if wanted])
        return self._needed[rank, source]

    def rows(self, reader: int) -> Tensor:
        """Where among this rank's keys those lie that ``reader`` sees something of: int64, on the device."""
        if reader not in self._rows:
            runs = [torch.arange(a, b) for a, b in self.held(reader)]
            self._rows[reader] = torch.cat(runs or [torch.arange(0)]).to(self.device)
        return self._rows[reader]

    def heads(self, found: Sequence[Piece], kv: Run, q: Run, heads_kv: int) -> tuple[Piece, ...]:
        """Pieces of some heads; the same tensors again, so that what kernels prepare of a mask is prepared once."""
        key = (*map(id, found), kv, q)  # of pieces that are kept here
        return self._placed(key, lambda: [piece.heads(kv, q, heads_kv) for piece in found])

    def _placed(self, key: tuple[object, ...], make: Callable[[], Sequence[Piece]]) -> tuple[Piece, ...]:
        if key not in self._made:
            self._made[key] = tuple([piece.to(self.device) for piece in make()])
        return self._made[key]
