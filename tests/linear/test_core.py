"""The three forms of linear attention on mapped inputs agree, with states and gradients."""

from __future__ import annotations

import pytest
import torch

from warploom.linear.cpu import chunked
from warploom.linear.reference import cumulative, quadratic
from warploom.linear.state import LinearState


def inputs(seqlen: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LinearState]:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    q, k, v = rand(2, seqlen, 3, 5), rand(2, seqlen, 3, 5), rand(2, seqlen, 3, 7) - 0.5
    return q, k, v, LinearState(rand(2, 3, 5, 7), rand(2, 3, 5))


@pytest.mark.parametrize("seqlen", [0, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_forms_agree(seqlen: int, normalize: bool) -> None:
    q, k, v, state = inputs(seqlen)
    want = quadratic(q, k, v, normalize=normalize, scale=0.5, state=state)
    for form in (cumulative, chunked):
        out, last = form(q, k, v, normalize=normalize, scale=0.5, state=state)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(last.s, state.s + torch.einsum("bshe,bshm->bhem", k, v))
        torch.testing.assert_close(last.z, state.z + k.sum(1))


def test_chained_states_equal_one_pass() -> None:
    q, k, v, state = inputs(150)
    want, _ = chunked(q, k, v, state=state)
    first, middle = chunked(q[:, :70], k[:, :70], v[:, :70], state=state)
    second, _ = chunked(q[:, 70:], k[:, 70:], v[:, 70:], state=middle)
    torch.testing.assert_close(torch.cat([first, second], 1), want)


def test_small_integers_are_exact_past_where_bf16_sums_stall() -> None:
    ones = torch.ones(1, 600, 1, 1, dtype=torch.bfloat16)
    out, last = chunked(ones, ones, ones, normalize=False)
    assert last.z.item() == 600 and last.s.item() == 600
    assert torch.equal(out.flatten(), torch.arange(1, 601).to(torch.bfloat16))


def test_gradients_through_both_states() -> None:
    q, k, v, state = inputs(66)
    leaves = [t[:1, :, :1].contiguous().requires_grad_() for t in (q, k, v)]
    leaves += [t[:1, :1].contiguous().requires_grad_() for t in state]

    def grads(form: str) -> tuple[torch.Tensor, ...]:
        out, last = (chunked if form == "chunked" else cumulative)(*leaves[:3], state=LinearState(*leaves[3:]))
        return torch.autograd.grad(out.sin().sum() + last.s.cos().sum() + last.z.sin().sum(), leaves)

    for got, want in zip(grads("chunked"), grads("cumulative"), strict=True):
        torch.testing.assert_close(got, want)
