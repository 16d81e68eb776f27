"""Which features the problems had, alone and in pairs, against minima."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

# Of a family's problems, each feature; and problems of each pair of its features that can occur together.
SHARE = 0.05
PAIR = 20

# Features that say what kind of another feature there was: counted and shown, but of too many kinds to each be common.
DETAILS = ("mask_",)
MAIN_MASKS = ("mask_per_batch", "mask_per_head", "mask_intersection")


def is_detail(feature: str) -> bool:
    return feature.startswith(DETAILS) and feature not in MAIN_MASKS


# Pairs that no problem can have, with the reason.
EXCLUSIVE = [
    ({"float16", "bfloat16", "float32", "float64"}, "a call has one dtype"),
    ({"heads_mha", "heads_gqa", "heads_mqa"}, "a call has one grouping"),
    ({"packed", "paged"}, "a call has one layout"),
]


@dataclass
class Coverage:
    """Counts by family."""

    problems: Counter[str] = field(default_factory=Counter)
    features: dict[str, Counter[str]] = field(default_factory=dict)
    pairs: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)

    def add(self, family: str, features: list[str]) -> None:
        self.problems[family] += 1
        self.features.setdefault(family, Counter()).update(features)
        main = sorted(f for f in features if not is_detail(f))
        self.pairs.setdefault(family, Counter()).update(combinations(main, 2))

    def to_json(self) -> dict[str, Any]:
        return {
            family: {
                "problems": self.problems[family],
                "features": dict(self.features[family].most_common()),
                "pairs": {f"{a} + {b}": n for (a, b), n in sorted(self.pairs[family].items())},
            }
            for family in sorted(self.features)
        }
