"""README.md and docs/ are executed: what a page shows is what its snippets print."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.snippets import Snippet, matches, pages, parse
from tests.forks import Forks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        forks = Forks()
    with forks:
        yield forks


def check(page: str, snippet: Snippet, printed: str) -> None:
    assert matches(snippet.expected, printed), (
        f"{page}:{snippet.line} prints\n{printed}\nand the page shows\n{snippet.expected or '(nothing)'}"
    )


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page(path: Path, tmp_path: Path, forks: Forks) -> None:
    page = path.relative_to(ROOT).as_posix()
    snippets = parse(path.read_text())

    python = [s for s in snippets if s.kind == "python"]
    if python:
        work = json.dumps([(f"{page}:{s.line}", s.source) for s in python])
        done = forks.run([str(Path(__file__).with_name("run_python.py"))], tmp_path, work)
        assert done.returncode == 0, done.stderr
        for snippet, (printed, error) in zip(python, json.loads(done.stdout), strict=False):
            assert error is None, error
            check(page, snippet, printed)

    for snippet in snippets:
        if snippet.kind == "command":
            program, *arguments = shlex.split(snippet.source)
            assert program == "warploom"
            done = forks.run(["-m", "warploom", *arguments], tmp_path)
            assert done.returncode == 0, f"{page}:{snippet.line} {snippet.source}\n{done.stdout}{done.stderr}"
            check(page, snippet, done.stdout)


def test_readme_shows_python_and_a_command() -> None:
    kinds = {s.kind for s in parse((ROOT / "README.md").read_text()) if s.expected}
    assert kinds == {"python", "command"}
