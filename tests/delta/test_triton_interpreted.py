"""The Triton kernels of the gated delta rule on a CPU, in the interpreter."""

from pathlib import Path

from tests.interpreter import run_interpreted


def test_under_the_interpreter() -> None:
    """All at once: a process takes some seconds before its first test."""
    run_interpreted(Path(__file__).parent / "interpreted")
