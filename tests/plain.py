"""Functions of kernel files run as plain Python on numbers: what a kernel itself says is tested, without the DSL.

The text of the function is taken from its file, its decorators and annotations are left out, and the names that it uses are
given by the test.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.sources import PACKAGE

# Of the DSL, what means the same for numbers.
CUTLASS = SimpleNamespace(min=min, max=max, range=lambda *bounds, unroll=1: range(*bounds), range_constexpr=range, Boolean=bool)
NAMES: dict[str, Any] = {"cutlass": CUTLASS, "Int32": int, "const_expr": bool}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def plain(file: str, name: str, **names: Any) -> Callable[..., Any]:
    """Function ``name`` of a file of the package, or method ``Class.name``, which uses these names besides NAMES."""
    body: list[ast.stmt] = ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        (found,) = (node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part)
        body = found.body
    assert isinstance(found, ast.FunctionDef), f"{name} is no function"
    found.decorator_list, found.returns = [], None
    for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    space = {**NAMES, **names}
    exec(compile(ast.Module([found], []), str(PACKAGE / file), "exec"), space)
    return space[found.name]  # type: ignore[no-any-return]


def parameters(file: str, name: str) -> list[str]:
    """Names of the parameters of a method, in their order, ``self`` left out."""
    code = plain(file, name).__code__
    return list(code.co_varnames[1 : code.co_argcount])
