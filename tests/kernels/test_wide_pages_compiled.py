"""The kernel that writes FP8 pages in 16 bits, compiled offline for sm_90: no stack, and loads and stores of 16 bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tools.kernel_resources import Recorded, compiled_launch, recorder, resources_of
from warploom import PagedKVCache
from warploom.attention.caches import cache_args
from warploom.attention.hopper import wide_pages
from warploom.kernels.e4m3 import E4M3
from warploom.runtime import triton_launch


@pytest.mark.parametrize("granularity", ["token", "head", "tensor"])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
def test_resources(dim: int, granularity: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[Recorded] = []
    monkeypatch.setattr(triton_launch, "Launch", recorder(found))
    cache = PagedKVCache.allocate(2, 96, 2, dim, dtype=E4M3, granularity=granularity)  # type: ignore[arg-type]
    q, starts = torch.zeros(2, 4, dim, dtype=torch.bfloat16), torch.tensor([0, 1, 2], dtype=torch.int32)
    wide_pages._launch.cache_clear()
    wide_pages.widen(cache_args(q, cache, None, starts))
    wide_pages._launch.cache_clear()
    (launch,) = found
    built = compiled_launch(launch, 90)
    used = resources_of(launch, built, 90)
    assert used.faults == 0 and used.stack == 0
    if dim % 64 == 0:  # rows of whole 16 bytes of 8-bit numbers
        assert "ld.global.v4.b32" in built.asm["ptx"] and "st.global.v4.b32" in built.asm["ptx"]
