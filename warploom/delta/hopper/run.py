"""Running a call: all chunks prepared, then walked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from warploom.delta.hopper.config import CHUNK, ITEM
from warploom.delta.hopper.plan import prepare, walk
from warploom.delta.problem import DeltaCall
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.device import on_device


def forward(call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Out and the last state; see `warploom.delta.backend`."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    beta, decay = call.beta, call.beta if call.decay is None else call.decay
    batch, seqlen, heads_v, m = v.shape
    none, no_state = nothing(q.device)
    lengths, cu = (none if t is None else t.contiguous() for t in (call.lengths, call.cu_seqlens))
    slots = seqlen // CHUNK + call.sequences + 1 if call.cu_seqlens is not None else batch * -(-seqlen // CHUNK)
    out = torch.empty((batch, seqlen, heads_v, m), dtype=v.dtype, device=v.device)
    shape = (call.sequences, heads_v, q.shape[3], m)
    last = torch.empty(shape, dtype=torch.float32, device=v.device) if return_state else no_state
    prepared = torch.empty((slots * heads_v, ITEM), dtype=torch.float32, device=v.device)
    dtype = str(v.dtype).removeprefix("torch.")
    sequences = call.sequences + (call.cu_seqlens is not None)
    count = processors(q.device.index)
    variants = prepare(dtype, q.shape[3]), walk(dtype, q.shape[3], m, sequences * heads_v, count)
    first, second = (modules.fetch(variant.spec) for variant in variants)
    with on_device(q):
        first(
            q, k, beta, decay, lengths, cu, prepared, call.scale, call.eps, int(call.normalize_qk), int(call.decay is not None)
        )
        second(q, k, v, out, prepared, no_state if call.state is None else call.state, last, lengths, cu)
    return out, last if return_state else None


def bind(call: DeltaCall, return_state: bool) -> Callable[..., tuple[Tensor, Tensor | None] | None] | None:
    """What launches further calls of this kind by their tensors; see `warploom.delta.backend`."""
    if any([aligned(t) is not t for t in (call.q, call.k, call.v)]):
        return None
    numbers = call.scale, call.normalize_qk, call.eps

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, *others: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if q.ndim == 3:
            q, k, v, beta = (t.unsqueeze(0) for t in (q, k, v, beta))
            decay = None if decay is None else decay.unsqueeze(0)
        return forward(DeltaCall(q, k, v, beta, decay, *numbers, *others), return_state)

    return run


@cache
def nothing(device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands for lengths or starts, and for states, that are not there."""
    return torch.empty(0, dtype=torch.int32, device=device), torch.empty((0, 1, 1, 1), dtype=torch.float32, device=device)


@cache
def processors(index: int | None) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
