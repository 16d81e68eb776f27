"""Running a backward pass: all chunks prepared; then range by range walked, walked back, and their gradients taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from warploom.delta.hopper.plan import back, gradients, keep, prepare, warpgroups
from warploom.delta.hopper.ranges import Kept, Ranges, Sizes
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
    cut = schedule(sizes, count)
    of = str(call.v.dtype).removeprefix("torch."), sizes.e
    columns = *of, sizes.m, sizes.sequences * sizes.heads_v, count
    variants = prepare(*of, True), keep(*columns), keep(*columns, True), back(*columns), gradients(*of)
    run_prepare, run_keep, run_again, run_back, run_gradients = (modules.fetch(variant.spec) for variant in variants)
    scale, eps, normalize, decays = call.scale, call.eps, int(call.normalize_qk), int(call.decay is not None)
    # Kernels write what counts.
    new = torch.empty_like if call.lengths is None and call.cu_seqlens is None else torch.zeros_like
    size, each, carriers, entries, end = cut.size, int(cut.per_sequence), cut.carriers, cut.entries, cut.number - 1
    dtype, plain = call.v.dtype, torch.contiguous_format

    def run(
        dout: Tensor, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None,
        state: Tensor | None, lengths: Tensor | None, cu: Tensor | None,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv, dbeta, ddecay = [new(t, memory_format=plain) for t in (q, k, v, beta, beta)]
        first = no_state if state is None else torch.empty_like(state, memory_format=plain)
        last = no_state if dstate is None else dstate.contiguous()
        given, loss = no_state if state is None else state, beta if decay is None else decay
        counted, starts = none if lengths is None else lengths.contiguous(), none if cu is None else cu.contiguous()
        prepared, states, dstates, missing, resume, carry = Kept.of(sizes, cut, device, dtype)

        def there(current: int) -> None:
            """States of a range; the last one is reached through all others, of which Y and the first states stay."""
            walk, begin = (run_keep, 0) if current == end else (run_again, current)
            to = states[current % cut.held]
            walk(k, v, prepared, given, resume, to, missing, counted, starts, size, begin, current, each, carriers)

        def back_again(current: int) -> None:
            """Gradients of a range's states and values."""
            run_back(q, k, dout, dv, prepared, last, first, carry, dstates, counted, starts, size, current, each)

        def take(current: int) -> None:
            """All other gradients of a range."""
            run_gradients(
                q, k, dout, dv, loss, prepared, states[current % cut.held], dstates, missing, dq, dk, dbeta, ddecay, counted,
                starts, eps, normalize, decays, size, current, each, entries, count,
            )  # fmt: skip

        with on_device(q):
            run_prepare(q, k, beta, loss, counted, starts, prepared, scale, eps, normalize, decays)
            (_side_by_side if cut.held == 2 else _in_turn)(cut.number, there, back_again, take, device)
        return dq, dk, dv, dbeta, None if decay is None else ddecay, None if state is None else first

    return run


def schedule(sizes: Sizes, processors: int) -> Ranges:
    """How a pass is cut: into what is walked both ways at the same time where each way leaves half of the processors idle."""
    cut, heads = sizes.ranges(), sizes.sequences * sizes.heads_v
    blocks = heads * sizes.tiles // warpgroups(sizes.m, heads, processors)
    return cut if cut.number == 1 or 2 * blocks > processors else sizes.ranges(2)


Walk = Callable[[int], None]  # of a range with this number


def _in_turn(number: int, there: Walk, back: Walk, take: Walk, device: torch.device) -> None:
    """Range by range from the last."""
    for current in range(number - 1, -1, -1):
        there(current)
        back(current)
        take(current)


def _side_by_side(number: int, there: Walk, back: Walk, take: Walk, device: torch.device) -> None:
    """A second stream has states: of the last range while that is walked back, then of each while the one behind it is."""
    main, other = torch.cuda.current_stream(device), _stream(device)
    ready: list[torch.cuda.Event] = []
    for current in range(number - 1, -1, -1):
        # What is written over next was read by the gradients just launched.
        other.wait_stream(main)
        with torch.cuda.stream(other):
            for each in (current, current - 1) if not ready else (current - 1,):
                if each >= 0:
                    there(each)
                    ready.append(other.record_event())
        back(current)
        main.wait_event(ready[number - 1 - current])
        take(current)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
