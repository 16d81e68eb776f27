"""The Hopper backward under column masks on an H100 or H200, given out and lse of the reference: whatever the forward is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.cases import MASKS, NARROWED, masked
from tests.attention.harness import Call, model, results
from warploom import masks
from warploom.attention import hopper
from warploom.attention.arguments import dense_args
from warploom.attention.judge import judge
from warploom.masks import Mask

MISSING = hopper.BACKEND.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("here", "poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

HALVES = [torch.float16, torch.bfloat16]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
# Which run in the tiles past 128.
ODD_DIMS = [(136, 72), (160, 128), (72, 136), (168, 168), (184, 192), (200, 200), (248, 256), (256, 64)]
NAN = float("nan")


def seed() -> int:
    return random.randrange(2**31)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, **keywords: Any
) -> tuple[Tensor, ...]:
    args = dense_args(q, k, v, **{"deterministic": False, **keywords})
    return hopper.BACKEND.backward(args, dout, dlse, out, lse)


def check(call: Call) -> None:
    """Gradients of the kernel from out and lse of the reference, by the criterion of every backend."""
    want, low = results(call, "reference", torch.float64), model(call)
    q, k, v, sink = call.tensors()
    out, lse = want["out"].to(call.dtype), want["lse"].float()
    dout, dlse = call.upstream(out, lse)
    dlse = dlse.masked_fill(torch.isinf(lse), 0.0)
    found = gradients(q, k, v, dout, dlse if call.lse_gradient else None, out, lse, sink=sink, **call.keywords)
    for name, value in zip(("dq", "dk", "dv", *(["dsink"] if sink is not None else [])), found, strict=False):
        verdict = judge(name, value, want[name], low[name], call.dtype)
        assert verdict.passed, f"{verdict}\n{call}"


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name, narrow", [*((name, False) for name in MASKS), *((name, True) for name in NARROWED)])
def test_mask(name: str, narrow: bool, dims: tuple[int, int]) -> None:
    check(masked(name, seed(), "cuda", narrow, dtype=HALVES[narrow], head_dim=dims[0], head_dim_v=dims[1]))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("lengths", [(1000, 1000), (333, 1333), (1291, 517), (1, 700), (700, 1)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_drawn_vectors(dims: tuple[int, int], lengths: tuple[int, int], heads: int, deterministic: bool) -> None:
    """Four vectors: intervals of blocks of keys that differ a little from key to key, per head and batch; some dead keys."""
    generator = torch.Generator().manual_seed(seed())
    print(f"seed {generator.initial_seed()}")
    for causal in (False, True):
        mask = drawn(heads, *lengths, causal, generator).to("cuda")
        keywords = {"mask": mask, "deterministic": deterministic}
        check(Call(seed(), 2, *lengths, 6, 2, *dims, dtype=torch.bfloat16, device="cuda", keywords=keywords))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", ODD_DIMS, ids=str)
def test_head_dims_narrower_than_their_tile(dims: tuple[int, int], deterministic: bool) -> None:
    """Seven heads a group, lengths that no tile divides, masks of query heads."""
    mask = drawn(14, 517, 777, True, torch.Generator().manual_seed(seed())).to("cuda")
    keywords = {"mask": mask, "deterministic": deterministic}
    check(Call(seed(), 2, 517, 777, 14, 2, *dims, dtype=torch.float16, device="cuda", keywords=keywords))


def drawn(heads: int, seqlen_q: int, seqlen_k: int, causal: bool, generator: torch.Generator) -> Mask:
    block = torch.arange(seqlen_k) // 128
    vectors = []
    for _ in range(2):
        low = torch.randint(-50, seqlen_q, (2, heads, 16), generator=generator)[:, :, block % 16]
        high = low + torch.randint(0, seqlen_q, (2, heads, 16), generator=generator)[:, :, block % 16]
        vectors += [t + torch.randint(0, 20, t.shape, generator=generator) for t in (low, high)]
    dead = torch.rand(seqlen_k, generator=generator) < 0.1
    vectors[0][:, :, dead], vectors[1][:, :, dead] = 0, seqlen_q
    return masks.ColumnMask(*(t.int() for t in vectors), causal=causal)


@pytest.mark.parametrize("changes", [{"sink": True}, {"lse_gradient": True}, {"softcap": 3.0}, {"strided": True}], ids=str)
@pytest.mark.parametrize("dim", [64, 72, 96, 176, 192, 256])
def test_features(dim: int, changes: dict[str, Any]) -> None:
    if "softcap" in changes and dim > 192:
        pytest.skip("has no kernel, of registers")
    changes, keywords = dict(changes), dict[str, Any]()
    if "softcap" in changes:
        keywords = {"softcap": changes.pop("softcap")}
    mask = masks.Document([300, 37, 400, 263], causal=True).to("cuda")
    keywords["mask"] = mask
    check(Call(seed(), 1, 1000, 1000, 4, 2, dim, dtype=torch.bfloat16, device="cuda", keywords=keywords, **changes))


@pytest.mark.parametrize("name", ["documents", "causal documents", "vectors of each head", "window"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_deterministic_gradients_have_equal_bits(dims: tuple[int, int], name: str) -> None:
    """Of more key blocks than processors, while others compete for them."""
    seqlen, keywords = 5000, dict[str, Any](deterministic=True)
    found: dict[str, Mask] = {
        "documents": masks.Document([300, 1700, 37, 2000, 963]),
        "causal documents": masks.Document([300, 1700, 37, 2000, 963], causal=True),
        "vectors of each head": drawn(8, seqlen, seqlen, True, torch.Generator().manual_seed(seed())),
        "window": masks.Document([2600, 2400], causal=True),
    }
    keywords["mask"] = found[name].to("cuda")
    if name == "window":
        keywords["window"] = (700, 0)
    of_tensors = ((8, dims[0]), (4, dims[0]), (4, dims[1]), (8, dims[1]))
    q, k, v, dout = (torch.randn(2, seqlen, *heads, device="cuda", dtype=torch.bfloat16) for heads in of_tensors)
    out, lse = warploom.attention(q, k, v, return_lse=True, backend="triton", **keywords)
    want = gradients(q, k, v, dout, None, out, lse, **keywords)[:3]
    for a, b in zip(gradients(q, k, v, dout, None, out, lse, **keywords | {"deterministic": False}), want, strict=False):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    other.wait_stream(torch.cuda.current_stream())
    for i in range(100):
        if i % 2:
            with torch.cuda.stream(other):
                busy @ busy
        for a, b in zip(gradients(q, k, v, dout, None, out, lse, **keywords)[:3], want, strict=True):
            assert torch.equal(a, b), i


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_keys_that_nobody_sees_and_queries_that_see_nothing_may_hold_anything(dims: tuple[int, int], poison: float) -> None:
    """Rows anywhere, in tiles that others share; bits of all that no order of additions changes."""
    generator = torch.Generator("cuda").manual_seed(seed())
    of_tensors = ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]))
    q, k, v, dout = (
        torch.randn(2, 700, *heads, device="cuda", dtype=torch.bfloat16, generator=generator) for heads in of_tensors
    )
    seen = torch.ones(2, 700, dtype=torch.bool, device="cuda")
    seen[0, 300:500], seen[1, ::7] = False, False
    lts = torch.where(seen, 700, 0)[:, None].int()
    uts, ute = torch.full_like(lts, 200), torch.full_like(lts, 210)  # ten rows that see nothing
    mask = masks.ColumnMask(lts, None, uts, ute)

    def run() -> tuple[Tensor, ...]:
        out, lse = warploom.attention(q, k, v, mask=mask, return_lse=True, backend="reference")
        return *gradients(q, k, v, dout, None, out, lse, mask=mask)[:3], (lse == float("-inf")).transpose(1, 2)

    *clean, blind = run()
    assert blind.any()
    k[~seen], v[~seen] = poison, poison
    q[blind], dout[blind] = poison, poison
    *found, _ = run()
    assert torch.equal(found[1], clean[1]) and torch.equal(found[2], clean[2])
    torch.testing.assert_close(found[0], clean[0])
    assert not found[0][blind].any() and not found[1][~seen].any() and not found[2][~seen].any()


@pytest.mark.parametrize("dim", [128, 192, 256])
def test_more_blocks_than_processors(dim: int) -> None:
    """Persistent blocks pass from one key block to the next, some of which see nothing."""
    generator = torch.Generator().manual_seed(seed())
    mask = drawn(8, 4000, 5000, True, generator).to("cuda")
    q, k, v, dout = (torch.randn(2, n, h, dim, device="cuda", dtype=torch.bfloat16) for n, h in
                     ((4000, 8), (5000, 4), (5000, 4), (4000, 8)))  # fmt: skip
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = warploom.attention(*leaves, mask=mask, return_lse=True, backend="triton")
    want = torch.autograd.grad(out, leaves, dout)
    found = gradients(q.detach(), k.detach(), v.detach(), dout, None, out.detach(), lse.detach(), mask=mask)
    for a, b in zip(found[:3], want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    again = gradients(q.detach(), k.detach(), v.detach(), dout, None, out.detach(), lse.detach(), mask=mask)
    assert torch.equal(found[1], again[1]) and torch.equal(found[2], again[2])
