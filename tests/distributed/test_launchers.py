"""Sharded calls that come again are launched and not planned."""

import subprocess
import sys


def test_calls_of_a_kind_are_planned_twice() -> None:
    """In a process of its own: a GPU is pretended there."""
    done = subprocess.run([sys.executable, "-m", "tests.distributed.host_counts"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bytes_of_method_ring() -> None:
    """By a formula, and against its bar."""
    done = subprocess.run([sys.executable, "-m", "tests.distributed.ring_bytes"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
