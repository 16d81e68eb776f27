"""Under torch.autocast a call's dtypes are settled by its inputs; autocast reaches nothing within, forward or backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warploom

DTYPES = [torch.bfloat16, torch.float16]


def tensors(head_dim_v: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 70, 4, 16), (2, 90, 2, 16), (2, 90, 2, head_dim_v))
    return [(20 * torch.randn(s)).to(dtype).requires_grad_() for s in shapes]


def results(call: Any, inputs: list[Tensor]) -> list[Tensor]:
    out, lse = call(*inputs)
    weight = torch.linspace(-1.0, 1.0, out.numel()).view(out.shape)
    return [out, lse, *torch.autograd.grad((out.float() * weight).sum() + lse.sum(), inputs)]


CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (16, {}),
    "softcap": (16, {"softcap": 20.0}),
    "dropout": (16, {"dropout_p": 0.3, "dropout_seed": 5}),
    "head_dim_v": (24, {}),
    "sink": (16, {"sink": torch.zeros(4)}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_attention_computes_in_fp32_under_autocast(name: str, backend: str, dtype: torch.dtype) -> None:
    """Scores came out in bf16 and fp16: an lse wrong by 2.6e-2, and NaN where a score passes 65504."""
    head_dim_v, options = CALLS[name]
    inputs = tensors(head_dim_v, dtype)

    def call(*qkv: Tensor) -> Any:
        return warploom.attention(*qkv, return_lse=True, backend=backend, **options)

    expected = results(call, inputs)
    with torch.autocast("cpu", dtype=dtype):
        found = results(call, inputs)  # the backward pass too
    assert all(map(torch.equal, found, expected))
    assert all(torch.isfinite(t).all() for t in found)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_attention_varlen_under_autocast(backend: str) -> None:
    q, k, v = (t.detach().flatten(0, 1).requires_grad_() for t in tensors(16, torch.bfloat16))
    starts = torch.tensor([0, 30, 140], dtype=torch.int32), torch.tensor([0, 100, 180], dtype=torch.int32)

    def call(*qkv: Tensor) -> Any:
        return warploom.attention_varlen(*qkv, *starts, softcap=9.0, return_lse=True, backend=backend)

    expected = results(call, [q, k, v])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(call, [q, k, v])
    assert all(map(torch.equal, found, expected))


def test_only_the_backward_pass_of_the_reference_under_autocast() -> None:
    """Its products are torch's own, whose gradients autocast would round."""
    inputs = tensors(16, torch.float32)
    expected = results(lambda *qkv: warploom.attention(*qkv, return_lse=True, backend="reference"), inputs)
    out, lse = warploom.attention(*inputs, return_lse=True, backend="reference")
    weight = torch.linspace(-1.0, 1.0, out.numel()).view(out.shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad((out * weight).sum() + lse.sum(), inputs)
    assert all(map(torch.equal, found, expected[2:]))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_linear_attention_and_decode_under_autocast(backend: str) -> None:
    inputs = [t.detach()[:, :70].contiguous().requires_grad_() for t in tensors(16, torch.bfloat16)]

    def linear(*qkv: Tensor) -> list[Tensor]:
        out, state = warploom.linear_attention(*qkv, return_state=True, backend=backend)
        step, last = warploom.linear_attention_step(*(t[:, 0] for t in qkv), state, backend=backend)
        gradients = torch.autograd.grad(out.float().sum() + state.s.sum(), qkv)
        return [out, *state, step, *last, *gradients]

    def decode(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        cache = warploom.KVCache(k.detach(), v.detach(), torch.tensor([70, 9], dtype=torch.int32))
        return list(warploom.decode(q.detach()[:, :3], cache, softcap=5.0, return_lse=True, backend=backend))

    def delta(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        beta, decay = q.float()[..., 0].sigmoid(), -q.float()[..., 1].square()
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        given = {"normalize_qk": True, "backend": backend}
        out, state = warploom.gated_delta_rule(q, k, v.repeat_interleave(2, 2), beta, decay, return_state=True, **given)
        one = (t[:, 0] for t in (q, k, v.repeat_interleave(2, 2), beta))
        step, last = warploom.gated_delta_step(*one, state, decay[:, 0], **given)
        gradients = torch.autograd.grad(out.float().sum() + state.sum(), (q, k, v))
        return [out, state, step, last, *gradients]

    for call in (linear, delta, decode):
        expected = call(*inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = call(*inputs)
        assert all(map(torch.equal, found, expected))
