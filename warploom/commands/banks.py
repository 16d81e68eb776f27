"""`warploom banks`: shared-memory bank conflicts of an access, predicted; layouts designed and drawn; verified on a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warploom.commands.banks_text import draw_counts, many, sums, totals
from warploom.commands.banks_written import run_atom, run_layout
from warploom.commands.outputs import fitted, writable_file
from warploom.runtime.table import table
from warploom.smem import copies
from warploom.smem.access import ACCESSES, Pattern, parse_pattern
from warploom.smem.explain import describe, witness
from warploom.smem.layout import Tile, join, parse_swizzles, tma_refusals
from warploom.smem.model import Prediction, predict
from warploom.smem.swizzle import design
from warploom.smem.walk import count


def run(options: argparse.Namespace) -> int:
    if options.verify or options.ladder or options.gemm or options.attention:
        if options.access or options.design or options.draw:
            raise ValueError("--ladder, --gemm, --attention and --verify take no --access, --design or --draw")
        return _verify(options) if options.verify else _time(options)
    if options.size is not None:
        raise ValueError("--size takes one of --gemm and --attention beside it")
    if options.draw and Path(options.draw).suffix in (".svg", ".png", ".html"):
        writable_file("--draw", options.draw)
    if options.atom is not None:
        return run_atom(options)
    if options.layout is not None:
        return run_layout(options)
    if options.swizzle_bytes:
        raise ValueError("--swizzle-bytes takes a --layout beside it")
    named = options.access or []
    copied = named.count(copies.NAME)
    patterns = [parse_pattern(text) for text in named if text != copies.NAME]
    if not named:
        raise ValueError(f"--access takes one of {', '.join(ACCESSES)}, and got none; --help has examples")
    if copied and (options.addresses is not None or options.design or options.draw):
        raise ValueError(f"{copies.NAME} depends on global memory too: it takes no --addresses, --design or --draw")
    if options.addresses is not None:
        return _addresses(options, patterns)
    if options.rows is None or options.cols is None:
        raise ValueError("--rows and --cols are needed without --addresses")
    swizzles = () if options.swizzle is None else parse_swizzles(options.swizzle)
    tile = Tile(options.rows, options.cols, options.dtype, options.pad, swizzles)
    return _design(options, tile, patterns) if options.design else _count(options, tile, patterns, copied)


def _addresses(options: argparse.Namespace, patterns: Sequence[Pattern]) -> int:
    if len(patterns) != 1:
        raise ValueError(f"--addresses takes one --access, got {len(patterns)}")
    if options.rows or options.cols or options.pad or options.swizzle or options.design or options.draw:
        raise ValueError("--addresses are final: it takes no tile, padding, swizzle, --design or --draw")
    addresses = [_address(text) for text in options.addresses.split(",")]
    prediction = predict(patterns[0].access, addresses)
    if options.json:
        words = [{str(bank): list(held) for bank, held in phase.banks.items()} for phase in prediction.phases]
        lanes = [list(phase.lanes) for phase in prediction.phases]
        result = {"access": prediction.access.name, **prediction.to_dict(), "lanes": lanes, "words_by_bank": words}
        print(json.dumps(result))
    else:
        print(f"access    {prediction.access.name}\n{totals(prediction)}")
        rows = [
            (str(n), f"{phase.lanes[0]} to {phase.lanes[-1]}", str(phase.wavefronts), _busiest(prediction, n))
            for n, phase in enumerate(prediction.phases)
        ]
        print(table(rows, heading=("phase", "lanes", "wavefronts", "busiest bank")))
    return 0


def _busiest(prediction: Prediction, number: int) -> str:
    phase = prediction.phases[number]
    bank, words = max(phase.banks.items(), key=lambda item: len(item[1]))
    return f"{bank}: words {', '.join(map(str, words))}"


def _count(options: argparse.Namespace, tile: Tile, patterns: Sequence[Pattern], copied: int) -> int:
    counts = [count(pattern, tile) for pattern in patterns]
    filled = [copies.count(tile)] * copied
    if options.draw:
        draw_counts(options.draw, counts)
    if options.json:
        print(json.dumps({**_tile(tile), **sums([*filled, *counts]), "tma": tma_refusals(tile), "drawn": options.draw}))
        return 0
    print(f"tile      {tile}, rows of {tile.pitch_bytes} bytes")
    for copy in filled:
        print(f"access    {copies.NAME}, {many(copy.instructions)}, each row from a line of global memory on\n{totals(copy)}")
    for one in counts:
        print(f"access    {one.pattern}, {many(len(one.instructions))}\n{totals(one)}")
        conflict = witness(one.pattern, tile)
        if conflict:
            print(f"  first conflict: {conflict}")
    for mode, refusal in tma_refusals(tile).items():
        print(f"{mode:<10}{'a TMA box can hold this tile' if refusal is None else f'no: {refusal}'}")
    if options.draw:
        print(f"drawn     {options.draw}")
    return 0


def _design(options: argparse.Namespace, tile: Tile, patterns: Sequence[Pattern]) -> int:
    found = design(tile, patterns)
    if options.draw:
        draw_counts(options.draw, [count(pattern, found.best) for pattern in patterns])
    if options.json:
        best = {"pad": found.best.pad, "swizzle": _numbers(found.best)}
        print(json.dumps({**_tile(tile), **found.to_dict(), "best": best, "words": describe(found), "drawn": options.draw}))
        return 0
    print(fitted(describe(found)))
    if options.draw:
        print(f"drawn     {options.draw}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from warploom.smem.device.verify import PARTS, report, say, verify

    if options.size is not None:
        raise ValueError("--size is of the timed kernels, --verify has its own")
    named = tuple(part for part in PARTS if getattr(options, part, False))
    try:
        result = verify(options.seed, named or PARTS, say)
    except RuntimeError as error:
        print(f"warploom banks: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result.to_dict()) if options.json else report(result))
    return 0 if result.agrees else 1


def _time(options: argparse.Namespace) -> int:
    from warploom.smem.device.tester import Trial, report, time_attention, time_gemm, time_ladder, to_dict

    size = 4096 if options.size is None else options.size
    trials: list[Trial] = []
    trials += [time_ladder()] if options.ladder else []
    trials += [time_gemm(size)] if options.gemm else []
    trials += time_attention(size) if options.attention else []
    if options.json:
        print(json.dumps(to_dict(trials)))
    else:
        print("\n".join(map(report, trials)))
    return 0 if all(trial.right for trial in trials) else 1


def _tile(tile: Tile) -> dict[str, Any]:
    return {
        "rows": tile.rows,
        "cols": tile.cols,
        "dtype": tile.dtype,
        "pad": tile.pad,
        "layout": join(tile.swizzles),
        "bytes": tile.size_bytes,
    }


def _numbers(tile: Tile) -> list[list[int]]:
    return [[one.b, one.m, one.s] for one in tile.swizzles]


def _address(text: str) -> int | None:
    if text.strip() == "-":
        return None
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError(f"--addresses takes whole numbers (0x... too) or -, got {text.strip()!r}") from None
