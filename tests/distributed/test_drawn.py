"""Calls that are drawn for GPUs."""

from __future__ import annotations

import subprocess
import sys

from tests.distributed import drawn


def test_they_run_no_triton_kernel_of_attention() -> None:
    """In a process of its own: a GPU is pretended there."""
    command = [sys.executable, "-m", "tests.distributed.drawn_kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_they_are_long_enough_for_half_precision() -> None:
    for seed in range(200):
        for world in (2, 4):
            found = drawn.draw(seed, world, "cuda")
            assert min(found.seqlen_q, found.seqlen_k or found.seqlen_q) >= drawn.LEAST
            assert "dropout_p" not in found.keywords and found.keywords.get("scale", 1.0) > 0
