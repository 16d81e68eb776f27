"""What one rank computes, by the Triton kernels in the interpreter."""

from pathlib import Path

from tests.interpreter import run_interpreted


def test_under_the_interpreter() -> None:
    folder = Path(__file__).parent / "interpreted"
    run_interpreted(folder / "test_pieces.py", folder / "test_bits.py")
