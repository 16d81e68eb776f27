"""The chunked fp64 reference of long calls against the package's token-by-token one, and that it notices."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom.bench.recurrence import NAMES, Rule, last_key_head
from warploom.bench.reference import WrongResult

TOKENS = 150  # three chunks, the last not full


def inputs(heads_v: int) -> list[torch.Tensor]:
    q, k = (torch.randn(2, TOKENS, 2, 16) for _ in range(2))
    v, dout = (torch.randn(2, TOKENS, heads_v, 24) for _ in range(2))
    decay, beta = (torch.rand(2, TOKENS, heads_v) for _ in range(2))
    decay = -3 * decay
    decay[:, 70:75] = -200.0  # sums whose differences overflow where a later token is not left out
    return [q, k, v, decay, 2 * beta, dout]


def test_delta_rule_of_long_calls() -> None:
    *tensors, dout = inputs(6)
    leaves = [t.requires_grad_() for t in tensors]
    q, k, v, decay, beta = leaves
    out = warploom.gated_delta_rule(q, k, v, beta, decay, normalize_qk=True, eps=1e-3, backend="reference")
    gradients = torch.autograd.grad(out, leaves, dout)
    want = last_key_head(Rule(16**-0.5, 1e-3), dout, *tensors)
    assert want.check_out(out) < 1e-6 and want.check_gradients(gradients) < 1e-6
    assert last_key_head(Rule(16**-0.5, 1e-3), None, *tensors).gradients is None
    with pytest.raises(WrongResult, match="out is"):
        want.check_out(1.02 * out)
    for at, name in enumerate(NAMES):
        wrong = [1.05 * t if n == at else t for n, t in enumerate(gradients)]
        with pytest.raises(WrongResult, match=f"{name} is"):
            want.check_gradients(wrong)
    with pytest.raises(WrongResult, match="out is"):
        want.check_out(out * float("nan"))


@pytest.mark.parametrize("kind", ["none", "head", "token"])
def test_linear_attention_of_long_calls(kind: str) -> None:
    q, k, v, decay, _, dout = inputs(2)
    given = {"none": None, "head": -torch.rand(2), "token": decay}[kind]
    leaves = [t.requires_grad_() for t in (q, k, v)] + ([given.requires_grad_()] if kind == "token" else [])
    out = warploom.linear_attention(
        q, k, v, feature_map="identity", normalize=False, scale=0.5, decay=given, backend="reference"
    )
    want = last_key_head(Rule(0.5), dout, q, k, v, given)
    assert want.check_out(out) < 1e-6
    assert want.check_gradients(torch.autograd.grad(out, leaves, dout)) < 1e-6


def test_lost_memory_of_earlier_tokens_is_seen() -> None:
    """Whoever drops the state at a chunk's end, or forgets a token too late, is wrong."""
    *tensors, _ = inputs(2)
    q, k, v, decay, beta = tensors
    late = torch.cat([torch.zeros(2, 1, 2), decay[:, :-1]], 1)
    wrong = warploom.gated_delta_rule(q, k, v, beta, late, normalize_qk=True)
    with pytest.raises(WrongResult, match="out is"):
        last_key_head(Rule(16**-0.5, 1e-6), None, *tensors).check_out(wrong)
    tensors[3] = 0.001 * decay.clamp(min=-3.0)
    halves = [[t[:, part] for t in tensors] for part in (slice(0, 128), slice(128, TOKENS))]
    cut = [warploom.gated_delta_rule(a, b, c, e, d, normalize_qk=True) for a, b, c, d, e in halves]
    with pytest.raises(WrongResult, match="out is"):
        last_key_head(Rule(16**-0.5, 1e-6), None, *tensors).check_out(torch.cat(cut, 1))
