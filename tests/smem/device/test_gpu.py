"""The laboratory on this GPU: its kernels' results, and the bank model against counters (cuda-core; ncu with permission)."""

from __future__ import annotations

import pytest
import torch

from warploom.smem.device.kernels import attention, gemm, ladder, nvrtc
from warploom.smem.device.profiler import find
from warploom.smem.device.verify import PARTS, report, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(nvrtc.refusal() is not None, reason=f"no kernel can be compiled: {nvrtc.refusal()}"),
]


def test_every_rung_is_exact() -> None:
    subjects = ladder.Subjects()
    for rung in ladder.rungs():
        assert subjects.check(subjects.launch(rung.name, subjects.poisoned())) == 0, rung.name


@pytest.mark.parametrize("size", [128, 640, 1024])
def test_the_layouts_of_the_large_product_have_the_same_bits(size: int) -> None:
    subjects = gemm.Subjects(size)
    results = [subjects.launch(layout, subjects.poisoned()) for layout in gemm.LAYOUTS]
    assert subjects.check(results[0]) <= 2
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.skipif(attention.refusal() is not None, reason=f"the Ampere forward {attention.refusal()}")
@pytest.mark.parametrize("seqlen", [200, 1024])
def test_the_layouts_of_the_forward_have_the_same_bits(seqlen: int) -> None:
    q, k, v = attention.draw(seqlen, batch=2)
    results = [attention.forward(config, q, k, v) for config in attention.layouts().values()]
    assert attention.Check(q, k, v)(results[0]) <= 2
    assert all(torch.equal(result, results[0]) for result in results)
    assert attention.Check(q, k, v, causal=True)(attention.forward(attention.causal(), q, k, v)) <= 2


@pytest.mark.skipif(find("ncu") is None, reason="ncu is not found")
@pytest.mark.parametrize("part", PARTS)
def test_counters_are_as_predicted(part: str) -> None:
    result = verify(parts=[part])
    assert len(result.rows) >= {"single": 200, "ladder": 5}.get(part, 0)
    assert result.agrees, report(result)
    if part == "gemm":
        assert [one.excess == 0 for one in result.large] == [False, False, True]
