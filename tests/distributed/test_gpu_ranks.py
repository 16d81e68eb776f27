"""Sharded calls on GPUs, a process each, over NCCL: drawn ones against one device's model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def test_drawn_calls() -> None:
    ranks = torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("needs two GPUs")
    seed = torch.seed() % 2**31
    command = [sys.executable, "-m", "tests.distributed.drawn", str(ranks), "60", str(seed), "--device", "cuda"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
