"""Triton's interpreter, mended where it refuses what a compiled kernel may do, and spared work whose result nobody looks at."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from tests.interpreter_operators import Functions


@cache
def apply() -> None:
    """For the rest of the process, once; triton has been imported under TRITON_INTERPRET, or is to be."""
    from triton import language
    from triton.runtime import interpreter

    _mend(language, interpreter)
    _replace_once(language, interpreter)
    _describe_when_asked(language)
    _remember_dtypes(language, interpreter)
    _spare_steps(language, interpreter)
    # Not told to debug, the interpreter computes overflow checks and throws them away.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def apply_for_any_problem() -> None:
    """And what drawn problems ask for besides: products in one order, as some compare bits, and bfloat16 that is rounded."""
    from triton import language
    from triton.runtime import interpreter

    apply()
    np.matmul = matmul  # type: ignore[assignment, misc]
    convert = interpreter._convert_float

    def rounded(data: np.ndarray, given: Any, wanted: Any, mode: Any) -> np.ndarray:
        """To nearest, where the interpreter cuts."""
        if mode is not None or given != language.float32 or wanted != language.bfloat16:
            return convert(data, given, wanted, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        near = np.where(np.isnan(data), bits | 1 << 22, bits + 0x7FFF + (bits >> 16 & 1))
        return (near >> 16).astype(np.uint16)

    interpreter._convert_float = rounded


def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """numpy's, summed in one order: what a BLAS for some processors adds up depends on a row's place in its tile."""
    a, b = a.astype(dtype), b.astype(dtype)
    found = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), dtype)
    for i in range(a.shape[-1]):
        found += a[..., :, i, None] * b[..., i, None, :]
    return found


def _mend(language: Any, interpreter: Any) -> None:
    """Let tensors bound loops: the interpreter calls int() on arrays of one element, which numpy 2.4 refuses.

    And let a loop's variable, a plain int there, be divided by a constexpr with remainder, as a compiled one can be.
    """
    language.constexpr.__rmod__ = lambda self, other: other % self.value

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *args: Any) -> None:
        patch(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _replace_once(language: Any, interpreter: Any) -> None:
    """Replace the language's functions at a kernel's launch, and not again at each call of a device function."""

    @cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return [(name, each) for name, each in inspect.getmembers(package) if language.core.is_builtin(each)]

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        for name, builtin in builtins(package):
            if getattr(package, name) is builtin:  # else replaced already
                interpreter._patch_attr(package, name, builtin, builder, *scope)
                setattr(package, name, interpreted(package, name, builtin))

    functions, semantic = Functions(language, interpreter), interpreter.interpreter_semantic
    language.block_type.with_element_ty = lambda self, element_ty: functions.typed(element_ty, self.sizes)

    @cache
    def interpreted(package: Any, name: str, builtin: Any) -> Any:
        compute = getattr(builtin, "__wrapped__", builtin)  # the check that somebody hands it a semantic is left out

        def slow(*args: Any, _semantic: Any = None, **named: Any) -> Any:
            return compute(*args, **named, _semantic=semantic)

        return functions.replacing(package, name, slow)

    interpreter._patch_builtin = patch_builtin

    patch_language, replaced, ready = interpreter._patch_lang, set(), set()

    class Launch(interpreter._LangPatchScope):  # type: ignore[misc]
        """What a launch replaced, whose end makes the next one replace it again."""

        def restore(self) -> None:
            super().restore()
            replaced.clear()
            ready.clear()

    @cache
    def packages(function: Any) -> frozenset[str]:
        seen = (value for value in function.__globals__.values() if inspect.ismodule(value))
        return frozenset(value.__name__ for value in seen if value in (language, language.core))

    def patch(function: Any) -> Any:
        if function in ready:  # a device function, whose scope nobody looks at
            return None
        ready.add(function)
        scope = Launch()
        if not replaced.issuperset(packages(function)) or not replaced:
            scope._changes = patch_language(function)._changes
            replaced.update(packages(function))
        return scope

    interpreter._patch_lang = patch


def _remember_dtypes(language: Any, interpreter: Any) -> None:
    """Numpy's dtype of a type's elements, in place of a table of all made at each question."""
    find, found = interpreter._get_np_dtype, {}

    def of(type: Any) -> Any:
        element = type.element_ty if isinstance(type, language.block_type) else type
        if element.name not in found:
            found[element.name] = find(element)
        return found[element.name]

    interpreter._get_np_dtype = of


def _spare_steps(language: Any, interpreter: Any) -> None:
    """Objects that are made for each operation, and calls of device functions, without what comes out the same each time."""
    core, semantic = language.core, type(interpreter.interpreter_semantic)
    to_tensor = semantic.to_tensor

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1:  # else no type is narrower
            self.__post_init__()

    def as_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else to_tensor(self, x, check_type)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        interpreter._patch_lang(self.fn)
        return (self.rewritten_fn.get(self.fn) or self.rewrite())(*args, **named)

    interpreter.TensorHandle.__init__ = make_handle
    semantic.to_tensor = as_tensor
    interpreter.InterpretedFunction.__call__ = call


def _describe_when_asked(language: Any) -> None:
    """Tuples' types and blocks' names, which shapes are made of and seldom asked for, are made when they are."""
    core = language.core

    def make_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        self._type = core.tuple_type(type) if type is not None and not isinstance(type, core.tuple_type) else type

    def type_of(self: Any) -> Any:
        if self._type is None:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.tuple.__init__ = make_tuple
    core.tuple.type = property(type_of, lambda self, type: setattr(self, "_type", type))

    @cache
    def extents(shape: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
        """A block's shape and size, and the same of its tensors."""
        size = core.validate_block_shape(shape)
        return core.tuple(shape), size, core.tuple(map(core.constexpr, shape)), core.constexpr(size)

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
        self.extents = extents(self.sizes)
        self.shape, self.numel = self.extents[:2]
        if not self.shape:
            raise TypeError("0d block_type is forbidden")

    core.block_type.__init__ = make_block
    core.block_type.to_ir = lambda self, builder: self  # as the interpreter's builder makes it
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")

    scalar = core.tuple([]), core.constexpr(1)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def described(self: Any) -> Any:
        return self.type.extents[2:] if self.type.is_block() else scalar

    core.tensor.__init__ = make_tensor
    core.tensor.shape = property(lambda self: described(self)[0])
    core.tensor.numel = property(lambda self: described(self)[1])
