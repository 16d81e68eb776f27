"""What a family of calls offers the fuzzer, and problems as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.fuzz.draw import Draw

# Models of a correct kernel that a result has to be wrong by before it is called so.
OPINIONS = 16
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Expected:
    """What a result has to be.

    ref: fp64, of the result's shape; infinities and NaN in it must be there in the result.
    lows: the same by low-precision models of correct kernels; none where the result must equal `ref` to the slack alone.
    dtype: what the result is rounded to, where that is narrower than the inputs' dtype; None: the inputs'.
    loose: NaN is allowed in the result where `ref` has a number (a visible NaN may reach rows that share its tile).
    like: dtype the result must have; None: not looked at.
    atol: slack of the largest error, where it is more than the dtype's.
    eps: slack of the norm, likewise.
    """

    ref: Tensor
    lows: tuple[Tensor, ...] = ()
    dtype: torch.dtype | None = None
    loose: bool = False
    like: torch.dtype | None = None
    atol: float | None = None
    eps: float | None = None


class Family(Protocol):
    """A module of tests/fuzz/families.

    A *problem* is a frozen dataclass registered with `@spec`, with a field `dtype`, a name of DTYPES, and `deterministic` where
    there is such a keyword (True: the runner compares the bits of two runs). Its fields are ints, floats, strings, None,
    booleans, tuples of these and other specs, so that a replay survives changes of the drawing code. All data come from its
    field `seed`.
    """

    NAME: str
    BACKENDS: tuple[str, ...]  # in the order of dispatch, those that can serve the family

    def variants(self, d: Draw, backend: str, count: int) -> list[Any]:
        """`count` drawn variants, frozen dataclasses: each is all that a compiled GPU kernel depends on."""

    def draw(self, d: Draw, variant: Any, backend: str) -> Any:
        """A problem; of the variant, or of any where that is None."""

    def features(self, problem: Any) -> frozenset[str]:
        """What the coverage table counts."""

    def inputs(self, problem: Any, device: torch.device) -> dict[str, Any]:
        """Tensors, as the problem's views lay them, and keyword arguments.

        The runner reads two of the names, where they are there: "buffers", tensors whose bits no call may change (whole
        buffers, with what lies around a view), and "observed", a set of further features that only the data show.
        """

    def run(self, problem: Any, inputs: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
        """The package's results by name."""

    def expect(self, problem: Any, inputs: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
        """The oracle's results by the same names.

        Args:
            oracle: its functions, so that a mutant can replace one.
            again: by the first models a result is wrong: have OPINIONS of them.
        """

    def refusal(self, problem: Any, inputs: dict[str, Any], backend: str) -> str | None:
        """The documented words with which the backend refuses the problem, or None."""

    def oracle(self) -> SimpleNamespace:
        """The oracle's functions that `expect` takes."""

    def shrink(self, problem: Any) -> Iterator[Any]:
        """Simpler problems, the simplest first."""


_SPECS: dict[str, type] = {}
T = TypeVar("T", bound=type)


def spec(cls: T) -> T:
    """Register a frozen dataclass for `from_json`."""
    _SPECS[cls.__name__] = cls
    return cls


def to_json(value: Any) -> Any:
    """Plain JSON of a spec; fields at their defaults are left out."""
    if is_dataclass(value):
        named = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
        return {"spec": type(value).__name__, **{name: to_json(v) for name, v in named.items()}}
    if isinstance(value, (tuple, list)):
        return [to_json(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a problem holds {type(value).__name__}, which is no JSON")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, dict):
        named = {name: from_json(v) for name, v in value.items() if name != "spec"}
        return _SPECS[value["spec"]](**named)
    if isinstance(value, list):
        return tuple(from_json(v) for v in value)
    return value
