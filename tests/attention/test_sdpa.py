"""The SDPA drop-in: torch's signature, layout, alignment and results."""

from __future__ import annotations

import inspect

import pytest
import torch

import warploom
from warploom import masks

torch_sdpa = torch.nn.functional.scaled_dot_product_attention


def qkv(*lead: int, seqlen_q: int = 9, seqlen_k: int = 13) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*lead, s, 16, requires_grad=True) for s in (seqlen_q, seqlen_k, seqlen_k)]


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "padding": {"attn_mask": torch.arange(13).expand(2, 1, 1, 13) < torch.tensor([5, 13]).view(2, 1, 1, 1)},
    "key row": {"attn_mask": torch.arange(13)[None] < 7},
    "dense": {"attn_mask": torch.ones(9, 13, dtype=torch.bool).tril(2)},
    "bias": {"attn_mask": torch.randn(9, 13)},
}


@pytest.mark.parametrize("seqlens", [(9, 13), (13, 13)])
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, seqlens: tuple[int, int]) -> None:
    inputs = qkv(2, 4, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    options = dict(CASES[name])
    mask = options.get("attn_mask")
    if mask is not None and mask.shape[-2] == 9:
        options["attn_mask"] = torch.cat([mask, mask[:4]], 0)[: seqlens[0]]
    got, want = (f(*inputs, **options) for f in (warploom.scaled_dot_product_attention, torch_sdpa))
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_causal_is_top_left_also_with_more_queries_than_keys() -> None:
    q, k, v = qkv(2, 4, seqlen_q=13, seqlen_k=5)
    torch.testing.assert_close(
        warploom.scaled_dot_product_attention(q, k, v, is_causal=True), torch_sdpa(q, k, v, is_causal=True)
    )


@pytest.mark.parametrize("lead", [(4,), (3, 2, 4)])
def test_other_ranks(lead: tuple[int, ...]) -> None:
    q, k, v = qkv(*lead)
    torch.testing.assert_close(warploom.scaled_dot_product_attention(q, k, v), torch_sdpa(q, k, v))


BIASES = {
    "heads": ((1, 4, 9, 13), {}),
    "keys": ((2, 1, 1, 13), {"scale": 0.3}),
    "a matrix": ((9, 13), {"enable_gqa": True}),
    "full": ((2, 4, 9, 13), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BIASES)
def test_float_masks_are_biases_with_gradients(name: str, dtype: torch.dtype) -> None:
    shape, options = BIASES[name]
    q, (_, k, v) = qkv(2, 4)[0], qkv(2, 2 if "enable_gqa" in options else 4)
    inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, torch.randn(shape))]
    exact = [t.detach().float().requires_grad_() for t in inputs]
    assert warploom.explain(*inputs[:3], attn_mask=inputs[3], **options).implementation == "cpu"
    got = warploom.scaled_dot_product_attention(*inputs[:3], inputs[3], **options)
    want = torch_sdpa(*exact[:3], exact[3], **options)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(got.float(), want, **near)
    pairs = (torch.autograd.grad(out.sin().sum(), leaves) for out, leaves in ((got.float(), inputs), (want, exact)))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a.float(), b, **near)


@pytest.mark.parametrize(("lead", "shape"), [((4,), (4, 9, 13)), ((3, 2, 4), (4, 1, 13)), ((3, 2, 4), (3, 2, 1, 9, 13))])
def test_float_masks_of_other_ranks(lead: tuple[int, ...], shape: tuple[int, ...]) -> None:
    q, k, v = qkv(*lead)
    bias = torch.randn(shape)
    torch.testing.assert_close(warploom.scaled_dot_product_attention(q, k, v, bias), torch_sdpa(q, k, v, bias))


def test_grouped_heads_need_their_flag_as_in_torch() -> None:
    q, _, _ = qkv(2, 4)
    _, k, v = qkv(2, 2)
    torch.testing.assert_close(
        warploom.scaled_dot_product_attention(q, k, v, enable_gqa=True), torch_sdpa(q, k, v, enable_gqa=True)
    )
    with pytest.raises(ValueError, match="enable_gqa=True"):
        warploom.scaled_dot_product_attention(q, k, v)


def test_takes_column_masks() -> None:
    q, k, v = qkv(2, 4, seqlen_q=13)
    mask = masks.Document([6, 7])
    got = warploom.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, torch_sdpa(q, k, v, mask.dense(13, 13)))


def test_explain_says_when_torch_runs() -> None:
    q, k, v = qkv(2, 4)
    assert warploom.explain(q, k, v, is_causal=True).implementation == "cpu"
    assert warploom.explain(q, k, v, attn_mask=CASES["padding"]["attn_mask"]).implementation == "cpu"
    plan = warploom.explain(q, k, v, attn_mask=CASES["dense"]["attn_mask"])
    assert plan.implementation == "torch" and "dense mask of shape (9, 13)" in str(plan)
    plan = warploom.explain(q, k, v, attn_mask=CASES["bias"]["attn_mask"])
    assert plan.implementation == "cpu" and "bias (tensor)" in plan.call
    doubles = [t.double() for t in (q, k, v)]
    plan = warploom.explain(*doubles, attn_mask=CASES["bias"]["attn_mask"].double())
    assert plan.implementation == "torch" and "no kernel takes here (cpu: accumulates in fp32" in str(plan)
    plan = warploom.explain(*(t[None] for t in (q, k, v)), attn_mask=torch.zeros(1, 2, 4, 9, 13))
    assert plan.implementation == "torch" and "beyond a batch" in str(plan)


def test_signature_is_torchs() -> None:
    ours = inspect.signature(warploom.scaled_dot_product_attention).parameters.values()
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    assert [(p.name, p.default) for p in ours] == [
        (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in theirs
    ]


def test_both_masks_are_refused() -> None:
    q, k, v = qkv(2, 4, seqlen_q=13)
    with pytest.raises(ValueError, match="attn_mask and is_causal=True together"):
        warploom.scaled_dot_product_attention(q, k, v, masks.Full(), is_causal=True)
