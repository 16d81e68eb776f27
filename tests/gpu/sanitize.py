"""A representative set of kernels for compute-sanitizer, small and unasserted but for NaN:

compute-sanitizer --tool memcheck python -m tests.gpu.sanitize
"""

from __future__ import annotations

from dataclasses import replace

import torch

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


def main() -> None:
    half = torch.bfloat16
    for name in DENSE:
        finite(name, list(results(case(name, 1, dtype=half, device="cuda"), "triton").values()))
    for name in MASKED:
        finite(name, list(results(masked(name, 1, "cuda", dtype=half), "triton").values()))
    for name in VARLEN:
        finite(name, list(Packed(seed=1, dtype=half, device="cuda", **PACKED[name]).results("triton").values()))
    for name in DECODE:
        finite(name, list(run(replace(decode_case(name, 1), dtype=half, device="cuda"), "triton")))
    torch.cuda.synchronize()
    print(f"ran {len(DENSE) + len(MASKED) + len(VARLEN) + len(DECODE)} cases")


def finite(name: str, tensors: list[torch.Tensor]) -> None:
    assert not any(t.isnan().any() for t in tensors), name


if __name__ == "__main__":
    main()
