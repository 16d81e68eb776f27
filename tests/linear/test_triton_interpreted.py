"""The Triton kernels of linear attention on a CPU, in the interpreter."""

from pathlib import Path

from tests.interpreter import run_interpreted


def test_under_the_interpreter() -> None:
    run_interpreted(Path(__file__).parent / "interpreted")
