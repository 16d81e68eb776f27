"""Sharded calls on GPUs, a process each, over NCCL: drawn ones against one device's model.

Nearly every call compiles Triton kernels of its own, on one core: several worlds share the calls, and what is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


CALLS, MOST_WORLDS = 60, 10


def test_drawn_calls() -> None:
    ranks = torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("needs two GPUs")
    worlds = max(1, min(MOST_WORLDS, len(os.sched_getaffinity(0)) // (2 * ranks)))
    cuts = [CALLS * n // worlds for n in range(worlds + 1)]
    seed = torch.seed() % 2**31
    command = [sys.executable, "-m", "tests.distributed.drawn", str(ranks)]
    running = []
    for first, past in pairwise(cuts):
        more = [str(past - first), str(seed + first), "--device", "cuda"]
        running.append(subprocess.Popen([*command, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ended = [(*world.communicate(), world.returncode) for world in running]
    for words, errors, status in ended:
        assert status == 0, words + errors[-4000:]
