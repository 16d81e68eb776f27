"""One token at a time equals one pass, from any state, and nothing given is changed."""

from __future__ import annotations

import random

import pytest
import torch

from tests.linear.harness import Case
from warploom import LinearState, linear_attention, linear_attention_step
from warploom.linear.feature_maps import RandomFeatures


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    """Whether the largest difference is small beside the largest value: sums that cancel keep the rounding of their terms."""
    return bool((got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max().clamp_min(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "keywords",
    [{}, {"normalize": False, "scale": 0.3}, {"feature_map": RandomFeatures(16, 24)}],
    ids=["default", "plain", "favor"],
)
def test_prefill_then_steps_equal_one_pass(dtype: torch.dtype, keywords: dict) -> None:
    c = Case(random.randrange(2**31), seqlen_q=40, heads_q=4, heads_kv=2, dim_v=24, dtype=dtype)
    q, k, v = (c.draw()[name].detach() for name in "qkv")
    want, last = linear_attention(q, k, v, return_state=True, **keywords)
    out, state = linear_attention(q[:, :25], k[:, :25], v[:, :25], return_state=True, **keywords)
    rows = [out]
    for i in range(25, 40):
        row, state = linear_attention_step(q[:, i], k[:, i], v[:, i], state, **keywords)
        rows.append(row.unsqueeze(1))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2**-7}[dtype]
    got = torch.cat(rows, 1)
    assert got.dtype == dtype and state.s.dtype == torch.promote_types(dtype, torch.float32)
    assert near(got, want, tolerance), c
    for a, b in zip(state, last, strict=True):
        assert near(a, b, 1e-5), c


def test_chained_states_equal_one_pass() -> None:
    c = Case(random.randrange(2**31), seqlen_q=150, dtype=torch.float64)
    q, k, v = (c.draw()[name].detach() for name in "qkv")
    want = linear_attention(q, k, v)
    first, middle = linear_attention(q[:, :70], k[:, :70], v[:, :70], return_state=True)
    second = linear_attention(q[:, 70:], k[:, 70:], v[:, 70:], state=middle)
    assert near(torch.cat([first, second], 1), want, 1e-10), c


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_state_given_stays(backend: str) -> None:
    c = Case(random.randrange(2**31), seqlen_q=1, heads_q=4, heads_kv=2, state=True)
    arguments = c.draw()
    held = LinearState(*(t.detach() for t in arguments["state"]))
    before = [t.clone() for t in held]
    q, k, v = (arguments[n].detach() for n in "qkv")
    out, new = linear_attention_step(q, k, v, held, backend=backend)
    whole, last = linear_attention(q, k, v, state=held, return_state=True, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert out.shape == q.shape and near(out, whole, 1e-4), c
    assert near(new.s, last.s, 1e-5) and near(new.z, last.z, 1e-5), c
    assert torch.equal(linear_attention_step(q[:, 0], k[:, 0], v[:, 0], held, backend=backend)[0], out[:, 0])


def test_gradients_flow_through_steps() -> None:
    c = Case(random.randrange(2**31), seqlen_q=6, dtype=torch.float64)
    arguments = c.draw()
    q, k, v = (arguments[n] for n in "qkv")
    want = torch.autograd.grad(linear_attention(q, k, v).sin().sum(), (q, k, v))
    state, rows = LinearState.zeros(2, 2, 16, 16, dtype=torch.float64), []
    for i in range(6):
        row, state = linear_attention_step(q[:, i], k[:, i], v[:, i], state)
        rows.append(row)
    for got, each in zip(torch.autograd.grad(torch.stack(rows, 1).sin().sum(), (q, k, v)), want, strict=True):
        assert torch.allclose(got, each, rtol=1e-9, atol=1e-9), c


def test_no_sequences() -> None:
    q = torch.zeros(0, 2, 16)
    out, state = linear_attention_step(q, q, q, LinearState.zeros(0, 2, 16, 16))
    assert out.shape == (0, 2, 16) and state.s.shape == (0, 2, 16, 16)


def test_a_forward_mode_derivative_of_a_step_was_silently_zero() -> None:
    q, k = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    state = LinearState.zeros(1, 2, 8, 8)
    with pytest.raises(NotImplementedError, match=r"forward-mode AD through warploom\.linear_attention"):
        torch.func.jvp(lambda q: linear_attention_step(q, k, k, state)[0], (q,), (q,))

    def step(q: torch.Tensor) -> torch.Tensor:
        return linear_attention_step(q, k, k, state, backend="reference", normalize=False, feature_map="identity")[0]

    out, tangent = torch.func.jvp(step, (q,), (q,))
    torch.testing.assert_close(tangent, out)  # linear in q
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        linear_attention_step(torch.autograd.forward_ad.make_dual(q, q), k, k, state)
