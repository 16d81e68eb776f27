"""Launchers of linear attention that are kept, as `warploom.runtime.kept` has it: of passes, of gradients, of steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from warploom.linear.backend import LinearBackend
from warploom.linear.ops import is_empty, linear_op
from warploom.linear.problem import LinearCall, StepArgs
from warploom.runtime import dispatch, kept
from warploom.runtime.likeness import like

Given = tuple[Tensor | None, ...]
Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
# By the tensors of Given; None where it does not take these addresses, which a checked call then copies.
Launch = Callable[..., Results | None]


def keep(
    key: Hashable, call: LinearCall, given: Given, chosen: str, backend: str | None, return_state: bool, records: bool
) -> None:
    """Keep what launches further calls like ``call``, which has run.

    Args:
        key: of `warploom.runtime.kept.find`.
        given: the caller's q, k, v, s, z, decay, lengths and cu_seqlens, which launchers take.
        chosen: the implementation that ran it; ``backend`` is the one that the caller named.
    """
    read = (call.q, call.k, call.v, call.s, call.z, call.decay, call.lengths, call.cu_seqlens)
    if key is None or is_empty(call) or not kept.same(given, read):
        return
    packed = given[0] is not None and given[0].ndim == 3
    kept.bind(key, call, chosen, "linear", backend is not None, partial(_bind, call, packed, chosen, return_state, records))


def keep_step(
    key: Hashable, call: LinearCall, args: StepArgs, given: Given, tokens: bool, backend: str | None
) -> None:
    """The same of a step; ``given``: the caller's q, k, v, s, z and decay, where ``tokens`` with a dimension of 1."""
    q, k, v, s, z, decay = given
    rows = [t if t is None or not tokens else t.squeeze(1) for t in (q, k, v)]
    logs = decay if decay is None or not tokens or decay.ndim == 1 else decay.squeeze(1)
    if key is None or is_empty(call) or not kept.same((*rows, s, z, logs), (*args[:5], args.decay)):
        return
    kept.bind(key, call, args.backend, "linear", backend is not None, partial(_bind_step, args, tokens))


def _bind(call: LinearCall, packed: bool, chosen: str, return_state: bool, records: bool) -> Launch | None:
    backend = cast(LinearBackend, dispatch.find(chosen, "linear"))
    forward = backend.bind(call, return_state)
    if forward is None:
        return None
    numbers = (call.map_q, call.map_k, call.causal, call.normalize, call.eps, call.scale)
    options, asks = (chosen, return_state), call.decay_grad
    nothing = like((0,), call.accumulator, call.q.device)

    def flat(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, decay: Tensor | None, *where: Tensor | None
    ) -> tuple[object, ...]:
        if q.ndim == 3:
            q, k, v, decay = _batch_of_one(q, k, v, decay)
        return (q, k, v, *numbers, s, z, *where, decay, asks, *options)

    def filled(*tensors: Tensor | None) -> tuple[Tensor, ...] | None:
        found = forward(*tensors)
        return found if found is None else tuple([torch.empty_like(nothing) if t is None else t for t in found])

    def bind_backward(
        flat: tuple[object, ...], dout: Tensor, ds: Tensor | None, dz: Tensor | None, norm: Tensor
    ) -> Callable[..., Any] | None:
        given = LinearCall(*flat[:-2])  # type: ignore[arg-type]
        bound = backend.bind_backward(given, dout, norm if given.normalize else None, ds, dz)
        if bound is None:
            return None
        normalize = given.normalize

        def launch(
            dout: Tensor, ds: Tensor | None, dz: Tensor | None, norm: Tensor, *tensors: Tensor | None
        ) -> Any:
            return bound(dout, norm if normalize else None, ds, dz, *tensors)

        return launch

    run: Launch = forward
    if records:
        run = linear_op.recorded_by(kept.Launcher(linear_op, flat, filled, bind_backward, linear_op.constant(options)))
    if not packed:
        return run

    def launch(
        q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, decay: Tensor | None, *where: Tensor | None
    ) -> Results | None:
        if records:
            q, k, v, decay = _batch_of_one(q, k, v, decay)
        found = run(q, k, v, s, z, decay, *where)
        return None if found is None else (found[0].squeeze(0), *found[1:])

    return launch


def _batch_of_one(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of packed tensors; a decay of heads alone has no tokens."""
    return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), decay if decay is None or decay.ndim == 1 else decay.unsqueeze(0)


def _bind_step(args: StepArgs, tokens: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor] | None] | None:
    run = cast(LinearBackend, dispatch.find(args.backend, "linear")).bind_step(args)
    if run is None or not tokens:
        return run

    def launch(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        found = run(*tensors)
        return None if found is None else (found[0].unsqueeze(1), found[1], found[2])

    return launch
