"""Triton's interpreter in a process of its own: TRITON_INTERPRET must be set before triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import interpreter_patches

ROOT = Path(__file__).parents[1]


def run_interpreted(*paths: Path) -> None:
    """Run pytest over ``paths`` under the interpreter; AssertionError with its output unless all pass and none is skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, paths)]
    # The summary is read, which options from outside (--durations, -v) would lengthen by names of tests.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


def check_groups(folder: Path, groups: Mapping[str, Sequence[str]]) -> None:
    """AssertionError where a file of interpreted tests is in no group of them, or in two."""
    assert sorted(file for files in groups.values() for file in files) == sorted(path.name for path in folder.glob("test_*.py"))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits do not depend on a row's place in its tile."""
    monkeypatch.setattr(np, "matmul", interpreter_patches.matmul)


def ignored() -> list[str]:
    """The files that pytest is not to collect in a folder of interpreted tests: all, but under the interpreter, made ready."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return ["test_*.py"]
    interpreter_patches.apply()
    return []
