"""How a result is judged: its distance to the fp64 oracle, against that of a low-precision model of a correct kernel.

    max |out - ref|      <= 2   * max |low - ref|      + atol * max(1, max |ref|) + u * max |ref|
    |out - ref| / |ref|  <= 1.5 * |low - ref| / |ref|  + eps

with u half an ulp of 1 in the result's dtype: docs/explain.md has the reasons. Of several models the largest |low - ref|
counts, and the largest norm of one. An lse counts as at least 1, in norm too: its error is a relative one of weights, however
close to 0 it is. NaN and infinities of the oracle must be there.
Written apart from the package's own judge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.fuzz.problem import Expected

# dtype: atol, eps
SLACK = {
    torch.float64: (1e-13, 1e-13),
    torch.float32: (1e-6, 1e-6),
    torch.float16: (2e-5, 1e-4),
    torch.bfloat16: (2e-4, 2e-4),
}
# Numbers from which on the norms of two independent roundings are alike, and rows of them.
FEWEST = 64
FEWEST_ROWS = 16


@dataclass(frozen=True)
class Verdict:
    """One result; it is wrong where `why` is not empty, or a ratio is above 1 or NaN."""

    name: str
    max_error: float = 0.0
    max_ratio: float = 0.0
    norm_ratio: float = 0.0
    why: str = ""

    @property
    def right(self) -> bool:
        return not self.why and self.max_ratio <= 1.0 and self.norm_ratio <= 1.0

    @property
    def ratio(self) -> float:
        return max(self.max_ratio, self.norm_ratio)

    def __str__(self) -> str:
        if self.why:
            return f"{self.name}: {self.why}"
        return f"{self.name}: max error {self.max_error:.3g}, {self.max_ratio:.3g} bounds; norm {self.norm_ratio:.3g} bounds"


def judge(results: dict[str, Tensor | None], expected: dict[str, Expected], dtype: torch.dtype) -> list[Verdict]:
    """A verdict on each expected result; one wait for the device in all.

    Args:
        dtype: of the call's inputs.
    """
    verdicts, pending, numbers = [], [], []
    for name, want in expected.items():
        got = results.get(name)
        why = _misshapen(got, want)
        if why:
            verdicts.append(Verdict(name, why=why))
        elif want.ref.numel():
            assert got is not None
            pending.append((name, want))
            numbers.append(_measure(got.detach(), want))
        else:
            verdicts.append(Verdict(name))
    if pending:
        measured = torch.stack(numbers).tolist()
        verdicts += [_conclude(name, want, dtype, row) for (name, want), row in zip(pending, measured, strict=True)]
    for name in results:
        if name not in expected and results[name] is not None:
            verdicts.append(Verdict(name, why="is a result that nothing was expected of"))
    return verdicts


def _misshapen(got: Tensor | None, want: Expected) -> str:
    if got is None:
        return "is missing"
    if got.shape != want.ref.shape:
        return f"has shape {tuple(got.shape)} for {tuple(want.ref.shape)}"
    if want.like is not None and got.dtype != want.like:
        return f"has dtype {got.dtype} for {want.like}"
    return ""


def _measure(got: Tensor, want: Expected) -> Tensor:
    """Numbers wrong where the oracle has none, then those of the criterion."""
    got, ref = got.double(), want.ref.double()
    finite = torch.isfinite(ref)
    same = (got == ref) | (got.isnan() & ref.isnan())
    wrong = (~same & ~finite).sum()
    spread = ~torch.isfinite(got) & finite
    if want.like is not None and want.like.is_floating_point:
        # Beyond what the result's dtype holds, the infinity of the same sign is right too.
        large = ref.abs() > torch.finfo(want.like).max * (1 - 2.0**-8)
        beyond = large & (got == torch.copysign(torch.full_like(ref, float("inf")), ref))
    else:
        beyond = torch.zeros_like(spread)
    lost = torch.zeros_like(wrong) if want.loose else (spread & ~beyond).sum()
    counted = finite & ~spread
    error = torch.where(counted, got - ref, 0.0)
    exact = torch.where(counted, ref, 0.0)
    rows = (exact != 0).any(-1).sum() if exact.ndim else (exact != 0).sum()
    measured = [wrong, lost, rows, counted.sum(), *_sizes(error), *_sizes(exact)]
    numbers = [torch.stack(_sizes(error * 0.0))]
    for low in want.lows:
        # A model may overflow where a kernel need not; it then grants nothing there.
        near = low.double()
        numbers.append(torch.stack(_sizes(torch.where(counted & torch.isfinite(near), near - ref, 0.0))))
    return torch.cat([torch.stack([n.double() for n in measured]), torch.stack(numbers).amax(0)])


def _sizes(t: Tensor) -> list[Tensor]:
    """The largest magnitude, and the norm."""
    return [t.abs().max(), torch.linalg.vector_norm(t)]


def _conclude(name: str, want: Expected, dtype: torch.dtype, row: list[float]) -> Verdict:
    wrong, lost, rows, count, max_error, norm_error, largest, size, max_model, norm_model = row
    if wrong:
        return Verdict(name, why=f"{int(wrong)} elements are not the NaN or infinity that they should be")
    if lost:
        return Verdict(name, why=f"{int(lost)} elements are NaN or infinite that should be numbers")
    atol, eps = SLACK[dtype]
    atol = atol if want.atol is None else max(atol, want.atol)
    eps = eps if want.eps is None else max(eps, want.eps)
    rounded = dtype if want.dtype is None else want.dtype
    unit = torch.finfo(rounded).eps / 2
    max_ratio = max_error / (2.0 * max_model + atol * max(1.0, largest) + unit * largest)
    if name == "lse":
        size = max(size, count**0.5)
    averages = count >= FEWEST and size > atol * count**0.5
    if want.ref.ndim > 1 and name != "lse":
        averages = averages and rows >= FEWEST_ROWS
    norm_ratio = norm_error / (1.5 * norm_model + eps * size) if averages else 0.0
    return Verdict(name, max_error, max_ratio, norm_ratio)
