"""The plan of a decode() call: what explain() says of a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from warploom.decode.arguments import decode_args
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.chunk import chunk_call
from warploom.decode.ops import is_empty
from warploom.decode.problem import DecodeProblem
from warploom.runtime import dispatch, invariance
from warploom.runtime.plan import Plan, choice

# Keywords of decode(), in the order in which decode_args() takes them.
_DEFAULTS: dict[str, Any] = {
    "scale": None, "softcap": 0.0, "window": None, "sink": None, "tree": None, "bias": None, "prefix": None,
}  # fmt: skip


def plan_of(q: Tensor, cache: KVCache | PagedKVCache, *, backend: str | None = None, **keywords: Any) -> Plan:
    """What decode(q, cache, **keywords) would run, and why; raises as the call would."""
    for name in keywords:
        if name not in _DEFAULTS:
            raise TypeError(
                f"{name} is no argument of decode(), which a call over a cache is; with cu_seqlens_q a PagedKVCache makes one "
                "of attention_varlen()"
            )
    args = decode_args(q, cache, *(_DEFAULTS | keywords).values())
    problem = DecodeProblem.from_args(args)
    words = problem.describe()
    if is_empty(args):
        dispatch.choose(problem, backend, "decode")  # a refusal by name is one of this call too
        return Plan(words, "none", "there is no query or no key: out is 0 and lse -inf", batch_invariant=True)
    call = chunk_call(args, keywords.get("bias"), backend) if invariance.enabled else None
    if call is not None:
        plan: Plan = invariance.explain(*call.arguments, **call.keywords)
        over = "attention_varlen() over the cache's pages, whose bits it has under warploom.batch_invariant()"
        return replace(plan, call=words, reason=f"{plan.reason}; {over}")
    found = choice(problem, backend, "decode")
    return Plan(words, *found[:2], refused=found.refused, batch_invariant=True)
