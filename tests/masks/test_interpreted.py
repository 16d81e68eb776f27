"""Kernels of masks on a CPU, in Triton's interpreter."""

from pathlib import Path

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"


def test_under_the_interpreter() -> None:
    run_interpreted(FOLDER)
