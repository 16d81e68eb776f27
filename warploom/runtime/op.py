"""The torch.library boundary that all families share: what may see a call, ops, their autograd, refusals in words.

An op is opaque to compilers; its autograd formula is an autograd.Function that calls the backward op. Where nothing would see
the op (plain tensors, no mode, transform, trace or profiler) a call goes straight to the implementation: the dispatcher takes
longer than a kernel's launch.
"""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from warploom.runtime import flops
from warploom.runtime.exporters import refuse_onnx

_library = torch.library.Library("warploom", "DEF")
_SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str"}
_PLAIN = frozenset((Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_unwrapped = torch._C._functorch.unwrap_if_dead
_grad_enabled, _tracing, _profiling = torch.is_grad_enabled, torch._C._is_tracing, torch.autograd._profiler_enabled


def plain(*values: object) -> bool:
    """Whether nothing would see an op on these: plain tensors and numbers; no mode, transform, trace or profiler."""
    return _PLAIN.issuperset(map(type, values)) and not watched()


def watched() -> bool:
    """Whether a mode, transform, trace or profiler would see an op on plain tensors."""
    return bool(
        _modes()
        or (_function_modes() and _are_watched_functions())
        or _transforms()
        or forward_ad._current_level >= 0
        or _tracing()
        or _profiling()
    )


def _are_watched_functions() -> bool:
    """Whether a function mode is active that does more than fill in a default device."""
    return any([type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()])


def recorded(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked for of one of these."""
    if _grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def unobserved(*tensors: Tensor | None) -> bool:
    """As ``plain``, and no gradient is recorded."""
    return plain(*tensors) and not recorded(*tensors)


def settled_dtypes(t: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast leaves an implementation's own arithmetic alone: the call's dtypes are settled."""
    device = t.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def differentiates_forward(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD goes through one of these, by torch.func.jvp or by dual numbers."""
    if _transforms() and torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Jvp:
        return True
    return forward_ad._current_level >= 0 and any(
        [t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors]
    )


def schema(arguments: type) -> str:
    """The arguments of an op whose fields a NamedTuple or dataclass declares."""
    return ", ".join(f"{_schema_type(t)} {n}" for n, t in typing.get_type_hints(arguments).items())


def _schema_type(annotation: Any) -> str:
    if isinstance(annotation, types.UnionType):
        inner = next(a for a in typing.get_args(annotation) if a is not type(None))
        return _schema_type(inner) + "?"
    return _SCHEMA_TYPES[annotation]


class Launcher(Protocol):
    """Runs the calls of one kind, of a differentiable op, by their tensors: first ``launched`` ones of its ``gradients``."""

    constant: tuple[int, ...]  # results that no gradient goes through

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The results."""
        ...

    def backward(
        self, upstream: Sequence[Tensor | None], kept: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        """The gradients, of a backward pass that nothing sees; upstream and kept as the op's ``backward`` has them."""
        ...

    def arguments(self, tensors: Sequence[Tensor | None]) -> Sequence[Any]:
        """The op's."""
        ...


class Op(ABC):
    """One op of the library, called with flat arguments: straight where nothing sees it."""

    name: str
    public: str  # the function of the user's, in words
    signature: str  # of arguments and results, as torch.library has it
    without: str = "export torch's scaled_dot_product_attention in its place"  # what to do where the op cannot go

    def __init__(self) -> None:
        refuses = type(self).differentiated is not Op.differentiated
        self.op = _define(self.name, self.signature, self.forward, self._traced, self._recorded if refuses else None)
        flops.register(self.name, self.flops)

    @abstractmethod
    def forward(self, *flat: Any) -> Any:
        """Compute."""

    @abstractmethod
    def fake(self, *flat: Any) -> Any:
        """New tensors of the results' shapes and dtypes."""

    @abstractmethod
    def flops(self, *flat: Any) -> Any:
        """FLOPs of its products."""

    def differentiated(self, *flat: Any) -> Any:
        """What a call on tensors that require gradients does; without an override the op is none of autograd's."""
        raise NotImplementedError

    def __call__(self, *flat: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.op(*flat)
        tensors = _tensors(flat)
        if unobserved(*tensors):
            return self.forward(*flat)
        if differentiates_forward(*tensors):
            raise NotImplementedError(f"forward-mode AD through {self.public} is not supported")
        refuse_onnx(self.public, self.without)
        return self.op(*flat)

    def _traced(self, *flat: Any) -> Any:
        refuse_onnx(self.public, self.without)
        return self.fake(*flat)

    def _recorded(self, *flat: Any) -> Any:
        return self.differentiated(*flat) if recorded(*_tensors(flat)) else _below_autograd(self.op, flat)


class DifferentiableOp(ABC):
    """An op, the op of its backward pass, and what autograd and torch.func do with both.

    The results are tensors. The backward op takes the gradients of ``results[i] for i in upstream``, None where there is none,
    then ``results[i] for i in kept``, then the op's arguments. It returns a gradient for each name of ``gradients``; that of an
    argument which is None is dropped.
    """

    name: str  # of the op; the backward's is name_backward
    public: str  # the function of the user's, in words
    arguments: str  # the schema
    names: tuple[str, ...]  # of the arguments, in order
    results: int
    upstream: tuple[int, ...]
    kept: tuple[int, ...]
    gradients: tuple[str, ...]
    launched: int | None = None  # how many of these, the first, calls of launchers have; None: all
    # Tensors in the order that launchers take them, where that is not ``gradients`` and then the rest of ``names``. A backward
    # pass keeps them in it, whoever ran the call: a checkpointed one may be run again by a launcher that was not there before.
    order: tuple[str, ...] = ()
    without: str = "export the model with backend='reference' in its place"  # what to do where the op cannot go

    def __init__(self) -> None:
        self._wanted = [self.names.index(name) for name in self.gradients]
        upstream = [f"Tensor? d{i}" for i in self.upstream] + [f"Tensor result{i}" for i in self.kept]
        count = len(self.gradients)
        tensors = ", ".join(["Tensor"] * self.results), ", ".join(["Tensor"] * count)
        signature = f"({self.arguments}) -> ({tensors[0]})"
        self.op = _define(self.name, signature, self.forward, self._traced, self._recorded_forward)
        self.backward_op = _define(
            f"{self.name}_backward",
            f"({', '.join(upstream)}, {self.arguments}) -> ({tensors[1]})",
            self._backward,
            self._fake_backward,
            self._recorded_backward,
        )
        flops.register(self.name, self.flops)
        flops.register(f"{self.name}_backward", self._flops_backward)
        self._function, self._transformed, self._second = _functions(self)
        self._launched = _launched(self)

    @abstractmethod
    def forward(self, *flat: Any) -> tuple[Tensor, ...]:
        """The results."""

    @abstractmethod
    def backward(self, upstream: Sequence[Tensor | None], kept: Sequence[Tensor], flat: Sequence[Any]) -> tuple[Tensor, ...]:
        """The gradients."""

    @abstractmethod
    def fake(self, *flat: Any) -> tuple[Tensor, ...]:
        """New tensors of the results' shapes and dtypes."""

    @abstractmethod
    def fake_backward(self, *flat: Any) -> tuple[Tensor, ...]:
        """New tensors of the gradients' shapes and dtypes."""

    @abstractmethod
    def flops(self, *flat: Any) -> Any:
        """FLOPs of its products, as torch counts those of scaled_dot_product_attention."""

    @abstractmethod
    def flops_backward(self, *flat: Any) -> Any:
        """The backward op's, of the op's arguments."""

    def constant(self, flat: Sequence[Any]) -> tuple[int, ...]:
        """Which results no gradient goes through."""
        return tuple(i for i in range(self.results) if i not in self.upstream)

    def __call__(self, *flat: Any) -> Any:
        """Run the op on validated arguments; refuses forward AD in words, where torch would name an internal class."""
        if torch.compiler.is_compiling():
            return self.op(*flat)
        tensors = self._inputs(flat)
        if plain(*tensors):
            return self._function.apply(*flat) if recorded(*tensors) else self.forward(*flat)
        if differentiates_forward(*tensors):
            raise NotImplementedError(self.refused("forward-mode AD through"))
        refuse_onnx(self.public, self.without)
        return self._transformed.apply(*flat) if _transforms() else self.op(*flat)

    def recorded_by(self, launcher: Launcher) -> Callable[..., Any]:
        """What runs a launcher's calls, which nothing sees, so that autograd records them."""
        # Without what torch's own puts before it, which asks for transforms again: 3 us.
        apply = super(torch.autograd.Function, self._launched).apply  # type: ignore[misc]

        def run(*tensors: Tensor | None) -> Any:
            return apply(launcher, *[t if t is None else _unwrapped(t) for t in tensors])

        return run

    def refused(self, what: str) -> str:
        return f"{what} {self.public} is not supported by this backend; backend='reference' supports it"

    def _backward(self, *flat: Any) -> tuple[Tensor, ...]:
        first, second = len(self.upstream), len(self.upstream) + len(self.kept)
        return self.backward(flat[:first], flat[first:second], flat[second:])

    def _traced(self, *flat: Any) -> tuple[Tensor, ...]:
        refuse_onnx(self.public, self.without)
        return self.fake(*flat)

    def _fake_backward(self, *flat: Any) -> tuple[Tensor, ...]:
        return self.fake_backward(*flat[len(self.upstream) + len(self.kept) :])

    def _flops_backward(self, *flat: Any) -> Any:
        return self.flops_backward(*flat[len(self.upstream) + len(self.kept) :])

    def _inputs(self, flat: Sequence[Any]) -> list[Tensor | None]:
        """The arguments that have gradients."""
        return [flat[i] for i in self._wanted]

    def _recorded_forward(self, *flat: Any) -> Any:
        return self._function.apply(*flat) if recorded(*_tensors(flat)) else _below_autograd(self.op, flat)

    def _recorded_backward(self, *flat: Any) -> Any:
        return self._second.apply(*flat) if recorded(*_tensors(flat)) else _below_autograd(self.backward_op, flat)


def _define(name: str, signature: str, run: Any, fake: Any, recorded: Any | None) -> Any:
    _library.define(name + signature)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    if recorded is not None:
        _library.impl(name, recorded, "Autograd")
    torch.library.register_fake(f"warploom::{name}", fake, lib=_library)
    return getattr(torch.ops.warploom, name).default


def _tensors(flat: Sequence[Any]) -> list[Tensor]:
    return [a for a in flat if isinstance(a, Tensor)]


def _below_autograd(op: Any, flat: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*flat)


def _functions(op: DifferentiableOp) -> tuple[Any, Any, Any]:
    """The autograd.Function of an op, the same in the form that torch.func needs, and that of its backward op."""

    ahead = op.order or op.gradients
    order = [op.names.index(name) for name in (*ahead, *(name for name in op.names if name not in ahead))]

    def save(ctx: Any, flat: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.constant = op.constant(flat)
        ctx.mark_non_differentiable(*[output[i] for i in ctx.constant])
        ctx.save_for_backward(*[output[i] for i in op.kept], *[flat[i] for i in order if isinstance(flat[i], Tensor)])
        ctx.others = [None if isinstance(a, Tensor) else (a,) for a in flat]

    def refuse_vmap(info: Any, in_dims: Any, *flat: Any) -> Any:
        raise NotImplementedError(op.refused("torch.vmap over"))

    class Call(torch.autograd.Function):
        """The op, differentiable."""

        @staticmethod
        def forward(ctx: Any, *flat: Any) -> Any:
            output = op.forward(*flat) if plain(*op._inputs(flat)) else _below_autograd(op.op, flat)
            save(ctx, flat, output)
            return output

        @staticmethod
        def backward(ctx: Any, *found: Tensor | None) -> Any:
            upstream = [None if i in ctx.constant else found[i] for i in op.upstream]
            gradients: list[Tensor | None] = [None] * len(op.names)
            if all([t is None for t in upstream]):
                return tuple(gradients)
            saved = ctx.saved_tensors
            kept, tensors = saved[: len(op.kept)], iter(saved[len(op.kept) :])
            flat = [None if other is None else other[0] for other in ctx.others]
            for i in order:
                if ctx.others[i] is None:
                    flat[i] = next(tensors)
            if unobserved(*upstream, *kept, *op._inputs(flat)):
                results = op.backward(upstream, kept, flat)
            else:
                results = (op._second.apply if _transforms() else op.backward_op)(*upstream, *kept, *flat)
            for at, gradient in zip(op._wanted, results, strict=True):
                gradients[at] = gradient if flat[at] is not None and ctx.needs_input_grad[at] else None
            return tuple(gradients)

    class Transformed(Call):
        """The same in the form that torch.func needs, which torch takes 50 us longer to call."""

        @staticmethod
        def forward(*flat: Any) -> Any:
            return _below_autograd(op.op, flat)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            save(ctx, inputs, output)

        vmap = staticmethod(refuse_vmap)

    class Second(torch.autograd.Function):
        """The backward op, whose own derivative is refused in words rather than silently dropped."""

        @staticmethod
        def forward(*flat: Any) -> Any:
            return _below_autograd(op.backward_op, flat)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *found: Tensor | None) -> Any:
            raise NotImplementedError(op.refused("double backward through"))

        vmap = staticmethod(refuse_vmap)

    # A node of the graph is named after its class: _AttentionBackward.
    title = op.name.title().replace("_", "")
    named = ((Call, ""), (Transformed, "Transformed"), (Second, "Backward"))
    first, second, third = (type(f"_{title}{word}", (base,), {"__doc__": base.__doc__}) for base, word in named)
    return first, second, third


def _launched(op: DifferentiableOp) -> Any:
    """The autograd.Function of an op's launchers."""
    count, wanted = len(op.kept), len(op.gradients) if op.launched is None else op.launched

    class Launched(torch.autograd.Function):
        """The op by a launcher that is kept."""

        @staticmethod
        def forward(ctx: Any, launcher: Launcher, *tensors: Tensor | None) -> Any:
            results = launcher(*tensors)
            ctx.set_materialize_grads(False)
            ctx.launcher = launcher
            if launcher.constant:
                ctx.mark_non_differentiable(*[results[i] for i in launcher.constant])
            ctx.save_for_backward(*[results[i] for i in op.kept], *tensors)
            return results

        @staticmethod
        def backward(ctx: Any, *found: Tensor | None) -> Any:
            launcher = ctx.launcher
            upstream = [None if i in launcher.constant else found[i] for i in op.upstream]
            if all([t is None for t in upstream]):
                return (None,) * len(ctx.needs_input_grad)
            saved = ctx.saved_tensors
            kept, tensors = saved[:count], saved[count:]
            if unobserved(*upstream, *kept, *tensors[:wanted]):
                gradients = launcher.backward(upstream, kept, tensors)
            else:
                flat = launcher.arguments(tensors)
                gradients = (op._second.apply if _transforms() else op.backward_op)(*upstream, *kept, *flat)
            given = [None if t is None else gradient for t, gradient in zip(tensors[:wanted], gradients, strict=False)]
            return None, *given, *(None,) * (len(tensors) - wanted)

    return type(f"_{op.name.title().replace('_', '')}", (Launched,), {"__doc__": Launched.__doc__})
