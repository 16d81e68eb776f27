"""The Triton kernels of the gated delta rule on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("file", ["test_cases.py", "test_inverse.py", "test_step.py"])
def test_under_the_interpreter(file: str) -> None:
    output = run_interpreted(FOLDER / file)
    assert " passed" in output and "skipped" not in output
