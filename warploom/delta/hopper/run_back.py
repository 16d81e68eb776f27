"""Running a backward pass: all chunks prepared; then range by range walked, walked back, and their gradients taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.delta.hopper.plan import back, gradients, keep, prepare
from warploom.delta.hopper.ranges import Kept, Sizes
from warploom.delta.hopper.run import nothing, processors
from warploom.delta.problem import DeltaCall
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.device import on_device

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def backward(call: DeltaCall, dout: Tensor, dstate: Tensor | None) -> Gradients:
    """dq, dk, dv, dbeta, ddecay and the initial state's gradient."""
    q, k, v, dout = (aligned(t) for t in (call.q, call.k, call.v, dout))
    decay = call.beta if call.decay is None else call.decay
    none, no_state = nothing(q.device)
    lengths, cu = (none if t is None else t.contiguous() for t in (call.lengths, call.cu_seqlens))
    # Kernels write what counts.
    new = torch.empty if call.lengths is None and call.cu_seqlens is None else torch.zeros
    dq, dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dbeta, ddecay = (new(call.beta.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    last = no_state if dstate is None else dstate.contiguous()
    first = no_state if call.state is None else torch.empty_like(call.state, memory_format=torch.contiguous_format)
    sizes = Sizes.of(call)
    cut = sizes.ranges()
    kept = Kept.of(sizes, cut, no_state, v.dtype)
    count = processors(q.device.index)
    of = str(v.dtype).removeprefix("torch."), sizes.e
    columns = *of, sizes.m, sizes.sequences * sizes.heads_v, count
    variants = prepare(*of, True), keep(*columns), back(*columns), gradients(*of)
    run_prepare, run_keep, run_back, run_gradients = (modules.fetch(variant.spec) for variant in variants)
    normalize, decays, each = int(call.normalize_qk), int(call.decay is not None), int(cut.per_sequence)
    with on_device(q):
        run_prepare(q, k, call.beta, decay, lengths, cu, kept.prepared, call.scale, call.eps, normalize, decays)
        for current in reversed(range(cut.number)):
            # The last range is reached through all others, whose first states stay.
            begin = 0 if current == cut.number - 1 else current
            state = no_state if call.state is None else call.state
            run_keep(
                k, v, kept.prepared, state, kept.resume, kept.states, kept.missing, lengths, cu, cut.size, begin, current, each,
                cut.carriers,
            )  # fmt: skip
            run_back(
                q, k, dout, dv, kept.prepared, last, first, kept.carry, kept.dstates, lengths, cu, cut.size, current, each
            )
            run_gradients(
                q, k, dout, dv, decay, kept.prepared, kept.states, kept.dstates, kept.missing, dq, dk, dbeta, ddecay, lengths,
                cu, call.eps, normalize, decays, cut.size, current, each, cut.entries, count,
            )  # fmt: skip
    return dq, dk, dv, dbeta, None if call.decay is None else ddecay, None if call.state is None else first


def bind_backward(call: DeltaCall, dout: Tensor, dstate: Tensor | None) -> Callable[..., Gradients | None] | None:
    """What launches further backward passes of this kind by dout, dstate and the call's tensors."""
    if any([aligned(t) is not t for t in (call.q, call.k, call.v, dout)]):
        return None
    numbers = call.scale, call.normalize_qk, call.eps

    def run(
        dout: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None,
        *others: Tensor | None,
    ) -> Gradients | None:  # fmt: skip
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
            return None
        return backward(DeltaCall(q, k, v, beta, decay, *numbers, *others), dout, dstate)

    return run
