"""What a picture of banks shows: of each access its worst instruction, in the plain tile and in the layout given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from warploom.smem.laid import LaidTile
from warploom.smem.model import BANK_BYTES, BANKS, Prediction
from warploom.smem.walk import AnyTile, TileCount, count, lane_addresses


@dataclass(frozen=True)
class Piece:
    """What one lane reads or writes of a line: neighbouring words. Of several lanes in the same words it is the first."""

    lane: int
    phase: int  # its place among the instruction's phases
    word: int  # the first
    words: int
    crowded: bool  # whether its banks hand out other words in the same phase

    @property
    def line(self) -> int:
        """Which 128 bytes of the tile."""
        return self.word // BANKS

    @property
    def bank(self) -> int:
        """Of the first word."""
        return self.word % BANKS


@dataclass(frozen=True)
class Shown:
    """One instruction of an access that covers a tile."""

    count: TileCount
    number: int

    @property
    def prediction(self) -> Prediction:
        return self.count.instructions[self.number]

    @property
    def heading(self) -> str:
        several = len(self.count.instructions)
        which = f", instruction {self.number} of {several}" if several > 1 else ""
        return f"{self.count.pattern} on {self.count.tile}{which}"

    @property
    def numbers(self) -> list[str]:
        """Of the instruction and, where there are several, of the tile."""
        one = self.prediction
        over = [f"{self.count.excess} excess over the tile"] if len(self.count.instructions) > 1 else []
        return [f"{one.wavefronts} wavefront{'s' * (one.wavefronts != 1)}, {one.ideal} ideal, {one.excess} excess", *over]

    @property
    def lines(self) -> int:
        """Of 128 bytes, that the tile has."""
        return -(-self.count.tile.size_bytes // (BANKS * BANK_BYTES))

    def pieces(self) -> list[Piece]:
        pattern, phases = self.count.pattern, self.prediction.phases
        place = {lane: n for n, phase in enumerate(phases) for lane in phase.lanes}
        lanes = next(islice(lane_addresses(pattern, self.count.tile), self.number, None))
        found: dict[int, Piece] = {}
        for lane, address in enumerate(lanes):
            if address is not None and (word := address // BANK_BYTES) not in found:
                # Lanes are aligned to their width: their words are the same or all others, and so are their banks' numbers.
                banks = [phase.banks.get(word % BANKS, ()) for phase in phases]
                crowded = any(word in words and len(words) > 1 for words in banks)
                found[word] = Piece(lane, place[lane], word, max(1, pattern.access.width // BANK_BYTES), crowded)
        return list(found.values())


def plain(tile: AnyTile) -> AnyTile:
    """The same tile without padding and swizzles."""
    return tile.plain() if isinstance(tile, LaidTile) else replace(tile, pad=0, swizzles=())


def shown_instruction(counts: Sequence[TileCount]) -> int:
    """The instruction to draw: the first with the most excess in any of the layouts."""
    excess = [max(column) for column in zip(*([p.excess for p in one.instructions] for one in counts), strict=True)]
    return excess.index(max(excess))


def shown(counts: Sequence[TileCount]) -> list[list[Shown]]:
    """For each access its instruction in one layout or two: the plain tile and the one given, where they differ."""
    rows = []
    for one in counts:
        before = plain(one.tile)
        layouts = [one] if before == one.tile else [count(one.pattern, before), one]
        number = shown_instruction(layouts)
        rows.append([Shown(each, number) for each in layouts])
    return rows
