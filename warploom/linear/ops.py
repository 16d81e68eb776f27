"""The torch.library boundary of linear attention: forward, backward and step as ops, with shapes, autograd and refusals.

States go in and come out; nothing is changed in place. What a call does not produce (norm without normalize, a state that is
not asked for) is an empty tensor, since an op returns no None.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warploom.linear.problem import LinearCall
from warploom.runtime import dispatch

_FIELDS = tuple(field.name for field in dataclasses.fields(LinearCall))
_CALL = (
    "Tensor q, Tensor k, Tensor v, str map_q, str map_k, bool causal, bool normalize, float eps, float scale, "
    "Tensor? s, Tensor? z, Tensor? lengths, Tensor? cu_seqlens, str backend"
)
_ADVICE = "; backend='reference' supports it"

_library = torch.library.Library("warploom", "FRAGMENT")
_library.define(f"linear_attention({_CALL}, bool return_state) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"linear_attention_backward(Tensor? dout, Tensor norm, Tensor? ds, Tensor? dz, {_CALL})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, str map_q, str map_k, bool normalize, "
    "float eps, float scale, str backend) -> (Tensor, Tensor, Tensor)"
)

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def flat(call: LinearCall, backend: str) -> tuple[Any, ...]:
    """The ops' arguments."""
    return (*(getattr(call, name) for name in _FIELDS), backend)


def _split(arguments: tuple[Any, ...]) -> tuple[LinearCall, Any]:
    """The call and its implementation's module."""
    return LinearCall(*arguments[:-1]), dispatch.find(arguments[-1], "linear").module


def _is_empty(call: LinearCall) -> bool:
    """Whether there is nothing to compute: no implementation sees such a call."""
    return call.sequences == 0 or call.q.shape[2] == 0 or (call.q.shape[1] == 0 and call.k.shape[1] == 0)


def _state_shape(call: LinearCall) -> tuple[int, int, int, int]:
    return call.sequences, call.k.shape[2], call.q.shape[3], call.v.shape[3]


def _results(call: LinearCall, return_state: bool) -> Four:
    """New tensors for the op's results."""
    q, wide = call.q, call.accumulator
    out = call.v.new_empty((*q.shape[:3], call.v.shape[3]))
    norm = q.new_empty((q.shape[0], q.shape[2], q.shape[1]) if call.normalize else (0,), dtype=wide)
    shape = _state_shape(call)
    s = q.new_empty(shape if return_state else (0,), dtype=wide)
    return out, norm, s, q.new_empty(shape[:3] if return_state else (0,), dtype=wide)


def _no_work(call: LinearCall, return_state: bool) -> Four:
    out, norm, s, z = _results(call, return_state)
    for t, first in ((s, call.s), (z, call.z)):
        if return_state and first is not None:
            t.copy_(first)
        else:
            t.zero_()
    return out.zero_(), norm.fill_(1.0), s, z


def _forward(*arguments: Any) -> Four:
    call, module = _split(arguments[:-1])
    if _is_empty(call):
        return _no_work(call, arguments[-1])
    with torch.autocast(call.device, enabled=False):
        out, *rest = module.forward(call, arguments[-1])
    norm, s, z = (call.q.new_empty(0, dtype=call.accumulator) if t is None else t for t in rest)
    return out, norm, s, z


def _backward(dout: Tensor | None, norm: Tensor, ds: Tensor | None, dz: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    call, module = _split(arguments)
    if _is_empty(call):
        dq, dk, dv, ds0, dz0 = _gradients(call)
        for t, last in ((ds0, ds), (dz0, dz)):
            if call.s is not None and last is not None:
                t.copy_(last)
            else:
                t.zero_()
        return dq.zero_(), dk.zero_(), dv.zero_(), ds0, dz0
    if dout is None:
        dout = call.v.new_zeros(()).expand(*call.q.shape[:3], call.v.shape[3])
    with torch.autocast(call.device, enabled=False):
        found = module.backward(call, dout, norm if call.normalize else None, ds, dz)
    return tuple(call.q.new_empty(0, dtype=call.accumulator) if t is None else t for t in found)


def _gradients(call: LinearCall) -> tuple[Tensor, ...]:
    """New tensors for the gradients."""
    first = (call.s, call.z)
    states = (call.q.new_empty((0,) if t is None else t.shape, dtype=call.accumulator) for t in first)
    return (*(t.new_empty(t.shape) for t in (call.q, call.k, call.v)), *states)


def step_arguments(call: LinearCall, backend: str) -> tuple[Any, ...]:
    """The step op's arguments of a call of one token a sequence with a state."""
    rows = (t.squeeze(1) for t in (call.q, call.k, call.v))
    return (*rows, call.s, call.z, call.map_q, call.map_k, call.normalize, call.eps, call.scale, backend)


def run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    map_q: str,
    map_k: str,
    normalize: bool,
    eps: float,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out and the new state of one token a sequence, without the op around it."""
    if q.shape[0] == 0 or q.shape[1] == 0:
        return v.new_zeros((*q.shape[:2], v.shape[2])), s.clone(), z.clone()
    module: Any = dispatch.find(backend, "linear").module
    options = {"map_q": map_q, "map_k": map_k, "normalize": normalize, "eps": eps, "scale": scale}
    with torch.autocast(q.device.type, enabled=False):
        return module.step(q, k, v, s, z, **options)  # type: ignore[no-any-return]


def _fake_step(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty((*q.shape[:2], v.shape[2])), s.new_empty(s.shape), z.new_empty(z.shape)


_linear_attention = torch.ops.warploom.linear_attention.default
_linear_attention_backward = torch.ops.warploom.linear_attention_backward.default
step_op = torch.ops.warploom.linear_attention_step.default


class _Linear(torch.autograd.Function):
    """The op, differentiable in q, k, v, s and z; norm is no output of the user's."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = _linear_attention(*arguments)
        _save(ctx, arguments, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Any, ds: Tensor | None, dz: Tensor | None) -> Any:  # type: ignore[override]
        count = len(_FIELDS) + 2
        if not ctx.return_state:
            ds = dz = None
        if dout is None and ds is None and dz is None:
            return (None,) * count
        norm, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        arguments = [next(saved) if other is None else other[0] for other in ctx.others]
        transformed = torch._C._are_functorch_transforms_active()
        call = _LinearBackward.apply if transformed else _linear_attention_backward
        dq, dk, dv, ds0, dz0 = call(dout, norm, ds, dz, *arguments)
        found = dict.fromkeys(_FIELDS)
        found.update(q=dq, k=dk, v=dv)
        if arguments[_FIELDS.index("s")] is not None:
            found.update(s=ds0, z=dz0)
        return (*found.values(), None, None)


def _save(ctx: Any, arguments: tuple[Any, ...], output: Four) -> None:
    ctx.set_materialize_grads(False)
    ctx.return_state = arguments[-1]
    call = arguments[:-1]
    ctx.mark_non_differentiable(output[1], *([] if ctx.return_state else output[2:]))
    ctx.save_for_backward(output[1], *[a for a in call if isinstance(a, Tensor)])
    ctx.others = [None if isinstance(a, Tensor) else (a,) for a in call]


class _TransformedLinear(_Linear):
    """The same in the form that torch.func needs."""

    @staticmethod
    def forward(*arguments: Any) -> Any:  # type: ignore[override]
        with torch._C._AutoDispatchBelowAutograd():
            return _linear_attention(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        raise NotImplementedError("torch.vmap over warploom.linear_attention is not supported by this backend" + _ADVICE)


class _LinearBackward(torch.autograd.Function):
    """The backward op, whose own derivative is refused in words rather than silently dropped."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _linear_attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            "double backward through warploom.linear_attention is not supported by this backend" + _ADVICE
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        raise NotImplementedError("torch.vmap over warploom.linear_attention is not supported by this backend" + _ADVICE)


def _recorded(arguments: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any([isinstance(a, Tensor) and a.requires_grad for a in arguments])


def _forward_autograd(*arguments: Any) -> Any:
    if _recorded(arguments):
        return _Linear.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _linear_attention(*arguments)


def _backward_autograd(*arguments: Any) -> Any:
    if _recorded(arguments):
        return _LinearBackward.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _linear_attention_backward(*arguments)


def _step_autograd(*arguments: Any) -> Any:
    if _recorded(arguments):
        raise NotImplementedError("linear_attention_step has no derivative; linear_attention() with a state has one")
    with torch._C._AutoDispatchBelowAutograd():
        return step_op(*arguments)


for _key in ("CPU", "CUDA"):
    _library.impl("linear_attention", _forward, _key)
    _library.impl("linear_attention_backward", _backward, _key)
    _library.impl("linear_attention_step", run_step, _key)
for _name, _function in (("", _forward_autograd), ("_backward", _backward_autograd), ("_step", _step_autograd)):
    _library.impl(f"linear_attention{_name}", _function, "Autograd")
torch.library.register_fake("warploom::linear_attention", lambda *a: _results(LinearCall(*a[:-2]), a[-1]), lib=_library)
torch.library.register_fake("warploom::linear_attention_backward", lambda *a: _gradients(LinearCall(*a[4:-1])), lib=_library)
torch.library.register_fake("warploom::linear_attention_step", _fake_step, lib=_library)


def linear_op(call: LinearCall, backend: str, return_state: bool) -> Four:
    """Run the op on a validated call; refuses forward AD in words, where torch would name an internal class."""
    arguments = (*flat(call, backend), return_state)
    if torch.compiler.is_compiling():
        return _linear_attention(*arguments)  # type: ignore[no-any-return]
    if torch._C._are_functorch_transforms_active():
        if torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Jvp:
            _refuse_forward_ad()
        return _TransformedLinear.apply(*arguments)  # type: ignore[no-any-return]
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in (call.q, call.k, call.v, call.s, call.z)
    ):
        _refuse_forward_ad()
    return _linear_attention(*arguments)  # type: ignore[no-any-return]


def _refuse_forward_ad() -> None:
    raise NotImplementedError("forward-mode AD through warploom.linear_attention is not supported by this backend" + _ADVICE)


def watched(t: Tensor) -> bool:
    """Whether something looks at torch's ops (a compiler, a mode, a subclass, a transform): a step must then be one."""
    return (
        torch.compiler.is_compiling()
        or type(t) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
