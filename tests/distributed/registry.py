"""The cases that every process of a world runs, by name."""

from __future__ import annotations

from collections.abc import Callable

Case = Callable[[int, int, int], None]  # rank, world, seed

CASES: dict[str, Case] = {}
ONLY: dict[str, tuple[int, ...]] = {}  # worlds of a case that takes long, and asks nothing else of larger ones


def case(name: str, *worlds: int) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = function
        if worlds:
            ONLY[name] = worlds
        return function

    return add


def of_world(world: int) -> dict[str, Case]:
    return {name: function for name, function in CASES.items() if world in ONLY.get(name, (world,))}
