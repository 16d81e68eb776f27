"""The phases of a pattern reduced to what a swizzle can tell apart, and how many conflicts swizzles leave, many at once.

A swizzle is linear over XOR: swizzle(a ^ d) = swizzle(a) ^ swizzle(d). So two phases whose addresses differ from their first
lane's by the same XORs have the same conflicts under every swizzle, and one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from warploom.smem.access import Pattern
from warploom.smem.layout import Swizzle, Tile
from warploom.smem.model import BANK_BYTES, BANKS
from warploom.smem.walk import walk

LARGEST_BATCH = 1 << 16  # numbers in one temporary tensor: what a core's cache holds was fastest
NOWHERE = -1


@dataclass(frozen=True)
class Places:
    """Where the lanes of a pattern's phases lie in a tile: int32 (phases, lanes), rows NOWHERE for lanes without work.

    `weights` int64 (phases,) says how often each phase occurs.
    """

    pattern: Pattern
    rows: Tensor
    bytes: Tensor
    weights: Tensor

    @classmethod
    def of(cls, pattern: Pattern, tile: Tile) -> Places:
        lanes = [lane or (NOWHERE, 0) for group in walk(pattern, tile) for lane in group]
        table = torch.tensor(lanes, dtype=torch.int32).reshape(-1, pattern.access.phase_lanes, 2)
        table = table[table[:, 0, 0] >= 0]  # only the last lanes of the last instruction are without work
        return cls(pattern, table[..., 0], table[..., 1], torch.ones(len(table), dtype=torch.int64))

    def up_to_translation(self) -> Places:
        """One phase for all of one shape, which is all that padding can tell apart.

        Moving a phase by whole words turns the banks round; where it starts within a word is kept.
        """
        absent = self.rows < 0
        top = self.rows.masked_fill(absent, 1 << 30).amin(1, keepdim=True)
        left = self.bytes.masked_fill(absent, 1 << 30).amin(1, keepdim=True)
        rows = (self.rows - top + top % BANK_BYTES).masked_fill(absent, NOWHERE)
        starts = (self.bytes - left + left % BANK_BYTES).masked_fill(absent, 0)
        shapes, weights = torch.unique(torch.stack([rows, starts], 2), dim=0, return_counts=True)
        return Places(self.pattern, shapes[..., 0], shapes[..., 1], weights)


@dataclass(frozen=True)
class PhaseClasses:
    """Distinct phases of one pattern, as XOR differences of byte addresses.

    `unit` is the bytes that every swizzle keeps together: one piece of the access, or a word of smaller ones. `offsets` is
    int32 (classes, pieces), NOWHERE beside a class's distinct pieces; `weights` int64 (classes,), the phases each stands for.
    """

    unit: int
    offsets: Tensor
    weights: Tensor

    @classmethod
    def of(cls, places: Places, pitch_bytes: int) -> PhaseClasses:
        unit = max(BANK_BYTES, places.pattern.access.width)
        pieces = (places.rows * pitch_bytes + places.bytes) // unit * unit
        offsets = (pieces ^ pieces[:, :1]).masked_fill(places.rows < 0, 0).sort(1).values
        again = torch.zeros_like(offsets, dtype=torch.bool)
        again[:, 1:] = offsets[:, 1:] == offsets[:, :-1]
        return cls(unit, offsets.masked_fill(again, NOWHERE), places.weights)

    def merged(self) -> PhaseClasses:
        """Equal rows as one, the heaviest first."""
        distinct, which = torch.unique(self.offsets, dim=0, return_inverse=True)
        weights = torch.zeros(len(distinct), dtype=torch.int64).scatter_add_(0, which, self.weights)
        order = weights.argsort(descending=True)
        return PhaseClasses(self.unit, distinct[order], weights[order])

    def __len__(self) -> int:
        return len(self.weights)

    def part(self, start: int, end: int) -> PhaseClasses:
        return PhaseClasses(self.unit, self.offsets[start:end], self.weights[start:end])

    def excess(self, stacks: Tensor) -> Tensor:
        """Wavefronts beyond the ideal under each stack of byte swizzles, from `encode`: int64 (stacks,)."""
        chunk = max(1, LARGEST_BATCH // self.offsets.numel())
        return torch.cat([self._excess(part) for part in stacks.split(chunk)])

    def _excess(self, stacks: Tensor) -> Tensor:
        present = (self.offsets >= 0).to(torch.int8)
        moved = apply(stacks, self.offsets.clamp(min=0).expand(len(stacks), *self.offsets.shape))
        groups = BANKS * BANK_BYTES // self.unit
        places = (moved >> self.unit.bit_length() - 1).bitwise_and_(groups - 1).long()
        held = torch.zeros(*moved.shape[:2], groups, dtype=torch.int8)
        held.scatter_add_(2, places, present.expand_as(places))
        return ((held.amax(2).long() - 1) * self.weights).sum(1)


def encode(stacks: Sequence[Sequence[Swizzle]]) -> Tensor:
    """Stacks of equally many byte swizzles as int32 (stacks, depth, 3): source bit, target bit, mask."""
    rows = [[(one.m + one.s, one.m, (1 << one.b) - 1) for one in stack] for stack in stacks]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(stacks), -1, 3)


def apply(stacks: Tensor, offsets: Tensor) -> Tensor:
    """Each stack, from its first swizzle to its last, on its own offsets: int32 (stacks, ...)."""
    for depth in range(stacks.shape[1]):
        source, target, mask = stacks[:, depth].reshape(len(stacks), *[1] * (offsets.ndim - 1), 3).unbind(-1)
        offsets = offsets ^ ((offsets >> source & mask) << target)
    return offsets
