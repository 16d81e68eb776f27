"""Biases of decode on the reference and the CPU; tests/decode/cases.py has them beside all else that a call may have."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.decode import bias_checks
from tests.decode.fp8_case import Fp8Case, check_fp8
from tests.decode.harness import Case, check
from warploom import KVCache, attention, decode
from warploom.bias import ALiBi, Key, Relative

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


@BACKENDS
def test_nan_behind_hidden_keys_changes_nothing(backend: str) -> None:
    bias_checks.check_nan_behind_hidden(backend)


@BACKENDS
def test_a_visible_nan_of_a_bias_stays_in_its_row(backend: str) -> None:
    bias_checks.check_a_visible_nan(backend)


@BACKENDS
def test_the_lowest_number_hides_nothing(backend: str) -> None:
    bias_checks.check_the_lowest_number(backend)


@BACKENDS
def test_a_tree_has_the_biases_of_its_paths(backend: str) -> None:
    bias_checks.check_paths_under_biases(backend)


@BACKENDS
def test_bits_do_not_depend_on_neighbours_or_layout(backend: str) -> None:
    bias_checks.check_bits(backend, 600, {"queries": 2})


@pytest.mark.parametrize("bias", ["alibi", "relative", "key of heads, hides"])
def test_fp8_caches(bias: str) -> None:
    shape: dict[str, Any] = {"queries": 3, "head_dim": 24, "page_size": 16, "capacity": 64}
    check_fp8(Fp8Case(random.randrange(2**31), [60, 9], bias=bias, **shape), "cpu")


def test_float64_runs_on_the_reference() -> None:
    for bias in ("alibi", "relative", "key"):
        check(Case(random.randrange(2**31), [40, 3], queries=2, dtype=torch.float64, bias=bias), "reference")


@pytest.mark.parametrize("bias", [ALiBi.standard(4), Relative(torch.randn(4, 33)), Relative(torch.randn(1, 32), buckets="t5")])
def test_the_rows_of_a_prefill(bias: Any) -> None:
    """What attention() gives its last queries."""
    q, k, v = (torch.randn(1, 70, heads, 16) for heads in (4, 2, 2))
    want = attention(q, k, v, causal=True, bias=bias)[:, -3:]
    cache = KVCache(k, v, torch.tensor([70], dtype=torch.int32))
    torch.testing.assert_close(decode(q[:, -3:], cache, bias=bias), want, rtol=1e-5, atol=1e-5)


def test_compiled_with_a_bias() -> None:
    c = Case(random.randrange(2**31), [40, 7], queries=2)
    cache, slopes = c.cache(0.0), torch.rand(4)

    def step(q: torch.Tensor, cache: KVCache, slopes: torch.Tensor) -> torch.Tensor:
        return decode(q, cache, bias=ALiBi(slopes))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(c.q(), cache, slopes), step(c.q(), cache, slopes))


@pytest.mark.parametrize(
    "bias,error,words",
    [
        (torch.zeros(1, 4, 1, 40), TypeError, r"takes no tensor as bias, got .*: give ALiBi\(slopes\), Relative\(table"),
        ("alibi", TypeError, "bias must be ALiBi, Relative or Key of warploom.bias, got str"),
        (ALiBi(torch.zeros(3)), ValueError, "slopes of 3 heads.*q has 4 heads"),
        (ALiBi(torch.zeros(3, 4)), ValueError, "slopes of batch 3, but q has batch 2"),
        (Relative(torch.zeros(3, 5)), ValueError, "table of 3 heads.*q has 4 heads"),
        (Key(torch.zeros(2, 4, 39)), ValueError, r"shape \(2, 4, 39\).* = \(2 or 1, 4 or 1, 40\)"),
        (Key(torch.zeros(3, 4, 40)), ValueError, r"shape \(3, 4, 40\)"),
        (Key(torch.zeros(2, 2, 40)), ValueError, r"shape \(2, 2, 40\)"),
        (ALiBi(torch.zeros(4, device="meta")), ValueError, "bias is on meta but q is on cpu"),
        (ALiBi(torch.zeros(4, requires_grad=True)), ValueError, r"bias requires grad, and decode\(\) has no backward"),
    ],
)
def test_refused(bias: Any, error: type[Exception], words: str) -> None:
    c = Case(0, [40, 7])
    with pytest.raises(error, match=words):
        decode(c.q(), c.cache(), bias=bias)


def test_a_bias_that_requires_grad_without_grad() -> None:
    c = Case(0, [40, 7])
    with torch.no_grad():
        decode(c.q(), c.cache(), bias=ALiBi(torch.zeros(4, requires_grad=True)))
    bias = Key(torch.zeros(1, 1, 40))
    with torch.autograd.forward_ad.dual_level():
        bias.values = torch.autograd.forward_ad.make_dual(bias.values, bias.values)
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            decode(c.q(), c.cache(), bias=bias)
