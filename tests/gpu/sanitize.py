"""A representative set of kernels for compute-sanitizer, small and unasserted but for NaN:

compute-sanitizer --tool memcheck python -m tests.gpu.sanitize [triton | hopper | ampere]
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

import warploom
from tests.attention.cases import case, masked
from tests.attention.harness import results
from tests.attention.packed import PACKED, Packed
from tests.decode.cases import case as decode_case
from tests.decode.harness import run

DENSE = [
    "causal, queries that see nothing",
    "head_dim 128",
    "group of 7",
    "softcap, sink and lse",
    "dropout",
    "strided",
    "head_dim 72",
]
MASKED = ["Document", "GlobalWindow", "Padding anywhere"]
VARLEN = ["empty sequences", "used keys", "four vectors", "pages of 16"]
DECODE = ["one query", "group of 7, 5 queries, batch 3", "pages of 16", "empty sequences"]
# Of the Hopper forward: no mask in turns and pieces merged; several heads a tile, split; whole rounds before split tiles.
# Queries, keys, heads and their groups' number, head_dim, causal.
HOPPER = [(400, 3000, 2, 1, 64, False), (5, 3000, 8, 2, 128, True), (1100, 3000, 17, 17, 128, False)]
# What the others refuse.
TRITON_ONLY = ("dropout", "four vectors", "pages of 16")


def main(backend: str = "triton") -> None:
    half = torch.bfloat16
    dense, masks, varlen, decode = DENSE, MASKED, VARLEN, DECODE
    if backend != "triton":
        dense, varlen = ([name for name in names if name not in TRITON_ONLY] for names in (dense, varlen))
        masks, varlen, decode = [], varlen if backend == "hopper" else [], []
    for name in dense:
        finite(name, list(results(case(name, 1, dtype=half, device="cuda"), backend).values()))
    for name in masks:
        finite(name, list(results(masked(name, 1, "cuda", dtype=half), backend).values()))
    for name in varlen:
        finite(name, list(Packed(seed=1, dtype=half, device="cuda", **PACKED[name]).results(backend).values()))
    for name in decode:
        finite(name, list(run(replace(decode_case(name, 1), dtype=half, device="cuda"), backend)))
    more = HOPPER if backend == "hopper" else []
    for queries, keys, heads, kv, dim, causal in more:
        shapes = (1, queries, heads, dim), (1, keys, kv, dim), (1, keys, kv, dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=half) for shape in shapes)
        finite(f"{queries} × {keys}", list(warploom.attention(q, k, v, causal=causal, return_lse=True, backend=backend)))
    torch.cuda.synchronize()
    print(f"ran {len(dense) + len(masks) + len(varlen) + len(decode) + len(more)} cases of {backend}")


def finite(name: str, tensors: list[torch.Tensor]) -> None:
    assert not any(t.isnan().any() for t in tensors), name


if __name__ == "__main__":
    main(*sys.argv[1:])
