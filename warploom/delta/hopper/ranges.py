"""How a backward pass is cut into ranges of chunks, so that what kernels leave each other stays within a bound."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from warploom.delta.hopper.config import BACK_ITEM, CHUNK, COLUMNS
from warploom.delta.hopper.plan import width
from warploom.delta.problem import DeltaCall

SMALL = 2**24  # bytes that no call need save: more ranges are more launches
_NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)


class Ranges(NamedTuple):
    """Each range of chunks is walked, walked back, and gives its gradients before the one before it."""

    per_sequence: bool  # each holds `size` chunks of every sequence; else `size` slots; the first what these leave
    size: int
    number: int
    entries: int  # chunks of one range
    carriers: int  # sequences that a boundary may cut


class Sizes(NamedTuple):
    """What room depends on."""

    sequences: int
    tokens: int  # of all sequences
    chunks: int  # of a sequence, where they are not packed
    slots: int
    packed: bool
    heads: int
    heads_v: int
    e: int
    m: int

    @classmethod
    def of(cls, c: DeltaCall) -> Sizes:
        batch, seqlen, heads, e = c.q.shape
        packed, chunks = c.cu_seqlens is not None, -(-seqlen // CHUNK)
        slots = seqlen // CHUNK + c.sequences + 1 if packed else batch * chunks
        return cls(c.sequences, batch * seqlen, chunks, slots, packed, heads, c.v.shape[2], e, c.v.shape[3])

    @property
    def tiles(self) -> int:
        """Of value columns."""
        return -(-self.m // COLUMNS)

    @property
    def beside(self) -> bool:
        """Whether Y of all value heads has room in the gradients of queries and keys, until these are written."""
        return self.heads_v <= 2 * self.heads and self.m <= self.e

    @property
    def kept(self) -> int:
        """Bytes of the state before a chunk and of the gradient of the one after it, of a value head."""
        return 4 * self.tiles * COLUMNS * width(self.e)

    def ranges(self) -> Ranges:
        """The fewest whose room is no more than the bytes of q, k, v and out, or ``SMALL``; else those of the least room.

        Each as long as that allows: the last is walked back beside the first walk, and not walked again.
        """
        allowed = max(self.tokens * 2 * (self.heads * self.e + self.heads_v * self.m) * 2, SMALL)
        cuts = [self.cut(each, n) for each in ((False,) if self.packed else (True, False)) for n in _NUMBERS]
        found = next((cut for cut in cuts if self.room(cut) <= allowed), min(cuts, key=self.room))
        more = (allowed - self.room(found)) // (self.kept * self.heads_v * (found.entries // found.size))
        return found if found.number == 1 or more <= 0 else self.sized(found.per_sequence, found.size + more)

    def cut(self, per_sequence: bool, wanted: int) -> Ranges:
        """About so many ranges; those of packed sequences, whose lengths only the device knows, are of slots."""
        return self.sized(per_sequence, -(-(self.chunks if per_sequence else self.slots) // wanted))

    def sized(self, per_sequence: bool, size: int) -> Ranges:
        """Ranges of so many chunks, or slots."""
        chunks = self.chunks if per_sequence else self.slots
        entries, carriers = (size * self.sequences, self.sequences) if per_sequence else (size, 1)
        return Ranges(per_sequence, size, -(-chunks // size), entries, carriers)

    def room(self, cut: Ranges) -> int:
        """Bytes that a backward pass takes beside its results."""
        missing = 0 if self.beside else 2 * self.m * self.tokens
        boundaries = 0
        if cut.number > 1:
            between = cut.number - 1 + (1 if cut.per_sequence else 2)
            boundaries = between * cut.carriers * self.tiles * COLUMNS * width(self.e) * 4
        return self.heads_v * (4 * BACK_ITEM * self.slots + self.kept * cut.entries + boundaries + missing)


class Kept(NamedTuple):
    """What kernels of a backward pass leave each other; see `back_base`."""

    prepared: Tensor
    states: Tensor
    dstates: Tensor
    resume: Tensor
    carry: Tensor

    @classmethod
    def of(cls, sizes: Sizes, cut: Ranges, device: torch.device, dtype: torch.dtype) -> Kept:
        """New memory."""
        count, size = cut.entries * sizes.heads_v * sizes.tiles, width(sizes.e) * COLUMNS

        def between(number: int) -> Tensor:
            number = number * sizes.heads_v * sizes.tiles if cut.number > 1 else 0
            return torch.empty((number, size), dtype=torch.float32, device=device)

        def states() -> Tensor:
            return torch.empty((count, size), dtype=dtype, device=device)

        return cls(
            torch.empty((sizes.slots * sizes.heads_v, BACK_ITEM), dtype=torch.float32, device=device),
            states(),
            states(),
            between((cut.number - 1) * cut.carriers),
            between(cut.carriers if cut.per_sequence else 2),
        )
