"""The Triton kernels of linear attention on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("file", ["test_cases.py", "test_rows.py", "test_cut.py", "test_truncation.py", "test_found.py"])
def test_under_the_interpreter(file: str) -> None:
    output = run_interpreted(FOLDER / file)
    assert " passed" in output and "skipped" not in output
