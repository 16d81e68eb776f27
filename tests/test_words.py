"""Docstrings of the package begin with a summary: one whole sentence or phrase, ended, on the first line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import warploom

PACKAGE = Path(warploom.__file__).parent
FILES = sorted(path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py"))


def faults(source: str) -> Iterator[str]:
    """Line and fault of each docstring whose summary is none."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        first, *others = text.split("\n")
        line = f"line {node.body[0].lineno}: {first!r:.80}"
        if not first.endswith((".", ":", "?")):
            yield f"{line} does not end its first line; the summary is one line"
        elif others and others[0]:
            yield f"{line} is not followed by an empty line"


@pytest.mark.parametrize("name", FILES)
def test_summaries_were_broken_over_two_lines(name: str) -> None:
    found = list(faults((PACKAGE.parent / name).read_text(encoding="utf-8")))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("One line.", None),
        ("A summary.\n\n    And more\n    lines.", None),
        ("A summary that goes\n    on.", "does not end its first line"),
        ("A summary.\n    More at once.", "is not followed by an empty line"),
        ("No full stop", "does not end its first line"),
    ],
)
def test_a_fault_is_seen(docstring: str, fault: str | None) -> None:
    found = list(faults(f'def f():\n    """{docstring}\n    """'.replace(".\n    \"\"\"", '."""')))
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0])
