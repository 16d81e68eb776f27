"""The snippet reader lets no block go unchecked."""

from __future__ import annotations

import pytest

from tests.docs.snippets import matches, parse


def test_output_belongs_to_the_block_above() -> None:
    page = "```python\nprint(1)\n```\nprints\n\n```text\n1\n```\n\n```python\nx = 2\n```\n"
    first, second = parse(page)
    assert (first.source, first.expected) == ("print(1)", "1")
    assert (second.source, second.expected) == ("x = 2", None)


def test_diff_executes_what_stays() -> None:
    (snippet,) = parse("```diff\n-import old\n+import new\n x = 1\n```")
    assert snippet.source == "import new\nx = 1"


def test_console_executes_our_commands_only() -> None:
    snippets = parse("```console\n$ pip install warploom\n$ warploom doctor\n```\n```text\nok\n```")
    assert [(s.kind, s.source, s.expected) for s in snippets] == [("command", "warploom doctor", "ok")]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```text\nhello\n```", "output of no executed block"),
        ("```console\n$ pip install warploom\n```\n```text\nok\n```", "output of no executed block"),
        ("```python\nprint(1)\n```\n```text\n1\n```\n```text\n1\n```", "output of no executed block"),
        ("```bash\nls\n```", "not 'bash'"),
        ("```python skip\nprint(1)\n```", "not 'python skip'"),
        ("```\nhello\n```", "not ''"),
        ("```console\n$ rm file\n```", "neither executed nor in NOT_RUN"),
        ("```console\nwarploom doctor\n```", "start with"),
        ("- item\n  ```python\n  1\n  ```", "indented"),
        ("```python\nprint(1)", "never closed"),
    ],
)
def test_refuses(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(page)


def test_matches() -> None:
    assert matches(None, "")
    assert not matches(None, "surprise")
    assert matches("a  \nb", "a\nb\n")
    assert not matches("a", "a\nb")
    assert matches("a ... c", "a bbb c")
    assert not matches("a ... c", "a b\nb c")
    assert matches("a\n...\nd", "a\nb\nc\nd")
    assert not matches("1.5", "115")
