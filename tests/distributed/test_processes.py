"""Worlds of two, three and four processes over gloo: every case runs once in each, all of them in one start of processes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.distributed import cases, drawn, faults, usage  # noqa: F401  (they fill CASES)
from tests.distributed.registry import of_world
from tests.forks import Forks
from warploom.distributed.choice import METHODS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """With what each rank would import for a case or two: torch.compile and checkpoints need it."""
    with Forks("torch._dynamo.backends.debugging") as forks:
        yield forks


@cache
def results(forks: Forks, world: int, folder: Path) -> tuple[list[dict[str, str | None]], str]:
    """What failed, by rank and case, and what the processes wrote."""
    seed = random.randrange(2**31)
    ended = forks.run(["-m", "tests.distributed.worker", str(world), str(seed), str(folder)], ROOT)
    found = [folder / f"{rank}.json" for rank in range(world)]
    words = f"seed {seed}, status {ended.returncode}\n{ended.stderr[-4000:]}"
    return [json.loads(path.read_text()) if path.exists() else {} for path in found], words


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {world: tmp_path_factory.mktemp(f"world{world}") for world in (2, 3, 4)}


@pytest.mark.parametrize(("world", "name"), [(n, name) for n in (2, 3, 4) for name in [*of_world(n), "a rank that dies"]])
def test_case(world: int, name: str, folders: dict[int, Path], forks: Forks) -> None:
    failures, words = results(forks, world, folders[world])
    told = [failures[rank].get(name, "did not run") for rank in range(world - (name == "a rank that dies"))]
    for rank, failure in enumerate(told):
        assert failure is None, f"rank {rank} of {world}: {failure}\n{words}"


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_hangs(method: str, forks: Forks) -> None:
    """Where no connection closes, the others end with the group's timeout."""
    done = forks.run(["-m", "tests.distributed.stuck", method], ROOT)
    assert done.returncode == 0, done.stderr[-4000:]


def test_eight_processes(forks: Forks) -> None:
    seed = random.randrange(2**31)
    done = forks.run(["-m", "tests.distributed.drawn", "8", "6", str(seed)], ROOT)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
