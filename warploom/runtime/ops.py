"""The torch.library boundary: one forward and one backward op, whose schema later implementations share.

The op is opaque to compilers; its autograd formula is an autograd.Function that calls the backward op. Under
torch.func transforms a dispatcher kernel cannot enter an autograd.Function, so `attention_op` applies the Function
directly there.
"""

from __future__ import annotations

import types
import typing
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warploom.attention.problem import AttentionArgs
from warploom.runtime import dispatch

_SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}


def _schema_type(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType):
        inner = next(a for a in typing.get_args(annotation) if a is not type(None))
        return _schema_type(inner) + "?"
    return _SCHEMA_TYPES[annotation]


_ARGS = ", ".join(f"{_schema_type(t)} {n}" for n, t in typing.get_type_hints(AttentionArgs).items())
_COUNT = len(AttentionArgs._fields)

_library = torch.library.Library("warploom", "DEF")
_library.define(f"attention({_ARGS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _lse_shape(args: AttentionArgs) -> tuple[int, ...]:
    q = args.q
    return (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])


def _is_empty(args: AttentionArgs) -> bool:
    return args.q.numel() == 0 or args.k.numel() == 0


def _only_sinks(args: AttentionArgs) -> Tensor:
    """The lse of a call without keys: the sink, or -inf without one and of packed tokens past the last sequence."""
    lse = args.q.new_full(_lse_shape(args), float("-inf"), dtype=torch.float32)
    if args.sink is None:
        return lse
    lse.copy_(args.sink[:, None].expand(lse.shape))
    if args.cu_seqlens_q is not None:
        nobody = torch.arange(args.q.shape[0], device=args.q.device) >= args.cu_seqlens_q[-1]
        lse.masked_fill_(nobody, float("-inf"))
    return lse


def _settled_dtypes(t: Tensor) -> Any:
    """A context in which autocast leaves an implementation's own arithmetic alone: the call's dtypes are settled."""
    device = t.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _forward(*flat: Any) -> tuple[Tensor, Tensor]:
    return _compute(AttentionArgs(*flat))


def _compute(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    if _is_empty(args):
        return args.q.new_zeros((*args.q.shape[:-1], args.v.shape[-1])), _only_sinks(args)
    with _settled_dtypes(args.q):
        return dispatch.find(args.backend).module.forward(args)  # type: ignore[no-any-return]


def _backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _compute_backward(dout, dlse, out, lse, AttentionArgs(*flat))


def _compute_backward(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, args: AttentionArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _is_empty(args):
        dsink = args.q.new_zeros(0) if args.sink is None else torch.zeros_like(args.sink)
        if args.sink is not None and dlse is not None:
            # Where lse is -inf it is not the sink: a token of no sequence.
            dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
            dsink += dlse.sum(dim=[d for d in range(dlse.ndim) if d != dlse.ndim - 2]).to(dsink.dtype)
        dq, dk, dv = (t.new_zeros(t.shape) for t in (args.q, args.k, args.v))
        return dq, dk, dv, dsink
    if dout is None:
        dout = torch.zeros_like(out)
    with _settled_dtypes(args.q):
        return dispatch.find(args.backend).module.backward(args, dout, dlse, out, lse)  # type: ignore[no-any-return]


def _forward_fake(*flat: Any) -> tuple[Tensor, Tensor]:
    args = AttentionArgs(*flat)
    out = args.q.new_empty((*args.q.shape[:-1], args.v.shape[-1]))
    return out, args.q.new_empty(_lse_shape(args), dtype=torch.float32)


def _backward_fake(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *flat: Any) -> tuple[Tensor, ...]:
    args = AttentionArgs(*flat)
    dsink = args.q.new_empty(0) if args.sink is None else args.sink.new_empty(args.sink.shape)
    return (*(t.new_empty(t.shape) for t in (args.q, args.k, args.v)), dsink)


_attention = torch.ops.warploom.attention.default
_attention_backward = torch.ops.warploom.attention_backward.default

_ADVICE = "; backend='reference' supports it"


def _save(ctx: Any, flat: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *[a for a in flat if isinstance(a, Tensor)])
    ctx.others = [None if isinstance(a, Tensor) else (a,) for a in flat]


class _Attention(torch.autograd.Function):
    """out, lse = attention(*AttentionArgs), differentiable in q, k, v and sink."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        args = AttentionArgs(*flat)
        if unobserved(args.q, args.k, args.v, args.sink):
            output = _compute(args)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                output = _attention(*flat)
        _save(ctx, flat, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * _COUNT
        out, lse, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        args = AttentionArgs(*[next(saved) if other is None else other[0] for other in ctx.others])
        if unobserved(args.q, args.k, args.v, args.sink, dout, dlse, out, lse):
            dq, dk, dv, dsink = _compute_backward(dout, dlse, out, lse, args)
        else:
            call = _AttentionBackward.apply if _transforms() else _attention_backward
            dq, dk, dv, dsink = call(dout, dlse, out, lse, *args)
        nones = dict.fromkeys(AttentionArgs._fields)
        nones.update(q=dq, k=dk, v=dv, sink=dsink if args.sink is not None else None)
        return tuple(nones.values())


class _TransformedAttention(_Attention):
    """The same in the form that torch.func needs, which torch takes 50 us longer to call."""

    @staticmethod
    def forward(*flat: Any) -> Any:  # type: ignore[override]
        with torch._C._AutoDispatchBelowAutograd():
            return _attention(*flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError("torch.vmap over warploom.attention is not supported by this backend" + _ADVICE)


class _AttentionBackward(torch.autograd.Function):
    """The backward op, whose own derivative is refused in words rather than silently dropped."""

    @staticmethod
    def forward(*flat: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _attention_backward(*flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError("double backward through warploom.attention is not supported by this backend" + _ADVICE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError("torch.vmap over warploom.attention is not supported by this backend" + _ADVICE)


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _forward, _key)
    _library.impl("attention_backward", _backward, _key)
torch.library.register_fake("warploom::attention", _forward_fake, lib=_library)
torch.library.register_fake("warploom::attention_backward", _backward_fake, lib=_library)


def _forward_autograd(*flat: Any) -> Any:
    if recorded(*flat):
        return _Attention.apply(*flat)
    with torch._C._AutoDispatchBelowAutograd():
        return _attention(*flat)


def _backward_autograd(*flat: Any) -> Any:
    if recorded(*flat):
        return _AttentionBackward.apply(*flat)
    with torch._C._AutoDispatchBelowAutograd():
        return _attention_backward(*flat)


_library.impl("attention", _forward_autograd, "Autograd")
_library.impl("attention_backward", _backward_autograd, "Autograd")


def attention_op(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Run the op on validated arguments; refuses forward AD in words, where torch would name an internal class."""
    if torch.compiler.is_compiling():
        return _attention(*args)
    if args.q.is_cuda and plain(args.q, args.k, args.v, args.sink):
        return _Attention.apply(*args) if recorded(args.q, args.k, args.v, args.sink) else _compute(args)  # type: ignore[no-any-return]
    if torch._C._are_functorch_transforms_active():
        if torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Jvp:
            _refuse_forward_ad()
        return _TransformedAttention.apply(*args)  # type: ignore[no-any-return]
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in (args.q, args.k, args.v, args.sink)
    ):
        _refuse_forward_ad()
    return _attention(*args)


def recorded(*flat: Any) -> bool:
    """Whether a gradient may be asked for of one of these."""
    return _grad_enabled() and any([isinstance(a, Tensor) and a.requires_grad for a in flat])


_PLAIN = (Tensor, torch.nn.Parameter, type(None))
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_grad_enabled, _tracing, _profiling = torch.is_grad_enabled, torch._C._is_tracing, torch.autograd._profiler_enabled


def unobserved(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *vectors: Tensor | None) -> bool:
    """As ``plain``, and no gradient is recorded."""
    return plain(q, k, v, sink, *vectors) and not recorded(q, k, v, sink)


def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *vectors: Tensor | None) -> bool:
    """Plain tensors, no mode and no transform: nothing would see the op, whose dispatch takes longer than a kernel's launch."""
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and type(sink) in _PLAIN
        and not (vectors and any([type(vector) not in _PLAIN for vector in vectors]))
        and not _modes()
        and not _function_modes()
        and not _transforms()
        and forward_ad._current_level < 0
        and not _tracing()
        and not _profiling()
    )


def _refuse_forward_ad() -> None:
    raise NotImplementedError("forward-mode AD through warploom.attention is not supported by this backend" + _ADVICE)
