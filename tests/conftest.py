"""Hypothesis draws anew on every run by hand and the same examples in CI, whose verdict is to be about the change.

It looks at no clock: an example may take as long as a busy machine needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "here", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("here")


def _poisoned(warn_only: bool) -> Iterator[None]:
    """torch.empty hands out NaN, so that a result which nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Of a CPU, where torch's own operations are deterministic."""
    yield from _poisoned(warn_only=False)


@pytest.fixture
def poisoned_gpu_memory() -> Iterator[None]:
    """Of a GPU, where some of torch's own operations are not."""
    yield from _poisoned(warn_only=True)
