"""The package as the command first sees it: without torch, until something asks for more than names and help.

`import warploom` brings all of it in every program but the command itself. There `warploom --help` ends before anything is
needed, and what needs more gets it at its first use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from importlib import reload
from types import ModuleType
from typing import Any

_over = False


def defers() -> bool:
    """Whether this process is the command, which has not asked for more than its own modules yet.

    Python sets sys.argv[0] to "-m" while it looks for the module of `python -m warploom`.
    """
    program = (getattr(sys, "argv", None) or [""])[0]
    return not _over and (program == "-m" or os.path.splitext(os.path.basename(program))[0] == "warploom")


def leave(*_: object) -> None:
    """What Ctrl-C does to the command before its work begins and after it ends: there is nothing to clean up.

    While modules are imported an exception would leave a traceback, or be caught by one of them and forgotten.
    """
    os.write(2, b"warploom: interrupted\n")
    os._exit(130)


class Deferred(ModuleType):
    """`warploom` without its public names. The first use of one, or the import of its module, brings them all."""

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__["__all__"]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        complete()
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Python binds a submodule so, and `attention` and `decode` are functions too: in a complete package they win.
        if name in self.__dict__["__all__"]:
            complete()

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__dict__["__all__"]})


def defer() -> None:
    """Make the package, whose `__init__` runs, a deferred one."""
    sys.modules["warploom"].__class__ = Deferred
    with contextlib.suppress(ValueError):  # of a thread that is not the main one
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, leave)


def complete() -> None:
    """Run the rest of the package's `__init__`, where it was put off."""
    global _over
    package = sys.modules["warploom"]
    _over = True
    if isinstance(package, Deferred):
        object.__setattr__(package, "__class__", ModuleType)
        reload(package)
