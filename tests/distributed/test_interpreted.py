"""What one rank computes, by the Triton kernels in the interpreter."""

from pathlib import Path

from tests.interpreter import run_interpreted


def test_under_the_interpreter() -> None:
    output = run_interpreted(Path(__file__).parent / "interpreted" / "test_pieces.py")
    assert " passed" in output and "skipped" not in output
