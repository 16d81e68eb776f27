"""The reference is the definition: idiap's formulas, and its quadratic and cumulative forms agree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.linear.cases import CASES, case
from tests.linear.harness import Case, check
from warploom import LinearState, linear_attention
from warploom.linear.reference import cumulative, quadratic


def draw(seed: int, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k, v


def idiap(q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: Tensor) -> Tensor:
    """The formulas of fast-transformers' two attention layers, written out (eps 1e-6 added to the denominator)."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    k = k * (torch.arange(k.shape[1]) < lengths[:, None])[:, :, None, None]
    if causal:
        kv = torch.einsum("nshd,nshm->nshdm", k, v).cumsum(1)
        z = 1 / (torch.einsum("nlhd,nlhd->nlh", q, k.cumsum(1)) + 1e-6)
        return torch.einsum("nlhd,nlhdm,nlh->nlhm", q, kv, z)
    kv = torch.einsum("nshd,nshm->nhmd", k, v)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(1)) + 1e-6)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_defaults_are_idiaps(causal: bool, backend: str) -> None:
    seed = random.randrange(2**31)
    q, k, v = draw(seed, 3, 50, 2, 8)
    lengths = torch.tensor([50, 20, 1], dtype=torch.int32)
    got = linear_attention(q, k, v, causal=causal, lengths=lengths, backend=backend)
    torch.testing.assert_close(got, idiap(q, k, v, causal, lengths), msg=lambda m: f"seed {seed}: {m}")
    whole = linear_attention(q, k, v, causal=causal, backend=backend)
    torch.testing.assert_close(whole, idiap(q, k, v, causal, torch.full((3,), 50)), msg=lambda m: f"seed {seed}: {m}")


def test_a_longer_key_is_not_seen_and_a_missing_one_adds_nothing() -> None:
    """What idiap's make_sizes_compatible means, done to keys and values."""
    seed = random.randrange(2**31)
    q, k, v = draw(seed, 1, 40, 2, 8)
    short = linear_attention(q[:, :25], k, v)
    torch.testing.assert_close(short, linear_attention(q[:, :25], k[:, :25], v[:, :25]))
    padded = linear_attention(q, k, v, lengths=torch.tensor([25], dtype=torch.int32))
    torch.testing.assert_close(linear_attention(q, k[:, :25], v[:, :25]), padded)


@pytest.mark.parametrize("seqlen", [0, 1, 65])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_forms_agree(seqlen: int, normalize: bool) -> None:
    seed = random.randrange(2**31)
    q, k, v = draw(seed, 2, seqlen, 3, 5)
    held = LinearState(torch.rand(2, 3, 5, 5).double(), torch.rand(2, 3, 5).double())
    q, k = q.exp(), k.exp()
    want, last = cumulative(q, k, v, normalize=normalize, scale=0.5, state=held)
    torch.testing.assert_close(quadratic(q, k, v, normalize=normalize, scale=0.5, state=held), want)
    for backend in ("cpu", "reference"):
        options = {"feature_map": "identity", "normalize": normalize, "scale": 0.5, "state": held, "return_state": True}
        out, state = linear_attention(q, k, v, **options, backend=backend)
        torch.testing.assert_close(out, want, msg=lambda m: f"seed {seed}: {m}")
        torch.testing.assert_close(state.s, last.s)
        torch.testing.assert_close(state.z, last.z)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    check(case(name, random.randrange(2**31)), "reference")


def test_backward_is_what_forward_changes_by() -> None:
    """reference.backward, which asks autograd, by differences: along one direction in all inputs, and in each alone."""
    from warploom.linear import reference
    from warploom.linear.arguments import linear_call

    c = replace(case("packed, state, group", random.randrange(2**31)), dtype=torch.float64, decay="token")
    options = {"causal": True, "feature_map": "elu+1", "normalize": True, "eps": 1e-6, "scale": 1.0, "lengths": None}
    call = linear_call(**{**options, **c.draw()})
    names = ("q", "k", "v", "s", "z", "decay")
    inputs = {name: getattr(call, name).detach() for name in names}
    call = replace(call, **inputs)
    out, _, s, z = reference.BACKEND.forward(call, True)
    upstream = [torch.randn_like(t) for t in (out, s, z)]
    found = dict(zip(names, reference.BACKEND.backward(call, upstream[0], None, *upstream[1:]), strict=True))

    def along(direction: dict[str, Tensor], step: float) -> float:
        moved = {name: t + step * direction[name] for name, t in inputs.items()}
        out, _, s, z = reference.BACKEND.forward(replace(call, **moved), True)
        return float(sum((t * d).sum() for t, d in zip((out, s, z), upstream, strict=True)))

    whole = {name: torch.randn_like(t) for name, t in inputs.items()}
    for chosen in (names, *zip(names, strict=True)):
        direction = {name: t * (name in chosen) for name, t in whole.items()}
        rise = (along(direction, 1e-5) - along(direction, -1e-5)) / 2e-5
        want = float(sum((found[name] * t).sum() for name, t in direction.items()))
        assert rise == pytest.approx(want, rel=1e-6, abs=1e-6), (chosen, c)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_keys_past_the_last_query_may_hold_anything(backend: str) -> None:
    """When causal nobody sees them: NaN there once reached out and all gradients, unless the state is asked for."""
    c = Case(random.randrange(2**31), seqlen_q=40, seqlen_k=90, lengths=[90, 50])
    arguments = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in c.draw().items()}
    results = []
    for hidden in (0.0, float("nan")):
        for name in ("k", "v"):
            arguments[name] = arguments[name].clone()
            arguments[name][:, 40:] = hidden
        leaves = [arguments[name].requires_grad_() for name in ("q", "k", "v")]
        out = linear_attention(**arguments, backend=backend)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert b.isfinite().all() and torch.equal(a, b), c
    assert not results[1][2][:, 40:].any() and not results[1][3][:, 40:].any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_packed_sequence_has_gradients_of_zero(tokens: int, backend: str) -> None:
    """cu_seqlens=[0]: the reference once had no gradient at all."""
    q, k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(3))
    starts = torch.zeros(1, dtype=torch.int32)
    out, state = linear_attention(q, k, v, cu_seqlens=starts, return_state=True, backend=backend)
    assert not out.any() and state.s.shape == (0, 2, 8, 8)
    for result in (out, *state):
        for t in torch.autograd.grad(result.sum(), (q, k, v), retain_graph=True, materialize_grads=True):
            assert t.shape == (tokens, 2, 8) and not t.any()
