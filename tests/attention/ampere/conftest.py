"""Kernels whose tests have not run on a GPU since they last changed are within reach of their tests."""

from __future__ import annotations

import pytest

from warploom.runtime import modules


@pytest.fixture(autouse=True)
def unconfirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "UNCONFIRMED", True)
