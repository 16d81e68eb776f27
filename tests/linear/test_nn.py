"""The modules: projections, idiap's weights, steps."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from warploom.linear.feature_maps import RandomFeatures
from warploom.nn import CausalLinearAttention, LinearAttention


def seeded() -> int:
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    return seed


def idiap_weights(dim: int, keys: int, values: int, prefix: str) -> dict[str, torch.Tensor]:
    """As torch.save of a model with one of idiap's AttentionLayer would hold them, and things beside it."""
    shapes = {"query": (keys, dim), "key": (keys, dim), "value": (values, dim), "out": (dim, values)}
    found = {f"{prefix}{name}_projection.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    found |= {f"{prefix}{name}_projection.bias": torch.randn(shape[0]) for name, shape in shapes.items()}
    return {**found, f"{prefix}inner_attention.feature_map.omega": torch.randn(4, 4), "norm.weight": torch.ones(dim)}


@pytest.mark.parametrize("causal", [True, False])
def test_idiaps_weights_give_idiaps_layer(causal: bool) -> None:
    seed = seeded()
    weights = idiap_weights(12, 4 * 5, 4 * 7, "layers.0.attention.")
    layer = (CausalLinearAttention if causal else LinearAttention)(12, 4, head_dim=5, head_dim_v=7)
    layer.load_idiap(weights, "layers.0.attention.")
    x = torch.randn(2, 30, 12)

    def project(name: str, t: torch.Tensor) -> torch.Tensor:
        key = f"layers.0.attention.{name}_projection."
        return F.linear(t, weights[key + "weight"], weights[key + "bias"])

    q, k, v = (project(name, x).view(2, 30, 4, -1) for name in ("query", "key", "value"))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    scores = torch.einsum("nlhd,nshd->nhls", q, k)
    scores = scores.tril() if causal else scores
    attended = torch.einsum("nhls,nshm->nlhm", scores / (scores.sum(-1, keepdim=True) + 1e-6), v)
    want = project("out", attended.flatten(2))
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5, msg=lambda m: f"seed {seed}: {m}")


def test_weights_that_do_not_fit_are_named() -> None:
    weights = idiap_weights(12, 20, 28, "layers.0.attention.")
    with pytest.raises(ValueError, match=r"no 'query_projection.weight'; it has layers at \['layers.0.attention.'\]"):
        CausalLinearAttention(12, 4, head_dim=5, head_dim_v=7).load_idiap(weights)
    with pytest.raises(ValueError, match=r"value_projection.weight has shape \(28, 12\), this layer \(20, 12\)"):
        CausalLinearAttention(12, 4, head_dim=5).load_idiap(weights, "layers.0.attention.")


@pytest.mark.parametrize("feature_map", ["elu+1", RandomFeatures(6, 10), (torch.nn.Softplus(), "relu")])
def test_steps_equal_the_pass(feature_map: object) -> None:
    seed = seeded()
    layer = CausalLinearAttention(24, 4, kv_heads=2, feature_map=feature_map).double()  # type: ignore[arg-type]
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    want, last = layer(x, return_state=True)
    rows, state = [], None
    for i in range(20):
        row, state = layer.step(x[:, i], state)
        rows.append(row)
    torch.testing.assert_close(torch.stack(rows, 1), want, msg=lambda m: f"seed {seed}: {m}")
    torch.testing.assert_close(state.s, last.s)
    first, middle = layer(x[:, :11], return_state=True)
    second = layer(x[:, 11:], state=middle)
    torch.testing.assert_close(torch.cat([first, second], 1), want)


@pytest.mark.parametrize("tokens", [False, True], ids=["a head's", "a token's"])
def test_steps_of_a_layer_that_fades(tokens: bool) -> None:
    """From no state on: constants of heads, as RetNet has them, or logs that a gate computed."""
    seed = seeded()
    layer = CausalLinearAttention(24, 4, kv_heads=2).double()
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    decay = F.logsigmoid(torch.randn(2, 12, 2, dtype=torch.float64)) if tokens else torch.tensor([-0.03, -1.0]).double()
    want, last = layer(x, decay=decay, return_state=True)
    rows, state = [], None
    for i in range(12):
        row, state = layer.step(x[:, i], state, decay=decay[:, i] if tokens else decay)
        rows.append(row)
    torch.testing.assert_close((torch.stack(rows, 1), *state), (want, *last), msg=lambda m: f"seed {seed}: {m}")
    assert not torch.allclose(want, layer(x))
    with pytest.raises(ValueError, match="decay needs causal=True"):
        LinearAttention(24, 4, kv_heads=2).double()(x, decay=decay)


def test_cross_attention_lengths_and_packing() -> None:
    seed = seeded()
    layer = LinearAttention(16, 2)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 9, 16)
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    out = layer(x, memory, lengths=lengths)
    torch.testing.assert_close(out[1:], layer(x[1:], memory[1:, :4]), msg=lambda m: f"seed {seed}: {m}")
    packed = layer(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 5, 10], dtype=torch.int32))
    torch.testing.assert_close(packed.view(2, 5, 16), layer(x))


def test_training_reaches_every_parameter() -> None:
    layer = CausalLinearAttention(16, 2, bias=False)
    layer(torch.randn(2, 7, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    assert len(list(layer.parameters())) == 4


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        LinearAttention(16, 4, kv_heads=3)
    with pytest.raises(ValueError, match="dim must be a multiple of heads"):
        LinearAttention(16, 3)
