"""The process-wide switch that calls take where they leave ``batch_invariant`` at None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    It is the process's, for all threads, as torch.use_deterministic_algorithms() is. A call that gives ``batch_invariant``
    itself does not look at it. What torch.compile or a CUDA graph makes of a call keeps what held when it was made; a compiled
    function that is called under another value is compiled again.

    Under it decode() runs attention_varlen() over the cache's pages where that takes the call, so that a token has the bits
    that a chunk of its prompt gives it there. Its own kernels, which are batch-invariant always and faster, run for trees and
    latent caches.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = flag("enabled", enabled)
        # What was before the blocks that are open; the first block puts back what was before the switch.
        self._before, self._switched = [_set(self.enabled)], True

    def __enter__(self) -> None:
        if not self._switched:
            self._before.append(_set(self.enabled))
        self._switched = False

    def __exit__(self, *_: Any) -> None:
        _set(self._before.pop())


def _set(value: bool) -> bool:
    """Set the switch; what it was."""
    global enabled
    before, enabled = enabled, value
    return before


def asked(value: Any) -> Any:
    """The ``batch_invariant`` of a call: what it gives, or the switch's where that is None."""
    return enabled if value is None else flag("batch_invariant", value, optional=True)
