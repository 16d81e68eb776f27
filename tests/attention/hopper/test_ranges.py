"""Which key tiles a warpgroup computes and masks, as forward.py has it, in plain integers: all that a row sees."""

from __future__ import annotations

import random


def up(a: int, b: int) -> int:
    return -(-a // b)


def key_tiles(
    row: int, rows: int, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, tile_n: int
) -> tuple[int, int]:
    """HopperForward.key_tiles."""
    shift = seqlen_k - seqlen_q
    first, end = 0, up(seqlen_k, tile_n)
    if right is not None:
        last_row = min(row + rows, seqlen_q) - 1
        end = min(end, up(max(last_row + shift + right + 1, 0), tile_n))
    if left is not None:
        first = max(row + shift - left, 0) // tile_n
    return first, end


def walk(
    top: int, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, tile_n: int, first: int, end: int
) -> tuple[int, list[tuple[int, bool]], int]:
    """HopperForward.compute: tiles skipped, computed (with or without a mask) and skipped, of a tile's [first, end)."""
    shift = seqlen_k - seqlen_q
    own_first, own_end = key_tiles(top, 64, seqlen_q, seqlen_k, left, right, tile_n)
    own_first = min(max(own_first, first), end)
    own_end = min(own_end, end) if top < seqlen_q else own_first
    own_end = max(own_end, own_first)
    whole_first, whole_end = own_first, seqlen_k // tile_n
    if right is not None:
        whole_end = min(whole_end, max(top + shift + right + 1, 0) // tile_n)
    if left is not None:
        last_row = min(top + 64, seqlen_q) - 1
        whole_first = max(up(max(last_row + shift - left, 0), tile_n), own_first)
    computed = []
    if own_first < own_end:
        n = own_end - 1
        computed.append((n, True))
        loops = [(max(whole_end, own_first), True), (whole_first, False)] + ([(own_first, True)] if left is not None else [])
        for until, masked in loops:
            for _ in range(n - until):
                n -= 1
                computed.append((n, masked))
    return end - own_end, computed, own_first - first


def test_every_row_gets_its_keys() -> None:
    draw = random.Random(1)
    for _ in range(4000):
        tile_n, groups = draw.choice([64, 80, 112, 128]), draw.choice([2, 3, 4])
        seqlen_q, seqlen_k = draw.randint(1, 700), draw.randint(1, 900)
        left = draw.choice([None, None, -140, -5, 0, 3, 60, 128, 300])
        right = draw.choice([None, 0, 0, -7, 5, 130])
        call = (seqlen_q, seqlen_k, left, right, tile_n)
        shift = seqlen_k - seqlen_q
        tile = draw.randrange(up(seqlen_q, 64 * groups)) * 64 * groups
        first, end = key_tiles(tile, 64 * groups, *call)
        for top in range(tile, tile + 64 * groups, 64):
            before, computed, after = walk(top, *call, first, end) if first < end else (0, [], 0)
            # All warpgroups pass the same number of tiles, or one would wait for ever.
            assert before + len(computed) + after == max(end - first, 0) and before >= 0 and after >= 0, call
            assert [n for n, _ in computed] == list(range(end - before - 1, first + after - 1, -1)), call
            for row in range(top, min(top + 64, seqlen_q)):
                low = 0 if left is None else max(0, row + shift - left)
                high = seqlen_k if right is None else min(seqlen_k, row + shift + right + 1)
                seen = range(low // tile_n, (high - 1) // tile_n + 1) if low < high else range(0)
                assert set(seen) <= {n for n, _ in computed}, (call, row)
                assert all(low <= n * tile_n and high >= (n + 1) * tile_n for n, masked in computed if not masked), (call, row)


def own_columns(limit: int, tile_n: int) -> int:
    """HopperForward.own_columns."""
    limit = min(max(limit, 0), tile_n)
    return (limit >> 3) * 2 + min(limit & 7, 2)


def test_bits_of_a_mask_are_the_columns_below_a_limit() -> None:
    """A thread has columns 8 i and 8 i + 1, counted from its first; words of 24 hold them in order."""
    for tile_n in (64, 80, 112, 128):
        columns = [8 * (c // 2) + c % 2 for c in range(tile_n // 4)]
        for limit in range(-30, tile_n + 30):
            words = [(1 << max(min(own_columns(limit, tile_n) - start, 24), 0)) - 1 for start in range(0, len(columns), 24)]
            assert [words[c // 24] >> c % 24 & 1 for c in range(len(columns))] == [int(column < limit) for column in columns]
