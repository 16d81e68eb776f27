"""The options of `warploom build`."""

from __future__ import annotations

import argparse
import os

from warploom.commands.numbers import whole

EXAMPLES = """examples:
  warploom build --list                      the named set by kind, and how much of it the cache holds
  warploom build --list --all                each of its modules by name
  warploom build --only '*bfloat16_d128*'    the variants of one head dim
  warploom build --jobs 8 --out /opt/cache   all of them, into another cache (WARPLOOM_CACHE=/opt/cache to use it)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm_90a", choices=["sm_90a", "sm_80"], help="sm_90a: Hopper; sm_80: Ampere, Ada")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names to build, as a shell pattern")
    half = max(1, (os.cpu_count() or 2) // 2)
    parser.add_argument("--jobs", type=whole(1, 1024), metavar="N", default=half, help=f"compilers at a time; default: {half}")
    parser.add_argument("--out", metavar="DIR", help="the cache to fill; default: WARPLOOM_CACHE or ~/.cache/warploom")
    parser.add_argument("--list", action="store_true", help="only say what there is, summed by kind")
    parser.add_argument("--all", action="store_true", help="of --list: module by module")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    from warploom.commands.build import run

    return run(options)
