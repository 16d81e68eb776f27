"""What a documentation page promises, read from its fenced blocks.

Every fence is one of these, so that none can be skipped unseen:

    ```python    executed; blocks of a page share one namespace, in order
    ```diff      before and after: the `+` and unmarked lines are executed as Python, the `-` lines are not
    ```console   lines `$ command`: warploom commands are executed, those in NOT_RUN are not
    ```text      what the block above it prints; a line `...` stands for any lines, within a line for any text

A block that prints must be followed by its text; a text must follow a block that ran.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NOT_RUN = ("pip install ", "make ", "git clone ", "cd ")


@dataclass(frozen=True)
class Snippet:
    line: int
    kind: str  # "python" or "command"
    source: str
    expected: str | None  # None: it must print nothing


def fences(page: str) -> list[tuple[int, str, list[str]]]:
    """(line number, info string, lines) of every fenced block."""
    found: list[tuple[int, str, list[str]]] = []
    inside = False
    for number, line in enumerate(page.splitlines(), start=1):
        if re.match(r"\s*```", line):
            if line.startswith(" "):
                raise ValueError(f"line {number}: an indented fence is not read; start it in the first column")
            if not inside:
                found.append((number, line[3:].strip(), []))
            inside = not inside
        elif inside:
            found[-1][2].append(line)
    if inside:
        raise ValueError(f"line {found[-1][0]}: this fence is never closed")
    return found


def parse(page: str) -> list[Snippet]:
    """The executable snippets of a page, with their expected output."""
    snippets: list[Snippet] = []
    awaits_text = False
    for line, info, body in fences(page):
        text = "\n".join(body)
        if info == "text":
            if not awaits_text:
                raise ValueError(f"line {line}: this text is the output of no executed block")
            snippets[-1] = Snippet(snippets[-1].line, snippets[-1].kind, snippets[-1].source, text)
            awaits_text = False
        elif info == "python":
            snippets.append(Snippet(line, "python", text, None))
            awaits_text = True
        elif info == "diff":
            kept = [row[1:] for row in body if not row.startswith("-")]
            snippets.append(Snippet(line, "python", "\n".join(kept), None))
            awaits_text = True
        elif info == "console":
            awaits_text = False
            for offset, row in enumerate(body, start=1):
                command = row.removeprefix("$ ")
                if command == row:
                    raise ValueError(f"line {line + offset}: console lines start with '$ ', output is a text block")
                if command.startswith("warploom"):
                    snippets.append(Snippet(line + offset, "command", command, None))
                    awaits_text = True
                elif not command.startswith(NOT_RUN):
                    raise ValueError(f"line {line + offset}: {command!r} is neither executed nor in NOT_RUN")
        else:
            raise ValueError(f"line {line}: a fence is python, diff, console or text, not {info!r}")
    return snippets


def matches(expected: str | None, printed: str) -> bool:
    """Whether the output is what the page shows, `...` standing for anything."""
    lines = [line.rstrip() for line in (expected or "").strip("\n").splitlines()]
    pattern = "\n".join(".*" if line.strip() == "..." else "[^\n]*".join(map(re.escape, line.split("..."))) for line in lines)
    output = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, output, re.DOTALL) is not None


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
