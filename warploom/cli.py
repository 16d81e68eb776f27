"""The command `warploom`: each subcommand is a module with `add_arguments(parser)` and `run(options)`.

What is here, and what these modules import at once, is there without torch: help and the version cost no more than Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import warploom

COMMANDS = {
    "doctor": ("warploom.commands.options.doctor", "what is installed, what can run here, and why the rest cannot"),
    "explain": ("warploom.commands.options.explain", "which implementation serves a call of given shapes, and why"),
    "bench": ("warploom.commands.options.bench", "time warploom against its peers on this machine, and report it"),
    "banks": ("warploom.commands.options.banks", "bank conflicts of shared memory: predicted, explained, designed away"),
    "build": ("warploom.commands.options.build", "compile the Hopper kernels ahead of time, without a GPU"),
    "demo": ("warploom.demo", "a real encoder over real text, eager against warploom, padded and packed"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warploom",
        description="Attention for PyTorch: look at a machine, ask for a plan, run the demo.",
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
    """Run one command; the exit status is 0 for success, 1 for a failed check, 2 for bad input, 130 for Ctrl-C."""
    command = "warploom"
    try:
        options = make_parser().parse_args(arguments)
        command = f"warploom {options.command}"
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except (TypeError, ValueError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left, as `head` does. What is still buffered must go somewhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
