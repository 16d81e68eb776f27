"""A seeded source of choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tests.fuzz.views import ALIASED, EVEN, KINDS, View

T = TypeVar("T")


class Draw:
    """Choices that depend on the words it is made of and on nothing else: Draw(seed, number)."""

    def __init__(self, *words: object) -> None:
        self.random = random.Random("/".join(map(str, words)))

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return self.random.randint(low, high)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, choices: Sequence[T], weights: Sequence[float] | None = None) -> T:
        return self.random.choices(choices, weights)[0] if weights is not None else self.random.choice(choices)

    def real(self, low: float, high: float) -> float:
        return round(self.random.uniform(low, high), 4)

    def seed(self) -> int:
        """For data: fits 31 bits."""
        return self.random.randrange(2**31)

    def seed64(self) -> int:
        """For Philox: any int64."""
        return self.random.randrange(-(2**63), 2**63)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self.random.sample(list(items), len(items))

    def length(self, most: int) -> int:
        """Mostly short, often around tile sizes, 0 at times; at most `most`."""
        kind = self.random.random()
        if kind < 0.05:
            n = 0
        elif kind < 0.10:
            n = 1
        elif kind < 0.30:
            n = self.integer(2, 24)
        elif kind < 0.55:
            n = self.pick((16, 32, 48, 64, 96, 128, 192, 256)) + self.integer(-3, 3)
        elif kind < 0.85:
            n = self.integer(24, 130)
        elif kind < 0.97:
            n = self.integer(100, 300)
        else:
            n = self.integer(300, 1500)
        # Folded rather than cut, so that no length is drawn more often than its neighbours.
        return n if n <= most else self.integer(0, most)

    def lengths(self, most: int) -> tuple[int, int]:
        """A call's numbers of queries and keys: equal, a few queries, or any two."""
        keys = self.length(most)
        kind = self.random.random()
        if kind < 0.3:
            return keys, keys
        if kind < 0.45:
            return min(self.integer(1, 8), most), keys
        return self.length(most), keys

    def split(self, total: int, fill: bool | None = None) -> tuple[int, ...]:
        """Lengths with a sum of at most `total` (`fill`: exactly), zeros among them."""
        fill = self.chance(0.5) if fill is None else fill
        left, parts = total if fill else self.integer(0, total), []
        while left:
            n = self.pick((0, 1, self.integer(1, left), self.integer(1, left), self.integer(1, max(1, left // 3))))
            parts.append(n)
            left -= n
        return tuple(parts)

    def heads(self, most: int = 8) -> tuple[int, int]:
        """(heads_q, heads_kv)."""
        kv = self.pick((1, 2, 3, 4), (4, 4, 1, 1))
        group = self.pick((1, 2, 3, 4, 5, 7, 8), (5, 3, 2, 1, 1, 1, 1))
        while kv * group > most:
            kv, group = (kv, group - 1) if group > kv else (kv - 1, group)
        return kv * group, kv

    def view(
        self,
        shape: tuple[int, ...],
        *,
        plain: float = 0.4,
        aliased: bool = True,
        unit: int = 1,
        aligned: bool | None = None,
        kinds: Sequence[str] | None = None,
    ) -> View:
        """How a tensor of this logical shape (…, rows, heads, dim) lies in memory.

        Args:
            plain: probability of a contiguous one.
            aliased: elements may share memory.
            unit: strides, and the offset where `aligned`, are multiples of so many elements (dim has to be too).
            aligned: True: the base is aligned to 16 bytes; False: it is not, of 16-bit elements; None: either.
            kinds: only these.
        """
        if kinds is None:
            kinds = [k for k in KINDS if (aliased or k not in ALIASED) and (unit == 1 or k in EVEN)]
            if self.chance(plain):
                kinds = ("contiguous",)
        kind = self.pick(kinds)
        heads, dim = shape[-2], shape[-1]
        amount = self._amount(kind, heads, dim, unit)
        if aligned is None:
            aligned = not self.chance(0.2)
        offset = 8 * self.integer(0, 2) if aligned else self.integer(1, 7)
        return View(kind, amount, offset)

    def _amount(self, kind: str, heads: int, dim: int, unit: int) -> int:
        if kind == "packed_qkv":
            return self.integer(0, 2)
        if kind == "packed_kv":
            return self.integer(0, 1)
        if kind in ("sliced_rows", "sliced_heads"):
            return self.integer(2, 3)
        if kind in ("padded_rows", "padded_heads", "padded_batch"):
            return 8 * self.integer(1, 3) if unit == 8 or self.chance(0.4) else self.pick((1, 2, 3, 4, 5, 7, 9, 12, 20))
        if kind in ("overlapping_rows", "overlapping_heads"):
            full = heads * dim if kind == "overlapping_rows" else dim
            if unit > 1:
                return unit * self.integer(1, max(1, full // unit - 1))
            return self.integer(1, max(1, full - 1))
        return 0

    def places(self, shapes: dict[str, tuple[int, ...]], off: Sequence[bool], unit: bool) -> dict[str, View]:
        """A view of each shape by its name: with strides in units of 8, or aligned where it is not ``off``."""
        found = {}
        for (name, shape), shifted in zip(shapes.items(), off, strict=True):
            view = self.view(shape, unit=8, aligned=True) if unit else self.view(shape, aligned=not shifted)
            if not unit and shifted and view.offset == 4:
                view = replace(view, offset=5)  # four elements of fp32 are 16 bytes
            found[name] = view
        return found

    def hostile(self) -> str:
        """What all that is hidden holds: 'nan', 'inf', '-inf', 'mixed' or '' (ordinary numbers)."""
        return self.pick(("nan", "inf", "-inf", "mixed", ""), (5, 2, 1, 2, 2))

    def any_of(self, options: dict[Any, float]) -> Any:
        """A key, by the weights that are its values."""
        return self.pick(list(options), list(options.values()))
