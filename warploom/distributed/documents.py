"""Method gather of documents in a row: most are whole on a rank, and run as packed sequences while the others' keys arrive.

Rows of a document of which keys lie on other ranks are a packed call of their own. Of a causal one other keys lie before all of
these rows, so that their order is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.call import Call
from warploom.distributed.collectives import Exchange, Exchanging, split_beside
from warploom.distributed.layout import Run, joined
from warploom.distributed.pieces import MOST_RUNS, Piece, Sequences, Sharded
from warploom.masks.intervals import ResolvedMask

# Rows that are copied for nothing but the time that an exchange takes to begin: a kernel before it would hold all processors.
_PAUSE = 128

_Place = tuple[int, int, int]  # first position of some keys, past the last, and where the first lies


class Shared(NamedTuple):
    """Rows of a document that needs keys of other ranks.

    Attributes:
        piece: its keys are those of ``runs``, one behind the other.
        runs: of what ``Exchanging`` finds.
    """

    piece: Piece
    runs: tuple[Run, ...]


class Documents(NamedTuple):
    """A rank's rows by documents.

    Attributes:
        whole: one call of all rows and the rank's own keys. Rows of ``shared`` see none in it, and are written again. None:
            no document is whole here.
        shared: documents that need other keys.
        exchange: these, and those of the rank's own keys that ``shared`` needs.
    """

    whole: Piece | None
    shared: tuple[Shared, ...]
    exchange: Exchange

    @property
    def pieces(self) -> tuple[Piece, ...]:
        whole = () if self.whole is None else (self.whole,)
        return (*whole, *[shared.piece for shared in self.shared])


def documents_of(sharded: Sharded) -> Documents | None:
    """None where the mask is more than documents, or too many of a rank's need keys of others."""
    if "documents" not in sharded.kept:
        sharded.kept["documents"] = _documents_of(sharded)
    found: Documents | None = sharded.kept["documents"]
    return found


def _documents_of(sharded: Sharded) -> Documents | None:
    starts, layout, rank = sharded.whole.documents, sharded.queries, sharded.rank
    if starts is None or sharded.keys is not layout or not layout.counts[rank]:
        return None
    causal = sharded.whole.mask.right is not None
    rows = list(_places(layout.runs[rank]))
    needed = [run for source in sharded.others for run in sharded.needed(rank, source)]
    found = list(_places(needed))
    taken, own = sum(sharded.exchange.taken), list[Run]()
    whole, shared = list[Run](), list[tuple[Run, list[Run]]]()  # numbers of queries and keys; rows, and runs of keys
    for a, b, row in rows:
        for first, end in pairwise(starts):
            low, high = max(a, first), min(b, end)
            if low >= high:
                continue
            count, keys = high - low, (first, high if causal else end)
            if keys == (low, high):
                whole.append((count, count))
                continue
            whole += [(count, 0), (0, count)]
            runs = _within(found, keys)
            for run in _within(rows, keys):
                at = taken + sum(d - c for c, d in own)
                own.append(run)
                runs.append((at, at + run[1] - run[0]))
            shared.append(((row + low - a, row + high - a), list(joined(runs))))
    if len(shared) > MOST_RUNS:
        return None
    if not shared and sharded.exchange.counts and sum(sharded.exchange.counts):
        own.append((0, min(_PAUSE, layout.counts[rank])))
    mask = ResolvedMask(None, sharded.whole.mask.right, None, None, None, None)

    def piece(where: Run, keys: Run, lengths: Sequence[Run]) -> Piece:
        return Piece(where, keys, mask, sequences=_sequences(lengths)).to(sharded.device)

    every = 0, layout.counts[rank]
    alone = piece(every, every, whole) if any(count and keys for count, keys in whole) else None
    several = []
    for where, runs in shared:
        count = sum(b - a for a, b in runs)
        keys = runs[0] if len(runs) == 1 else (0, count)
        several.append(Shared(piece(where, keys, [(where[1] - where[0], count)]), tuple(runs)))
    return Documents(alone, tuple(several), sharded.exchange._replace(own=own))


def forward(
    call: Call, documents: Documents, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """Write out and lse of this rank's queries; others' keys and values that it saw, as ``Exchanging`` finds them."""
    coming = Exchanging(call.group, documents.exchange, k, v)
    coming.put_own()
    if documents.whole is not None:
        local.write(call.run, q, k, v, sink, (documents.whole,), out, lse)
    found = coming.result()
    for piece, runs in documents.shared:
        some = found if len(runs) == 1 else torch.cat([found[a:b] for a, b in runs])
        others_k, others_v = split_beside(some, (k.shape[3], v.shape[3]))
        local.write(call.run, q, others_k, others_v, sink, (piece,), out, lse)
    return found[: sum(documents.exchange.taken)]


def _places(runs: Sequence[Run]) -> Iterator[_Place]:
    """Runs of positions that lie one behind the other."""
    before = accumulate([b - a for a, b in runs], initial=0)
    return ((a, b, at) for (a, b), at in zip(runs, before, strict=False))


def _within(places: Sequence[_Place], wanted: Run) -> list[Run]:
    """Where those lie that are wanted."""
    cut = [(max(a, wanted[0]), min(b, wanted[1]), at - a) for a, b, at in places]
    return [(a + shift, b + shift) for a, b, shift in cut if a < b]


def _sequences(lengths: Sequence[Run]) -> Sequences:
    """Of numbers of queries and keys."""
    queries, keys = zip(*lengths, strict=True)
    starts_q, starts_k = [torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (queries, keys)]
    return Sequences(starts_q, starts_k, max(queries), max(keys))
