"""Packed calls cut into dense ones, for implementations that walk sequences on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from warploom.linear.problem import LinearCall


def sequences(call: LinearCall) -> Iterator[tuple[int, slice, LinearCall]]:
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
        s, z = (None if t is None else t[n : n + 1] for t in (call.s, call.z))
        q, k, v = (t[:, span] for t in (call.q, call.k, call.v))
        decay = call.decay if call.decay is None or call.decay.ndim == 1 else call.decay[:, span]
        yield n, span, dataclasses.replace(call, q=q, k=k, v=v, s=s, z=z, decay=decay, cu_seqlens=None)
