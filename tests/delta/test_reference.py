"""The specification is the papers' recurrence, and its gradients are what it changes by."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.delta.cases import CASES, Case
from tests.delta.harness import drawn, gradients
from warploom import gated_delta_rule
from warploom.delta import reference


def papers(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """S_t = S_{t-1} (α_t (I - β_t k_t k_tT)) + β_t v_t k_tT, o_t = S_t q_t of one head, states (M, E) as printed."""
    s, rows = q.new_zeros(v.shape[1], q.shape[1]), []
    for i in range(len(q)):
        s = s @ (decay[i].exp() * (torch.eye(q.shape[1], dtype=q.dtype) - beta[i] * torch.outer(k[i], k[i])))
        s = s + beta[i] * torch.outer(v[i], k[i])
        rows.append(s @ q[i])
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_formula_as_printed(backend: str) -> None:
    given = drawn(Case(random.randrange(2**31), tokens=80, heads=2, group=3, dtype=torch.float64))
    out = gated_delta_rule(**given, backend=backend)
    normal = [t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (given["q"], given["k"])]
    for head in range(6):
        q, k = (t[0, :, head // 3] for t in normal)
        want = papers(q * given["scale"], k, given["v"][0, :, head], given["beta"][0, :, head], given["decay"][0, :, head])
        torch.testing.assert_close(out[0, :, head], want)


@pytest.mark.parametrize("name", ["packed", "lengths", "forgets"])
def test_backward_is_what_forward_changes_by(name: str) -> None:
    """reference.backward, which asks autograd, by differences along one direction in each input."""
    case = Case(random.randrange(2**31), **{**CASES[name], "dtype": torch.float64, "hidden": 0.0, "tokens": 101})
    if case.lengths is not None:
        case = replace(case, lengths=(101, 17, 0))
    call, dout, dstate = case.call()
    names = ("q", "k", "v", "beta", "decay", "state")
    found = dict(zip(names, reference.BACKEND.backward(call, dout, dstate), strict=True))

    def along(name: str, direction: Tensor, step: float) -> float:
        out, state = reference.BACKEND.forward(replace(call, **{name: getattr(call, name) + step * direction}), True)
        assert state is not None
        return float((out * dout).sum() + (state * dstate).sum())

    for name in names:
        direction = torch.randn_like(found[name])
        rise = (along(name, direction, 1e-6) - along(name, direction, -1e-6)) / 2e-6
        assert rise == pytest.approx(float((found[name] * direction).sum()), rel=1e-5, abs=1e-5), (name, case)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck_of_everything(backend: str) -> None:
    given = drawn(Case(random.randrange(2**31), tokens=5, e=3, m=2, group=2, state=True, dtype=torch.float64))
    with torch.no_grad():
        given["decay"] -= 0.01  # a step to either side of it is a decay too
    names = ("q", "k", "v", "beta", "decay", "state")

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_rule(**{**given, **dict(zip(names, tensors, strict=True))}, return_state=True, backend=backend)

    assert torch.autograd.gradcheck(call, [given[name] for name in names])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_decay_of_minus_infinity_forgets_all(backend: str) -> None:
    """What comes after is as if nothing had come before, to the bit of the state it starts with; no gradient is NaN."""
    case = Case(random.randrange(2**31), tokens=90, state=True, dtype=torch.float64)
    given = drawn(case)
    with torch.no_grad():
        given["decay"][:, 30] = -torch.inf
    out, state = gated_delta_rule(**given, return_state=True, backend=backend)
    after = {n: t[:, 30:] if n in ("q", "k", "v", "beta", "decay") else t for n, t in given.items()}
    alone, last = gated_delta_rule(**{**after, "state": None}, return_state=True, backend=backend)
    torch.testing.assert_close(out[:, 30:], alone)
    torch.testing.assert_close(state, last)
    found = gradients(out, state, given)
    assert all(t.isfinite().all() for t in found), case
    assert not found[4][:, 30].any()
    torch.testing.assert_close(out[:, :30], gated_delta_rule(**given, backend="reference")[:, :30])


def test_a_beta_of_one_recalls_what_it_wrote() -> None:
    """With unit keys, out of q = k is v exactly, whatever the state held: the rule's purpose."""
    case = Case(random.randrange(2**31), tokens=150, heads=2, decay=None, scale=1.0, state=True)
    given = drawn(case)
    out = gated_delta_rule(**{**given, "q": given["k"], "beta": torch.ones_like(given["beta"])})
    torch.testing.assert_close(out, given["v"], rtol=1e-4, atol=1e-4)


def test_small_integers_are_exact() -> None:
    """Orthogonal keys that replace each other's values: every sum is an integer."""
    eye = torch.eye(16, dtype=torch.bfloat16).repeat(20, 1)[None, :, None]
    v = torch.randint(-8, 9, (1, 320, 1, 16)).to(torch.bfloat16)
    out = gated_delta_rule(eye, eye, v, torch.ones(1, 320, 1), scale=1.0)
    assert torch.equal(out, v)
    seen = gated_delta_rule(torch.ones_like(eye), eye, v, torch.ones(1, 320, 1), scale=1.0)
    assert torch.equal(seen[:, 16:], torch.stack([v[:, i - 15 : i + 1].sum(1) for i in range(16, 320)], 1))
