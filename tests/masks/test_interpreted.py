"""Kernels of masks on a CPU, in Triton's interpreter."""

from pathlib import Path

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"


def test_under_the_interpreter() -> None:
    output = run_interpreted(FOLDER)
    assert " passed" in output and "skipped" not in output
