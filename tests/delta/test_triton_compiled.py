"""The gated delta rule's Triton kernels compiled offline for sm_90: they fit, spill nothing, have no known fault."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from tests.delta.triton_compiled import launches
from tools.kernel_resources import compile_launch

SHARED_LIMIT = 227 * 1024


def test_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """E = M = 128 in bf16, each kernel of each pass once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {(recorded.kernel.__name__, recorded.constants.get("C")): recorded for recorded in launches(128, 128)}
    assert {name for name, _ in found} == {f"{name}_kernel" for name in ("prepare", "walk", "back", "dq", "dk", "step")}
    for (name, _), recorded in found.items():
        used = compile_launch(recorded, 90)
        assert used.shared <= SHARED_LIMIT and used.stack == 0 and not used.faults, (name, used)
        assert (used.wgmma > 0) == (name != "step_kernel" and recorded.constants["num_warps"] >= 4), name


@pytest.mark.parametrize("e,m", [(64, 64), (256, 20), (128, 30), (256, 30)])
def test_steps(e: int, m: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Of other dims, and of states whose rows are no multiple of sixteen bytes apart."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (step,) = [recorded for recorded in launches(e, m) if recorded.kernel.__name__ == "step_kernel"]
    used = compile_launch(step, 90)
    assert step.constants["DENSE"] == (m % 4 == 0) and used.stack == 0 and not used.faults, used
