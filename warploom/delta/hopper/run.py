"""Running a call: all chunks prepared, then walked."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.delta.hopper.config import CHUNK, ITEM
from warploom.delta.hopper.plan import prepare, walk
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.device import on_device

if TYPE_CHECKING:
    from warploom.delta.problem import DeltaCall


def forward(call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Out and the last state; see `warploom.delta.backend`."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    beta, decay = call.beta, call.beta if call.decay is None else call.decay
    batch, seqlen, heads_v, m = v.shape
    none, no_state = _nothing(q.device)
    lengths, cu = (none if t is None else t.contiguous() for t in (call.lengths, call.cu_seqlens))
    slots = seqlen // CHUNK + call.sequences + 1 if call.cu_seqlens is not None else batch * -(-seqlen // CHUNK)
    out = torch.empty((batch, seqlen, heads_v, m), dtype=v.dtype, device=v.device)
    shape = (call.sequences, heads_v, q.shape[3], m)
    last = torch.empty(shape, dtype=torch.float32, device=v.device) if return_state else no_state
    prepared = torch.empty((slots * heads_v, ITEM), dtype=torch.float32, device=v.device)
    dtype = str(v.dtype).removeprefix("torch.")
    sequences = call.sequences + (call.cu_seqlens is not None)
    processors = _processors(q.device.index)
    variants = prepare(dtype, q.shape[3]), walk(dtype, q.shape[3], m, sequences * heads_v, processors)
    first, second = (modules.fetch(variant.spec) for variant in variants)
    with on_device(q):
        first(
            q, k, beta, decay, lengths, cu, prepared, call.scale, call.eps, int(call.normalize_qk), int(call.decay is not None)
        )
        second(q, k, v, out, prepared, no_state if call.state is None else call.state, last, lengths, cu)
    return out, last if return_state else None


@cache
def _nothing(device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands for lengths or starts, and for states, that are not there."""
    return torch.empty(0, dtype=torch.int32, device=device), torch.empty((0, 1, 1, 1), dtype=torch.float32, device=device)


@cache
def _processors(index: int | None) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
