"""What ``tests.interpreter_operators`` computes without the interpreter is what the interpreter computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from triton import language
from triton.runtime import interpreter

from tests.interpreter_operators import ARITHMETIC, COMPARE, NUMBERS, UNARY, Functions

core, semantic = language.core, interpreter.interpreter_semantic
FUNCTIONS = Functions(language, interpreter)
ELEMENTS = {"fp32": core.float32, "int32": core.int32, "int64": core.int64, "int1": core.int1, "fp16": core.float16}
SHAPES = [(), (4,), (1, 4), (2, 1), (2, 4)]
NUMBERS_GIVEN = [0, 3, -7, 2**31 - 1, 0.0, 0.5, -2.25, float("inf")]
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40]


def tensor(kind: str, shape: tuple[int, ...]) -> Any:
    """Random, among it what has rules of its own."""
    count = (shape or (1,)) and int(np.prod(shape or (1,)))
    if kind in ("fp32", "fp16"):
        numbers = torch.where(torch.rand(count) < 0.3, torch.tensor(SPECIAL)[torch.randint(6, (count,))], torch.randn(count))
        data = numbers.numpy().astype(np.float32 if kind == "fp32" else np.float16)
    else:
        data = torch.randint(-9, 10, (count,)).numpy().astype({"int32": np.int32, "int64": np.int64, "int1": bool}[kind])
    element = ELEMENTS[kind]
    return core.tensor(interpreter.TensorHandle(data.reshape(shape or (1,)), element), made(element, shape))


def made(element: Any, shape: tuple[int, ...]) -> Any:
    return core.block_type(element, shape) if shape else element


def plain(of: Any) -> Callable[..., Any]:
    """The interpreter's own, and that nothing but it is asked."""
    return lambda *args, **named: of(*args, **named, _semantic=semantic)


def refuse(*args: Any, **named: Any) -> Any:
    raise AssertionError(f"{args} {named} are a plain case")


def check(package: Any, name: str, *args: Any, **named: Any) -> None:
    with np.errstate(all="ignore"):
        wanted = plain(getattr(package, name))(*args, **named)
        found = FUNCTIONS.replacing(package, name, refuse)(*args, **named)
    assert found.type == wanted.type, (name, found.type, wanted.type)
    assert found.handle.data.dtype == wanted.handle.data.dtype
    np.testing.assert_array_equal(found.handle.data, wanted.handle.data, err_msg=f"{name} {args}")
    zeros = found.handle.data == 0
    assert (np.signbit(found.handle.data[zeros]) == np.signbit(wanted.handle.data[zeros])).all(), f"{name} {args}"


def operands(kinds: Any) -> list[tuple[Any, Any]]:
    tensors = [(tensor(k, a), tensor(k, b)) for k in kinds for a, b in itertools.product(SHAPES, SHAPES)]
    mixed = [(tensor("int32", a), tensor("int64", b)) for a, b in itertools.product(SHAPES, SHAPES) if "int64" in kinds]
    numbers = [
        (tensor(kind, shape), core.constexpr(number) if shape else number)
        for kind in kinds if kind in NUMBERS for shape in SHAPES
        for number in NUMBERS_GIVEN if isinstance(number, int) or kind == "fp32"
    ]  # fmt: skip
    return [*tensors, *mixed, *[(b, a) for a, b in mixed], *numbers]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str) -> None:
    for a, b in operands(ARITHMETIC[name][1]):
        if name in ("floordiv", "mod") and not np.all(getattr(getattr(b, "handle", None), "data", 1)):
            b.handle.data = np.where(b.handle.data == 0, 5, b.handle.data).astype(b.handle.data.dtype)
        if name in ("floordiv", "mod", "lshift", "rshift") and not isinstance(b, core.tensor):
            b = 3
        if name in ("lshift", "rshift") and isinstance(b, core.tensor):
            b.handle.data = np.abs(b.handle.data)
        check(core.tensor, f"__{name}__", a, b)
        if not isinstance(b, core.tensor) and name not in ("lshift", "rshift", "floordiv", "mod"):
            check(core.tensor, f"__r{name}__", a, b)


@pytest.mark.parametrize("name", COMPARE)
def test_compare(name: str) -> None:
    for a, b in operands(NUMBERS):
        check(core.tensor, f"__{name}__", a, b)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extremes(name: str) -> None:
    for a, b in operands(NUMBERS):
        check(core, name, a, b)


def test_where() -> None:
    for a, b in operands(NUMBERS):
        for shape in SHAPES:
            check(core, "where", tensor("int1", shape), a, b)
            check(core, "where", tensor("int1", shape), b, a)


@pytest.mark.parametrize("name", UNARY)
def test_of_one(name: str) -> None:
    for shape in SHAPES:
        check(language.math, name, tensor("fp32", shape))


def test_fma() -> None:
    for shapes in itertools.product(SHAPES, repeat=3):
        check(language.math, "fma", *(tensor("fp32", shape) for shape in shapes))


def test_casts() -> None:
    for kind, wanted, shape in itertools.product(ELEMENTS, ELEMENTS, SHAPES):
        if wanted != "int1" and (kind != "fp16" or wanted in ("fp16", "fp32")) and {kind, wanted} & {"fp32", "int32"}:
            finite = tensor(kind, shape)
            if wanted not in ("fp16", "fp32"):
                finite.handle.data = np.nan_to_num(finite.handle.data, posinf=3, neginf=-3)
            check(core.tensor, "to", finite, core.constexpr(ELEMENTS[wanted]))
    for kind, wanted in (("fp32", "int32"), ("int32", "fp32")):
        check(core.tensor, "to", tensor(kind, (4,)), ELEMENTS[wanted], bitcast=True)


def test_new_axes() -> None:
    for shape, index in (((4,), (slice(None), None)), ((4,), (None, slice(None))), ((2, 4), (slice(None), None, slice(None)))):
        check(core.tensor, "__getitem__", tensor("fp32", shape), index)


def test_broadcast() -> None:
    for shape in SHAPES:
        check(core, "broadcast_to", tensor("int64", shape), [core.constexpr(2), core.constexpr(4)] if shape != (4,) else [4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.bfloat16, torch.uint8])
def test_pointers_and_loads(dtype: torch.dtype) -> None:
    memory = torch.arange(16).to(dtype)
    names = {torch.float32: "fp32", torch.int32: "int32", torch.int64: "int64", torch.bfloat16: "bf16", torch.uint8: "uint8"}
    element = core.pointer_type(core.dtype(names[dtype]))
    base = core.tensor(interpreter.TensorHandle(np.array([memory.data_ptr()], np.uint64), element), element)
    load = FUNCTIONS.replacing(core, "load", plain(core.load))
    load(base)
    FUNCTIONS.replacing(core, "load", plain(core.load))(base, cache_modifier=".cg")
    for shape in SHAPES:
        places = tensor("int32", shape)
        places.handle.data = np.abs(places.handle.data)
        check(core.tensor, "__add__", base, places)
        check(core.tensor, "__radd__", base, places)
        check(core.tensor, "__add__", base, 3)
        at = core.tensor.__add__(base, places, _semantic=semantic)
        check(core, "load", at)
        mask = tensor("int1", shape)
        check(core, "load", at, mask)
        check(core, "load", at, mask, core.constexpr(0), cache_modifier=".cg")
        if names[dtype] in NUMBERS:
            check(core, "load", at, mask, -5)
            check(core, "load", at, tensor("int1", ()), tensor(names[dtype], ()))


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("__add__", "fp32", "int32"), ("__add__", "int1", "int1"), ("__truediv__", "int32", "int32"),
        ("__add__", "int32", 2**31), ("__add__", "int32", 0.5), ("__mul__", "fp32", 1e-40),
        ("__mul__", "fp32", 1e39), ("__mul__", "fp16", "fp16"),
        ("__and__", "int1", 1), ("__lt__", "int1", "int1"), ("__add__", "fp32", True),
    ],
)  # fmt: skip
def test_the_rest_is_the_interpreters(name: str, a: str, b: Any) -> None:
    asked = []
    function = FUNCTIONS.replacing(core.tensor, name, lambda *args, **named: asked.append(args))
    function(tensor(a, (4,)), tensor(b, (4,)) if isinstance(b, str) else b)
    assert len(asked) == 1


def test_shapes_that_do_not_fit_are_the_interpreters() -> None:
    a, b = tensor("fp32", (4,)), tensor("fp32", (8,))
    with pytest.raises(ValueError, match="incompatible dimensions"):
        FUNCTIONS.replacing(core.tensor, "__add__", plain(core.tensor.__add__))(a, b)
