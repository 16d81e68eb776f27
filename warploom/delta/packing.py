"""Packed calls cut into dense ones, for implementations that walk sequences on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from warploom.delta.problem import DeltaCall


def sequences(call: DeltaCall) -> Iterator[tuple[int, slice, DeltaCall]]:
    """Number, tokens and dense call of batch 1 of each packed sequence; reads ``cu_seqlens`` on the host.

    Out-of-range contents are clamped, so that bad starts never read out of bounds.
    """
    assert call.cu_seqlens is not None
    last = 0
    starts = []
    for value in call.cu_seqlens.tolist():
        last = min(max(value, last), call.q.shape[1])
        starts.append(last)
    for n in range(len(starts) - 1):
        span = slice(starts[n], starts[n + 1])
        q, k, v, beta = (t[:, span] for t in (call.q, call.k, call.v, call.beta))
        decay = None if call.decay is None else call.decay[:, span]
        state = None if call.state is None else call.state[n : n + 1]
        yield n, span, dataclasses.replace(call, q=q, k=k, v=v, beta=beta, decay=decay, state=state, cu_seqlens=None)
