"""The command that names what GPU tests load, without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from warploom.runtime import modules


@pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")
def test_it_names_the_modules_of_the_chosen_tests() -> None:
    """In a process of its own: a GPU is pretended there."""
    here = "tests/linear/hopper/test_gpu.py"
    command = [sys.executable, "-m", "tests.gpu_modules", "--list", "-k", "test_strides", here]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert names and all(name.startswith("linear_walk_sm90_") for name in names)


def test_it_asks_where_to_build() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu_modules"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--cache" in done.stderr
