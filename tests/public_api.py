"""The public names of the package and their signatures, as lines of text.

python -m tests.public_api    write tests/public_api.txt, which tests/test_public_api.py compares

A signature is what a caller depends on: names, order, kinds and defaults of parameters. Types are mypy's to hold.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import warploom
from warploom import bias, distributed, fp8, masks, nn
from warploom.cli import make_parser
from warploom.integrations import collators, flash_attn, transformers
from warploom.linear import feature_maps

FILE = Path(__file__).with_name("public_api.txt")
# What a module without __all__ makes public.
NAMES = {
    nn: ("CausalLinearAttention", "GatedDeltaNet", "GatedDeltaState", "LinearAttention"),
    feature_maps: ("RandomFeatures",),
    collators: ("BoundsCollator", "cu_seqlens_bounds", "padding_bounds", "position_ids_bounds"),
    flash_attn: tuple(name for name in vars(flash_attn) if name.startswith("flash_attn_")),
}


def text() -> str:
    """All of it, as the file holds it."""
    lines: list[str] = []
    for module in (warploom, masks, bias, fp8, distributed, nn, feature_maps, transformers, collators, flash_attn):
        lines += ["", module.__name__, *(f"  {line}" for line in module_lines(module))]
    q = torch.zeros(1, 1, 1, 16)
    lines += ["", "what warploom.explain() returns", *(f"  {line}" for line in class_lines(type(warploom.explain(q, q, q))))]
    lines += ["", "command line", *(f"  {line}" for line in command_lines())]
    return "\n".join(lines[1:]) + "\n"


def module_lines(module: ModuleType) -> Iterator[str]:
    for name in sorted(NAMES.get(module) or module.__all__):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield f"{name} (module)"
        elif isinstance(value, type):
            yield from class_lines(value)
        else:
            yield f"{name}{signature(value)}"


def class_lines(cls: type) -> Iterator[str]:
    """The class, and the members that it adds to its public base."""
    base = next((each for each in (masks.Mask, bias.Bias) if issubclass(cls, each) and cls is not each), None)
    yield f"class {cls.__name__}{signature(cls)}" + (f", a {base.__name__}" if base else "")
    own = [part for part in cls.__mro__ if part.__module__.startswith("warploom") and not (base and issubclass(base, part))]
    members = {name: value for part in reversed(own) for name, value in vars(part).items()}
    for name, value in sorted(members.items()):
        if name.startswith("_") and name not in ("__and__", "__call__", "__or__"):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            yield f"  .{name}{signature(getattr(cls, name))} ({type(value).__name__})"
        elif inspect.isfunction(value):
            yield f"  .{name}{signature(value)}"
        elif isinstance(value, property):
            yield f"  .{name} (property)"


def signature(value: Any) -> str:
    """Without annotations."""
    found = inspect.signature(value)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def command_lines() -> Iterator[str]:
    """Each command with its options."""
    subcommands = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in sorted(subcommands.choices.items()):
        options = [a.option_strings[-1] if a.option_strings else a.dest.upper() for a in parser._actions if a.dest != "help"]
        yield f"warploom {name}: {', '.join(sorted(options))}"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
