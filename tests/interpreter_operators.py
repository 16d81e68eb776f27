"""Triton's interpreter: what a kernel does most often goes to numpy without detours.

The interpreter tells types, broadcasts both operands and makes some ten objects for an operator, many times numpy's own time.
What is no plain case here goes its way; so do all errors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Function = Callable[..., Any]
NUMBERS = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
INTEGERS = frozenset(("int32", "int64"))
LOGICAL = INTEGERS | {"int1"}
MADE = {**NUMBERS, "int1": np.bool_}  # dtypes of what is computed here
CAST = {**MADE, "fp16": np.float16}
UNARY: dict[str, Function] = {"exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2}
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of fp32, normal


def _divided(a: np.ndarray, b: np.ndarray) -> Any:
    """Towards zero."""
    return (a - np.fmod(a, b)) // b


ARITHMETIC: dict[str, tuple[Function, Any]] = {
    "add": (np.add, NUMBERS), "sub": (np.subtract, NUMBERS), "mul": (np.multiply, NUMBERS), "truediv": (np.divide, {"fp32"}),
    "floordiv": (_divided, INTEGERS), "mod": (np.fmod, INTEGERS), "and": (np.bitwise_and, LOGICAL),
    "or": (np.bitwise_or, LOGICAL), "xor": (np.bitwise_xor, LOGICAL), "rshift": (np.right_shift, INTEGERS),
    "lshift": (np.left_shift, INTEGERS),
}  # fmt: skip
COMPARE: dict[str, Function] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


@cache
def _constant(kind: str, value: float, sort: type) -> np.ndarray | None:
    """A number of Python's as the operand of a tensor of that type; None where the result may be of another type."""
    whole = sort is int and -(2**31) <= value < 2**31
    real = sort is float and (value in (0, np.inf, -np.inf) or SMALLEST <= abs(value) <= LARGEST)
    if kind not in NUMBERS or not (whole or (real and kind == "fp32")):
        return None
    return np.array([value or 0], NUMBERS[kind])  # no -0.0, as there


@cache
def _joined(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of several that are broadcast; None: they cannot be."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        return None


class Functions:
    """In place of a function of the language, ``slow``, what computes plain cases."""

    def __init__(self, language: Any, interpreter: Any) -> None:
        core = self.core = language.core
        self.tensor, self.block, self.pointer = core.tensor, core.block_type, core.pointer_type
        self.handle, self.interpreter, self.checked = interpreter.TensorHandle, interpreter, set()
        self.boolean = core.int1
        self.types: dict[tuple[str, tuple[int, ...]], Any] = {}

    def replacing(self, package: Any, name: str, slow: Function) -> Function:
        """What an attribute of a package, or of tensors, is to be."""
        if package is self.core.tensor_descriptor_base:
            return slow
        plain = name.strip("_") if package is self.tensor and name.startswith("__") else ""
        if plain in COMPARE:
            return self.compare(COMPARE[plain], slow)
        if plain in ("add", "radd"):
            return self.arithmetic(np.add, NUMBERS, self.shifted(slow))
        if plain in ARITHMETIC:
            return self.arithmetic(*ARITHMETIC[plain], slow)
        if plain[:1] == "r" and plain[1:] in ARITHMETIC:
            compute, kinds = ARITHMETIC[plain[1:]]
            return self.arithmetic(lambda a, b: compute(b, a), kinds, slow)
        if plain == "getitem":
            return self.getitem(slow)
        if name in ("maximum", "minimum"):
            return self.extreme(getattr(np, name), slow)
        if name in UNARY:
            return self.of_one(UNARY[name], slow)
        if name in ("to", "cast"):
            return self.to(slow)
        others = {"fma": self.fma, "where": self.where, "load": self.load, "broadcast_to": self.broadcast_to}
        return others[name](slow) if name in others else slow

    def sizes(self, type_: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = type_.sizes if type(type_) is self.block else ()
        return shape

    def made(self, data: np.ndarray, element: Any, shape: tuple[int, ...]) -> Any:
        """A tensor; its data is of its type by what made it, which the interpreter's own handle would check."""
        handle, tensor = self.handle.__new__(self.handle), self.tensor.__new__(self.tensor)
        handle.data, handle.dtype, handle.attr = data, element, {}
        tensor.handle, tensor.type, tensor.dtype = handle, self.typed(element, shape), element
        return tensor

    def typed(self, element: Any, shape: tuple[int, ...]) -> Any:
        if not shape:
            return element
        key = element.name, shape
        if key not in self.types:
            self.types[key] = self.block(element, shape)
        return self.types[key]

    def other(self, a: Any, b: Any) -> tuple[Any, Any, Any]:
        """The data of an operand beside a tensor ``a``, None where it is no plain case; type and shape of what both make."""
        element, shape = a.dtype, self.sizes(a.type)
        if type(b) is self.core.constexpr:
            b = b.value
        if type(b) is self.tensor:
            if b.dtype.name != element.name:
                if b.dtype.name not in INTEGERS or element.name not in INTEGERS:
                    return None, None, None
                element = self.core.int64
            if a.type is not b.type and shape != (other := self.sizes(b.type)):
                shape = _joined(shape, other)
            return (None if shape is None else b.handle.data), element, shape
        if type(b) is int or type(b) is float:
            return _constant(element.name, b, type(b)), element, shape
        return None, None, None

    def arithmetic(self, compute: Function, kinds: Any, slow: Function) -> Function:
        def operator(a: Any, b: Any, *options: Any, **named: Any) -> Any:
            if a.dtype.name in kinds:
                data, element, shape = self.other(a, b)
                if data is not None:
                    found = compute(a.handle.data, data)
                    if found.dtype == MADE[element.name]:
                        return self.made(found, element, shape)
            return slow(a, b, *options, **named)

        return operator

    def compare(self, compute: Function, slow: Function) -> Function:
        def operator(a: Any, b: Any, **named: Any) -> Any:
            if a.dtype.name in NUMBERS:
                data, _, shape = self.other(a, b)
                if data is not None:
                    return self.made(compute(a.handle.data, data), self.boolean, shape)
            return slow(a, b, **named)

        return operator

    def of_one(self, compute: Function, slow: Function) -> Function:
        def function(x: Any, **named: Any) -> Any:
            if type(x) is self.tensor and x.dtype.name == "fp32":
                return self.made(compute(x.handle.data), x.dtype, self.sizes(x.type))
            return slow(x, **named)

        return function

    def fma(self, slow: Function) -> Function:
        def fma(x: Any, y: Any, z: Any, **named: Any) -> Any:
            if all(type(each) is self.tensor and each.dtype.name == "fp32" for each in (x, y, z)):
                shape = _joined(*(self.sizes(each.type) for each in (x, y, z)))
                if shape is not None:
                    found = self.interpreter.interpreter_builder.create_fma(x.handle, y.handle, z.handle)  # which tests replace
                    return self.made(found.data, x.dtype, shape)
            return slow(x, y, z, **named)

        return fma

    def extreme(self, compute: Function, slow: Function) -> Function:
        """Whatever is asked about NaN, as there."""
        fast = self.arithmetic(compute, NUMBERS, slow)
        return lambda x, y, *options, **named: (fast if type(x) is self.tensor else slow)(x, y, *options, **named)

    def shifted(self, slow: Function) -> Function:
        """Of pointers."""

        def operator(a: Any, b: Any, **named: Any) -> Any:
            if type(b) is self.tensor and type(b.dtype) is self.pointer:
                a, b = b, a
            if type(a.dtype) is self.pointer:
                by, shape = None, self.sizes(a.type)
                if type(b) is self.tensor and b.dtype.name in INTEGERS:
                    by, shape = b.handle.data, _joined(shape, self.sizes(b.type))
                elif type(b) is int:
                    by = _constant("int32", b, int)
                if by is not None and shape is not None:
                    width = max(1, a.dtype.element_ty.primitive_bitwidth // 8)
                    return self.made(a.handle.data + width * by.astype(np.uint64), a.dtype, shape)
            return slow(a, b, **named)

        return operator

    def where(self, slow: Function) -> Function:
        def where(condition: Any, x: Any, y: Any, **named: Any) -> Any:
            if type(condition) is self.tensor and condition.dtype.name == "int1":
                first = type(x) is self.tensor
                a, b = (x, y) if first else (y, x)
                if type(a) is self.tensor and a.dtype.name in NUMBERS:
                    data, element, shape = self.other(a, b)
                    shape = None if data is None else _joined(shape, self.sizes(condition.type))
                    if shape is not None:
                        chosen = (a.handle.data, data) if first else (data, a.handle.data)
                        return self.made(np.where(condition.handle.data, *chosen), element, shape)
            return slow(condition, x, y, **named)

        return where

    def to(self, slow: Function) -> Function:
        def to(x: Any, dtype: Any, *options: Any, **named: Any) -> Any:
            if type(dtype) is self.core.constexpr:
                dtype = dtype.value
            if type(x) is self.tensor and type(dtype) is type(x.dtype) is self.core.dtype and not options:
                kind, wanted = x.dtype.name, dtype.name
                if kind == wanted:
                    return x
                given = {name: value for name, value in named.items() if name != "_semantic"}
                if given == {"bitcast": True} and x.dtype.primitive_bitwidth == dtype.primitive_bitwidth:
                    return self.made(x.handle.data.view(self.interpreter._get_np_dtype(dtype)), dtype, self.sizes(x.type))
                if not given and kind in CAST and wanted in CAST and wanted != "int1" and (kind != "fp16" or wanted == "fp32"):
                    return self.made(x.handle.data.astype(CAST[wanted]), dtype, self.sizes(x.type))
            return slow(x, dtype, *options, **named)

        return to

    def broadcast_to(self, slow: Function) -> Function:
        def broadcast_to(x: Any, *shape: Any, **named: Any) -> Any:
            given = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple | self.core.tuple) else shape
            wanted = tuple([each.value if type(each) is self.core.constexpr else each for each in given])
            if type(x) is self.tensor:
                there = self.sizes(x.type)
                if len(there) in (0, len(wanted)) and _joined(there, wanted) == wanted:
                    return self.made(np.broadcast_to(x.handle.data, wanted), x.dtype, wanted)
            return slow(x, *shape, **named)

        return broadcast_to

    def getitem(self, slow: Function) -> Function:
        def getitem(x: Any, index: Any, **named: Any) -> Any:
            if type(x.type) is self.block and type(index) is tuple and all(i is None or i == slice(None) for i in index):
                data = x.handle.data[index]
                return self.made(data, x.dtype, data.shape)
            return slow(x, index, **named)

        return getitem

    def load(self, slow: Function) -> Function:
        def load(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            hints = tuple(named.items())
            given = self.loading(pointer, mask, other) if hints in self.checked else None
            if given is not None:
                return self.made(self.interpreter._interpreter.load(*given), pointer.dtype.element_ty, self.sizes(pointer.type))
            found = slow(pointer, mask, other, **named)
            if named.keys() <= {"cache_modifier", "eviction_policy"}:  # which nobody follows here, and which are right
                self.checked.add(hints)
            return found

        return load

    def loading(self, pointer: Any, mask: Any, other: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.dtype] | None:
        """Addresses, where to load, what to have elsewhere and its dtype; None where it is no plain case."""
        if type(pointer.dtype) is not self.pointer or pointer.dtype.element_ty.name == "int1":
            return None  # a bool is loaded as a byte
        if mask is None and other is not None:
            return None
        kind, shape, places = pointer.dtype.element_ty.name, self.sizes(pointer.type), pointer.handle.data
        dtype = self.interpreter._get_np_dtype(pointer.dtype.element_ty)
        where = np.ones(1, bool) if mask is None else self.spread(mask, "int1", shape)
        if type(other) is self.core.constexpr:
            other = other.value
        if other is None or ((type(other) is int or type(other) is float) and other == 0):
            rest = np.zeros(1, dtype)
        elif type(other) is int or type(other) is float:
            rest = _constant(kind, other, type(other))
        else:
            rest = self.spread(other, kind, shape)
        if where is None or rest is None:
            return None
        where, rest = (x if x.shape == places.shape else np.broadcast_to(x, places.shape) for x in (where, rest))
        return places, where, rest, dtype

    def spread(self, x: Any, kind: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The data of a tensor of that type which can be broadcast to that shape, else None."""
        if type(x) is not self.tensor or x.dtype.name != kind or _joined(shape, self.sizes(x.type)) != shape:
            return None
        data: np.ndarray = x.handle.data
        return data
