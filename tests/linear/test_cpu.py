"""The CPU implementation and its backward by hand against the reference in fp64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.linear.cases import CASES, case
from tests.linear.harness import Case, any_case, check, run
from warploom import linear_attention
from warploom.linear import cpu


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("poisoned_memory")
def test_case(name: str) -> None:
    check(case(name, random.randrange(2**31)), "cpu")


@pytest.mark.usefixtures("poisoned_memory")
def test_any_call_in_fp64() -> None:
    """Three dozen calls with anything in them, all gradients, to nine digits."""
    first = random.randrange(2**31)
    for seed in range(first, first + 36):
        check(any_case(seed), "cpu")


@pytest.mark.parametrize("size", [1, 2**11, 2**14])
def test_blocks_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "BLOCK", size)
    seed = random.randrange(2**31)
    check(Case(seed, seqlen_q=200, heads_q=4, heads_kv=2, dtype=torch.float64, state=True), "cpu")
    check(Case(seed, seqlen_q=200, seqlen_k=131, dtype=torch.float64, lengths=[131, 90]), "cpu")
    check(Case(seed, seqlen_q=99, seqlen_k=231, dtype=torch.float64, state=True), "cpu")
    check(Case(seed, seqlen_q=200, dtype=torch.float64, keywords={"causal": False}), "cpu")


def test_small_integers_are_exact_past_where_bf16_sums_stall() -> None:
    ones = torch.ones(1, 600, 1, 16, dtype=torch.bfloat16)
    out, state = linear_attention(ones, ones, ones, feature_map="identity", normalize=False, return_state=True)
    assert (state.z == 600).all() and (state.s == 600).all()
    assert torch.equal(out[0, :, 0, 0], (16 * torch.arange(1, 601)).to(torch.bfloat16))
    out = linear_attention(ones, ones, ones, feature_map="identity", eps=1e-6)
    assert torch.equal(out, ones)


def test_values_of_one_give_ones() -> None:
    """With V = 1 the numerator is the denominator less eps."""
    c = Case(random.randrange(2**31), seqlen_q=300)
    q, k, v = (c.draw()[name].detach() for name in "qkv")
    out = linear_attention(q, k, torch.ones_like(v))
    torch.testing.assert_close(out, torch.ones_like(v), rtol=1e-5, atol=1e-5)


def test_equal_bits_run_to_run() -> None:
    c = Case(random.randrange(2**31), seqlen_q=200, state=True)
    first, second = run(c, "cpu"), run(c, "cpu")
    assert torch.equal(first.out, second.out)
    assert all(torch.equal(first.gradients[n], second.gradients[n]) for n in first.gradients), c


def test_a_rows_bits_do_not_depend_on_the_sequences_beside_it() -> None:
    c = Case(random.randrange(2**31), batch=1, seqlen_q=120, starts=[0, 50, 120], dtype=torch.float64)
    together = run(c, "cpu").out
    alone = run(replace(c, starts=[0, 50]), "cpu").out
    assert torch.equal(together[:, :50], alone[:, :50]), c
