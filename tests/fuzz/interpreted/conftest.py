"""These tests need TRITON_INTERPRET=1 before triton is imported; tests/fuzz/test_fuzz.py runs them so."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import patch_numpy_scalars

if os.environ.get("TRITON_INTERPRET") == "1":
    patch_numpy_scalars()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
