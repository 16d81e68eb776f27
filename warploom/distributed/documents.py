"""Method gather of documents in a row: most are whole on a rank, and run as packed sequences while the others' keys arrive.

Rows of a document of which keys lie on other ranks are a packed call of their own. Of a causal one other keys lie before all of
these rows, so that their order is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.collectives import FEW_ROWS, Exchange, Exchanging, split_beside
from warploom.distributed.layout import Run, joined, length_of
from warploom.distributed.pieces import MOST_RUNS, Piece, Sequences, Sharded
from warploom.distributed.streams import Aside
from warploom.masks.intervals import ResolvedMask

_Place = tuple[int, int, int]  # first position of some keys, past the last, and where the first lies


class Part(NamedTuple):
    """Rows of a rank's that are of one document.

    Attributes:
        rows: of the rank's.
        runs: its keys, of what ``Exchanging`` finds but for its own rows before; None: they are the same rows of its own.
    """

    rows: Run
    runs: list[Run] | None

    @property
    def length(self) -> int:
        return self.rows[1] - self.rows[0]


class Shared(NamedTuple):
    """Rows of which some need keys of other ranks.

    Attributes:
        piece: its keys are those of ``runs``, one behind the other.
        runs: of what ``Exchanging`` finds.
    """

    piece: Piece
    runs: tuple[Run, ...]


class Documents(NamedTuple):
    """A rank's rows by documents.

    Attributes:
        whole: one call of rows and own keys. Rows of ``shared`` among them see no key in it, and are written again. None: no
            document is whole here.
        shared: rows that need other keys, and whole documents beside them.
        exchange: ours, and the rank's own keys that ``shared`` needs.
    """

    whole: Piece | None
    shared: tuple[Shared, ...]
    exchange: Exchange

    @property
    def pieces(self) -> tuple[Piece, ...]:
        whole = () if self.whole is None else (self.whole,)
        return (*whole, *[shared.piece for shared in self.shared])

    @property
    def apart(self) -> bool:
        """Whether no row of ``shared`` is among those of ``whole``."""
        if self.whole is None:
            return False
        first, past = self.whole.rows
        return all([shared.piece.rows[1] <= first or past <= shared.piece.rows[0] for shared in self.shared])


def documents_of(sharded: Sharded) -> Documents | None:
    """None where the mask is more than documents, or too many of a rank's need keys of others."""
    if "documents" not in sharded.kept:
        sharded.kept["documents"] = _documents_of(sharded)
    found: Documents | None = sharded.kept["documents"]
    return found


def _documents_of(sharded: Sharded) -> Documents | None:
    layout, rank, exchange = sharded.queries, sharded.rank, sharded.exchange
    if sharded.whole.documents is None or sharded.keys is not layout or not layout.counts[rank]:
        return None
    parts, own = _parts(sharded)
    places = [n for n, part in enumerate(parts) if part.runs is not None]
    if len(places) > MOST_RUNS:
        return None
    before, behind = list[Part](), list[Part]()
    if len(places) == 1:
        # The call of whole documents is of rows in a row: the fewer ones beside a shared document go with that.
        before, shared, behind = parts[: places[0]], parts[places[0]], parts[places[0] + 1 :]
        if before and behind:
            fewer = length_of([part.rows for part in before]) < length_of([part.rows for part in behind])
            parts = behind if fewer else before
            before, behind = (before, []) if fewer else ([], behind)
        else:
            parts, before, behind = before or behind, [], []
        own = own + [part.rows for part in behind]
        several = [_shared(sharded, before, shared, behind)]
    else:
        several = [_shared(sharded, [], parts[n], []) for n in places]
        parts = _trimmed(parts)
    if not several and any(exchange.counts):
        own = [(0, min(FEW_ROWS, layout.counts[rank]))]  # before a kernel, as there
    exchange = exchange._replace(own=own, before=[part.rows for part in before])
    return Documents(_whole(sharded, parts) if parts else None, tuple(several), exchange)


def _parts(sharded: Sharded) -> tuple[list[Part], list[Run]]:
    """A rank's rows by documents, and its own keys that those need that need keys of others."""
    causal, (held, rank) = sharded.whole.mask.right is not None, (sharded.queries.runs[sharded.rank], sharded.rank)
    rows = list(_places(held))
    others = list(_places([run for source in sharded.others for run in sharded.needed(rank, source)]))
    at, parts, own = sum(sharded.exchange.taken), list[Part](), list[Run]()
    for a, b, row in rows:
        for first, end in pairwise(sharded.whole.documents or ()):
            low, high = max(a, first), min(b, end)
            if low >= high:
                continue
            keys, runs = (first, high if causal else end), None
            if keys != (low, high):
                runs = _within(others, keys)
                for run in _within(rows, keys):
                    own.append(run)
                    runs.append((at, at + run[1] - run[0]))
                    at = runs[-1][1]
            parts.append(Part((row + low - a, row + high - a), runs))
    return parts, own


def _trimmed(parts: list[Part]) -> list[Part]:
    """Without those before and behind all whole documents."""
    whole = [n for n, part in enumerate(parts) if part.runs is None]
    return parts[whole[0] : whole[-1] + 1] if whole else []


def _whole(sharded: Sharded, parts: list[Part]) -> Piece:
    where = parts[0].rows[0], parts[-1].rows[1]
    lengths = [[(part.length, part.length)] if part.runs is None else [(part.length, 0), (0, part.length)] for part in parts]
    return _piece(sharded, where, where, [each for several in lengths for each in several])


def _shared(sharded: Sharded, before: list[Part], part: Part, behind: list[Part]) -> Shared:
    """Whole documents' keys lie before what comes from others, or behind all."""
    assert part.runs is not None
    front = length_of([some.rows for some in before])
    runs = list(joined([(a + front, b + front) for a, b in part.runs]))
    count = length_of(runs)
    lengths = [*[(some.length,) * 2 for some in before], (part.length, count), *[(some.length,) * 2 for some in behind]]
    if behind:
        runs[-1] = runs[-1][0], runs[-1][1] + length_of([some.rows for some in behind])
    runs = list(joined([(0, front), *runs])) if front else runs
    where = (before or [part])[0].rows[0], (behind or [part])[-1].rows[1]
    total = sum([keys for _, keys in lengths])
    if len(runs) == 2 and runs[0] == (0, front):  # what lies between is nobody's
        lengths.insert(len(before), (0, runs[1][0] - front))
        runs = [(0, runs[1][1])]
    return Shared(_piece(sharded, where, runs[0] if len(runs) == 1 else (0, total), lengths), tuple(runs))


def _piece(sharded: Sharded, rows: Run, keys: Run, lengths: Sequence[tuple[int, ...]]) -> Piece:
    mask = ResolvedMask(None, sharded.whole.mask.right, None, None, None, None)
    return Piece(rows, keys, mask, sequences=_sequences(lengths)).to(sharded.device)


def forward(
    call: Call, documents: Documents, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """Write out and lse of this rank's queries; others' keys and values that it saw, as ``Exchanging`` finds them."""
    coming = Exchanging(call.group, documents.exchange, k, v)
    coming.put_own()
    # The first call's end leaves processors idle, which the others' beginning can have.
    aside = Aside(q.device) if documents.apart else nullcontext()
    if documents.whole is not None:
        local.write(call.run, q, k, v, sink, (documents.whole,), out, lse)
    with aside:
        found = coming.result()
        for piece, runs in documents.shared:
            some = found if len(runs) == 1 else torch.cat([found[a:b] for a, b in runs])
            others_k, others_v = split_beside(some, (k.shape[3], v.shape[3]))
            local.write(call.run, q, others_k, others_v, sink, (piece,), out, lse)
    return found[coming.received]


def alone(t: Tensor) -> Tensor:
    """A view to be kept: a copy where it would keep more alive that nobody needs than it has itself."""
    return t.clone() if t.untyped_storage().nbytes() > 2 * t.numel() * t.element_size() else t


def _places(runs: Sequence[Run]) -> Iterator[_Place]:
    """Runs of positions that lie one behind the other."""
    before = accumulate([b - a for a, b in runs], initial=0)
    return ((a, b, at) for (a, b), at in zip(runs, before, strict=False))


def _within(places: Sequence[_Place], wanted: Run) -> list[Run]:
    """Where those lie that are wanted."""
    cut = [(max(a, wanted[0]), min(b, wanted[1]), at - a) for a, b, at in places]
    return [(a + shift, b + shift) for a, b, shift in cut if a < b]


def _sequences(lengths: Sequence[tuple[int, ...]]) -> Sequences:
    """Of numbers of queries and keys."""
    queries, keys = zip(*lengths, strict=True)
    starts_q, starts_k = [torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (queries, keys)]
    return Sequences(starts_q, starts_k, max(queries), max(keys))
