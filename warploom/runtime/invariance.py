"""The process-wide switch that calls take where they leave ``batch_invariant`` at None."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from threading import Lock
from typing import Any

import torch

from warploom.runtime.arguments import flag

enabled = False


def attend(*arguments: Any, **keywords: Any) -> Any:
    """attention_varlen(), for decode, a family beside attention's, which imports nothing of it."""
    assert _attend is not None
    return _attend(*arguments, **keywords)


def explain(*arguments: Any, **keywords: Any) -> Any:
    """The plan of a call of ``attend``."""
    assert _explain is not None
    return _explain(*arguments, **keywords)


_attend: Callable[..., Any] | None = None
_explain: Callable[..., Any] | None = None


def offer(attention_varlen: Callable[..., Any], explained: Callable[..., Any]) -> None:
    """Say what ``attend`` and ``explain`` are."""
    global _attend, _explain
    _attend, _explain = attention_varlen, explained


class batch_invariant:
    """Make ``batch_invariant=True`` the default of attention() and attention_varlen(), and let decode() agree with them.

    A switch, or a context manager that puts back at its end what was before::

        warploom.batch_invariant()         # from here on
        with warploom.batch_invariant():   # within
            out = warploom.attention(q, k, v, causal=True)

    It is the process's, for all threads, as torch.use_deterministic_algorithms() is; blocks of several threads may overlap, and
    the last one to end puts back what was before the first. A call that gives ``batch_invariant``
    itself does not look at it. What torch.compile or a CUDA graph makes of a call keeps what held when it was made; a compiled
    function that is called under another value is compiled again.

    Under it decode() runs attention_varlen() over the cache's pages where that takes the call, so that a token has the bits
    that a chunk of its prompt gives it there. Its own kernels, which are batch-invariant always and faster, run for trees and
    latent caches.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = flag("enabled", enabled)
        with _alone():
            self._begun = [_Block(_set(self.enabled))]
        self._switched = True

    def __enter__(self) -> None:
        with _alone():
            before = _set(self.enabled)
            if not self._switched:
                self._begun.append(_Block(before))
            elif before != self.enabled:  # since the switch another thread's block has ended
                self._begun[-1].before = before
            self._switched = False
            _begin(self._begun[-1])

    def __exit__(self, *_: Any) -> None:
        with _alone():
            _end(self._begun.pop())


class _Block:
    """What a block puts back, and of those that are not traced a number, by which they began."""

    def __init__(self, before: bool) -> None:
        self.before = before
        self.number = 0 if torch.compiler.is_compiling() else next(_numbers)


_open: list[_Block] = []  # that go on, in the order of their numbers
_numbers = count(1)
_lock = Lock()


def _alone() -> AbstractContextManager[Any]:
    """No other thread meanwhile; compilers, which trace blocks, know no locks."""
    return nullcontext() if torch.compiler.is_compiling() else _lock


def _begin(block: _Block) -> None:
    # A compiler would compile again where other blocks are open.
    if not torch.compiler.is_compiling():
        _open.insert(sum(each.number < block.number for each in _open), block)


def _end(block: _Block) -> None:
    if torch.compiler.is_compiling():
        _set(block.before)
        return
    # Another thread's block may have begun within and go on: it keeps its value, and puts back what was before this one.
    later = next((each for each in _open if each.number > block.number), None)
    if later is None:
        _set(block.before)
    else:
        later.before = block.before
    _open.remove(block)


def _set(value: bool) -> bool:
    """Set the switch; what it was."""
    global enabled
    before, enabled = enabled, value
    return before


def asked(value: Any) -> Any:
    """The ``batch_invariant`` of a call: what it gives, or the switch's where that is None."""
    return enabled if value is None else flag("batch_invariant", value, optional=True)
