"""The plan of an attention call: the chosen implementation, its tiles, what it skips, and who refused."""

from __future__ import annotations

import torch

from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import measured_by
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import TileClasses
from warploom.runtime import dispatch
from warploom.runtime.plan import Plan, choice


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
    chosen, reason, refused = choice(problem, backend, "attention")
    runs, found = chosen, dispatch.find(chosen)
    handed = found.hands_on(args) if args.q.numel() and args.k.numel() else None
    if handed is not None:
        found, refused = dispatch.delegate(chosen, problem), (*refused, (chosen, handed))
        runs, reason = found.name, "; ".join(filter(None, (f"handed on by {chosen}", found.describe(problem))))
    tile, at_once = found.tiles(args) or (None, 0)
    loaded = None if tile is None else found.loaded_tile(args)
    counts, skipped = (None, None)
    whole = problem.layout == "dense" and not problem.q_offset and not found.packs(problem)
    if tile is not None and whole and problem.seqlen_q and problem.seqlen_k:
        device = args.q.device if mask is None else torch.device("cpu")
        classes = TileClasses.of(mask or args.mask, problem.seqlen_q, problem.seqlen_k, tile[0], at_once, device)
        found_tiles = classes.in_tiles(tile[1])
        total = sum(found_tiles.values())
        if total:  # none under a mask of no batch entries
            counts, skipped = found_tiles, found_tiles["hidden"] / total
    backward = tuple(found.backward_tiles(args).items()) if problem.backward else ()
    measuring = measured_by(args, problem, chosen, names)
    return Plan(
        call=problem.describe(),
        implementation=runs,
        reason=reason,
        tile=tile,
        backward_tiles=backward,
        tiles=counts,
        skipped=skipped,
        loaded_tile=None if loaded == tile else loaded,
        refused=refused,
        stats=names,
        stats_implementation=measuring,
        batch_invariant=problem.batch_invariant,
    )


def torch_plan(reason: str) -> Plan:
    """The plan of a drop-in call that torch's own function takes."""
    return Plan("scaled_dot_product_attention", "torch", f"torch.nn.functional.scaled_dot_product_attention: {reason}")
