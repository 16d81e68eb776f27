"""`help()` of a public function answers for every argument, and its examples run."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
import torch

import warploom

FUNCTIONS = [name for name in warploom.__all__ if inspect.isfunction(getattr(warploom, name))]
# Which function's arguments a docstring points to for those that it does not name.
POINTS_TO = {
    "attention_varlen": "attention",
    "explain": "attention",
    "prepare": "attention",
    "gated_delta_step": "gated_delta_rule",
    "linear_attention_step": "linear_attention",
}


def named(name: str) -> set[str]:
    """The arguments that the docstring has an entry for, or names in ``code``."""
    text = inspect.getdoc(getattr(warploom, name)) or ""
    entries = [match[1] for match in re.finditer(r"^    ([a-z]\w*(?:, [a-z]\w*)*): ", text, re.M)]
    return {each for entry in entries for each in entry.split(", ")} | set(re.findall(r"``(\w+)(?:=\w*)?``", text))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_went_without_a_word(name: str) -> None:
    text = inspect.getdoc(getattr(warploom, name)) or ""
    known = named(name)
    if name in POINTS_TO:
        assert POINTS_TO[name] in text
        known |= named(POINTS_TO[name])
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {p.name for p in inspect.signature(getattr(warploom, name)).parameters.values() if p.kind in plain}
    assert taken <= known, sorted(taken - known)


@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_the_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = inspect.getdoc(getattr(warploom, name)) or ""
    (block,) = re.findall(r"::\n\n((?:    .*\n)+)", text)
    held = {"torch": torch, "warploom": warploom}
    exec(textwrap.dedent(block), held)
    assert held["out"].shape == held["q"].shape
