"""The cases that every process of a world runs, by name."""

from __future__ import annotations

from collections.abc import Callable

Case = Callable[[int, int, int], None]  # rank, world, seed

CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        return function

    return add
