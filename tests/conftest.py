"""Tests draw anew on every run by hand and the same numbers in CI, whose verdict is to be about the change.

Hypothesis looks at no clock: an example may take as long as a busy machine needs.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.compiled import Compiler
from warploom.runtime import dispatch

settings.register_profile(
    "here", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("here")

SEED = "WARPLOOM_TEST_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Workers are started afterwards and take the seed from the environment.

    They share the processors: with as many threads each as there are processors, they would wait for each other.
    """
    os.environ.setdefault(SEED, "0" if os.environ.get("CI") else str(random.randrange(2**32)))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of processes that tests start
        torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what takes a minute or two, so that no process is left with it while the others have nothing to do."""
    items.sort(key=lambda item: "test_under_the_interpreter" not in item.nodeid)


def pytest_sessionfinish() -> None:
    Compiler.close_all()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} draws these numbers again")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Of its name and the run's seed, so that a test draws the same alone, in any order and on any worker."""
    seed = zlib.crc32(f"{os.environ[SEED]} {request.node.nodeid}".encode())
    random.seed(seed)
    torch.manual_seed(seed)


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
def poisoned_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a GPU, where some of torch's own operations are not.

    What torch.compile's calls allocate with, as kept launchers do, is never filled. Launchers hold it, so they are forgotten.
    """

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    guards = getattr(torch._C._dynamo, "guards", None)
    with monkeypatch.context() as patch:
        if guards is not None:
            patch.setattr(guards, "_empty_strided_cuda", empty, raising=False)
        dispatch._forget()
        yield from _poisoned(warn_only=True)
    dispatch._forget()
