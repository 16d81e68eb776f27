"""The Triton kernels on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"


FILES = [
    "test_bias.py", "test_cases.py", "test_behaviour.py", "test_chunks.py", "test_edges.py", "test_explain.py",
    "test_invariance.py", "test_packed_bounds.py", "test_stats.py",
]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file: str) -> None:
    output = run_interpreted(FOLDER / file)
    assert " passed" in output and "skipped" not in output
