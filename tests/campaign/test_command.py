"""The command that runs GPU tests in several processes, on tests that need none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import os
from threading import Event
import pytest

@pytest.mark.parametrize("n", range(6))
def test_fine(n):
    pass

def test_wrong():
    assert 1 + 1 == 3

def test_lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_left_out():
    pytest.skip("not here")

def test_hangs():
    Event().wait()

def test_dies():
    os._exit(7)
"""


def test_each_test_is_run_once_whatever_others_do(tmp_path: Path) -> None:
    tests, results = tmp_path / "test_some.py", tmp_path / "results.txt"
    tests.write_text(TESTS)
    command = [sys.executable, "-m", "tests.campaign", "--results", str(results), "--mark", "", "--seed", "3"]
    done = subprocess.run(
        [*command, "--processes", "2", "--hang", "15", str(tests)], capture_output=True, text=True, check=False
    )
    lines = [line for line in results.read_text().splitlines() if not line.startswith("    ")]
    found = sorted((line.split()[0], line.split()[1].rpartition("::")[2]) for line in lines)
    others = [("died", "test_dies"), ("failed", "test_lost"), ("failed", "test_wrong"), ("hung", "test_hangs")]
    assert found == [*others, *(("passed", f"test_fine[{n}]") for n in range(6)), ("skipped", "test_left_out")]
    assert done.returncode == 1 and "seed 3: 1 died, 2 failed, 1 hung, 6 passed, 1 skipped" in done.stdout
    assert "assert (1 + 1) == 3" in results.read_text()
