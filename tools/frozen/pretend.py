"""A Hopper GPU that is not there: calls on CPU tensors take the way of CUDA tensors, and launches are written down, not made.

Nothing of the package is replaced but the three places where work leaves it: `Launch` of runtime/triton_launch.py, Triton's own
launch, and `load` of runtime/modules.py. What torch says of devices is replaced too.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import warploom
from warploom.runtime import dispatch, modules, triton_launch

PROCESSORS = 132  # of an H100 or H200
_GPU = torch.device("cuda", 0)
_FAMILIES = ("attention", "decode", "delta", "linear", "masks", "runtime")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "randint", "rand", "randn", "randperm")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
_METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
# Numbers past it are addresses: nothing else that a kernel takes without its tensor is so large.
_ADDRESSES = 2**40


class Recorder:
    """The launches of a call in their order, names of chosen backends, and all binaries that were asked of Triton."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.backends: list[str] = []
        self.specialisations: dict[str, set[str]] = {}

    def clear(self) -> None:
        """Begin a call; the binaries stay."""
        self.launches, self.backends = [], []

    def triton(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any], direct: bool | None
    ) -> None:
        """A launch of a triton.jit function."""
        own = [p.name for p in kernel.params if p.is_constexpr]
        taken = [p for p in kernel.params if not p.is_constexpr]
        others = sorted(n for n in constants if n not in own)
        ordered = {n: constants[n] for n in (*own, *others) if n in constants}
        names = [p.name for p in taken] if len(taken) == len(arguments) else []
        name = kernel.__name__
        kinds = [kind(p, a) for p, a in zip(taken, arguments, strict=False)]
        self.specialisations.setdefault(name, set()).add(repr(([str(v) for v in ordered.values()], kinds)))
        self.launches.append(
            {
                "kernel": name,
                "grid": described(tuple(grid)),
                "direct": direct,
                "constants": {n: described(v) for n, v in ordered.items()},
                "values": [described(a) for a in arguments],
                "names": names,
            }
        )

    def module(self, spec: Any, arguments: tuple[Any, ...]) -> None:
        """A call of a compiled module's function."""
        constants = {"arch": spec.arch, **{n: described(v) for n, v in spec.config}}
        self.launches.append({"kernel": spec.name, "constants": constants, "values": [described(a) for a in arguments]})


def described(value: Any) -> Any:
    """A kernel's argument as JSON: of a tensor its dtype, shape, strides and address modulo 16, never its contents."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} by {list(value.stride())} at {value.data_ptr() % 16}"
    if isinstance(value, TensorDescriptor):
        return f"boxes of {list(value.block_shape)} of {described(value.base)}: {list(value.shape)} by {list(value.strides)}"
    if isinstance(value, (tuple, list)):
        return [described(v) for v in value]
    if isinstance(value, int) and abs(value) >= _ADDRESSES and not isinstance(value, bool):
        return f"address at {value % 16}"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def kind(parameter: Any, value: Any) -> str:
    """What of an argument Triton compiles a binary for."""
    special = not parameter.do_not_specialize
    if isinstance(value, Tensor):
        return f"*{value.dtype}{' of 16' * (special and value.data_ptr() % 16 == 0)}"
    if isinstance(value, TensorDescriptor):
        return f"boxes {value.base.dtype} {list(value.block_shape)}"
    if value is None or isinstance(value, (bool, float)):
        return f"{value}" if value is None else type(value).__name__
    if special and value == 1:
        return "1"
    wide = parameter.annotation_type or ("i32" if -(2**31) <= value < 2**31 else "i64")
    return f"{wide}{' of 16' * (special and value % 16 == 0)}"


def load_package() -> list[Any]:
    """Import the families, without what compiles kernels; their modules."""
    found = [warploom]
    dsl = sys.modules.get("cutlass")
    sys.modules["cutlass"] = None  # type: ignore[assignment]  # importing the CuTe DSL then raises
    try:
        for family in _FAMILIES:
            folder = importlib.import_module(f"warploom.{family}")
            for each in pkgutil.walk_packages(folder.__path__, f"warploom.{family}."):
                try:
                    found.append(importlib.import_module(each.name))
                except ImportError as error:
                    if "cutlass" not in str(error):
                        raise
    finally:
        del sys.modules["cutlass"]
        if dsl is not None:
            sys.modules["cutlass"] = dsl
    return found


class Caches:
    """What the package keeps between calls: functools' caches, and containers of its modules that begin empty."""

    def __init__(self, loaded: list[Any]) -> None:
        self._functions: list[Any] = []
        self._containers: list[Any] = []
        for module in loaded:
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    self._functions.append(value)
                elif isinstance(value, (dict, set, list)) and not value:
                    self._containers.append(value)

    def clear(self) -> None:
        """So that what a call does depends on no earlier one."""
        for function in self._functions:
            function.cache_clear()
        for container in self._containers:
            container.clear()


@functools.cache
def _package_caches() -> Caches:
    return Caches(load_package())


@contextmanager
def hopper(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Inside, tensors say that they lie on an H100, and launches go to the recorder; yields what begins a call afresh."""
    caches = _package_caches()

    def fresh() -> None:
        caches.clear()
        recorder.clear()

    def load(spec: Any) -> Callable[..., None]:
        return lambda *arguments: recorder.module(spec, arguments)

    def launch(self: Any, grid: Any, *arguments: Any) -> None:
        recorder.triton(self._kernel, grid, arguments, self._constants, self._direct)

    def kept(self: Any, grid: Any, rest: tuple[Any, ...]) -> Any:
        return lambda *first: recorder.triton(self._kernel, grid, (*first, *rest), self._constants, self._direct)

    def raw(self: Any) -> Any:
        def short(grid: Any, stream: int, *arguments: Any) -> None:
            recorder.triton(self._kernel, grid, arguments, self._constants, None)

        short.bound = lambda grid, rest: lambda *first: short(grid, 0, *first, *rest)  # type: ignore[attr-defined]
        return short if self._direct else None

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = {p.name: a for p, a in zip(self.params, arguments, strict=False)} | named
        constexprs = {p.name for p in self.params if p.is_constexpr}
        inputs = tuple(given[p.name] for p in self.params if p.name in given and p.name not in constexprs)
        others = {n: v for n, v in given.items() if n in constexprs or n not in {p.name for p in self.params}}
        recorder.triton(self, grid, inputs, others, None)

    choose = dispatch.choose

    def chosen(*arguments: Any, **named: Any) -> str:
        found = choose(*arguments, **named)
        recorder.backends.append(found)
        return found

    with ExitStack() as stack:

        def put(where: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(where, name, value, create=True))

        put(triton_launch.Launch, "__call__", launch)
        put(triton_launch.Launch, "kept", kept)
        put(triton_launch.Launch, "raw", raw)
        put(JITFunction, "run", run)
        put(modules, "load", load)
        for refusal in ("cannot_load", "cannot_build", "driver_refusal"):
            put(modules, refusal, lambda: None)
        put(dispatch, "choose", chosen)
        for name, value in _cuda().items():
            put(torch.cuda, name, value)
        put(torch._C._dynamo.guards, "_empty_strided_cuda", torch._C._dynamo.guards._empty_strided_cpu)
        put(torch._C, "_cuda_getDevice", lambda: 0)
        put(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
        for where, names in ((torch, _FACTORIES + _LIKE), (Tensor, _METHODS)):
            for name in names:
                put(where, name, _on_cpu(getattr(where, name)))
        put(Tensor, "get_device", lambda t: 0)
        put(Tensor, "is_cuda", property(lambda t: True))
        put(Tensor, "is_cpu", property(lambda t: False))
        put(Tensor, "device", property(lambda t: _GPU))
        try:
            yield fresh
        finally:
            caches.clear()


def _cuda() -> dict[str, Any]:
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, major=9, minor=0, name="pretended H100")
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
    }


def _on_cpu(function: Any) -> Any:
    """The same function, that makes its tensor on the CPU when it is asked for one on a GPU."""

    def is_gpu(value: Any) -> bool:
        return isinstance(value, (torch.device, str)) and str(value).startswith("cuda")

    @functools.wraps(function)
    def made(*arguments: Any, **named: Any) -> Any:
        arguments = tuple(torch.device("cpu") if is_gpu(a) else a for a in arguments)
        named = {n: torch.device("cpu") if is_gpu(v) else v for n, v in named.items()}
        return function(*arguments, **named)

    return made
