"""The families of calls that are fuzzed, one module each; `Family` in problem.py says what a module offers."""

from __future__ import annotations

from importlib import import_module

from tests.fuzz.problem import Family

NAMES = ("attention", "varlen", "sdpa", "fp8", "decode", "linear", "delta")


def load(name: str) -> Family:
    """The family's module."""
    if name not in NAMES:
        raise ValueError(f"there is no family {name!r}; there are {', '.join(NAMES)}")
    return import_module(f"tests.fuzz.families.{name}")  # type: ignore[return-value]
