"""Draws masks as their tiles, hidden, partial and full, and prints what each leaves of the work; needs matplotlib.

python examples/draw_masks.py [--out masks] [--seqlen 64]
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from warploom.masks import Causal, Document, GlobalWindow, Mask, PrefixLM, SlidingWindow


def masks(seqlen: int) -> dict[str, Mask]:
    half = seqlen // 2
    documents = Document([half // 2, half, seqlen - half - half // 2])
    return {
        "causal": Causal(),
        "window": SlidingWindow(seqlen // 8),
        "documents": documents,
        "documents-in-a-window": documents & SlidingWindow(seqlen // 8),
        "prefix": PrefixLM(seqlen // 4),
        "global": GlobalWindow(4, seqlen // 8),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("masks"), help="folder of the pictures (default: masks)")
    parser.add_argument("--seqlen", type=int, default=64, help="queries and keys (default: 64)")
    options = parser.parse_args()
    if options.seqlen < 1:
        parser.error(f"--seqlen takes 1 or more, got {options.seqlen}")
    if find_spec("matplotlib") is None:
        parser.error("drawing needs matplotlib: pip install matplotlib")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, mask in masks(options.seqlen).items():
        path = options.out / f"{name}.svg"
        mask.draw(path, options.seqlen, options.seqlen)
        density = mask.density(options.seqlen, options.seqlen)
        skipped = mask.tiles(8, 8, options.seqlen, options.seqlen).skipped
        print(f"{name:<22} {density:4.0%} of the scores are visible, {skipped:4.0%} of the 8×8 tiles are skipped: {path}")


if __name__ == "__main__":
    main()
