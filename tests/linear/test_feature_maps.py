"""Feature maps by name, callable or pair, their errors, and random features."""

from __future__ import annotations

import pytest
import torch

from warploom import attention, linear_attention, linear_attention_step
from warploom.linear.feature_maps import NAMED, RandomFeatures, map_in_place, resolve, through_map_in_place
from warploom.linear.state import LinearState

SPECIAL = [0.0, 1e-40, 1e-30, 1e-3, 0.5, 1.0, 12.0, 20.0, 50.0, 88.8, 104.0, 1e10, 1e38, float("inf")]


def test_names_callables_and_pairs() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    torch.testing.assert_close(NAMED["elu+1"](x), torch.tensor([float(torch.tensor(-1.0).exp()), 1.0, 3.0]))
    assert torch.equal(NAMED["relu"](x), x.clamp(min=0))
    assert NAMED["identity"](x) is x
    assert resolve("elu+1") == ("elu+1", "elu+1")
    assert resolve(torch.exp) == (torch.exp, torch.exp)
    assert resolve((torch.exp, "relu")) == (torch.exp, "relu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMED)
def test_maps_in_place_and_their_slopes_are_those_of_autograd(name: str, dtype: torch.dtype) -> None:
    """At NaN, infinities and zeros of both signs too; tests/kernels asks the same of Triton's."""
    x = torch.tensor([*SPECIAL, *(-x for x in SPECIAL), float("nan")], dtype=dtype)
    leaf = x.clone().requires_grad_()
    want = NAMED[name](leaf)
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    mapped = map_in_place(name, x.clone(), torch.empty_like(x))
    found = through_map_in_place(name, torch.ones_like(x), mapped, torch.empty_like(x))
    # An exponent of up to 150 in log2 units is rounded to 24 bits before the power is taken.
    near = {"rtol": 2.0**-16, "atol": 2.0**-126, "equal_nan": True}
    torch.testing.assert_close(mapped, want.detach(), **near)
    torch.testing.assert_close(found, slope, **near)
    assert slope[-1].isnan() == (name == "elu+1")
    if name != "elu+1":
        assert torch.equal(mapped.signbit()[:-1], want.signbit()[:-1])


def test_elu_plus_one_had_lost_the_digits_of_small_numbers() -> None:
    """It was torch's elu, near -1, plus 1: at -15 in fp32, as a step computes it, nothing was right, and in fp64 at -37."""
    x = torch.tensor([-5.0, -12.0, -15.0, -20.0, -37.0, -60.0])
    for dtype, near in ((torch.float32, 2.0**-20), (torch.float64, 2.0**-48)):
        torch.testing.assert_close(NAMED["elu+1"](x.to(dtype)), x.to(dtype).exp(), rtol=near, atol=0.0)
    q, k, v = torch.full((1, 1, 8), -15.0), torch.zeros(1, 1, 8), torch.ones(1, 1, 4)
    state = LinearState(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8))
    stepped, _ = linear_attention_step(q, k, v, state, normalize=False)
    whole = linear_attention(q[:, None], k[:, None], v[:, None], normalize=False)
    torch.testing.assert_close(stepped, whole[:, 0], rtol=2.0**-16, atol=0.0)


def test_errors_name_the_argument() -> None:
    for bad in ("elu", ("relu", "elu")):
        with pytest.raises(ValueError, match="feature_map is 'elu'"):
            resolve(bad)  # type: ignore[arg-type]
    for worse in (3, (torch.exp,), (torch.exp, 3)):
        with pytest.raises(TypeError, match="feature_map"):
            resolve(worse)  # type: ignore[arg-type]


def test_random_features_estimate_the_softmax_kernel() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (0.5 * torch.randn(50, 16, generator=generator) for _ in range(2))
    phi = RandomFeatures(16, 4096, seed=5)
    estimate, want = phi(q) @ phi(k).mT, (q @ k.mT / 4).exp()
    assert (estimate / want - 1).abs().median() < 0.05
    assert torch.equal(RandomFeatures(16, 4096, seed=5).weight, phi.weight)
    assert not torch.equal(RandomFeatures(16, 4096, seed=6).weight, phi.weight)


def test_random_features_are_orthogonal_within_a_block() -> None:
    weight = RandomFeatures(8, 20).weight
    for block in (weight[:8], weight[8:16], weight[16:]):
        gram = block.double() @ block.double().mT
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5


def test_attention_with_random_features_is_near_softmax_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (0.5 * torch.randn(1, 60, 2, 16, generator=generator) for _ in range(3))
    want = attention(q, k, v, causal=True)
    near, far = (
        (linear_attention(q, k, v, feature_map=RandomFeatures(16, n, seed=2)) - want).norm() / want.norm() for n in (2048, 32)
    )
    assert near < 0.06 < far


def test_random_features_say_what_they_take() -> None:
    with pytest.raises(ValueError, match="take head_dim 16, got 8"):
        RandomFeatures(16)(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="at least 1"):
        RandomFeatures(0)
    assert RandomFeatures(64).weight.shape == (256, 64)
    half = RandomFeatures(16)(torch.zeros(2, 16, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16 and half.shape == (2, 45)
