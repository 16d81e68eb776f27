"""The Triton kernels on a CPU, in the interpreter."""

from pathlib import Path

import pytest

from tests.interpreter import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
# A process takes some seconds before its first test. These take about as long each.
GROUPS = {
    "behaviour": ["test_behaviour.py", "test_explain.py", "test_invariance.py", "test_stats.py"],
    "cases": ["test_cases.py", "test_chunks.py", "test_fp8_pages.py"],
    "bias": ["test_bias.py", "test_edges.py", "test_packed_bounds.py"],
}


@pytest.mark.parametrize("group", GROUPS)
def test_under_the_interpreter(group: str) -> None:
    output = run_interpreted(*(FOLDER / file for file in GROUPS[group]))
    assert " passed" in output and "skipped" not in output


def test_every_file_is_in_a_group() -> None:
    assert sorted(file for files in GROUPS.values() for file in files) == sorted(path.name for path in FOLDER.glob("test_*.py"))
