"""The best swizzle, the least padding, the best two swizzles and the best of both for a tile and all accesses made to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from warploom.runtime.threads import one_thread
from warploom.smem.access import Pattern, parse_pattern
from warploom.smem.classes import LINE, TOP, PhaseClasses, Places, apply, banks_from, distinct, encode, joined
from warploom.smem.layout import Swizzle, Tile
from warploom.smem.model import BANK_BYTES
from warploom.smem.race import Race, Work
from warploom.smem.walk import count, viewed


@dataclass(frozen=True)
class Padded:
    """The least padding that, with some swizzle, conflicts less than anything else; none without a swizzle."""

    pad: int = 0
    swizzle: Swizzle | None = None
    excess: int | None = None
    searched: int = 0


@dataclass(frozen=True)
class Design:
    """What a search over every swizzle, padding and pair of swizzles found for a tile.

    Attributes:
        tile: the tile as given, without padding and swizzles.
        patterns: the accesses.
        before: excess wavefronts without a change; each access covers the whole tile once, here and below.
        swizzle: the best single swizzle, in elements; None where none is better than no swizzle.
        excess: wavefronts that it leaves.
        by_bits: the least excess that any swizzle of b bits reaches (0 bits: none), by b: the proof that `swizzle` has no more
            bits than needed.
        searched: how many single swizzles were tried.
        pad: the best padding, in elements a row; 0 where none helps.
        pad_excess: wavefronts that it leaves.
        stack: two swizzles, the first applied first, where they leave less than all of the above; else None.
        stack_excess: wavefronts that they leave, or None.
        pairs: how many pairs of swizzles were tried.
        padded: the best padding together with a swizzle.
        work: how many phases the search counted, under one layout each.
    """

    tile: Tile
    patterns: tuple[Pattern, ...]
    before: int
    swizzle: Swizzle | None
    excess: int
    by_bits: dict[int, int]
    searched: int
    pad: int
    pad_excess: int
    stack: tuple[Swizzle, ...] | None
    stack_excess: int | None
    pairs: int
    padded: Padded
    work: int

    @property
    def best(self) -> Tile:
        """The tile with the layout to use: whatever conflicts least; of equals a swizzle, two, padding, padding with one."""
        choices = [(self.before, 0, self.tile)]
        if self.swizzle is not None:
            choices.append((self.excess, 1, replace(self.tile, swizzles=(self.swizzle,))))
        if self.stack is not None and self.stack_excess is not None:
            choices.append((self.stack_excess, 2, replace(self.tile, swizzles=self.stack)))
        if all(pattern.view is None for pattern in self.patterns):
            choices.append((self.pad_excess, 3, replace(self.tile, pad=self.pad)))
        if self.padded.swizzle is not None and self.padded.excess is not None:
            both = replace(self.tile, pad=self.padded.pad, swizzles=(self.padded.swizzle,))
            choices.append((self.padded.excess, 4, both))
        return min(choices, key=lambda choice: choice[:2])[2]

    def to_dict(self) -> dict[str, Any]:
        """What `warploom banks --design --json` prints; a swizzle is [B, M, S], in elements."""

        def numbers(swizzle: Swizzle) -> list[int]:
            return [swizzle.b, swizzle.m, swizzle.s]

        return {
            "accesses": [str(pattern) for pattern in self.patterns],
            "before": self.before,
            "swizzle": None if self.swizzle is None else numbers(self.swizzle),
            "excess": self.excess,
            "least_excess_by_bits": {str(bits): excess for bits, excess in self.by_bits.items()},
            "searched": self.searched,
            "pad": self.pad,
            "pad_excess": self.pad_excess,
            "stack": None if self.stack is None else [numbers(one) for one in self.stack],
            "stack_excess": self.stack_excess,
            "pairs_searched": self.pairs,
            "padded_swizzle": None if self.padded.swizzle is None else [self.padded.pad, *numbers(self.padded.swizzle)],
            "padded_swizzle_excess": self.padded.excess,
            "padded_swizzles_searched": self.padded.searched,
            "phases_counted": self.work,
        }


# The search's tensors are small.
@one_thread()
def design(tile: Tile, patterns: Iterable[Pattern | str]) -> Design:
    """Search the layouts of a tile for the fewest bank conflicts over all of its accesses together.

    Tried are all Swizzle<B, M, S> with S ≥ B (as CuTe demands) that change bank bits only, keep each lane's bytes together and
    stay within the tile; ties go to fewer bits, then to the smaller shift. Paddings are all up to one line of banks, after
    which banks repeat. Pairs of swizzles are tried where one swizzle leaves conflicts; where no padding and no pair removes
    them either, every swizzle of every tile padded to whole words. Pairs worse than padding, and padded swizzles no better
    than all else, are not reported.

    Args:
        tile: without padding and swizzles.
        patterns: the accesses that write and read it, at least one; names as `parse_pattern` takes them.

    Returns:
        A `Design`; its `best` is the tile with the layout to use.

    Raises:
        ValueError: a tile that has padding or swizzles, no access, or one that does not fit the tile.
    """
    if tile.pad or tile.swizzles:
        raise ValueError(f"design takes a tile without padding and swizzles, got {tile}")
    parsed = tuple(parse_pattern(one) if isinstance(one, str) else one for one in patterns)
    if not parsed:
        raise ValueError("design takes at least one access, got none")
    for pattern in parsed:
        if tile.row_bytes % pattern.access.width == 0 and viewed(tile, pattern).pitch_bytes % pattern.access.width:
            raise ValueError(f"access {pattern}: rows are not aligned to its {pattern.access.width} bytes")
    places = [Places.of(pattern, tile) for pattern in parsed]
    pitches = [viewed(tile, pattern).pitch_bytes for pattern in parsed]
    classes = [PhaseClasses.of(*each) for each in zip(places, pitches, strict=True)]
    shift = tile.itemsize.bit_length() - 1

    def in_elements(swizzle: Swizzle) -> Swizzle:
        return replace(swizzle, m=swizzle.m - shift)

    work = Work()
    race = Race([one.merged() for one in joined(classes)], _lowest(tile, parsed), work)
    before = race.plain
    singles = candidates(tile, parsed)
    by_bits, excess, found = {0: before}, before, None
    for bits in sorted({one.b for one in singles}):
        own = sorted((one for one in singles if one.b == bits), key=lambda one: (one.s, one.m))
        least = race.least(encode([(one,) for one in own]))
        if least is not None:
            by_bits[bits] = least[0]
            if least[0] < excess:
                excess, found = least[0], own[least[1]]
    pad, pad_excess = _padding(tile, parsed, places, before, work)
    # Two swizzles take no memory, so they are as good as a padding that leaves as much.
    pairs = _pairs(singles) if excess else []
    stack, stack_excess = None, None
    if pairs:
        best = race.least(encode(pairs), min(excess, pad_excess + 1))
        if best is not None:
            stack_excess, stack = best[0], pairs[best[1]]
    limit = min(excess, pad_excess, before if stack_excess is None else stack_excess)
    padded = _padded_and_swizzled(tile, parsed, places, limit, work)
    return Design(
        tile=tile,
        patterns=parsed,
        before=before,
        swizzle=None if found is None else in_elements(found),
        excess=excess,
        by_bits=by_bits,
        searched=len(singles),
        pad=pad,
        pad_excess=pad_excess,
        stack=None if stack is None else tuple(map(in_elements, stack)),
        stack_excess=stack_excess,
        pairs=len(pairs),
        padded=replace(padded, swizzle=None if padded.swizzle is None else in_elements(padded.swizzle)),
        work=work.phases,
    )


def _lowest(tile: Tile, patterns: Sequence[Pattern]) -> int:
    """The lowest address bit that a swizzle may change: those below are within a bank, an element or an access."""
    return max(BANK_BYTES, tile.itemsize, *(pattern.access.width for pattern in patterns)).bit_length() - 1


def candidates(tile: Tile, patterns: Sequence[Pattern]) -> list[Swizzle]:
    """Every swizzle worth trying, on byte offsets.

    Target bits below an access's width would take its bytes apart, those above the bank bits would move nothing to another
    bank, and source bits above the tile's size are always 0.
    """
    lowest = _lowest(tile, patterns)
    top = (tile.size_bytes - 1).bit_length()
    found = []
    for m in range(lowest, TOP):
        for b in range(1, TOP - m + 1):
            found += [Swizzle(b, m, s) for s in range(b, top - m)]
    end = tile.size_bytes % LINE
    if found and end:
        # Target bits lie within a line of banks: only in the last, incomplete one can a swizzle point past the end.
        starts = torch.arange(tile.size_bytes - end, tile.size_bytes, 1 << lowest, dtype=torch.int32)
        moved = apply(encode([(one,) for one in found]), starts.expand(len(found), -1))
        found = [one for one, last in zip(found, moved.amax(1).tolist(), strict=True) if last < tile.size_bytes]
    return found


def _pairs(singles: Sequence[Swizzle]) -> list[tuple[Swizzle, Swizzle]]:
    """Every two swizzles one after the other, fewer bits first: of those that conflict alike, as most do, one."""
    singles = sorted(singles)
    one, other = torch.combinations(torch.arange(len(singles)), 2).unbind(1)
    bits, shifts = torch.tensor([(single.b, single.s) for single in singles]).reshape(-1, 2).unbind(1)
    rank = ((bits[one] * 32 + shifts[one]) * 32 + bits[other]) * 32 + shifts[other]
    order = torch.cat([rank, rank]).argsort(stable=True)
    first, second = torch.cat([one, other])[order], torch.cat([other, one])[order]
    codes = encode([(single,) for single in singles])[:, 0]
    banks = banks_from(torch.stack([codes[first], codes[second]], 1))
    kept, _ = distinct(banks, torch.ones(len(banks), dtype=torch.int64))
    return [(singles[int(first[n])], singles[int(second[n])]) for n in kept.sort().values]


def _padding(tile: Tile, patterns: Sequence[Pattern], places: Sequence[Places], before: int, work: Work) -> tuple[int, int]:
    """The least padding with the fewest conflicts, and how many those are."""
    best = 0, before
    if any(pattern.view for pattern in patterns):
        return best  # another shape over the same memory has no rows to pad
    widest = max(pattern.access.width for pattern in patterns)
    shapes = [one.up_to_translation() for one in places]
    for pad in range(1, LINE // tile.itemsize):
        pitch = tile.pitch_bytes + pad * tile.itemsize
        if best[1] and pitch % widest == 0:
            excess = 0
            for one in shapes:
                classes = PhaseClasses.of(one, pitch)
                excess += int((work.excess(classes) * classes.weights).sum())
            best = min(best, (pad, excess), key=lambda choice: choice[1])
    return best


def _padded_and_swizzled(tile: Tile, patterns: Sequence[Pattern], places: Sequence[Places], limit: int, work: Work) -> Padded:
    """The swizzle of a padded tile that leaves fewer than `limit` conflicts, and the fewest; of equals the least padding."""
    if any(pattern.view for pattern in patterns):
        return Padded()
    widest = max(pattern.access.width for pattern in patterns)
    units = [one.in_units() for one in joined([one.in_units() for one in places])]
    best, searched = Padded(), 0
    for pad in range(1, LINE // tile.itemsize):
        padded = replace(tile, pad=pad)
        if padded.pitch_bytes % max(widest, BANK_BYTES) or not limit:
            continue
        swizzles = sorted(candidates(padded, patterns), key=lambda one: (one.b, one.s, one.m))
        searched += len(swizzles)
        stacks = encode([(one,) for one in swizzles])
        # Those that bring no other addresses together leave what padding alone does.
        alive = (banks_from(stacks) != 0).any(1).nonzero().flatten()
        lowest = _lowest(padded, patterns)
        if len(alive):
            race = Race([PhaseClasses.in_units(one, padded.pitch_bytes).merged() for one in units], lowest, work)
            least = race.least(stacks[alive], limit)
            if least is not None:
                limit, best = least[0], Padded(pad, swizzles[int(alive[least[1]])], least[0])
    return replace(best, searched=searched)


def check(found: Design) -> None:
    """Recount the chosen layouts with the model, lane by lane; an error if the search and the model disagree."""
    layouts = [(found.tile, found.before)]
    if found.swizzle is not None:
        layouts.append((replace(found.tile, swizzles=(found.swizzle,)), found.excess))
    if found.stack is not None and found.stack_excess is not None:
        layouts.append((replace(found.tile, swizzles=found.stack), found.stack_excess))
    if found.pad:
        layouts.append((replace(found.tile, pad=found.pad), found.pad_excess))
    if found.padded.swizzle is not None and found.padded.excess is not None:
        both = replace(found.tile, pad=found.padded.pad, swizzles=(found.padded.swizzle,))
        layouts.append((both, found.padded.excess))
    for layout, expected in layouts:
        counted = sum(count(pattern, layout).excess for pattern in found.patterns)
        if counted != expected:
            raise AssertionError(f"the search says {expected} conflicts for {layout}, the model {counted}")
