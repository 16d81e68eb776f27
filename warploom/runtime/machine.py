"""The GPUs of this machine, or one that is not here, of which explain() is asked what would run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

Found = TypeVar("Found", bound=Callable[..., Any])


class Elsewhere(NamedTuple):
    """A machine that is not this one."""

    capability: tuple[int, int]
    extras: bool  # whether every optional package counts as installed there; else those that are here


assumed: Elsewhere | None = None
_examined: list[Any] = []


def examined(function: Found) -> Found:
    """As functools.cache, for what depends on the machine: another one is examined anew."""
    kept = cache(function)
    _examined.append(kept)
    return kept  # type: ignore[return-value]


@contextmanager
def elsewhere(capability: tuple[int, int], extras: bool = False) -> Iterator[None]:
    """Answer for a machine with a GPU of this compute capability; nothing may be launched meanwhile."""
    global assumed
    _forget()
    assumed = Elsewhere(capability, extras)
    try:
        yield
    finally:
        assumed = None
        _forget()


def _forget() -> None:
    for kept in _examined:
        kept.cache_clear()


def capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capabilities of the GPUs that torch sees, one each."""
    if assumed is not None:
        return (assumed.capability,)
    return tuple(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
