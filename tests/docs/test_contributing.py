"""CONTRIBUTING.md's recipes are followed: their Python runs, and the files that they name exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.snippets import matches, parse
from tests.forks import Forks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """A third-level section of the page."""
    found = re.search(rf"^### {title}\n(.*?)(?=^##|\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert found, f"CONTRIBUTING.md has no section {title!r}"
    return found[1]


RECIPES = ("A new mask", "A new backend", "A new GPU architecture", "A new benchmark")


@pytest.mark.parametrize("title", ["A new mask", "A new backend"])
def test_recipe_runs_and_prints_what_it_shows(title: str, tmp_path: Path) -> None:
    snippets = parse(section(title))
    work = json.dumps([(f"{title}, snippet {number}", s.source) for number, s in enumerate(snippets, 1)])
    with Forks() as forks:
        done = forks.run([str(Path(__file__).with_name("run_python.py"))], tmp_path, work)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for snippet, (printed, error) in zip(snippets, results, strict=False):
        assert error is None, error
        assert matches(snippet.expected, printed), f"{title} prints\n{printed}\nand shows\n{snippet.expected}"
    assert len(results) == len(snippets) >= 2


@pytest.mark.parametrize("title", RECIPES)
def test_files_that_a_recipe_names_exist(title: str) -> None:
    named = re.findall(r"`((?:warploom|tests|tools|docs|benchmarks)/[\w/.]*|[A-Z]+\.md)`", section(title))
    assert len(named) >= 5
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []
