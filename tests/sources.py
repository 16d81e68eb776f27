"""Which files of the package kernel code is made of, found by its imports."""

from __future__ import annotations

import ast
from pathlib import Path

import warploom

PACKAGE = Path(warploom.__file__).parent
KERNELS = (
    "warploom.attention.ampere",
    "warploom.attention.hopper",
    "warploom.decode.hopper",
    "warploom.delta.hopper",
    "warploom.linear.hopper",
    "warploom.kernels.cute",
    "warploom.kernels.distances",
    "warploom.kernels.reach",
    "warploom.runtime.compile",
)


def imported(*files: str) -> set[str]:
    """These files of the package and those of kernel code that they import, and so on."""
    found: set[str] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        found.add(file)
        names: list[str] = []
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        paths = [name.removeprefix("warploom.").replace(".", "/") + ".py" for name in names if name.startswith(KERNELS)]
        waiting += [path for path in paths if path not in found and (PACKAGE / path).is_file()]
    return found
