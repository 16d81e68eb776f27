"""The Triton kernels on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import check_groups, run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
# A process takes some seconds before its first test. These take about as long each.
GROUPS = {"kernels": ["test_kernels.py"], "others": ["test_bias.py", "test_fp8.py", "test_prefix.py"]}


@pytest.mark.parametrize("group", GROUPS)
def test_under_the_interpreter(group: str) -> None:
    run_interpreted(*(FOLDER / file for file in GROUPS[group]))


def test_every_file_is_in_a_group() -> None:
    check_groups(FOLDER, GROUPS)
