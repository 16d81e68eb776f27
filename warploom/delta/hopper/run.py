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
from warploom.runtime.likeness import like


def forward(call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Out and the last state; see `warploom.delta.backend`."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    beta, decay = call.beta, call.beta if call.decay is None else call.decay
    none, no_state = nothing(q.device)
    lengths, cu = (none if t is None else t.contiguous() for t in (call.lengths, call.cu_seqlens))
    of_out, of_prepared, of_last = _results(call)
    out, prepared = (torch.empty(shape, dtype=dtype, device=v.device) for shape, dtype in (of_out, of_prepared))
    last = torch.empty(of_last[0], dtype=of_last[1], device=v.device) if return_state else no_state
    first, second = _functions(call)
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
    if any([t is not None and not t.is_contiguous() for t in (call.lengths, call.cu_seqlens)]):
        return None
    none, no_state = nothing(call.q.device)
    first, second = _functions(call)
    likes = tuple([like(shape, dtype, call.v.device) for shape, dtype in _results(call)])
    like_out, like_prepared, like_last = likes
    numbers = call.scale, call.eps, int(call.normalize_qk), int(call.decay is not None)

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, state: Tensor | None,
        lengths: Tensor | None, cu: Tensor | None,
    ) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if q.ndim == 3:
            q, k, v, beta = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), beta.unsqueeze(0)
            decay = None if decay is None else decay.unsqueeze(0)
        lengths, cu = none if lengths is None else lengths, none if cu is None else cu
        out, prepared = torch.empty_like(like_out), torch.empty_like(like_prepared)
        last = torch.empty_like(like_last) if return_state else no_state
        with on_device(q):
            first(q, k, beta, beta if decay is None else decay, lengths, cu, prepared, *numbers)
            second(q, k, v, out, prepared, no_state if state is None else state, last, lengths, cu)
        return out, last if return_state else None

    return run


def _functions(call: DeltaCall) -> tuple[Callable[..., None], Callable[..., None]]:
    """What prepares chunks, and what walks them."""
    dtype, (heads_v, m) = str(call.v.dtype).removeprefix("torch."), call.v.shape[2:]
    sequences = call.sequences + (call.cu_seqlens is not None)
    variants = (
        prepare(dtype, call.q.shape[3]),
        walk(dtype, call.q.shape[3], m, sequences * heads_v, processors(call.q.device.index)),
    )
    first, second = (modules.fetch(variant.spec) for variant in variants)
    return first, second


def _results(call: DeltaCall) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and dtypes of out, of what is prepared, and of the last state."""
    batch, seqlen, heads_v, m = call.v.shape
    slots = seqlen // CHUNK + call.sequences + 1 if call.cu_seqlens is not None else batch * -(-seqlen // CHUNK)
    return (
        ((batch, seqlen, heads_v, m), call.v.dtype),
        ((slots * heads_v, ITEM), torch.float32),
        ((call.sequences, heads_v, call.q.shape[3], m), torch.float32),
    )


@cache
def nothing(device: torch.device) -> tuple[Tensor, Tensor]:
    """What stands for lengths or starts, and for states, that are not there."""
    return torch.empty(0, dtype=torch.int32, device=device), torch.empty((0, 1, 1, 1), dtype=torch.float32, device=device)


@cache
def processors(index: int | None) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
