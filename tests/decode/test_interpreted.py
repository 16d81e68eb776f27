"""The Triton kernels on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
# A process takes some seconds before its first test. These take about as long each.
GROUPS = {"kernels": ["test_kernels.py"], "others": ["test_bias.py", "test_fp8.py", "test_prefix.py"]}


@pytest.mark.parametrize("group", GROUPS)
def test_under_the_interpreter(group: str) -> None:
    output = run_interpreted(*(FOLDER / file for file in GROUPS[group]))
    assert " passed" in output and "skipped" not in output


def test_every_file_is_in_a_group() -> None:
    assert sorted(file for files in GROUPS.values() for file in files) == sorted(p.name for p in FOLDER.glob("test_*.py"))
