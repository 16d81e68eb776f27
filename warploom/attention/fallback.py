"""Where an implementation sends a call, or the backward pass of one, that it has no kernel for."""

from __future__ import annotations

from types import ModuleType

from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.runtime import dispatch


def fallback(name: str, args: AttentionArgs, backward: bool) -> ModuleType:
    """The module of that implementation; NotImplementedError where there is none."""
    found = dispatch.following(name, AttentionProblem.from_args(args, backward))
    if found is None:
        raise NotImplementedError("no other implementation takes this call")
    return found.module
