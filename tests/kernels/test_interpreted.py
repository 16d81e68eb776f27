"""What Triton kernels of several families share, on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
FILES = ["test_feature_maps.py", "test_fp8.py", "test_fp8_values.py", "test_numerics.py", "test_packed.py", "test_softmax.py"]


@pytest.mark.parametrize("file", FILES)
def test_under_the_interpreter(file: str) -> None:
    output = run_interpreted(FOLDER / file)
    assert " passed" in output and "skipped" not in output
