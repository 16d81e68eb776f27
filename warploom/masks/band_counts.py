"""How many tiles a band hides, cuts and shows in full, in closed form: sums of rounded multiples, whatever the lengths.

A block of keys [n0, n1) sees rows n0 - right - offset to n1 - 1 + left - offset, offset = seqlen_k - seqlen_q. It is shown in
full in rows n1 - 1 - right - offset to n0 + left - offset. So its row blocks, of either kind, run between two multiples of its
number, rounded to row blocks and kept within the sequence.
"""

from __future__ import annotations

from warploom.runtime.arguments import keeps_nothing


def count_band(
    left: int | None, right: int | None, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int
) -> tuple[int, int, int]:
    """Hidden, partial and full tiles of `block_m` queries by `block_n` keys; the last of each kind is cut at its length."""
    blocks, rest = divmod(seqlen_k, block_n)
    rows = -(-seqlen_q // block_m)
    every = rows * (blocks + (rest > 0))
    if keeps_nothing(left, right):
        return every, 0, 0
    offset = seqlen_k - seqlen_q
    # Beyond any row: a side without a limit.
    low = 2 * (seqlen_q + seqlen_k) if left is None else left
    high = 2 * (seqlen_q + seqlen_k) if right is None else right
    shown = full = 0
    for first, count, width in ((0, blocks, block_n), (blocks * block_n, min(rest, 1), rest)):
        shown += _begun(count, block_n, first + width + low - offset, seqlen_q, block_m)
        shown -= _ended(count, block_n, first - high - offset, seqlen_q, block_m)
        full += _full(count, block_n, first + low - offset + 1, first + width - high - offset - 1, seqlen_q, block_m)
    return every - shown, shown - full, full


def _full(count: int, step: int, end: int, begin: int, seqlen_q: int, block_m: int) -> int:
    """Row blocks within rows [begin, end), summed over `count` such ranges, each `step` after the last."""
    blocks, rest = divmod(seqlen_q, block_m)
    full = 0
    if end - begin >= block_m - 1:  # in shorter ones no whole block fits, and of these none holds less than none
        full = _clamped(count, step, end, block_m, blocks) - _clamped(count, step, begin + block_m - 1, block_m, blocks)
    if rest:  # the cut block fits where a range begins before it and reaches the end
        reaches, begins_later = _from(count, step, seqlen_q - end), _from(count, step, blocks * block_m + 1 - begin)
        full += max(0, begins_later - reaches)
    return full


def _begun(count: int, step: int, row: int, seqlen_q: int, block_m: int) -> int:
    """Row blocks that begin before `row`, summed over `count` rows `step` apart."""
    return _clamped(count, step, row + block_m - 1, block_m, -(-seqlen_q // block_m))


def _ended(count: int, step: int, row: int, seqlen_q: int, block_m: int) -> int:
    """Row blocks that end at or before `row`, summed over `count` rows `step` apart."""
    blocks, rest = divmod(seqlen_q, block_m)
    cut = count - _from(count, step, seqlen_q - row) if rest else 0
    return _clamped(count, step, row, block_m, blocks) + cut


def _from(count: int, step: int, least: int) -> int:
    """The first i < count with step * i >= least, or count."""
    return min(count, max(0, -(-least // step)))


def _clamped(count: int, step: int, start: int, unit: int, most: int) -> int:
    """The sum over i < count of (step * i + start) // unit, each within [0, most]."""
    low, high = _from(count, step, -start), _from(count, step, most * unit - start)
    return _floors(high - low, step, start + low * step, unit) + (count - high) * most if low < high else (count - high) * most


def _floors(count: int, step: int, start: int, unit: int) -> int:
    """The sum over i < count of (step * i + start) // unit, for start >= 0, by Euclid's algorithm on step and unit."""
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (step // unit) + count * (start // unit)
        step, start = step % unit, start % unit
        # What is left counts lattice points under a line, and the same points are counted along its other axis.
        count, start = divmod(step * count + start, unit)
        step, unit = unit, step
    return total
