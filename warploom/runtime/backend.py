"""What a backend is: one way to compute a family's calls, as dispatch and the family's door see it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol


class Backend(Protocol):
    """One way to compute a family's calls. Subclass it, give it a name, write ``supports`` and ``forward``.

    ``problem`` is the family's description of a call (shapes, dtypes and features, never contents), ``args`` are the validated
    arguments of its op. A backend imports optional dependencies when it runs, not when it is imported.
    `warploom.runtime.dispatch.register` puts it into a family's list.
    """

    name: str
    special: bool = False  # made for some problems: what it refuses is no slower elsewhere, so nothing is said about it
    device: str | None = None  # the one type of device whose tensors it takes; None: ``supports`` says
    eager: bool = False  # torch ops, slower than kernels, which torch differentiates itself: a family may go without an op

    def available(self) -> str | None:
        """Why this machine cannot run it, or None."""
        return None

    def declines(self, problem: Any = None) -> str | None:
        """Why it does not run a problem unasked here, though it could; None: it does. Of no problem: why it runs none."""
        return None

    @abstractmethod
    def supports(self, problem: Any) -> str | None:
        """What of a problem it refuses, in words that follow its name, or None."""
        ...

    def wavers(self, problem: Any = None) -> bool:
        """Whether it may still come to take, in this process, a problem that it refuses now; None: some such problem."""
        return True

    def describe(self, problem: Any) -> str:
        """What it would run, for explain(); "": nothing to say."""
        return ""

    def tiles(self, args: Any) -> tuple[tuple[int, int], int] | None:
        """Queries × keys that a forward pass computes or skips together, and how many keys it skips at once, for explain().

        None: it has no tiles.
        """
        return None

    def loaded_tile(self, args: Any) -> tuple[int, int] | None:
        """Queries × keys of the tiles for which keys are loaded, where these may be larger than ``tiles``; None: the same."""
        return None

    def packs(self, problem: Any) -> bool:
        """Whether it runs a dense problem's forward pass as packed sequences, whose tiles nobody counts."""
        return False

    def backward_tiles(self, args: Any) -> dict[str, tuple[int, int]]:
        """Queries × keys of the tiles from which each gradient is summed, by its name, for explain(); {}: nothing to say."""
        return {}

    def rows_apart(self, problem: Any) -> bool:
        """Whether a row's bits in a batch-invariant problem depend neither on the others nor on which of them the call has."""
        return False

    def hands_on(self, args: Any) -> str | None:
        """Why the next implementation runs a call that it supports, for what no problem says; words follow the name."""
        return None

    def prepare(self, args: Any) -> Any:
        """The arguments that the op is given: with what is computed once for many calls."""
        return args

    @abstractmethod
    def forward(self, args: Any, *options: Any) -> Any:
        """The family's results."""
        ...

    def backward(self, args: Any, *gradients: Any) -> Any:
        """The family's gradients."""
        refused = f"{self.name} has no backward pass"
        raise NotImplementedError(refused)

    def bind(self, args: Any, *options: Any) -> Callable[..., Any] | None:
        """What launches further calls that differ from this one, which has run, in contents alone; None: nothing quicker."""
        return None

    def writes_into(self, args: Any) -> bool:
        """Whether what ``bind`` returns of a call writes its results into the tensors that it is given as ``into``."""
        return False

    def bind_backward(self, args: Any, *gradients: Any) -> Callable[..., Any] | None:
        """As ``bind``, of a backward pass that is about to run; it does not keep these tensors alive. None: nothing quicker."""
        return None

    def warm(self, args: Any) -> None:
        """Make ready what the call would run, so that a capturing stream finds it."""
        return None

    def refusal(self, problem: Any, by_name: bool = False) -> str | None:
        """Why it does not run the problem, unasked or ``by_name``, or None."""
        return self.available() or (None if by_name else self.declines(problem)) or self.supports(problem)
