"""What explain() returns, of every family that it describes, and who describes calls of a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from warploom.runtime import dispatch


@dataclass(frozen=True)
class Plan:
    """A call's plan; ``str(plan)`` is the text for people, ``to_dict()`` the same for programs."""

    call: str
    implementation: str
    reason: str
    tile: tuple[int, int] | None = None  # queries × keys that the forward pass computes or skips together
    backward_tiles: tuple[tuple[str, tuple[int, int]], ...] = ()  # the same of each gradient, where its backend tells
    tiles: dict[str, int] | None = None  # counts: hidden, partial, full
    skipped: float | None = None  # fraction of tiles that are skipped, as none of their elements is visible
    refused: tuple[tuple[str, str], ...] = ()  # (implementation, why), in dispatch order
    stats: tuple[str, ...] = ()  # those that the call returns
    stats_implementation: str | None = None  # which computes them
    batch_invariant: bool = False
    loaded_tile: tuple[int, int] | None = None  # queries × keys that keys are loaded for, where these are more

    def to_dict(self) -> dict[str, Any]:
        return {
            "call": self.call,
            "implementation": self.implementation,
            "reason": self.reason,
            "tile": list(self.tile) if self.tile else None,
            "backward_tiles": {name: list(tile) for name, tile in self.backward_tiles},
            "loaded_tile": list(self.loaded_tile) if self.loaded_tile else None,
            "tiles": self.tiles,
            "skipped": self.skipped,
            "stats": list(self.stats),
            "stats_implementation": self.stats_implementation,
            "batch_invariant": self.batch_invariant,
            "refused": [{"implementation": name, "why": why} for name, why in self.refused],
        }

    def __str__(self) -> str:
        lines = [f"call      {self.call}", f"runs      {self.implementation}: {self.reason}"]
        if self.tile is not None:
            line = f"tiles     {self.tile[0]}×{self.tile[1]}"
            if self.tiles is not None and self.skipped is not None:
                counts = ", ".join(f"{count} {kind}" for kind, count in self.tiles.items())
                line += f": {counts}; {self.skipped:.1%} skipped"
            if self.loaded_tile is not None:
                line += f"; keys loaded for {self.loaded_tile[0]}×{self.loaded_tile[1]}"
            lines.append(line)
        if self.backward_tiles:
            lines.append("backward  " + ", ".join(f"{name} {m}×{n}" for name, (m, n) in self.backward_tiles))
        if self.stats:
            lines.append(f"stats     {', '.join(self.stats)} by {self.stats_implementation}")
        lines += [f"refused   {name}: {why}" for name, why in self.refused]
        return "\n".join(lines)


class Choice(NamedTuple):
    """What dispatch makes of a problem, in words."""

    implementation: str
    reason: str
    refused: tuple[tuple[str, str], ...]


def choice(problem: Any, backend: str | None, family: str) -> Choice:
    """Which implementation runs a problem, why it, and who refused before; raises as the call would."""
    chosen = dispatch.choose(problem, backend, family)
    refused, reason = [], f"forced by backend={backend!r}"
    if backend is None:
        reason = "the first that does not refuse"
        for implementation in dispatch.implementations(family):
            if implementation.name == chosen:
                break
            refused.append((implementation.name, implementation.refusal(problem) or ""))
    words = dispatch.find(chosen, family).describe(problem)
    return Choice(chosen, f"{reason}; {words}" if words else reason, tuple(refused))


class Describer(NamedTuple):
    """What a family gives for calls of its caches: both take the queries, the cache and the call's keywords."""

    explain: Callable[..., Plan]
    prepare: Callable[..., Plan]


_describers: dict[type, Describer] = {}


def offer(describer: Describer, *kinds: type) -> None:
    """Say who describes calls of these kinds of cache: attention's explain() and prepare() import nothing of their family."""
    _describers.update(dict.fromkeys(kinds, describer))


def describer(cache: object) -> Describer | None:
    """Who describes calls of this object, if it is a cache."""
    return next((_describers[kind] for kind in type(cache).__mro__ if kind in _describers), None)
