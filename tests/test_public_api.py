"""Public names and signatures stand in tests/public_api.txt: a change of one is seen, and meant."""

from __future__ import annotations

import difflib

import pytest

import warploom
from tests import public_api

ADVICE = """The public names or signatures of the package are no longer those of tests/public_api.txt:

{difference}

Where that is not meant, give the old name or signature back. Where it is meant:

1. Others rely on these names. What goes away, or changes its meaning, warns for one minor release first:
   docs/stability.md says how.
2. Write a line into CHANGELOG.md, and change the pages of docs/ that show the call.
3. Write the file anew with `python -m tests.public_api`, and commit it with the change.
"""


def test_public_names_and_signatures_are_those_written_down() -> None:
    before, now = public_api.FILE.read_text(encoding="utf-8"), public_api.text()
    difference = difflib.unified_diff(before.splitlines(), now.splitlines(), "written down", "found", lineterm="", n=1)
    assert before == now, ADVICE.format(difference="\n".join(difference))


def test_a_changed_default_a_new_name_and_a_lost_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one line of the difference; a changed annotation is none."""
    before = public_api.text()

    def decode(q: object, cache: object, *, scale: float = 1.0) -> None: ...

    def strict(enabled: int = True) -> int: ...  # type: ignore[empty-body]

    monkeypatch.setattr(warploom, "decode", decode)
    monkeypatch.setattr(warploom, "strict", strict)
    monkeypatch.setattr(warploom, "__all__", [*(set(warploom.__all__) - {"prepare"}), "__version__"])
    monkeypatch.setattr(warploom, "__version__", strict)
    changes = [line for line in difflib.ndiff(before.splitlines(), public_api.text().splitlines()) if line[0] in "+-"]
    names = sorted(line[0] + line[1:].strip().partition("(")[0] for line in changes)
    assert names == ["+__version__", "+decode", "-decode", "-prepare"]
