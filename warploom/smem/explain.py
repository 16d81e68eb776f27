"""A design in words: which address bits choose the bank, which of them an access varies, and what the swizzle does to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from warploom.smem import copies
from warploom.smem.access import Pattern
from warploom.smem.classes import LINE, TOP, PhaseClasses, Places, excess_by_phase
from warploom.smem.layout import Swizzle, Tile, join
from warploom.smem.model import BANK_BYTES, Phase, predict
from warploom.smem.swizzle import Design
from warploom.smem.walk import NOWHERE, TileCount, addresses, viewed

BANK_BITS = range(BANK_BYTES.bit_length() - 1, TOP)


@dataclass(frozen=True)
class Bits:
    """What the lanes of a pattern's commonest phase do to the bits of a byte address.

    `varied` are the bits in which they differ beyond the bytes of one access, `outside` those of them that choose no bank,
    `free` the bank bits that are alike in all lanes and can be changed without taking an access apart. `alone` says that
    all phases are like this one.
    """

    pattern: Pattern
    alone: bool
    varied: tuple[int, ...]
    outside: tuple[int, ...]
    free: tuple[int, ...]

    @classmethod
    def of(cls, pattern: Pattern, tile: Tile, lowest: int) -> Bits | None:
        """None where the lanes do not fill the bits they vary: with a pitch that is no power of two, say."""
        classes = PhaseClasses.of(Places.of(pattern, tile), viewed(tile, pattern).pitch_bytes).merged()
        pieces = [piece for piece in classes.offsets[0].tolist() if piece != NOWHERE]
        mask = 0
        for piece in pieces:
            mask |= piece
        varied = tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)
        if len(pieces) != 1 << len(varied):
            return None
        free = tuple(bit for bit in BANK_BITS if bit >= lowest and bit not in varied)
        return cls(pattern, len(classes) == 1, varied, tuple(bit for bit in varied if bit >= TOP), free)


def describe(found: Design) -> str:
    """The result and the reasons, as numbered steps."""
    tile = found.tile
    each = ", ".join(f"{pattern} {_excess(pattern, tile)}" for pattern in found.patterns)
    lines = [
        f"tile      {tile}, rows of {tile.pitch_bytes} bytes",
        f"as it is  {found.before} excess wavefronts: {each}",
        f"swizzle   {_swizzle_line(found)}",
        f"padding   {_padding_line(found)}",
    ]
    if found.pairs:
        lines.append(f"two       {_stack_line(found)}")
    if found.padded.searched:
        lines.append(f"both      {_both_line(found)}")
    return "\n".join([*lines, "why", *(f"  {n}. {step}" for n, step in enumerate(_steps(found), start=1))])


def _swizzle_line(found: Design) -> str:
    steps = ", ".join(f"{bits} bit{'s' * (bits != 1)} {excess}" for bits, excess in found.by_bits.items() if bits)
    tried = f"{found.searched} tried; the least by bits: {steps or 'none'}"
    if found.before == 0:
        return "none is needed"
    if found.swizzle is None:
        return f"none helps ({tried})"
    shown = f"{found.swizzle} in elements, {found.swizzle.in_bytes(found.tile.itemsize)} in bytes"
    if found.excess == 0:
        return f"{shown}: 0 left, with as few bits as can be ({tried})"
    return f"none removes every conflict; {shown} leaves {found.excess} ({tried})"


def _padding_line(found: Design) -> str:
    if any(pattern.view for pattern in found.patterns):
        return "not searched: an access sees the tile in another shape"
    if found.pad:
        extra = found.pad * found.tile.itemsize * found.tile.rows
        text = f"{found.pad} elements a row leave {found.pad_excess}, for {extra} bytes more; no smaller padding does as well"
        if any(pattern.access.name == "sts.128" for pattern in found.patterns):
            copied = copies.count(replace(found.tile, pad=found.pad)).excess - copies.count(found.tile).excess
            text += f", but filled by {copies.NAME} it costs {copied} more" if copied > 0 else ""
        return text
    return "none is needed" if found.before == 0 else f"none up to a line of {LINE} bytes leaves fewer than {found.before}"


def _stack_line(found: Design) -> str:
    if found.stack is None:
        least = min(found.excess, found.pad_excess + 1)
        return f"no two swizzles in a row leave fewer than {least} ({found.pairs} distinct pairs tried)"
    return f"{join(found.stack)} leave {found.stack_excess} ({found.pairs} distinct pairs tried)"


def _both_line(found: Design) -> str:
    both = found.padded
    if both.swizzle is None:
        return f"no padding with a swizzle leaves fewer than any of these ({both.searched} tried)"
    shown = f"{both.pad} elements a row with {both.swizzle} leave {both.excess}"
    return f"{shown}; no smaller padding with a swizzle does as well ({both.searched} tried)"


def _steps(found: Design) -> Iterable[str]:
    tile = found.tile
    names = bit_names(tile)
    first, last = BANK_BITS[0], BANK_BITS[-1]
    runs = _runs(names, tile) if names else ""
    meaning = f" In this tile {runs}." if runs else "" if names else f" {_no_bits(tile)}"
    yield f"Bits {first} to {last} of a byte address choose the bank.{meaning}"

    widest = max(max(BANK_BYTES, pattern.access.width) for pattern in found.patterns)
    lowest = max(widest, tile.itemsize).bit_length() - 1
    for pattern in found.patterns:
        yield _pattern_step(tile, pattern, lowest, names)

    chosen = found.best.swizzles
    if chosen and found.best.pad:
        names = bit_names(found.best)
        yield f"{found.best.pad} elements after each row make rows of {found.best.pitch_bytes} bytes."
    for swizzle in chosen:
        yield _swizzle_step(swizzle, tile, names)
    if chosen:
        left = {str(pattern): _excess(pattern, found.best) for pattern in found.patterns}
        if any(left.values()):
            rest = ", ".join(f"{name} {excess}" for name, excess in left.items())
            yield f"Counted again lane by lane, these conflicts stay: {rest}."
        else:
            yield "Counted again lane by lane, no phase of any access has two words in one bank."


def _pattern_step(tile: Tile, pattern: Pattern, lowest: int, names: dict[int, str]) -> str:
    bits = Bits.of(pattern, tile, lowest) if names else None
    seen = bit_names(viewed(tile, pattern)) if pattern.view else names
    conflict = witness(pattern, tile)
    if bits is None:
        return conflict or f"{pattern} has no conflicts."
    if not bits.alone and not bits.outside and conflict:
        return conflict
    if not bits.varied:
        return f"A phase of {pattern} touches one place only: no conflicts."
    which = "a phase" if bits.alone else "most phases"
    text = f"The lanes of {which} of {pattern} differ in {_list(bits.varied, seen)}."
    if not bits.outside:
        return f"{text} All of these choose banks: no conflicts."
    if bits.outside == bits.varied:
        text += f" None of these chooses a bank, so all {1 << len(bits.outside)} lanes share one."
    else:
        many = "chooses" if len(bits.outside) == 1 else "choose"
        text += f" Of these {_list(bits.outside, seen)} {many} no bank, so {1 << len(bits.outside)} lanes share one."
    if len(bits.outside) > len(bits.free):
        stuck = 1 << (len(bits.outside) - len(bits.free))
        have = f"only {_list(bits.free, seen)} of the bank bits" if bits.free else "no bank bit"
        return (
            f"{text} As every access is to keep its {1 << lowest} bytes together, {have} can take their place: "
            f"wherever the pieces are moved, at least {stuck} lanes still meet."
        )
    one = len(bits.free) == 1
    return f"{text} The bank {'bit' if one else 'bits'} left free, alike in all lanes: {_list(bits.free, seen)}."


def _swizzle_step(swizzle: Swizzle, tile: Tile, names: dict[int, str]) -> str:
    moved = swizzle.in_bytes(tile.itemsize)
    pairs = [(moved.m + moved.s + n, moved.m + n) for n in range(moved.b)]
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    text = f"{swizzle} XORs {_list(sources, names)} into {_list(targets, names)}."
    row, column = (
        all(names.get(bit, "").startswith(kind) for bit in bits) for kind, bits in (("row", sources), ("column", targets))
    )
    return f"{text} Within a row, pieces only change places." if row and column else text


def _excess(pattern: Pattern, tile: Tile) -> int:
    return int(excess_by_phase(pattern, tile).sum())


def witness(pattern: Pattern, tile: Tile) -> str | None:
    """The first conflict of a pattern, by lanes and bank; None where it has none."""
    conflicts = excess_by_phase(pattern, tile).nonzero()
    if not len(conflicts):
        return None
    number, index = conflicts[0].tolist()
    lanes = [None if address == NOWHERE else address for address in addresses(pattern, tile)[number].tolist()]
    phase = predict(pattern.access, lanes).phases[index]
    return _told(pattern, number, index, phase)


def first_conflict(one: TileCount) -> str | None:
    """The same of an access that has been counted, which may read one address in several lanes."""
    for number, prediction in enumerate(one.instructions):
        for index, phase in enumerate(prediction.phases):
            if phase.wavefronts > 1:
                return _told(one.pattern, number, index, phase)
    return None


def _told(pattern: Pattern, number: int, index: int, phase: Phase) -> str:
    bank, words = next((b, w) for b, w in phase.banks.items() if len(w) == phase.wavefronts)
    which = f"instruction {number}, phase {index} (lanes {phase.lanes[0]} to {phase.lanes[-1]})"
    shown = ", ".join(map(str, words[:4])) + (", ..." if len(words) > 4 else "")
    return f"{pattern}, {which}: {len(words)} different words in bank {bank} (words {shown})."


def bit_names(tile: Tile) -> dict[int, str]:
    """What each bit of a byte offset is in a tile whose pitch is a power of two; nothing for other pitches."""
    if tile.pitch_bytes & (tile.pitch_bytes - 1):
        return {}
    item, pitch = tile.itemsize.bit_length() - 1, tile.pitch_bytes.bit_length() - 1
    names = {bit: f"byte bit {bit}" for bit in range(item)}
    names |= {bit: f"column bit {bit - item}" for bit in range(item, pitch)}
    return names | {bit: f"row bit {bit - pitch}" for bit in range(pitch, (tile.size_bytes - 1).bit_length())}


def _runs(names: dict[int, str], tile: Tile) -> str:
    """Which bits are column bits and which row bits; nothing where neither has any."""
    item, pitch, top = tile.itemsize.bit_length() - 1, tile.pitch_bytes.bit_length() - 1, len(names)
    parts = [
        f"{'bit' if end - start == 1 else 'bits'} {_span(start, end)} {'is' if end - start == 1 else 'are'} {word} "
        f"{_span(0, end - start)}"
        for start, end, word in ((item, pitch, "column bits"), (pitch, top, "row bits"))
        if end > start
    ]
    return " and ".join(parts).replace("is column bits", "is column bit").replace("is row bits", "is row bit")


def _span(start: int, end: int) -> str:
    return str(start) if end - start == 1 else f"{start} to {end - 1}"


def _no_bits(tile: Tile) -> str:
    return f"With rows of {tile.pitch_bytes} bytes, no power of two, no bit belongs to the row or the column alone."


def _list(bits: Sequence[int], names: dict[int, str]) -> str:
    """Bits with their names, neighbours of one kind together: bits 5 to 7 (row bits 0 to 2) and bit 9 (row bit 4)."""
    runs: list[list[int]] = []
    for bit in bits:
        if runs and runs[-1][-1] == bit - 1 and _kind(bit, names) == _kind(bit - 1, names):
            runs[-1].append(bit)
        else:
            runs.append([bit])
    words = [_run(run, names) for run in runs]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _kind(bit: int, names: dict[int, str]) -> str:
    return names.get(bit, "").rpartition(" ")[0]


def _run(bits: Sequence[int], names: dict[int, str]) -> str:
    first, last = bits[0], bits[-1]
    if first == last:
        return f"bit {first} ({names[first]})" if first in names else f"bit {first}"
    numbers = [names[bit].rpartition(" ")[2] for bit in (first, last)] if first in names else []
    return f"bits {first} to {last}" + (f" ({_kind(first, names)}s {' to '.join(numbers)})" if numbers else "")
