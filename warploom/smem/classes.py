"""The phases of a pattern reduced to what a swizzle can tell apart, and how many conflicts swizzles leave, many at once.

A swizzle is linear over XOR: swizzle(a ^ d) = swizzle(a) ^ swizzle(d). So two phases whose addresses differ from their first
lane's by the same XORs have the same conflicts under every swizzle, and one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from warploom.smem.access import Pattern
from warploom.smem.layout import Swizzle, Tile
from warploom.smem.model import BANK_BYTES, BANKS
from warploom.smem.walk import NOWHERE, addresses, places

LINE = BANKS * BANK_BYTES  # bytes after which the banks repeat
TOP = LINE.bit_length() - 1  # address bits from here on choose no bank
LARGEST_BATCH = 1 << 16  # numbers in one temporary tensor: what a core's cache holds was fastest


@dataclass(frozen=True)
class Places:
    """Where the lanes of an access's phases lie in a tile: int32 (phases, lanes), rows NOWHERE for lanes without work.

    `unit` is the bytes that every swizzle keeps together: one piece of the access, or a word of smaller ones. `weights` int64
    (phases,) says how often each phase occurs.
    """

    unit: int
    rows: Tensor
    bytes: Tensor
    weights: Tensor

    @classmethod
    def of(cls, pattern: Pattern, tile: Tile) -> Places:
        table = places(pattern, tile).reshape(-1, pattern.access.phase_lanes, 2)
        table = table[table[:, 0, 0] >= 0]  # only the last lanes of the last instruction are without work
        weights = torch.ones(len(table), dtype=torch.int64)
        return cls(max(BANK_BYTES, pattern.access.width), table[..., 0], table[..., 1], weights)

    def up_to_translation(self) -> Places:
        """One phase for all of one shape, which is all that padding can tell apart.

        Moving a phase by whole words turns the banks round; where it starts within a word is kept.
        """
        absent = self.rows < 0
        top = self.rows.masked_fill(absent, 1 << 30).amin(1, keepdim=True)
        left = self.bytes.masked_fill(absent, 1 << 30).amin(1, keepdim=True)
        rows = (self.rows - top + top % BANK_BYTES).masked_fill(absent, NOWHERE)
        starts = (self.bytes - left + left % BANK_BYTES).masked_fill(absent, 0)
        return self._distinct(rows, starts)

    def in_units(self) -> Places:
        """Whole units, each once and in order, and equal phases as one: all that matters where rows start with a unit."""
        keys = (self.rows.long() << 32 | self.bytes // self.unit * self.unit).masked_fill(self.rows < 0, 1 << 62).sort(1).values
        absent = keys == 1 << 62
        absent[:, 1:] |= keys[:, 1:] == keys[:, :-1]
        rows, starts = (keys >> 32).masked_fill(absent, NOWHERE), (keys & (1 << 32) - 1).masked_fill(absent, 0)
        return self._distinct(rows.int(), starts.int())

    def _distinct(self, rows: Tensor, starts: Tensor) -> Places:
        first, weights = distinct(torch.cat([rows, starts], 1), self.weights)
        return Places(self.unit, rows[first], starts[first], weights)


@dataclass(frozen=True)
class PhaseClasses:
    """Distinct phases of accesses, as XOR differences of byte addresses.

    `offsets` is int32 (classes, pieces of `unit` bytes), NOWHERE beside a class's distinct pieces; `weights` int64 (classes,),
    the phases each stands for.
    """

    unit: int
    offsets: Tensor
    weights: Tensor

    @classmethod
    def of(cls, places: Places, pitch_bytes: int) -> PhaseClasses:
        pieces = (places.rows * pitch_bytes + places.bytes) // places.unit * places.unit
        offsets = (pieces ^ pieces[:, :1]).masked_fill(places.rows < 0, 0).sort(1).values
        again = torch.zeros_like(offsets, dtype=torch.bool)
        again[:, 1:] = offsets[:, 1:] == offsets[:, :-1]
        return cls(places.unit, offsets.masked_fill(again, NOWHERE), places.weights)

    @classmethod
    def in_units(cls, places: Places, pitch_bytes: int) -> PhaseClasses:
        """Of places in units, under a pitch of whole units."""
        pieces = places.rows * pitch_bytes + places.bytes
        return cls(places.unit, (pieces ^ pieces[:, :1]).masked_fill(places.rows < 0, NOWHERE), places.weights)

    def merged(self) -> PhaseClasses:
        """Equal rows as one, the heaviest first."""
        first, weights = distinct(self.offsets, self.weights)
        order = weights.argsort(descending=True, stable=True)
        return PhaseClasses(self.unit, self.offsets[first][order], weights[order])

    def __len__(self) -> int:
        return len(self.weights)

    def take(self, which: Tensor | slice) -> PhaseClasses:
        return PhaseClasses(self.unit, self.offsets[which], self.weights[which])

    @property
    def varied(self) -> Tensor:
        """The address bits in which each class's pieces differ: int32 (classes,)."""
        bits = self.offsets.clamp(min=0)
        while bits.shape[1] > 1:
            half = bits.shape[1] // 2
            bits = torch.cat([bits[:, :half] | bits[:, half : 2 * half], bits[:, 2 * half :]], 1)
        return bits[:, 0]

    def floor(self, lowest: int) -> Tensor:
        """Wavefronts beyond the ideal that no swizzle of bits from `lowest` on can remove: int64 (classes,).

        Pieces that differ above `lowest` only have but the banks to choose from that do so too.
        """
        kept = (1 << lowest) // self.unit
        held = _crowds(encode([()]).expand(len(self), -1, -1), self.offsets, self.unit, max(kept, 1))
        banks = LINE // max(self.unit, 1 << lowest)
        return (held + banks - 1) // banks - 1

    def excess(self, stacks: Tensor) -> Tensor:
        """Wavefronts beyond the ideal of each class under its own stack of byte swizzles, from `encode`: int64 (classes,)."""
        step = max(1, LARGEST_BATCH // self.offsets.shape[1])
        parts = zip(self.offsets.split(step), stacks.split(step), strict=True)
        return torch.cat([_crowds(own, offsets, self.unit, LINE // self.unit) for offsets, own in parts]) - 1


def _crowds(stacks: Tensor, offsets: Tensor, unit: int, groups: int) -> Tensor:
    """The most of a class's pieces in one of `groups` neighbouring units, each class under its own stack: int64 (classes,)."""
    absent = offsets < 0
    where = apply(stacks, offsets).bitwise_right_shift_(unit.bit_length() - 1).bitwise_and_(groups - 1)
    # One group more, for pieces that are not there.
    where = where.masked_fill_(absent, groups).long()
    held = torch.zeros(len(where), groups + 1, dtype=torch.int8)
    return held.scatter_add_(1, where, torch.ones_like(where, dtype=torch.int8))[:, :groups].amax(1).long()


def distinct(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Where each distinct row of an int32 table of even width occurs first, and the summed weights of all that equal it."""
    pairs = rows.contiguous().view(torch.int64)
    generator = torch.Generator().manual_seed(0)
    while True:
        # Sorting one number for each row is far cheaper than sorting rows. Unequal rows of one number are all but
        # impossible, and seen.
        factors = torch.randint(-(1 << 62), 1 << 62, (pairs.shape[1],), generator=generator)
        numbers, which = torch.unique((pairs * factors).sum(1), return_inverse=True)
        first = torch.full((len(numbers),), len(rows)).scatter_reduce_(0, which, torch.arange(len(rows)), "amin")
        if torch.equal(pairs[first[which]], pairs):
            return first, torch.zeros(len(numbers), dtype=torch.int64).scatter_add_(0, which, weights)


@lru_cache(maxsize=16)
def excess_by_phase(pattern: Pattern, tile: Tile) -> Tensor:
    """Wavefronts beyond the ideal of every phase of every instruction, from the address of each lane: int64.

    (instructions, phases), 0 for a phase without lanes. Where `count` follows one instruction after the other, this takes all
    of them at once.
    """
    lanes = addresses(pattern, tile).int().reshape(-1, pattern.access.phase_lanes)
    unit = max(BANK_BYTES, pattern.access.width)
    offsets = (lanes // unit * unit).masked_fill_(lanes == NOWHERE, NOWHERE).sort(1, descending=True).values
    offsets[:, 1:] = offsets[:, 1:].masked_fill(offsets[:, 1:] == offsets[:, :-1], NOWHERE)
    classes = PhaseClasses(unit, offsets, torch.ones(len(offsets), dtype=torch.int64))
    excess = classes.excess(encode([()]).expand(len(offsets), -1, -1)).clamp(min=0)
    return excess.reshape(-1, pattern.access.lanes // pattern.access.phase_lanes)


def encode(stacks: Sequence[Sequence[Swizzle]]) -> Tensor:
    """Stacks of equally many byte swizzles as int32 (stacks, depth, 3): source bit, target bit, mask."""
    rows = [[(one.m + one.s, one.m, (1 << one.b) - 1) for one in stack] for stack in stacks]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(stacks), len(stacks[0]) if stacks else 1, 3)


def apply(stacks: Tensor, offsets: Tensor) -> Tensor:
    """Each stack, from its first swizzle to its last, on its own offsets: int32 (stacks, ...)."""
    moved = offsets.clone()
    for depth in range(stacks.shape[1]):
        source, target, mask = stacks[:, depth].reshape(len(stacks), *[1] * (offsets.ndim - 1), 3).unbind(-1)
        moved ^= (moved >> source).bitwise_and_(mask).bitwise_left_shift_(target)
    return moved


def banks_from(stacks: Tensor) -> Tensor:
    """What each address bit from TOP on adds to the bank, up to a renaming of the banks: int32 (stacks, 31 − TOP).

    Stacks of equal rows conflict alike. A stack takes a byte address to bank A·low ⊕ M·high; in one bank are then the
    addresses that agree in low ⊕ A⁻¹·M·high.
    """
    first = BANK_BYTES.bit_length() - 1
    low = (torch.arange(BANKS, dtype=torch.int32) << first).expand(len(stacks), -1)
    high = (1 << torch.arange(TOP, 31)).to(torch.int32).expand(len(stacks), -1)
    renamed, added = ((apply(stacks, bits) >> first & BANKS - 1) for bits in (low, high))
    return renamed.argsort(1).gather(1, added.long()).to(torch.int32)


Phases = TypeVar("Phases", Places, PhaseClasses)


def joined(parts: Sequence[Phases]) -> list[Phases]:
    """Classes of one unit, joined into one object."""
    names = [field.name for field in fields(parts[0]) if field.name != "unit"]
    found = []
    for unit in dict.fromkeys(one.unit for one in parts):
        own = [one for one in parts if one.unit == unit]
        columns: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in own]) for name in names}
        found.append(replace(own[0], **columns))
    return found
