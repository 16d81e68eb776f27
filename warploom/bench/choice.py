"""Which cases and contenders of a run somebody asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from warploom.runtime.suggest import meant

SUITES = ("forward", "backward", "masks", "decode", "serving", "linear", "fp8", "bias", "training", "distributed")
MOST = 25  # rounds of one comparison


@dataclass(frozen=True)
class Choice:
    """None: all of them. Names of masks and passes as the suite has them, "-" and "_" for " " too; of shapes any part."""

    masks: Sequence[str] | None = None
    shapes: Sequence[str] | None = None
    passes: Sequence[str] | None = None
    peers: Sequence[str] | None = None

    def peer(self, name: str) -> bool:
        return self.peers is None or name in self.peers


def chosen(argument: str, wanted: Sequence[str] | None, names: Iterable[str], part: bool = False) -> list[str]:
    """Those of the names that are wanted, in their own order; with ``part``, that contain a wanted text.

    Raises:
        ValueError: a wanted one is no name, or part of none; the message says which there are.
    """
    names = list(names)
    if wanted is None:
        return names
    found = set()
    for each in wanted:
        plain = each.replace("-", " ").replace("_", " ").casefold()
        fits = [name for name in names if (plain in name.casefold() if part else plain == name.casefold())]
        if not fits:
            raise ValueError(f"{argument} {each}: there is none; there are {', '.join(names)}{meant(plain, names)}")
        found.update(fits)
    return [name for name in names if name in found]
