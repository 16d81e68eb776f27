"""The Triton kernels on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import check_groups, run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
# A process takes some seconds before its first test. These take about as long each.
GROUPS = {
    "behaviour": ["test_behaviour.py", "test_explain.py", "test_invariance.py", "test_stats.py"],
    "cases": ["test_cases.py", "test_chunks.py", "test_fp8_pages.py", "test_wide_pages.py"],
    "bias": ["test_bias.py", "test_edges.py", "test_packed_bounds.py"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_under_the_interpreter(group: str) -> None:
    run_interpreted(*(FOLDER / file for file in GROUPS[group]))


def test_every_file_is_in_a_group() -> None:
    check_groups(FOLDER, GROUPS)
