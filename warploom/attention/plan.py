"""What explain() returns: the chosen implementation, its tiles, what it skips, and who refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import stats_backend
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import TileClasses
from warploom.runtime import dispatch


@dataclass(frozen=True)
class Plan:
    """A call's plan; ``str(plan)`` is the text for people, ``to_dict()`` the same for programs."""

    call: str
    implementation: str
    reason: str
    tile: tuple[int, int] | None = None  # queries × keys of the forward pass
    backward_tiles: tuple[tuple[str, tuple[int, int]], ...] = ()  # the same of each gradient, where its backend tells
    tiles: dict[str, int] | None = None  # counts: hidden, partial, full
    skipped: float | None = None  # fraction of tiles that are skipped, as none of their elements is visible
    refused: tuple[tuple[str, str], ...] = ()  # (implementation, why), in dispatch order
    stats: tuple[str, ...] = ()  # those that the call returns
    stats_implementation: str | None = None  # which computes them
    batch_invariant: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "call": self.call,
            "implementation": self.implementation,
            "reason": self.reason,
            "tile": list(self.tile) if self.tile else None,
            "backward_tiles": {name: list(tile) for name, tile in self.backward_tiles},
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
            lines.append(line)
        if self.backward_tiles:
            lines.append("backward  " + ", ".join(f"{name} {m}×{n}" for name, (m, n) in self.backward_tiles))
        if self.stats:
            lines.append(f"stats     {', '.join(self.stats)} by {self.stats_implementation}")
        lines += [f"refused   {name}: {why}" for name, why in self.refused]
        return "\n".join(lines)


def plan_of(
    args: AttentionArgs,
    problem: AttentionProblem,
    backend: str | None,
    mask: ResolvedMask | None = None,
    names: tuple[str, ...] = (),
) -> Plan:
    """The plan of a validated call; raises as the call would where ``backend`` refuses.

    ``mask``: the call's, with vectors on the CPU, where those of ``args`` hold no values. ``names``: of the stats it asks for.
    """
    chosen = dispatch.choose(problem, backend)
    refused, reason = [], f"forced by backend={backend!r}"
    if backend is None:
        reason = "the first that does not refuse"
        for implementation in dispatch.implementations("attention"):
            if implementation.name == chosen:
                break
            refused.append((implementation.name, implementation.refusal(problem) or ""))
    found = dispatch.find(chosen)
    words = found.describe(problem)
    if words:
        reason = f"{reason}; {words}"
    tile, at_once = found.tiles(args) or (None, 0)
    counts, skipped = (None, None)
    whole = problem.layout == "dense" and not problem.q_offset
    if tile is not None and whole and problem.seqlen_q and problem.seqlen_k:
        device = args.q.device if mask is None else torch.device("cpu")
        classes = TileClasses.of(mask or args.mask, problem.seqlen_q, problem.seqlen_k, tile[0], at_once, device)
        counts = classes.in_tiles(tile[1])
        skipped = counts["hidden"] / sum(counts.values())
    backward = tuple(found.backward_tiles(args).items()) if problem.backward else ()
    measuring = stats_backend(problem, chosen) if names else None
    return Plan(
        call=problem.describe(),
        implementation=chosen,
        reason=reason,
        tile=tile,
        backward_tiles=backward,
        tiles=counts,
        skipped=skipped,
        refused=tuple(refused),
        stats=names,
        stats_implementation=measuring,
        batch_invariant=problem.batch_invariant,
    )


def torch_plan(reason: str) -> Plan:
    """The plan of a drop-in call that torch's own function takes."""
    return Plan("scaled_dot_product_attention", "torch", f"torch.nn.functional.scaled_dot_product_attention: {reason}")
