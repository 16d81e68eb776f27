"""What a run of the demo found."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .encoder import LICENCE, NAME, PACKAGE


@dataclass(frozen=True)
class Comparison:
    """Two ways to the same embeddings: the largest difference of an element, against its bound."""

    name: str
    max_abs_delta: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.max_abs_delta <= self.bound  # False for NaN too


@dataclass(frozen=True)
class Timing:
    """One way to embed all sentences.

    Attributes:
        seconds: of every timed pass.
        real_tokens: tokens of the sentences.
        computed_tokens: positions the model ran on, padding included.
        peak_bytes: highest memory above the idle process; None where that cannot be measured.
    """

    key: str
    name: str
    seconds: list[float]
    real_tokens: int
    computed_tokens: int
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / median(self.seconds)

    @property
    def padding(self) -> float:
        return 1 - self.real_tokens / self.computed_tokens


@dataclass(frozen=True)
class Neighbour:
    """A sentence, the nearest other one by cosine similarity, and whether eager and packed agree on which."""

    sentence: str
    nearest: str
    similarity: float
    agreed: bool


@dataclass(frozen=True)
class DemoReport:
    """Everything the demo prints. `passed` is what its exit status says.

    Attributes:
        foreign_cores: cores that other programs kept busy during the timed passes; None where not measurable.
    """

    sha256: str
    device: str
    dtype: str
    threads: int
    torch_version: str
    seed: int
    sentences: int
    longest: int
    comparisons: list[Comparison]
    timings: list[Timing]
    neighbours: list[Neighbour]
    neighbours_agreeing: int
    foreign_cores: float | None = None
    pictures: list[str] = field(default_factory=list)
    model: str = NAME
    licence: str = LICENCE
    package: str = PACKAGE

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every field, and what follows from them."""
        result = asdict(self)
        result["passed"] = self.passed
        for entry, comparison in zip(result["comparisons"], self.comparisons, strict=True):
            entry["passed"] = comparison.passed
        for entry, timing in zip(result["timings"], self.timings, strict=True):
            entry.update(tokens_per_second=timing.tokens_per_second, padding=timing.padding)
        return result

    def text(self) -> str:
        """The report as the terminal shows it."""
        real = self.timings[0].real_tokens
        lines = [
            f"model       {self.model}, {self.licence}",
            f"            from {self.package}, SHA-256 {self.sha256[:16]}… as expected",
            f"machine     {self.device}, {self.dtype}, torch {self.torch_version}"
            + (f", {self.threads} thread{'s' * (self.threads != 1)}" if self.device == "cpu" else ""),
            f"text        {self.sentences:,} sentences of Python's language reference (seed {self.seed}), "
            f"{real:,} tokens, longest {self.longest}",
            "",
            "same embeddings (largest difference of an element, all of length 1)",
            *(self._comparison(c) for c in self.comparisons),
            f"            same nearest neighbour: {self.neighbours_agreeing:,} of {self.sentences:,}",
            "",
            "speed       real tokens/s      passes (s)           padding   peak memory",
            *(self._timing(t) for t in self.timings),
            *self._disturbance(),
            "",
            "nearest neighbours, found with the packed embeddings",
            *(f"  {n.similarity:.2f}  {_shorten(n.sentence)}\n        {_shorten(n.nearest)}" for n in self.neighbours),
        ]
        if self.pictures:
            lines += ["", "pictures    " + ", ".join(self.pictures)]
        return "\n".join(lines)

    def _disturbance(self) -> list[str]:
        cores = os.cpu_count() or 1
        if self.device != "cpu" or self.foreign_cores is None or self.threads + self.foreign_cores < cores + 0.2:
            return []
        return [
            f"            other programs kept {self.foreign_cores:.1f} of {cores} cores busy meanwhile: "
            "these speeds are too low, and unevenly so"
        ]

    def _comparison(self, c: Comparison) -> str:
        verdict = "ok" if c.passed else "FAILED"
        return f"  {verdict:6s}    {c.name}: max |Δ| {c.max_abs_delta:.1e}, bound {c.bound:.1e}"

    def _timing(self, t: Timing) -> str:
        passes = " ".join(f"{s:.2f}" for s in t.seconds)
        memory = "not measurable here" if t.peak_bytes is None else f"{t.peak_bytes / 2**20:,.0f} MiB"
        return f"  {t.name:32s}{t.tokens_per_second:9,.0f}   {passes:20s} {t.padding:6.0%}   {memory}"


def _shorten(text: str, width: int = 100) -> str:
    return text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0] + "…"
