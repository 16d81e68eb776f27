"""A few variants that have as many different pairs of properties as they can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from itertools import combinations
from typing import Any, TypeVar

T = TypeVar("T")

# Variants drawn for each that is kept: of 6 or 16 some pairs of features were in no problem of 14,000.
TRIES = 30


def spread(draw: Callable[[], T], count: int, also: Callable[[Any], tuple[Any, ...]] = lambda _: ()) -> list[T]:
    """``count`` of the dataclasses that ``draw`` gives, each the one of several whose pairs of fields are the rarest so far.

    also: what is counted beside the fields of one, by how often it is named.
    """
    had: Counter[Any] = Counter()

    def pairs(one: Any) -> list[Any]:
        return list(combinations(enumerate((*astuple(one), *also(one))), 2))

    found = []
    for _ in range(count):
        drawn = [(each, pairs(each)) for each in (draw() for _ in range(TRIES))]
        best, new = max(drawn, key=lambda one: sum(1.0 / (1 + had[pair]) for pair in one[1]))
        had.update(new)
        found.append(best)
    return found
