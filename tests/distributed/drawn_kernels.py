"""Kernels of the calls that `test_gpu_ranks.py` draws, on a pretended GPU: `python -m tests.distributed.drawn_kernels`."""

from __future__ import annotations

from unittest.mock import patch

from tests.distributed import drawn
from tests.distributed.test_gpu_ranks import CALLS, SEED
from tools.frozen.pretend import Recorder, hopper
from warploom.runtime import modules

ATTENTION = {"forward_kernel", "rows_kernel", "dkdv_kernel", "dq_kernel"}


def check() -> None:
    """Modules, which are built before: Triton's kernels of attention would compile as the test runs."""
    loaded: list[str] = []
    recorder = Recorder()
    with hopper(recorder), patch.object(modules, "load", lambda spec: loaded.append(spec.name) or (lambda *arguments: None)):
        for number in range(SEED, SEED + CALLS, 3):
            drawn.played(2, 1, number)
    assert loaded and recorder.specialisations
    assert not ATTENTION & set(recorder.specialisations), set(recorder.specialisations)


if __name__ == "__main__":
    check()
