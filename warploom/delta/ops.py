"""The ops of the gated delta rule: one call, its backward pass, and one step of decoding, out of place and in place.

A state that is not asked for is an empty tensor, since an op returns no None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from warploom.delta.backend import DeltaBackend
from warploom.delta.problem import DeltaCall, StepArgs
from warploom.runtime import dispatch
from warploom.runtime.op import DifferentiableOp, Op, schema, settled_dtypes

_FIELDS = tuple(field.name for field in dataclasses.fields(DeltaCall))


class DeltaOp(DifferentiableOp):
    """Out and the last state of a call, its backend's name and whether the state is asked for."""

    name, public = "gated_delta_rule", "warploom.gated_delta_rule"
    arguments = f"{schema(DeltaCall)}, str backend, bool return_state"
    names = (*_FIELDS, "backend", "return_state")
    results, upstream, kept = 2, (0, 1), ()
    gradients = ("q", "k", "v", "beta", "decay", "state")

    def constant(self, flat: Sequence[Any]) -> tuple[int, ...]:
        return () if flat[-1] else (1,)

    def forward(self, *flat: Any) -> tuple[Tensor, Tensor]:
        call, backend, return_state = _read(flat)
        if is_empty(call):
            out, state = _results(call, return_state)
            if return_state and call.state is not None:
                state.copy_(call.state)
            else:
                state.zero_()
            return out.zero_(), state
        with settled_dtypes(call.q):
            out, last = backend.forward(call, return_state)
        return out, _or_empty(last, call)

    def backward(self, upstream: Sequence[Tensor | None], kept: Sequence[Tensor], flat: Sequence[Any]) -> tuple[Tensor, ...]:
        (call, backend, _), (dout, dstate) = _read(flat), upstream
        if is_empty(call):
            found = self.fake_backward(*flat)
            for t in found:
                t.zero_()
            if call.state is not None and dstate is not None:
                found[-1].copy_(dstate)
            return found
        if dout is None:
            dout = call.v.new_zeros(()).expand(call.v.shape)
        with settled_dtypes(call.q):
            return tuple(_or_empty(t, call) for t in backend.backward(call, dout, dstate))

    def fake(self, *flat: Any) -> tuple[Tensor, Tensor]:
        return _results(DeltaCall(*flat[:-2]), flat[-1])

    def fake_backward(self, *flat: Any) -> tuple[Tensor, ...]:
        call = DeltaCall(*flat[:-2])
        tensors = (getattr(call, name) for name in self.gradients)
        return tuple(_or_empty(t if t is None else t.new_empty(t.shape), call) for t in tensors)

    def flops(self, *flat: Any) -> Any:
        return 3 * _product(flat[0], flat[2])  # S^T k, k ⊗ x, S^T q

    def flops_backward(self, *flat: Any) -> Any:
        return 8 * _product(flat[0], flat[2])  # S^T k, k ⊗ x anew; q ⊗ do, dS^T k, k ⊗ dx; S do, S dx, dS x


class StepOp(Op):
    """Out and the new state of one token a sequence."""

    name, public = "gated_delta_step", "warploom.gated_delta_step"
    without = "export warploom.gated_delta_rule with a state and backend='reference' in its place"
    signature = f"({schema(StepArgs)}) -> (Tensor, Tensor)"

    def forward(self, *flat: Any) -> Any:
        args = StepArgs(*flat)
        if not args.v.shape[:2].numel():
            return args.v.new_zeros(args.v.shape), args.state.clone()
        with settled_dtypes(args.q):
            return _backend(args.backend).step(args, None)

    def fake(self, *flat: Any) -> Any:
        args = StepArgs(*flat)
        return args.v.new_empty(args.v.shape), args.state.new_empty(args.state.shape)

    def flops(self, *flat: Any) -> Any:
        return 3 * _product(flat[0], flat[2])

    def differentiated(self, *flat: Any) -> Any:
        raise NotImplementedError("gated_delta_step has no derivative; gated_delta_rule() with a state has one")


class InplaceStepOp(StepOp):
    """Out of one token a sequence; the new state is written over the old one."""

    name = "gated_delta_step_inplace"
    signature = f"({schema(StepArgs).replace('Tensor state', 'Tensor(a!) state')}) -> Tensor"

    def forward(self, *flat: Any) -> Any:
        args = StepArgs(*flat)
        if not args.v.shape[:2].numel():
            return args.v.new_zeros(args.v.shape)
        with settled_dtypes(args.q):
            out, _ = _backend(args.backend).step(args, args.state)
        if not args.state.is_inference():
            # Autograd must see the change where a kernel made it.
            torch.autograd.graph.increment_version(args.state)
        return out

    def fake(self, *flat: Any) -> Any:
        return super().fake(*flat)[0]


def flat(call: DeltaCall, backend: str, return_state: bool) -> tuple[Any, ...]:
    """The arguments of ``delta_op``."""
    return (*(getattr(call, name) for name in _FIELDS), backend, return_state)


def step_args(call: DeltaCall, backend: str) -> StepArgs:
    """The arguments of ``step_op`` of a call of one token a sequence with a state."""
    assert call.state is not None
    q, k, v, beta = (t.squeeze(1) for t in (call.q, call.k, call.v, call.beta))
    decay = None if call.decay is None else call.decay.squeeze(1)
    return StepArgs(q, k, v, beta, call.state, decay, call.scale, call.normalize_qk, call.eps, backend)


def _read(arguments: Sequence[Any]) -> tuple[DeltaCall, DeltaBackend, bool]:
    return DeltaCall(*arguments[:-2]), _backend(arguments[-2]), arguments[-1]


def _backend(name: str) -> DeltaBackend:
    return cast(DeltaBackend, dispatch.find(name, "delta"))


def _or_empty(t: Tensor | None, call: DeltaCall) -> Tensor:
    return call.q.new_empty(0, dtype=call.accumulator) if t is None else t


def _product(q: Tensor, v: Tensor) -> Any:
    """FLOPs of all value heads' products of a row and a state; a kernel's chunks take more."""
    return 2 * v.shape.numel() * q.shape[-1]


def is_empty(call: DeltaCall) -> bool:
    """Whether there is nothing to compute: no implementation sees such a call."""
    return call.sequences == 0 or call.v.shape[:3].numel() == 0


def _results(call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor]:
    """New tensors for the results."""
    shape = (call.sequences, call.v.shape[2], call.q.shape[3], call.v.shape[3])
    state = call.q.new_empty(shape if return_state else (0,), dtype=call.accumulator)
    return call.v.new_empty(call.v.shape), state


delta_op, step_op, inplace_step_op = DeltaOp(), StepOp(), InplaceStepOp()
