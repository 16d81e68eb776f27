"""The command `warploom`: each subcommand is a module with `add_arguments(parser)` and `run(options)`.

What is here, and what these modules import at once, is there without torch: help and the version cost no more than Python.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import warploom
from warploom import deferred
from warploom.runtime.suggest import meant

COMMANDS = {
    "doctor": ("warploom.commands.options.doctor", "what is installed, what can run here, and why the rest cannot"),
    "explain": ("warploom.commands.options.explain", "which implementation serves a call of given shapes, and why"),
    "bench": ("warploom.commands.options.bench", "time warploom against its peers on this machine, and report it"),
    "banks": ("warploom.commands.options.banks", "bank conflicts of shared memory: predicted, explained, designed away"),
    "build": ("warploom.commands.options.build", "compile the Hopper kernels ahead of time, without a GPU"),
    "demo": ("warploom.demo", "a real encoder over real text, eager against warploom, padded and packed"),
}


class Parser(argparse.ArgumentParser):
    """argparse's, which names what was meant by a name that is none, and shows the usage of the command that it is of."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # its overloads are argparse's own
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = meant(unknown[0].partition("=")[0], options) if unknown[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, f"{error.message}{meant(value, action.choices or ())}") from None


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="warploom",
        description="Attention for PyTorch: check a machine, plan a call, build and time kernels, study bank conflicts.",
        epilog="Every command takes --json and --help.",
    )
    parser.add_argument("--version", action="version", version=f"warploom {warploom.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        module = import_module(module_name)
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{name}: {summary}.",
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit status: 0 success, 1 failure, 2 bad input or a missing package, 130 Ctrl-C."""
    command = "warploom"
    try:
        options = make_parser().parse_args(arguments)
        command = f"warploom {options.command}"
        with warnings.catch_warnings():  # torch's, of a package that no command needs
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            deferred.complete()
        with _interruptible():
            status: int = options.run(options)
            sys.stdout.flush()
        return status
    except (TypeError, ValueError) as error:
        return _end(command, str(error), 2)
    except KeyboardInterrupt:
        exec("")  # Python, once code from a string was interrupted, ends by the signal: this takes the note of it back
        return _end(command, "interrupted", 130)
    except MemoryError as error:
        return _end(command, f"this needs more memory than there is{f' ({error})' if str(error) else ''}", 1)
    except ImportError as error:
        if error.name is None:  # our own words: a package that is missing
            return _end(command, str(error), 2)
        return _end(command, f"{error.name} cannot be imported ({error}); warploom doctor says what needs it", 1)
    except BrokenPipeError:
        # The reader has left, as `head` does. What is still buffered must go somewhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        return _end(command, f"{place}{error.strerror or error}", 1)
    except RuntimeError as error:
        if not _expected(error):
            raise
        return _end(command, str(error).partition("\n")[0], 1)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C unwind the command, which may have something to clean up; before and after, `deferred.leave` ends it."""
    ends = signal.getsignal(signal.SIGINT) is deferred.leave
    if ends:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ends:
            signal.signal(signal.SIGINT, deferred.leave)


def _end(command: str, words: str, status: int) -> int:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)  # a line of progress may stand there
    print(f"{command}: {words}", file=sys.stderr)
    return status


def _expected(error: RuntimeError) -> bool:
    """Whether it says what is wrong with the machine or its cache, and not with the program."""
    from warploom.runtime.trust import CacheError

    if isinstance(error, CacheError):
        return True
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
