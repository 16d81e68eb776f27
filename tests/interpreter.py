"""Triton's interpreter in a process of its own: TRITON_INTERPRET must be set before triton is first imported."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run_interpreted(*paths: Path) -> str:
    """Run pytest over ``paths`` under the interpreter; AssertionError shows its output, the output is returned."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, paths)]
    # Callers read the summary, which options from outside (--durations, -v) would lengthen by names of tests.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def ignored() -> list[str]:
    """The files that pytest is not to collect in a folder of interpreted tests: all, but under the interpreter, made ready."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return ["test_*.py"]
    patch_numpy_scalars()
    return []


@cache
def patch_numpy_scalars() -> None:
    """Let tensors bound loops: the interpreter calls int() on arrays of one element, which numpy 2.4 refuses.

    And let a loop's variable, a plain int there, be divided by a constexpr with remainder, as a compiled one can be. And spare
    two fifths of the time: look for what is to be replaced once, not at every call of a device function, and leave out the
    overflow checks that the interpreter computes and, as it is not told to debug, throws away.
    """
    from dataclasses import replace

    from triton import language
    from triton.runtime import interpreter

    language.constexpr.__rmod__ = lambda self, other: other % self.value

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, *args: object) -> None:
        patch(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched

    @cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return [(name, each) for name, each in inspect.getmembers(package) if language.core.is_builtin(each)]

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        for name, builtin in builtins(package):
            if getattr(package, name) is builtin:  # else replaced already, by the kernel that calls the function
                interpreter._patch_attr(package, name, builtin, builder, *scope)

    interpreter._patch_builtin = patch_builtin

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
