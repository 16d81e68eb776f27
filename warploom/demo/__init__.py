"""`warploom demo`: a real encoder over real text, eager against warploom, padded and packed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

EXAMPLES = """examples:
  warploom demo                          about a minute on two cores; pictures in demo-out/
  warploom demo --sentences 200          a shorter one
  warploom demo --dtype bfloat16         on a GPU
  warploom demo --json > demo.json       the whole report for programs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sentences", type=int, metavar="N", help="how many (default: 300, 1200 on a GPU)")
    parser.add_argument("--seed", type=int, default=0, help="which sentences, in which order (default: 0)")
    parser.add_argument("--repeats", type=int, metavar="R", help="timed passes; the median counts (default: up to 3 in 70 s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto, a GPU if there is one)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--batch-size", type=int, default=32, metavar="B", help="sentences in a padded batch (default: 32)")
    parser.add_argument(
        "--row-tokens",
        type=int,
        default=2048,
        metavar="T",
        help="positions in a packed row or a sorted batch (default: 2048)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="folder of the pictures (default: demo-out)",
    )
    parser.add_argument("--no-pictures", action="store_true", help="draw nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """The command: 0 when all embeddings agree, 1 when they do not, 2 when the demo cannot run."""
    from .pipeline import DemoOptions, run_demo

    if not options.no_pictures:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out: the folder {options.out} cannot be made: {error.strerror}") from None
    report = run_demo(
        DemoOptions(
            sentences=options.sentences,
            seed=options.seed,
            repeats=options.repeats,
            device=options.device,
            dtype=options.dtype,
            batch_size=options.batch_size,
            row_tokens=options.row_tokens,
            out=None if options.no_pictures else options.out,
            progress=not options.json and sys.stderr.isatty(),
        )
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.text())
    return 0 if report.passed else 1
