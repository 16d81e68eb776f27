"""FLOP formulas of ops, for torch.utils.flop_counter: FlopCounterMode, torch.compile's partitioner, runtime estimates.

Importing that module imports Triton too and takes 0.1 s, so that it is left to who counts: formulas wait for its import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., Any]] = {}


def register(name: str, count: Callable[..., Any]) -> None:
    """Make ``count``, of the arguments of warploom's op ``name``, its formula; a multiplication and an addition are 2 FLOPs."""

    def formula(*flat: Any, out_val: Any = None, **named: Any) -> Any:
        return count(*flat, **named)

    packet = getattr(torch.ops.warploom, name)
    _formulas[packet] = formula
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        _enter(counter, packet)


def nothing(*flat: Any) -> int:
    """The formula of an op without products."""
    return 0


def lengths_of(lengths: Tensor | None, number: Any, most: Any) -> Sequence[Any]:
    """Lengths as numbers: ``number`` times ``most`` where the tensor is None or holds none (of a tracer, on the meta device).

    Waits for the device, as torch's own count of packed sequences does.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if lengths is None or isinstance(lengths, (FakeTensor, FunctionalTensor)) or lengths.is_meta:
        return [most] * number
    found: list[int] = lengths.tolist()
    return found


def _enter(counter: ModuleType, packet: Any) -> None:
    counter.register_flop_formula(packet, get_raw=True)(_formulas[packet])


class _Finder(MetaPathFinder):
    """Finds torch's counter as the finders behind it do, and has formulas entered once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _enter_after(spec.loader)
                return spec
        return None


def _enter_after(loader: Loader) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        for packet in _formulas:
            _enter(module, packet)

    loader.exec_module = exec_module  # type: ignore[method-assign]


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
