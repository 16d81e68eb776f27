"""`mypy --strict` takes the README's Python, as a reader's own file: what a call returns follows from its arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import parse

ROOT = Path(__file__).parents[2]
# Errors in what the file imports are not the reader's; torch's untyped functions are torch's, and transformers is large.
CONFIG = """
[mypy]
strict = True
follow_imports = silent
untyped_calls_exclude = torch
[mypy-transformers.*]
follow_imports = skip
"""
RETURNED = """
from typing import assert_type
from warploom import KVCache, LinearState, attention, attention_varlen, decode, gated_delta_rule, linear_attention
from torch import Tensor

def pairs(q: Tensor, starts: Tensor, cache: KVCache, either: bool) -> None:
    assert_type(attention(q, q, q), Tensor)
    assert_type(attention(q, q, q, return_lse=False, backend="cpu"), Tensor)
    assert_type(attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(q, q, q, return_lse=either), Tensor | tuple[Tensor, Tensor])
    assert_type(attention_varlen(q, q, q, starts), Tensor)
    assert_type(attention_varlen(q, q, q, starts, starts, 3, 3, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention_varlen(q, q, q, starts, return_lse=either), Tensor | tuple[Tensor, Tensor])
    assert_type(decode(q, cache), Tensor)
    assert_type(decode(q, cache, return_lse=True), tuple[Tensor, Tensor])
    assert_type(decode(q, cache, return_lse=either), Tensor | tuple[Tensor, Tensor])
    assert_type(linear_attention(q, q, q), Tensor)
    assert_type(linear_attention(q, q, q, return_state=True), tuple[Tensor, LinearState])
    assert_type(linear_attention(q, q, q, return_state=either), Tensor | tuple[Tensor, LinearState])
    assert_type(gated_delta_rule(q, q, q, q), Tensor)
    assert_type(gated_delta_rule(q, q, q, q, q, return_state=True), tuple[Tensor, Tensor])
    assert_type(gated_delta_rule(q, q, q, q, return_state=either), Tensor | tuple[Tensor, Tensor])
"""
WRONG = """
import warploom
from torch import Tensor

def shape(q: Tensor) -> int:
    return warploom.attention(q, q, q, return_lse=True).ndim
"""


def complaints(folder: Path, **sources: str) -> str:
    """What mypy says of the files; its cache lies beside the one of `mypy` itself, whose options differ."""
    (folder / "mypy.ini").write_text(CONFIG)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    files = [str(folder / f"{name}.py") for name in sources]
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(ROOT / ".mypy_cache" / "strict")]
    command = [sys.executable, "-m", "mypy", *options, *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of all files at once, as most of the time goes into reading torch."""
    readme = "\n".join(s.source for s in parse((ROOT / "README.md").read_text()) if s.kind == "python")
    return complaints(tmp_path_factory.mktemp("types"), readme=readme, returned=RETURNED, wrong=WRONG)


def of(said: str, name: str) -> list[str]:
    return [line for line in said.splitlines() if f"{name}.py:" in line]


def test_strict_takes_the_readme(said: str) -> None:
    assert of(said, "readme") == []


def test_what_a_call_returned_was_a_union(said: str) -> None:
    """attention, attention_varlen, decode and linear_attention: their callers had to cast or assert."""
    assert of(said, "returned") == []


def test_a_pair_taken_for_a_tensor_is_refused(said: str) -> None:
    lines = of(said, "wrong")
    assert any('error: "tuple[Tensor, Tensor]" has no attribute "ndim"' in line for line in lines), lines
