"""How splits of a latent cache are added up, played through with numpy: bits do not depend on who adds what."""

from __future__ import annotations

import random

import numpy as np
import pytest

from warploom.decode.hopper.latent_plan import MOST_LOG

RADIX, MOST = 4, np.float32(20.0)
Part = tuple[np.float32, np.ndarray]  # a row's reference in log2 units; its sum and O


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0.0), x), x).astype(np.float32)


def exp2(x: np.float32) -> np.float32:
    return np.float32(flushed(np.exp2(np.asarray(x, dtype=np.float32))))


def factors(before: np.float32, after: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    new = after if after > before + MOST else before
    safe = np.float32(0.0) if new == -np.inf else new
    return new, exp2(before - safe), exp2(after - safe)


def add(before: Part, after: Part) -> Part:
    """As `merge` does."""
    new, first, second = factors(before[0], after[0])
    return new, flushed(flushed(first * flushed(before[1])) + flushed(second * flushed(after[1])))


def send(before: Part, after: Part) -> Part:
    """As memory does, which multiplies nothing; where the reference changes, as `add`."""
    new, _, second = factors(before[0], after[0])
    if new != before[0]:
        return add(before, after)
    return new, flushed(flushed(before[1]) + flushed(second * flushed(after[1])))


def walked(splits: list[Part]) -> Part:
    """What a block makes of its splits: a total of each level in memory, the last of four takes it over."""
    totals: dict[int, Part] = {}
    for i, split in enumerate(splits):
        level, own = 0, split
        while RADIX**level < len(splits):
            digit = i // RADIX**level % RADIX
            last = digit == RADIX - 1 or i + 1 == len(splits)
            if not last:
                totals[level] = own if digit == 0 else send(totals[level], own)
                break
            own = add(totals[level], own)
            level += 1
    return own


def merged(parts: list[Part]) -> Part:
    while len(parts) > 1:
        groups = [parts[i : i + RADIX] for i in range(0, len(parts), RADIX)]
        parts = []
        for group in groups:
            total = group[0]
            for part in group[1:]:
                total = add(total, part)
            parts.append(total)
    return parts[0]


def drawn(count: int, jumps: bool, draw: random.Random) -> list[Part]:
    generator = np.random.default_rng(draw.randrange(2**31))
    references = generator.normal(0, 60 if jumps else 3, count)
    hidden = generator.random(count) < (0.2 if jumps else 0.0)
    parts = []
    for reference, nothing in zip(references, hidden, strict=True):
        values = (
            np.zeros(8) if nothing else generator.normal(0, 1, 8) * 10.0 ** generator.integers(-3 if not jumps else -40, 3, 8)
        )
        values[0] = 0.0 if nothing else generator.uniform(1, 1000)  # a sum
        parts.append((np.float32(-np.inf if nothing else reference), values.astype(np.float32)))
    return parts


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("log", range(MOST_LOG + 1))
def test_bits_do_not_depend_on_who_adds(log: int, jumps: bool) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(20):
        splits = drawn(1 << log, jumps, draw)
        whole = walked(splits)
        for part_log in range(0, log + 1, 2):
            each = 1 << part_log
            shared = merged([walked(splits[i : i + each]) for i in range(0, len(splits), each)])
            assert shared[0] == whole[0] and shared[1].tobytes() == whole[1].tobytes(), (seed, part_log)
        seen = [(float(m), o.astype(np.float64)) for m, o in splits if m > -np.inf]
        if not seen:
            continue
        top = max(m for m, _ in seen)
        terms = [2.0 ** (m - top) * o for m, o in seen]
        found = whole[1].astype(np.float64) * 2.0 ** (float(whole[0]) - top)
        assert np.all(np.abs(found - sum(terms)) <= 1e-5 * sum(np.abs(term) for term in terms) + 1e3 * 2.0**-60), seed
