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
    decay = call.beta if call.decay is None else call.decay
    none, no_state = nothing(q.device)
    lengths, cu = (none if t is None else t.contiguous() for t in (call.lengths, call.cu_seqlens))
    # Kernels write what counts.
    new = torch.empty if call.lengths is None and call.cu_seqlens is None else torch.zeros
    dq, dk, dv = (new(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dbeta, ddecay = (new(call.beta.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    state = no_state if call.state is None else call.state
    last = no_state if dstate is None else dstate.contiguous()
    first = no_state if call.state is None else torch.empty_like(call.state, memory_format=torch.contiguous_format)
    sizes, count = Sizes.of(call), processors(q.device.index)
    cut, beside = schedule(sizes, count)
    kept = Kept.of(sizes, cut, no_state, v.dtype)
    of = str(v.dtype).removeprefix("torch."), sizes.e
    columns = *of, sizes.m, sizes.sequences * sizes.heads_v, count
    variants = prepare(*of, True), keep(*columns), keep(*columns, True), back(*columns), gradients(*of)
    run_prepare, run_keep, run_again, run_back, run_gradients = (modules.fetch(variant.spec) for variant in variants)
    normalize, decays, each = int(call.normalize_qk), int(call.decay is not None), int(cut.per_sequence)

    def walk(current: int, half: int) -> None:
        """A range there and back; the last one is reached through all others, of which Y and the first states stay."""
        run, begin = (run_keep, 0) if current == cut.number - 1 else (run_again, current)
        run(
            k, v, kept.prepared, state, kept.resume, kept.states[half], kept.missing, lengths, cu, cut.size, begin, current,
            each, cut.carriers,
        )  # fmt: skip
        run_back(
            q, k, dout, dv, kept.prepared, last, first, kept.carry, kept.dstates[half], lengths, cu, cut.size, current, each
        )

    def take(current: int, half: int, blocks: int) -> None:
        """A range's gradients."""
        run_gradients(
            q, k, dout, dv, decay, kept.prepared, kept.states[half], kept.dstates[half], kept.missing, dq, dk, dbeta,
            ddecay, lengths, cu, call.eps, normalize, decays, cut.size, current, each, cut.entries, blocks,
        )  # fmt: skip

    with on_device(q):
        run_prepare(q, k, call.beta, decay, lengths, cu, kept.prepared, call.scale, call.eps, normalize, decays)
        if beside:
            _beside(cut, walk, take, q.device, beside, count)
        else:
            for current in reversed(range(cut.number)):
                walk(current, 0)
                take(current, 0, count)
    return dq, dk, dv, dbeta, None if call.decay is None else ddecay, None if call.state is None else first


def schedule(sizes: Sizes, processors: int) -> tuple[Ranges, int]:
    """How a pass is cut; and how many processors take gradients beside walks that leave so many idle, or 0."""
    tiles = sizes.sequences * sizes.heads_v * sizes.tiles
    idle = processors - tiles // warpgroups(sizes.m, sizes.sequences * sizes.heads_v, processors)
    if 3 * idle >= processors:
        return sizes.ranges(2), idle
    return sizes.ranges(), 0


def _beside(
    cut: Ranges,
    walk: Callable[[int, int], None],
    take: Callable[[int, int, int], None],
    device: torch.device,
    beside: int,
    processors: int,
) -> None:
    """Gradients of a range in a second stream, while the next one is walked."""
    main, other = torch.cuda.current_stream(device), _stream(device)
    taken: list[torch.cuda.Event] = []
    for n, current in enumerate(reversed(range(cut.number))):
        if n >= cut.held:
            main.wait_event(taken[n - cut.held])
        walk(current, n % cut.held)
        if current == 0:
            take(current, n % cut.held, processors)
            break
        other.wait_stream(main)
        with torch.cuda.stream(other):
            take(current, n % cut.held, beside)
            taken.append(other.record_event())
    main.wait_stream(other)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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
