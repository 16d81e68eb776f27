"""Dispatch is data: for each family an ordered list of implementations that say, in words, what they refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from warploom.runtime.arguments import flag
from warploom.runtime.backend import Backend

_families: dict[str, tuple[Backend, ...]] = {}

# Choices by a key of the caller's that holds all that a problem does, and launchers by one that holds strides too.
_settled: dict[Any, str] = {}
_bound: dict[Any, Callable[..., Any] | None] = {}
_recent: dict[Any, Any] = {}
MOST_KEPT = 4096
_strict = False
_warned: set[tuple[str, str]] = set()


def strict(enabled: bool = True) -> None:
    """Make falling to a slower implementation on a GPU an error instead of one warning a process.

    A RuntimeError of the call then names the faster implementations and what each refuses. It holds for all threads, and
    changes nothing on a CPU, nor where ``backend=`` names an implementation.

    Args:
        enabled: False goes back to the warning.
    """
    global _strict
    _strict = flag("enabled", enabled)
    _forget()


def register(family: str, *ordered: Backend) -> None:
    """Set a family's dispatch list, fastest first: the first that does not refuse runs."""
    _families[family] = ordered
    _forget()


def _forget() -> None:
    _settled.clear()
    _bound.clear()
    _recent.clear()


def implementations(family: str = "attention") -> tuple[Backend, ...]:
    """The ordered dispatch list of a family."""
    return _families[family]


def find(name: str, family: str = "attention") -> Backend:
    """The implementation called ``name``; ValueError, or TypeError for no name, lists those there are."""
    if isinstance(name, str):
        for implementation in _families[family]:
            if implementation.name == name:
                return implementation
    from warploom.runtime.suggest import meant  # `import warploom` goes without

    names = [i.name for i in _families[family]]
    error = ValueError if isinstance(name, str) else TypeError
    raise error(f"backend must be one of {', '.join(map(repr, names))}, got {name!r}{meant(name, names)}")


def choose(problem: Any, backend: str | None = None, family: str = "attention") -> str:
    """The name of the implementation that runs ``problem``.

    Raises:
        ValueError: ``backend`` names none, or one that refuses; the message is its refusal.
        RuntimeError: under strict(), where a GPU call would fall to a slower implementation.
    """
    if backend is not None:
        forced = find(backend, family)
        reason = forced.refusal(problem, by_name=True)
        if reason is not None:
            raise ValueError(f"backend={backend!r} cannot run this call: {reason}")
        return forced.name
    refusals: list[tuple[str, str]] = []
    for implementation in _families[family]:
        unavailable = implementation.available() or implementation.declines(problem)
        reason = unavailable or implementation.supports(problem)
        if reason is None:
            if problem.device != "cpu":
                _report_fallback(implementation, refusals)
            return implementation.name
        if unavailable is None and not implementation.special and implementation.device in (None, problem.device):
            refusals.append((implementation.name, reason))
    raise ValueError("no implementation takes this call: " + "; ".join(f"{n}: {r}" for n, r in refusals))


def following(name: str, problem: Any, family: str = "attention") -> Backend | None:
    """The first implementation after ``name`` that takes the problem."""
    ordered = _families[family]
    after = [i.name for i in ordered].index(name) + 1
    return next((i for i in ordered[after:] if i.refusal(problem) is None), None)


def delegate(name: str, problem: Any, family: str = "attention") -> Backend:
    """As ``following``, for what the implementation has no kernel for; NotImplementedError where there is none."""
    found = following(name, problem, family)
    if found is None:
        raise NotImplementedError(f"{name} has no kernel for this call, and no other implementation takes it")
    return found


def settled(key: Any) -> str | None:
    """What an earlier ``settle`` found for the key."""
    return _settled.get(key)


def settle(key: Any, name: str, family: str = "attention", by_name: bool = False, problem: Any = None) -> None:
    """Remember a choice on a GPU that nothing but strict() or register() can change.

    The user made it ``by_name``, or what every faster implementation refuses here it refuses for good: ``problem``, or whatever
    it may be asked where that is None.
    """
    for implementation in _families[family]:
        if by_name or implementation.name == name:
            _keep(_settled, key, name)
            return
        if implementation.device == "cpu" or implementation.available() or implementation.declines(problem):
            continue
        if implementation.wavers(problem):
            return


def bound(key: Any) -> Callable[..., Any] | None:
    """What ``bind`` kept for the key."""
    return _bound.get(key)


def bind(key: Any, make: Callable[[], Callable[..., Any] | None]) -> None:
    """Keep a settled call's launcher, which takes any tensors of the same shapes, strides, dtypes and device.

    It is made when the key comes for the second time: lengths that change with every call would make one each time.
    """
    _keep(_bound, key, make() if key in _bound else None)


recent = _recent.get  # what ``remember`` kept for a place, if nothing has changed launchers since; asked at every call


def remember(place: Any, call: Any) -> None:
    """Keep what tells further calls like one that a launcher runs."""
    _keep(_recent, place, call)


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) > MOST_KEPT:
        kept.clear()
    kept[key] = value


def _report_fallback(chosen: Backend, refusals: list[tuple[str, str]]) -> None:
    if not refusals and not chosen.eager:
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals) or "no GPU implementation is available here"
    if _strict:
        raise RuntimeError(f"warploom.strict(): this call would fall to the slower {chosen.name!r} ({reasons})")
    if (chosen.name, reasons) not in _warned:
        _warned.add((chosen.name, reasons))
        warnings.warn(f"warploom runs the slower {chosen.name!r} here ({reasons})", stacklevel=4)
