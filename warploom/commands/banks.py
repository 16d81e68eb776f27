"""`warploom banks`: shared-memory bank conflicts of an access, predicted; layouts designed and drawn; verified on a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from warploom.commands.banks_text import draw_counts, many, sums, totals
from warploom.commands.banks_written import run_atom, run_layout
from warploom.runtime.table import table
from warploom.smem import copies
from warploom.smem.access import ACCESSES, ORDERS, Pattern, parse_pattern
from warploom.smem.explain import describe, witness
from warploom.smem.layout import DTYPES, Tile, join, parse_swizzles, tma_refusals
from warploom.smem.model import Prediction, predict
from warploom.smem.swizzle import design
from warploom.smem.walk import count

EXAMPLES = f"""examples:
  warploom banks --access ldmatrix.x4 --rows 16 --cols 128 --dtype f16
  warploom banks --access ldmatrix.x4 --rows 16 --cols 128 --dtype f16 --swizzle 3,3,4 --draw tile.svg
  warploom banks --access lds.64 --addresses 0,8,16,24,-,...       (32 byte addresses, - for a lane that is off)
  warploom banks --design --rows 16 --cols 16 --access sts.128 --access ldmatrix.x4
  warploom banks --layout "Swizzle<3,3,3> o (64,64):(64,1)" --access ldmatrix.x4
  warploom banks --atom wgmma-k-128 --draw operand.svg
  warploom banks --ladder --gemm --attention                       (needs a GPU and cuda-core: checks and times the kernels)
  warploom banks --verify                                          (needs ncu too: predicted against measured)

accesses: {", ".join(ACCESSES)};
also {copies.NAME}, which fills the tile by cp.async
orders, as in lds.32@columns:
{table([(name, meaning) for name, meaning in ORDERS.items()])}
ACCESS@ROWSxCOLS, as in ldmatrix.x4@256x16, sees the same memory in another shape.

atoms: tma-MODE, wgmma-k-MODE, wgmma-mn-MODE for MODE of none, 32, 64, 128; wgmma-accumulator, wgmma-a
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--access", action="append", metavar="ACCESS", help="an instruction; several for one tile")
    parser.add_argument("--addresses", metavar="A0,...,A31", help="byte addresses of the lanes of one instruction")
    tile = parser.add_argument_group("a tile, row after row, covered once by each access")
    tile.add_argument("--rows", type=_number, metavar="R")
    tile.add_argument("--cols", type=_number, metavar="C")
    tile.add_argument("--dtype", choices=DTYPES, default="f16", metavar="TYPE", help=f"{', '.join(DTYPES)}; default: f16")
    tile.add_argument("--pad", type=_number, default=0, metavar="N", help="elements after each row")
    tile.add_argument("--swizzle", metavar="B,M,S", help="in elements; two in a row joined by +")
    written = parser.add_argument_group("a tile by its layout in CuTe's notation, or one of Hopper's own as a picture")
    written.add_argument("--layout", metavar="TEXT", help='as in "Swizzle<3,3,3> o (64,64):(64,1)"; rows are its first mode')
    written.add_argument("--swizzle-bytes", action="store_true", help="its swizzles are of byte addresses, as in smem atoms")
    written.add_argument("--atom", metavar="NAME", help="a swizzle of TMA, an operand or accumulator of wgmma")
    actions = parser.add_argument_group("what to do with it, beside counting")
    actions.add_argument("--design", action="store_true", help="search the best swizzle, padding and pair of swizzles")
    actions.add_argument("--draw", metavar="FILE", help="a picture, .svg or .png, or an interactive page, .html")
    gpu = parser.add_argument_group("the laboratory's kernels, on this GPU")
    gpu.add_argument("--ladder", action="store_true", help="check and time the 16×16×16 product, from WMMA to stmatrix")
    gpu.add_argument("--gemm", action="store_true", help="check and time a large product, plain, padded, swizzled, and cuBLAS")
    gpu.add_argument("--attention", action="store_true", help="the same with the Ampere forward, beside FlashAttention-2")
    gpu.add_argument("--size", type=_number, metavar="N", help="rows, columns or tokens of the two; default: 4096")
    gpu.add_argument(
        "--verify",
        action="store_true",
        help="compare the model with Nsight Compute's counters: single instructions and these kernels, or the named ones",
    )
    gpu.add_argument("--seed", type=_number, default=0, metavar="N", help="of the random patterns of --verify; default: 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    if options.verify or options.ladder or options.gemm or options.attention:
        if options.access or options.design or options.draw:
            raise ValueError("--ladder, --gemm, --attention and --verify take no --access, --design or --draw")
        return _verify(options) if options.verify else _time(options)
    if options.size is not None:
        raise ValueError("--size takes one of --gemm and --attention beside it")
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
    print(describe(found))
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


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a whole number from 0, got {text!r}")
    return int(text)


def _address(text: str) -> int | None:
    if text.strip() == "-":
        return None
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError(f"--addresses takes whole numbers (0x... too) or -, got {text.strip()!r}") from None
