"""Launchers of the gated delta rule that are kept, as `warploom.runtime.kept` has it: of passes, of gradients, of steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from warploom.delta.backend import DeltaBackend
from warploom.delta.ops import delta_op, is_empty
from warploom.delta.problem import DeltaCall, StepArgs
from warploom.runtime import dispatch, kept
from warploom.runtime.likeness import like

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
# By the tensors of Given; None where it does not take these addresses, which a checked call then copies.
Launch = Callable[..., tuple[Tensor, Tensor | None] | None]


def keep(
    key: Hashable, call: DeltaCall, given: Given, chosen: str, backend: str | None, return_state: bool, records: bool
) -> None:
    """Keep what launches further calls like ``call``, which has run.

    Args:
        key: of `warploom.runtime.kept.find`.
        given: the caller's q, k, v, beta, decay, state, lengths and cu_seqlens, which launchers take.
        chosen: the implementation that ran it; ``backend`` is the one that the caller named.
    """
    read = (call.q, call.k, call.v, call.beta, call.decay, call.state, call.lengths, call.cu_seqlens)
    if key is None or is_empty(call) or not _same(given, read, call.accumulator):
        return
    make = partial(_bind, call, given, chosen, return_state, records)
    kept.bind(key, call, chosen, "delta", backend is not None, make)


def keep_step(
    key: Hashable,
    call: DeltaCall,
    args: StepArgs,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor],
    backend: str | None,
    inplace: bool,
) -> None:
    """The same of a step; ``given``: the caller's q, k, v, beta, decay and state."""
    q, k, v, beta, decay, state = given
    # A step's rows may have a dimension of 1 behind the batch.
    rows = [t if t is None or q.ndim == 3 else t.squeeze(1) for t in (q, k, v, beta, decay)]
    read = (args.q, args.k, args.v, args.beta, args.decay, args.state)
    if key is None or is_empty(call) or not _same((*rows, state), read, call.accumulator):
        return
    make = partial(_bind_step, args, q.ndim == 4, call.accumulator, inplace)
    kept.bind(key, call, args.backend, "delta", backend is not None, make)


def _same(given: tuple[Tensor | None, ...], read: tuple[Tensor | None, ...], wide: torch.dtype) -> bool:
    """Whether a call reads the caller's memory, but for beta and decay of other dtypes, which launchers convert."""
    converted = {n for n in (3, 4) if (t := given[n]) is not None and t.dtype != wide}
    return kept.same(*[[t for n, t in enumerate(each) if n not in converted] for each in (given, read)])


def _bind(call: DeltaCall, given: Given, chosen: str, return_state: bool, records: bool) -> Launch | None:
    backend = cast(DeltaBackend, dispatch.find(chosen, "delta"))
    packed, wide = given[0].ndim == 3, call.accumulator
    narrow = [t.dtype for t in given[3:5] if t is not None and t.dtype != wide]
    # Calls that are recorded convert: a checked one keeps what is converted, and checkpoints may run it again by its launcher.
    converts = bool(narrow) and (records or not all(map(backend.reads, narrow)))
    if narrow and not converts:
        beta, decay = given[3:5] if not packed else [t if t is None else t.unsqueeze(0) for t in given[3:5]]
        call = replace(call, beta=cast(Tensor, beta), decay=decay)
    forward = backend.bind(call, return_state)
    if forward is None:
        return None
    numbers, options = (call.scale, call.normalize_qk, call.eps), (chosen, return_state)
    nothing = like((0,), wide, call.q.device)

    def flat(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, state: Tensor | None, *where: Tensor | None
    ) -> tuple[object, ...]:
        if q.ndim == 3:
            q, k, v, beta, decay = _batch_of_one(q, k, v, beta, decay)
        return (q, k, v, beta, decay, *numbers, state, *where, *options)

    def filled(*tensors: Tensor | None) -> tuple[Tensor, Tensor] | None:
        found = forward(*tensors)
        return found if found is None or found[1] is not None else (found[0], torch.empty_like(nothing))

    def bind_backward(flat: tuple[object, ...], dout: Tensor, dstate: Tensor | None) -> Callable[..., Any] | None:
        return backend.bind_backward(DeltaCall(*flat[:-2]), dout, dstate)  # type: ignore[arg-type]

    run: Launch = forward
    if records:
        launcher = kept.Launcher(delta_op, flat, filled, bind_backward, delta_op.constant(options))
        run = delta_op.recorded_by(launcher)
    if not packed and not converts:
        return run

    def launch(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, state: Tensor | None, *where: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        if converts:
            beta, decay = _converted(beta, decay, wide)
        if packed and records:
            q, k, v, beta, decay = _batch_of_one(q, k, v, beta, decay)
        found = run(q, k, v, beta, decay, state, *where)
        return (found[0].squeeze(0), found[1]) if packed and found is not None else found

    return launch


def _converted(beta: Tensor, decay: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return beta.to(wide), None if decay is None else decay.to(wide)


def _batch_of_one(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    rows = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), beta.unsqueeze(0)
    return *rows, None if decay is None else decay.unsqueeze(0)


def _bind_step(
    args: StepArgs, tokens: bool, wide: torch.dtype, inplace: bool
) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
    """``tokens``: the caller's rows have the dimension of 1."""
    backend = cast(DeltaBackend, dispatch.find(args.backend, "delta"))
    run = backend.bind_step(args, args.state if inplace else None)
    if run is None:
        return None

    def launch(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, decay: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if beta.dtype != wide or (decay is not None and decay.dtype != wide):
            beta, decay = _converted(beta, decay, wide)
        found = run(q, k, v, beta, state, decay)
        if found is None:
            return None
        out, new = found
        if inplace and not state.is_inference():
            torch.autograd.graph.increment_version(state)
        return out.unsqueeze(1) if tokens else out, new

    return launch
