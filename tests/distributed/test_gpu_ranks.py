"""Sharded calls on GPUs, a process each, over NCCL: drawn ones against one device's model.

The same ones each time, so that `python -m tests.gpu_modules --cache FOLDER tests/distributed/test_gpu_ranks.py` builds what
they load. A few worlds run side by side, each on cores of its own, and say each call as it ends (`pytest -s`).
`python -m tests.distributed.drawn` draws others.
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


CALLS, SEED, MOST_WORLDS = 24, 2311, 3


def test_drawn_calls() -> None:
    ranks = torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("needs two GPUs")
    run(ranks, CALLS, SEED)


def run(ranks: int, calls: int, seed: int) -> None:
    """In as many worlds as the host has cores for."""
    worlds = max(1, min(MOST_WORLDS, len(os.sched_getaffinity(0)) // (2 * ranks)))
    cuts = [calls * n // worlds for n in range(worlds + 1)]
    command = [sys.executable, "-m", "tests.distributed.drawn", str(ranks)]
    running = []
    for first, past in pairwise(cuts):
        more = [str(past - first), str(seed + first), "--device", "cuda"]
        running.append(subprocess.Popen([*command, *more], cwd=ROOT))
    for world in running:
        world.wait()
    assert not any(world.returncode for world in running), "what the worlds said is above"
