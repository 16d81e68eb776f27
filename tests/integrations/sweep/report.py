"""The counts of a sweep, as docs/transformers.md shows them."""

from __future__ import annotations

from collections import Counter
from typing import Any

LABELS = (
    "equal, through Warploom",
    "equal, by an attention of its own",
    "refused",
    "WRONG",
    "crashed",
    "cannot be built",
    "classes",
)


def counted(classes: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Classes by outcome, in the order of LABELS; "classes" counts them all."""
    counts = Counter(label(record) for record in classes.values())
    return {name: len(classes) if name == "classes" else counts[name] for name in LABELS}


def label(record: dict[str, Any]) -> str:
    outcome: str = record["outcome"]
    if outcome != "equal":
        return outcome
    return LABELS[0] if record["calls"] else LABELS[1]


def table(classes: dict[str, dict[str, Any]]) -> str:
    rows = [f"| {name} | {count:,} |" for name, count in counted(classes).items()]
    return "\n".join(["| outcome | model classes |", "| --- | --- |", *rows])
