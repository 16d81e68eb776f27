"""The bank model against this GPU's counters; needs nvcc, ncu and the permission to read counters."""

from __future__ import annotations

import pytest

from warploom.smem.verify import find, report, verify

pytestmark = pytest.mark.gpu


def test_every_kernel_is_predicted_exactly() -> None:
    if missing := [name for name in ("nvcc", "ncu") if find(name) is None]:
        pytest.skip(f"not found: {', '.join(missing)}")
    result = verify()
    assert len(result.rows) >= 200
    assert result.agrees, report(result)
