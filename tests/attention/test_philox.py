"""Dropout's numbers: how often elements are dropped, what neighbours tell of each other, and the factor of what is kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from warploom.attention import philox

STEPS = 2**15


def every(count: int) -> tuple[torch.Tensor, ...]:
    """Numbers of 2 batch entries, 3 heads, ``count`` rows and 512 keys."""
    return tuple(torch.arange(n) for n in (2, 3, count, 512))


def drawn(seed: int, count: int = 512) -> torch.Tensor:
    return philox.numbers(torch.tensor([seed]), *every(count))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.003, 0.9, 1e-9, 1 - 1e-9])
def test_as_many_are_dropped_as_stated(dropout_p: float) -> None:
    """Within five standard deviations of a binomial distribution, also of each of sixteen keys."""
    keep = philox.keep_mask(torch.tensor([11]), dropout_p, *every(512))
    realised = 1.0 - 1.0 / philox.keep_scale(dropout_p)
    assert abs(realised - dropout_p) <= (0.5 if STEPS * min(dropout_p, 1 - dropout_p) > 1 else 1.0) / STEPS + 1e-12
    for kept in (keep, *(keep[..., n :: philox.KEYS] for n in range(philox.KEYS))):
        deviation = (realised * (1.0 - realised) / kept.numel()) ** 0.5
        assert abs(1.0 - float(kept.double().mean()) - realised) < 5 * deviation + 1e-12


def test_numbers_are_evenly_spread() -> None:
    """Every one of the sixteen keys: chi² of 128 upper and 256 lower parts within five standard deviations."""
    found = drawn(3)
    for n in range(philox.KEYS):
        own = found[..., n :: philox.KEYS].flatten()
        for part, count in ((own >> 8, 128), (own & 255, 256)):
            expected = own.numel() / count
            chi = ((torch.bincount(part, minlength=count) - expected) ** 2 / expected).sum()
            assert abs(float(chi) - (count - 1)) < 5 * (2 * (count - 1)) ** 0.5


def together(below: int) -> float:
    """By how much the two keys of a half word are below a bound together more often than apart, in all 2^16 halves: exactly."""
    half = torch.arange(2**16)
    first, second = half & (STEPS - 1), (half >> 8 | half << 8) & (STEPS - 1)
    both = float(((first < below) & (second < below)).double().mean())
    share = below / STEPS
    return (both - share * share) / (share * (1.0 - share))


def test_neighbours_correlate_by_less_than_a_hundredth() -> None:
    """Two keys eight apart share a half word: their correlation is at most 0.0081, of others it is 0.

    Of p up to 2^-8 they are dropped together with a probability of 2^-16, however small p is.
    """
    assert all(0.0 <= together(below) < 0.0081 for below in range(2**7, STEPS // 2 + 1, 61))
    for share in (below / STEPS for below in range(1, 2**7 + 1)):
        assert together(int(share * STEPS)) == pytest.approx((2**-16 - share**2) / (share * (1.0 - share)), abs=1e-12)
    for dropout_p in (0.1, 0.5):
        dropped = ~philox.keep_mask(torch.tensor([5]), dropout_p, *every(2048))
        share, wanted = 1.0 - 1.0 / philox.keep_scale(dropout_p), together(philox.bound(dropout_p))
        groups = (dropped.double() - share).unflatten(-1, (-1, philox.KEYS)).flatten(0, -2)
        found = groups.T @ groups / len(groups) / (share * (1.0 - share))
        for a, b in itertools.combinations(range(philox.KEYS), 2):
            assert abs(float(found[a, b]) - (wanted if b - a == 8 else 0.0)) < 5 / len(groups) ** 0.5, (a, b)


def test_rows_and_counters_are_independent() -> None:
    dropped = ~philox.keep_mask(torch.tensor([9]), 0.3, *every(1024))
    other = [dropped.roll(1, dim) for dim in range(4)] + [dropped.roll(16, 3)]
    share = 1.0 - 1.0 / philox.keep_scale(0.3)
    for shifted in other:
        both = float((dropped & shifted).double().mean())
        assert abs(both - share**2) < 5 * share / dropped.numel() ** 0.5


@pytest.mark.parametrize("dropout_p", [1e-9, 0.003, 0.1, 0.5, 0.50001, 0.9, 1 - 1e-9])
def test_kernels_are_told_the_same(dropout_p: float) -> None:
    """Two halves of an int32, whose sign says which side is kept; as fp16, which kernels compare, the order is the same."""
    told = philox.kernel_bound(dropout_p)
    assert -(2**31) <= told < 2**31 and (told < 0) == (dropout_p > 0.5)
    assert told & 0x7FFF == told >> 16 & 0x7FFF == philox.bound(dropout_p) and 1 <= philox.bound(dropout_p) <= 0x4000
    numbers = drawn(21, 64)
    as_fp16 = numbers.to(torch.int16).view(torch.float16)
    limit = torch.tensor(philox.bound(dropout_p)).to(torch.int16).view(torch.float16)
    assert torch.equal(~(as_fp16 < limit), numbers >= philox.bound(dropout_p))


def test_no_dropout_keeps_all() -> None:
    assert philox.keep_scale(0.0) == 1.0 and philox.keep_mask(torch.tensor([1]), 0.0, *every(16)).all()
