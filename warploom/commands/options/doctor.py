"""The options of `warploom doctor`."""

from __future__ import annotations

import argparse

from warploom.commands.numbers import whole

EXAMPLES = """examples:
  warploom doctor               versions, devices, implementations
  warploom doctor --selftest    also run every implementation against the fp64 reference, under 10 s
  warploom doctor --json        the same for programs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--selftest", action="store_true", help="check every implementation against fp64")
    parser.add_argument("--seed", type=whole(-(2**62), 2**62), help="seed of the selftest; else a fresh one, shown")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    from warploom.commands.doctor import run

    return run(options)
