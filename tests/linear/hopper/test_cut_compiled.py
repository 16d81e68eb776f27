"""What segments begin from, and what adds up logs' gradients, compiled offline for sm_90: no spills, no fault of Triton's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

triton = pytest.importorskip("triton")

from tools.kernel_resources import Recorded, compiled_launch, recorder  # noqa: E402
from tools.machine_code import faults, listing  # noqa: E402
from warploom.linear.hopper import cut, log_gradients  # noqa: E402
from warploom.linear.hopper.plan import TERMS, config  # noqa: E402
from warploom.runtime.cubin import resources  # noqa: E402


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("a_head", [False, True])
def test_kernel(a_head: bool, gradients: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[Recorded] = []
    x = torch.zeros(1, 4096, 2, 64, dtype=torch.bfloat16)
    logs = torch.zeros(2) if a_head else torch.zeros(1, 2, 4096)
    cut._launch.cache_clear()
    try:
        with patch.object(cut, "Launch", recorder(found)):
            if gradients:
                cut.gradient_states(x, x, x, x, logs, 4, 64)
            else:
                cut.bind_states(x, x, 4, 64, logs.stride()[-2:][0], a_head)(x, x, logs)
    finally:
        cut._launch.cache_clear()
    (launched,) = found
    binary = compiled_launch(launched, 90)
    code = listing(binary.asm["cubin"])
    assert [each.stack for each in resources(binary.asm["cubin"])] == [0]
    assert code.count("HGMMA") == 64 // 16 and code.count("WARPGROUP.DEPBAR") == 1
    assert not faults(binary.asm["ttgir"], binary.asm["ptx"], code)


@pytest.mark.parametrize("width", TERMS)
def test_log_gradients(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[Recorded] = []
    like = torch.zeros(2, 700, 3, width)
    terms = [log_gradients.Terms.of(config(width, fading=True, terms=True, reverse=reverse), like) for reverse in (False, True)]
    log_gradients._launch.cache_clear()
    try:
        with patch.object(log_gradients, "Launch", recorder(found)):
            log_gradients.log_gradients(*terms, torch.zeros(2, 700, 3), 64, 1.0)
    finally:
        log_gradients._launch.cache_clear()
    (launched,) = found
    assert [each.stack for each in resources(compiled_launch(launched, 90).asm["cubin"])] == [0]
