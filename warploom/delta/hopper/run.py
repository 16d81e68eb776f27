"""Running a call: all chunks prepared, then walked, by one call of their module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from warploom.delta.hopper import plan
from warploom.delta.hopper.config import CHUNK, ITEM
from warploom.delta.problem import DeltaCall
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.device import current
from warploom.runtime.likeness import allocation

_WORD = 2  # bytes that the strides of beta and decay count in


def forward(call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Out and the last state; see `warploom.delta.backend`."""
    q, k, v = (aligned(t) for t in (call.q, call.k, call.v))
    lengths, cu = (None if t is None else t.contiguous() for t in (call.lengths, call.cu_seqlens))
    call = replace(call, q=q, k=k, v=v, lengths=lengths, cu_seqlens=cu)
    found = _launcher(call, return_state)(q, k, v, call.beta, call.decay, call.state, lengths, cu)
    assert found is not None
    return found


def bind(call: DeltaCall, return_state: bool) -> Callable[..., tuple[Tensor, Tensor | None] | None] | None:
    """What launches further calls of this kind by their tensors; see `warploom.delta.backend`."""
    if any([aligned(t) is not t for t in (call.q, call.k, call.v)]):
        return None
    if any([t is not None and not t.is_contiguous() for t in (call.lengths, call.cu_seqlens)]):
        return None
    return _launcher(call, return_state)


def _launcher(call: DeltaCall, return_state: bool) -> Callable[..., tuple[Tensor, Tensor | None] | None]:
    none, no_state = nothing(call.q.device)
    function = _function(call)
    device = call.v.device
    new_out, new_prepared, new_last = [allocation(shape, dtype, device) for shape, dtype in _results(call)]
    index, current_device = device.index, current(device)
    of_beta = _words(call.beta)
    of_decay = of_beta if call.decay is None else _words(call.decay)
    numbers = *of_decay, call.scale, call.eps, int(call.normalize_qk), int(call.decay is not None)

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, state: Tensor | None,
        lengths: Tensor | None, cu: Tensor | None,
    ) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        if current_device() != index:
            with torch.cuda.device(device):
                return run(q, k, v, beta, decay, state, lengths, cu)
        if q.ndim == 3:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        out = new_out()
        last = new_last() if return_state else no_state
        address = beta.data_ptr()
        function(
            q, k, v, out, new_prepared(), no_state if state is None else state, last, none if lengths is None else lengths,
            none if cu is None else cu, address, *of_beta, address if decay is None else decay.data_ptr(), *numbers,
        )  # fmt: skip
        return out, last if return_state else None

    return run


def _words(t: Tensor) -> tuple[int, ...]:
    """Strides of batch, tokens and heads in words, and the words of an element."""
    words = t.element_size() // _WORD
    return *[s * words for s in t.stride()], words


def _function(call: DeltaCall) -> Callable[..., None]:
    """What launches both kernels."""
    dtype, (heads_v, m) = str(call.v.dtype).removeprefix("torch."), call.v.shape[2:]
    sequences = call.sequences + (call.cu_seqlens is not None)
    variant = plan.forward(dtype, call.q.shape[3], m, sequences * heads_v, processors(call.q.device.index))
    return modules.fetch(variant.spec)


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
