"""The options of `warploom banks`."""

from __future__ import annotations

import argparse

from warploom.commands.numbers import whole
from warploom.runtime.table import table

# What warploom.smem.access and warploom.smem.layout hold, written down again: to import them is to import torch.
ACCESSES = (
    *(f"{kind}.{bits}" for kind in ("lds", "sts") for bits in (8, 16, 32, 64, 128)),
    *(f"{kind}.x{count}{form}" for kind in ("ldmatrix", "stmatrix") for count in (1, 2, 4) for form in ("", ".trans")),
)
COPY = "cp.async.128"
ORDERS = {
    "rows": "lane after lane along each row, row after row",
    "columns": "lane after lane down each column, column after column",
    "fragment": "lane l at row l // 4, place l % 4 of each 8-row block: the accumulator of mma.m16n8",
    "matrices": "8×8 matrices, two down and two across for x4, two down for x2",
}
DTYPES = (
    *("f64", "fp64", "i64", "f32", "fp32", "tf32", "i32", "f16", "fp16", "bf16", "i16"),
    *("f8", "fp8", "e4m3", "e5m2", "i8"),
)

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
also {COPY}, which fills the tile by cp.async
orders, as in lds.32@columns:
{table([(name, meaning) for name, meaning in ORDERS.items()])}
ACCESS@ROWSxCOLS, as in ldmatrix.x4@256x16, sees the same memory in another shape.

atoms: tma-MODE, wgmma-k-MODE, wgmma-mn-MODE for MODE of none, 32, 64, 128; wgmma-accumulator, wgmma-a
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--access", action="append", metavar="ACCESS", help="an instruction; several for one tile")
    parser.add_argument("--addresses", metavar="A0,...,A31", help="byte addresses of the lanes of one instruction")
    tile = parser.add_argument_group("a tile, row after row, covered once by each access")
    tile.add_argument("--rows", type=whole(), metavar="R")
    tile.add_argument("--cols", type=whole(), metavar="C")
    tile.add_argument("--dtype", choices=DTYPES, default="f16", metavar="TYPE", help=f"{', '.join(DTYPES)}; default: f16")
    tile.add_argument("--pad", type=whole(), default=0, metavar="N", help="elements after each row")
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
    gpu.add_argument("--size", type=whole(), metavar="N", help="rows, columns or tokens of the two; default: 4096")
    gpu.add_argument(
        "--verify",
        action="store_true",
        help="compare the model with Nsight Compute's counters: single instructions and these kernels, or the named ones",
    )
    gpu.add_argument("--seed", type=whole(), default=0, metavar="N", help="of the random patterns of --verify; default: 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    from warploom.commands.banks import run

    return run(options)
