"""A representative set of kernels for compute-sanitizer, small and unasserted but for NaN:

compute-sanitizer --tool memcheck python -m tests.gpu.sanitize [triton | hopper | ampere | linear]
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
# Of linear attention past head_dim 128 on Hopper: batch, tokens, heads, E, M. Clusters and none, several waves, ragged ends.
LINEAR = [(2, 200, 3, 256, 256), (1, 129, 2, 136, 192), (4, 100, 40, 256, 200)]
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


def linear() -> None:
    """The Hopper walks and the passes over rows around them, forward and backward; none of Triton's kernels beside them."""
    from warploom.linear import hopper
    from warploom.linear.problem import LinearCall

    for batch, tokens, heads, e, m in LINEAR:
        q, k, v, dout = (torch.rand(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for dim in (e, e, m, m))
        for map_name, normalize in (("identity", False), ("identity", True), ("elu+1", True)):
            call = LinearCall(q, k, v, map_name, map_name, True, normalize, 1e-6, 1.0, None, None, None, None)
            out, norm, *_ = hopper.forward(call, False)
            finite(f"linear {map_name}", [out, *hopper.backward(call, dout, norm, None, None)[:3]])
    torch.cuda.synchronize()
    print(f"ran {3 * len(LINEAR)} cases of linear attention")


def finite(name: str, tensors: list[torch.Tensor]) -> None:
    assert not any(t.isnan().any() for t in tensors), name


if __name__ == "__main__":
    linear() if sys.argv[1:] == ["linear"] else main(*sys.argv[1:])
