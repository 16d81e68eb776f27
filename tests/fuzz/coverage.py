"""Which features the problems had, alone and in pairs, against minima."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

# Each feature is to be in this share of its family's problems, and each pair of a family's features, where a problem can have
# both, in so many.
SHARE = 0.05
PAIR = 20

DTYPES = {"float16", "bfloat16", "float32", "float64"}

# One of many kinds of what another feature names: counted and shown, but too many to each be common. float64 is the
# reference's alone.
DETAILS = ("mask_", "float64")
COMMON = ("mask_per_batch", "mask_per_head", "mask_intersection")


def is_detail(feature: str) -> bool:
    return feature.startswith(DETAILS) and feature not in COMMON


@dataclass
class Coverage:
    """Counts by family."""

    device: str = "cpu"
    problems: Counter[str] = field(default_factory=Counter)
    features: dict[str, Counter[str]] = field(default_factory=dict)
    pairs: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)

    def add(self, family: str, features: list[str]) -> None:
        self.problems[family] += 1
        self.features.setdefault(family, Counter()).update(features)
        main = sorted({f for f in features if not is_detail(f)})
        self.pairs.setdefault(family, Counter()).update(combinations(main, 2))

    def rare(self) -> dict[str, list[str]]:
        """Features of each family that are in less than SHARE of its problems."""
        found = {}
        for family, counts in sorted(self.features.items()):
            least = SHARE * self.problems[family]
            found[family] = sorted(f"{name}: {n}" for name, n in counts.items() if n < least and not is_detail(name))
        return found

    def impossible(self, family: str) -> list[tuple[set[str], str]]:
        """Sets of features of which no problem has two, with the reason."""
        from tests.fuzz import families

        module = families.load(family)
        there = list(getattr(module, "EXCLUSIVE", []))
        return there + list(getattr(module, "EXCLUSIVE_ON_GPU", [])) if self.device == "cuda" else there

    def scarce(self) -> dict[str, list[str]]:
        """Possible pairs of each family that fewer than PAIR problems had."""
        found = {}
        for family, counts in sorted(self.features.items()):
            groups = [*self.impossible(family), (DTYPES, "")]
            excluded = {frozenset(pair) for group, _ in groups for pair in combinations(sorted(group), 2)}
            names = sorted(name for name in counts if not is_detail(name))
            pairs = self.pairs[family]
            found[family] = [
                f"{a} + {b}: {pairs[a, b]}"
                for a, b in combinations(names, 2)
                if frozenset((a, b)) not in excluded and pairs[a, b] < PAIR
            ]
        return found

    def to_json(self) -> dict[str, Any]:
        rare, scarce = self.rare(), self.scarce()
        return {
            family: {
                "problems": self.problems[family],
                "features": {name: round(n / self.problems[family], 4) for name, n in self.features[family].most_common()},
                "features_below_their_minimum": rare[family],
                "pairs": {f"{a} + {b}": n for (a, b), n in sorted(self.pairs[family].items())},
                "pairs_below_their_minimum": scarce[family],
                "impossible": [[sorted(group), reason] for group, reason in self.impossible(family)],
            }
            for family in sorted(self.features)
        }

    def table(self) -> str:
        """Features of each family with their shares, and how many pairs there were."""
        lines = []
        for family, count in sorted(self.problems.items()):
            pairs, scarce = self.pairs[family], self.scarce()[family]
            enough = sum(n >= PAIR for n in pairs.values())
            lines.append(f"{family}: {count} problems; {enough} pairs of features in {PAIR} or more, {len(scarce)} in fewer")
            for name, n in self.features[family].most_common():
                mark = "" if n >= SHARE * count or is_detail(name) else "   below its minimum"
                lines.append(f"    {n / count:6.1%}  {name}{mark}")
            lines += [f"    scarce: {pair}" for pair in scarce[:40]]
        return "\n".join(lines)
