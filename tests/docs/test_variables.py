"""Environment variables: those that the package reads and those that its pages name are the same."""

from __future__ import annotations

import re
from pathlib import Path

import warploom

PACKAGE = Path(warploom.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"


def names(text: str) -> set[str]:
    return set(re.findall(r"\bWARPLOOM_[A-Z_]+\b", text))


def test_a_page_named_a_variable_that_nothing_reads() -> None:
    read = {name for path in PACKAGE.rglob("*.py") for name in names(path.read_text(encoding="utf-8"))}
    for path in DOCS.rglob("*.md"):
        assert names(path.read_text(encoding="utf-8")) <= read, path.name
    assert names((DOCS / "stability.md").read_text(encoding="utf-8")) == read
