"""Running a backward pass: all chunks prepared; then range by range walked, walked back, and their gradients taken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.delta.hopper.config import NO_STATE
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
    return _launcher(call)(dout, dstate, q, k, v, call.beta, call.decay, call.state, call.lengths, call.cu_seqlens)


def bind_backward(call: DeltaCall, dout: Tensor, dstate: Tensor | None) -> Callable[..., Gradients | None] | None:
    """What launches further backward passes of this kind by dout, dstate and the call's tensors."""
    if any([aligned(t) is not t for t in (call.q, call.k, call.v, dout)]):
        return None
    launch = _launcher(call)

    def run(dout: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Gradients | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
            return None
        return launch(dout, dstate, q, k, v, *others)

    return run


def _launcher(call: DeltaCall) -> Callable[..., Gradients]:
    """What launches passes of this kind by dout, dstate and the call's tensors."""
    device, count = call.q.device, processors(call.q.device.index)
    none, no_state = nothing(device)
    sizes = Sizes.of(call)
    cut = sizes.ranges()
    of = str(call.v.dtype).removeprefix("torch."), sizes.e
    columns = *of, sizes.m, sizes.sequences * sizes.heads_v, count
    variants = prepare(*of), keep(*columns), keep(*columns, True), back(*columns), gradients(*of)
    run_prepare, run_keep, run_again, run_back, run_gradients = (modules.fetch(variant.spec) for variant in variants)
    scale, eps, normalize = call.scale, call.eps, int(call.normalize_qk)
    decays = 0 if call.decay is None else 1 if call.state is not None else NO_STATE
    # Kernels write what counts.
    new = torch.empty_like if call.lengths is None and call.cu_seqlens is None else torch.zeros_like
    size, each, carriers, entries, end = cut.size, int(cut.per_sequence), cut.carriers, cut.entries, cut.number - 1
    beside, dtype, plain = sizes.beside, call.v.dtype, torch.contiguous_format

    def run(
        dout: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None,
        state: Tensor | None, lengths: Tensor | None, cu: Tensor | None,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv, dbeta, ddecay = [new(t, memory_format=plain) for t in (q, k, v, beta, beta)]
        first = no_state if state is None else torch.empty_like(state, memory_format=plain)
        last = no_state if dstate is None else dstate.contiguous()
        given, loss = no_state if state is None else state, beta if decay is None else decay
        closing = no_state if decay is None else last
        counted, starts = none if lengths is None else lengths.contiguous(), none if cu is None else cu.contiguous()
        prepared, states, dstates, resume, carry = Kept.of(sizes, cut, device, dtype)
        # Y, by value heads or by turns of even and odd ones.
        if beside:
            missing, missing_odd = dq, dk
        else:
            missing = missing_odd = torch.empty_like(v, memory_format=plain)

        with on_device(q):
            run_prepare(q, k, beta, loss, counted, starts, prepared, scale, eps, normalize, decays)
            for current in range(end, -1, -1):
                # The last one is reached through all others, of which Y and the first states stay.
                walk, begin = (run_keep, 0) if current == end else (run_again, current)
                walk(
                    k, v, prepared, given, closing, resume, states, missing, missing_odd, counted, starts, size, begin, current,
                    each, carriers,
                )  # fmt: skip
                run_back(q, k, dout, dv, prepared, last, first, carry, dstates, counted, starts, size, current, each)
                run_gradients(
                    q, k, dout, dv, loss, prepared, states, dstates, missing, missing_odd, dq, dk, dbeta, ddecay, counted,
                    starts, eps, normalize, decays, size, current, each, entries, count,
                )  # fmt: skip
        return dq, dk, dv, dbeta, None if decay is None else ddecay, None if state is None else first

    return run
