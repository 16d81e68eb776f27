"""What dispatch asks of a machine and its cache, also while torch.compile traces."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from warploom.runtime import modules
from warploom.runtime.module_spec import ModuleSpec

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """torch.compile runs the function while it traces and keeps the answer.

    As torch.compiler.assume_constant_result has it, whose import costs a second.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


@constant
def cannot_run() -> str | None:
    """Why no Hopper module runs on this machine, or None."""
    return modules.cannot_run()


class Found:
    """What the cache has all modules of, which is looked for once."""

    def __init__(self) -> None:
        self._keys: set[Hashable] = set()

    def refusal(self, key: Hashable, specs: Callable[[], Iterable[ModuleSpec]]) -> str | None:
        """Why a module of ``specs``, all that ``key`` stands for, can be neither loaded nor built here, or None."""
        if key in self._keys or modules.cannot_build() is None:
            return None
        for spec in specs():
            missing = modules.absence(spec)
            if missing is not None:
                return missing
        self._keys.add(key)
        return None
