"""The passes over rows compiled offline for sm_90: nothing spills, and no product is wgmma."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

triton = pytest.importorskip("triton")

from tools.kernel_resources import Recorded, compiled_launch, recorder  # noqa: E402
from warploom.linear.hopper import rows  # noqa: E402
from warploom.runtime.cubin import resources  # noqa: E402


def launches(e: int, name: str) -> list[Recorded]:
    """Of all passes, that do not happen."""
    found: list[Recorded] = []
    x = torch.zeros(1, 512, 2, e, dtype=torch.bfloat16)
    wide, weights = x.float(), torch.zeros(1, 2, 512)
    rows._launch.cache_clear()
    try:
        with patch.object(rows, "Launch", recorder(found)):
            rows.mapped(x, name)
            _, sums = rows.mapped_and_sums(x, name)
            rows.denominators(x, x, sums, 1.0, 1e-6)
            rows.queries_gradient(x, x, sums, wide, weights, 1.0, name)
            rows.through(x, x, name)
    finally:
        rows._launch.cache_clear()
    return found


@pytest.mark.parametrize(("e", "name", "count"), [(256, "elu+1", 5), (200, "identity", 3)])
def test_kernels(e: int, name: str, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = launches(e, name)
    assert len(found) == count
    for launch in found:
        binary, label = compiled_launch(launch, 90), launch.kernel.__name__
        assert [each.stack for each in resources(binary.asm["cubin"])] == [0], f"{label} spills"
        # Tiles of few rows leave products to single warps, which wait for them: of one by wgmma Triton 3.6 may overwrite the
        # tile that registers read too.
        assert "wgmma" not in binary.asm["ptx"], label
