"""The ops of linear attention: one call, its backward pass, and one step of decoding.

States go in and come out; nothing is changed in place. What a call does not produce (norm without normalize, a state that is
not asked for) is an empty tensor, since an op returns no None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from warploom.linear.backend import LinearBackend
from warploom.linear.problem import LinearCall, StepArgs
from warploom.runtime import dispatch
from warploom.runtime.op import DifferentiableOp, Op, schema, settled_dtypes

_FIELDS = tuple(field.name for field in dataclasses.fields(LinearCall))
Four = tuple[Tensor, Tensor, Tensor, Tensor]


class LinearOp(DifferentiableOp):
    """Out, norm and the last state of a call, its backend's name and whether the state is asked for."""

    name, public = "linear_attention", "warploom.linear_attention"
    arguments = f"{schema(LinearCall)}, str backend, bool return_state"
    names = (*_FIELDS, "backend", "return_state")
    results, upstream, kept = 4, (0, 2, 3), (1,)
    gradients = ("q", "k", "v", "s", "z", "decay")

    def constant(self, flat: Sequence[Any]) -> tuple[int, ...]:
        return (1,) if flat[-1] else (1, 2, 3)

    def forward(self, *flat: Any) -> Four:
        call, backend, return_state = _read(flat)
        if is_empty(call):
            out, norm, s, z = _results(call, return_state)
            for t, first in ((s, call.s), (z, call.z)):
                if return_state and first is not None:
                    t.copy_(first)
                else:
                    t.zero_()
            return out.zero_(), norm.fill_(1.0), s, z
        with settled_dtypes(call.q):
            out, *rest = backend.forward(call, return_state)
        norm, s, z = (call.q.new_empty(0, dtype=call.accumulator) if t is None else t for t in rest)
        return out, norm, s, z

    def backward(self, upstream: Sequence[Tensor | None], kept: Sequence[Tensor], flat: Sequence[Any]) -> tuple[Tensor, ...]:
        (call, backend, _), (dout, ds, dz), (norm,) = _read(flat), upstream, kept
        if is_empty(call):
            dq, dk, dv, ds0, dz0, ddecay = self.fake_backward(*flat)
            for t, last in ((ds0, ds), (dz0, dz)):
                if call.s is not None and last is not None:
                    t.copy_(last)
                else:
                    t.zero_()
            return dq.zero_(), dk.zero_(), dv.zero_(), ds0, dz0, ddecay.zero_()
        if dout is None:
            dout = call.v.new_zeros(()).expand(*call.q.shape[:3], call.v.shape[3])
        with settled_dtypes(call.q):
            found = backend.backward(call, dout, norm if call.normalize else None, ds, dz)
        return tuple(call.q.new_empty(0, dtype=call.accumulator) if t is None else t for t in found)

    def fake(self, *flat: Any) -> Four:
        return _results(LinearCall(*flat[:-2]), flat[-1])

    def fake_backward(self, *flat: Any) -> tuple[Tensor, ...]:
        call = LinearCall(*flat[:-2])
        states = (call.q.new_empty((0,) if t is None else t.shape, dtype=call.accumulator) for t in (call.s, call.z))
        decay = call.decay if call.decay_grad else None
        ddecay = call.q.new_empty((0,) if decay is None else decay.shape, dtype=call.accumulator)
        return (*(t.new_empty(t.shape) for t in (call.q, call.k, call.v)), *states, ddecay)

    def flops(self, *flat: Any) -> Any:
        queries, keys, products = _products(*flat[:3])
        return products * (queries + keys)  # phi(q) s, phi(k) ⊗ v

    def flops_backward(self, *flat: Any) -> Any:
        queries, keys, products = _products(*flat[:3])
        return products * (2 * queries + 3 * keys)  # do sᵀ, phi(q) ⊗ do; s anew, ds v, phi(k) ds


class StepOp(Op):
    """Out and the new state of one token a sequence."""

    name, public = "linear_attention_step", "warploom.linear_attention_step"
    without = "export warploom.linear_attention with a state and backend='reference' in its place"
    signature = f"({schema(StepArgs)}) -> (Tensor, Tensor, Tensor)"

    def forward(self, *flat: Any) -> tuple[Tensor, Tensor, Tensor]:
        args = StepArgs(*flat)
        q, _, v, s, z, *_ = args
        if q.shape[0] == 0 or q.shape[1] == 0:
            return v.new_zeros((*q.shape[:2], v.shape[2])), s.clone(), z.clone()
        with settled_dtypes(q):
            return _backend(args.backend).step(args)

    def fake(self, *flat: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, _, v, s, z, *_ = flat
        return v.new_empty((*q.shape[:2], v.shape[2])), s.new_empty(s.shape), z.new_empty(z.shape)

    def flops(self, *flat: Any) -> Any:
        queries, keys, products = _products(*flat[:3])
        return products * (queries + keys)

    def differentiated(self, *flat: Any) -> Any:
        raise NotImplementedError("linear_attention_step has no derivative; linear_attention() with a state has one")


def flat(call: LinearCall, backend: str, return_state: bool) -> tuple[Any, ...]:
    """The arguments of ``linear_op``."""
    return (*(getattr(call, name) for name in _FIELDS), backend, return_state)


def step_args(call: LinearCall, backend: str) -> StepArgs:
    """The arguments of ``step_op`` of a call of one token a sequence with a state."""
    assert call.s is not None and call.z is not None
    q, k, v = (t.squeeze(1) for t in (call.q, call.k, call.v))
    decay = call.decay if call.decay is None or call.decay.ndim == 1 else call.decay.squeeze(1)
    return StepArgs(q, k, v, call.s, call.z, call.map_q, call.map_k, call.normalize, call.eps, call.scale, backend, decay)


def _read(arguments: Sequence[Any]) -> tuple[LinearCall, LinearBackend, bool]:
    return LinearCall(*arguments[:-2]), _backend(arguments[-2]), arguments[-1]


def _backend(name: str) -> LinearBackend:
    return cast(LinearBackend, dispatch.find(name, "linear"))


def _products(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any]:
    """Rows of all heads of queries and of keys, and FLOPs of a row's product with a state; a kernel's blocks take more."""
    return q.shape[:-1].numel(), k.shape[:-1].numel(), 2 * q.shape[-1] * v.shape[-1]


def is_empty(call: LinearCall) -> bool:
    """Whether there is nothing to compute: no implementation sees such a call."""
    return call.sequences == 0 or call.q.shape[2] == 0 or (call.q.shape[1] == 0 and call.k.shape[1] == 0)


def _results(call: LinearCall, return_state: bool) -> Four:
    """New tensors for the results."""
    q, wide = call.q, call.accumulator
    out = call.v.new_empty((*q.shape[:3], call.v.shape[3]))
    norm = q.new_empty((q.shape[0], q.shape[2], q.shape[1]) if call.normalize else (0,), dtype=wide)
    shape = call.sequences, call.k.shape[2], q.shape[3], call.v.shape[3]
    s = q.new_empty(shape if return_state else (0,), dtype=wide)
    return out, norm, s, q.new_empty(shape[:3] if return_state else (0,), dtype=wide)


linear_op, step_op = LinearOp(), StepOp()
