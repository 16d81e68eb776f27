"""Column masks on the Hopper forward, on an H100 or H200: the criterion, lists of many tiles, dead columns, bits, graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.harness import Call, check
from warploom import masks
from warploom.attention import hopper
from warploom.masks import ColumnMask
from warploom.runtime import dispatch

MISSING = hopper.BACKEND.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]


def seed() -> int:
    return random.randrange(2**31)


def vectors(number: int, batch: int, heads: int, seqlen_q: int, seqlen_k: int, *names: str, causal: bool = False) -> ColumnMask:
    """Any rows, so that intervals are empty, overlap, and cover everything."""
    draw = torch.Generator().manual_seed(number)
    shape = batch, heads, seqlen_k
    found = {name: torch.randint(-3, seqlen_q + 4, shape, generator=draw, dtype=torch.int32).to("cuda") for name in names}
    return ColumnMask(found.pop("lts", None), causal=causal, **found)


def given(mask: ColumnMask, **keywords: Any) -> dict[str, Any]:
    """Keywords of a call whose backward pass is Hopper's too: poisoned memory makes it deterministic otherwise."""
    return {"mask": mask, "deterministic": False, **keywords}


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("names", [("lts",), ("lts", "ute"), ("lts", "lte"), ("lts", "lte", "uts", "ute")], ids="+".join)
@pytest.mark.parametrize("causal", [False, True])
def test_vectors(causal: bool, names: tuple[str, ...], dims: tuple[int, int]) -> None:
    number = seed()
    for heads, (seqlen_q, seqlen_k) in ((1, (333, 417)), (2, (417, 333)), (6, (129, 700))):
        mask = vectors(number, 2, heads, seqlen_q, seqlen_k, *names, causal=causal)
        shape = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": 6, "heads_kv": 2}
        dim = {"head_dim": dims[0], "head_dim_v": dims[1]}
        check(Call(number, device="cuda", dtype=torch.bfloat16, keywords=given(mask), **shape, **dim), "hopper")


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("step", [16, 32, 64])
def test_rows_that_see_the_same_columns(step: int, dim: int) -> None:
    """Intervals begin and end at multiples of so many rows, but for some columns."""
    number = seed()
    for heads, names in ((1, ("lts",)), (6, ("lts", "lte", "uts", "ute"))):
        mask = vectors(number, 2, heads, 417, 530, *names)
        some = torch.rand(530, generator=torch.Generator().manual_seed(number)).to("cuda") < 0.01
        alike = [torch.where(some, t, t // step * step) for t in (getattr(mask, name) for name in names)]
        mask = ColumnMask(*alike)
        shape = {"seqlen_q": 417, "seqlen_k": 530, "heads_q": 6, "heads_kv": 2, "head_dim": dim, "head_dim_v": dim}
        check(Call(number, device="cuda", dtype=torch.bfloat16, keywords=given(mask), **shape), "hopper")


@pytest.mark.parametrize("keywords", [{"window": (70, 30)}, {"window": (40, None)}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_with_bands_and_features(keywords: dict[str, Any], dim: int) -> None:
    number = seed()
    mask = vectors(number, 1, 1, 500, 450, "lts", "ute")
    shape = {"seqlen_q": 500, "seqlen_k": 450, "head_dim": dim, "sink": True, "lse_gradient": True}
    check(Call(number, device="cuda", dtype=torch.float16, keywords=given(mask, **keywords), **shape), "hopper")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    return warploom.attention(q, k, v, mask=mask, backend="hopper", **options)


def drawn(batch: int, seqlen: int, heads: int, kv: int, dim: int) -> list[Tensor]:
    return [torch.randn(batch, seqlen, h, dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv, kv)]


LONG = {
    "causal documents": lambda n: masks.Document(lengths=[n // 5, 3 * n // 5, n // 5]),
    "documents": lambda n: masks.Document(lengths=[n // 5, 3 * n // 5, n // 5], causal=False),
    "prefix": lambda n: masks.PrefixLM(n // 3),
    "global": lambda n: masks.GlobalWindow(20, 100, 100),
    "far apart": lambda n: ColumnMask(torch.arange(n, device="cuda", dtype=torch.int32) // 64 * 61 % 7 * (n // 7), causal=True),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_several_lists_of_tiles(name: str, dim: int) -> None:
    """More than 32 key tiles, against Triton."""
    n = 10000 if dim < 256 else 5000
    q, k, v = drawn(1, n, 4, 2, dim)
    mask = LONG[name](n)
    out, lse = attend(q, k, v, mask, return_lse=True)
    want, want_lse = warploom.attention(q, k, v, mask=mask, backend="triton", return_lse=True)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, want, rtol=3e-2, atol=1e-2)
    for _ in range(5):
        again, lse_again = attend(q, k, v, mask, return_lse=True)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_more_lists_than_one_look_finds(dim: int) -> None:
    """More than 32 lists of 32 key tiles, most of them hidden, against Triton."""
    n = 140000
    q, k, v = drawn(1, n, 2, 1, dim)
    block = torch.arange(n, device="cuda", dtype=torch.int32) // 64
    mask = ColumnMask(torch.where(block % 100 == 0, block // 100 % 7 * 50, 0).int())  # rows of 300 that see a key
    out, lse = attend(q[:, :300], k, v, mask, return_lse=True)
    want, want_lse = warploom.attention(q[:, :300], k, v, mask=mask, backend="triton", return_lse=True)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, want, rtol=3e-2, atol=1e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [1, 64])
def test_keys_that_some_rows_see(step: int, bad: float, dim: int) -> None:
    """Those rows are NaN, and none of other query tiles, whether rows see the same columns or each its own."""
    n = 777
    q, k, v = drawn(2, n, 4, 2, dim)
    lts = torch.randint(1, n + 1, (2, 1, n), device="cuda", dtype=torch.int32) // step * step
    some = torch.rand(2, n, device="cuda") < 0.05
    lts[some[:, None]] = torch.randint(1, 321, (int(some.sum()),), device="cuda", dtype=torch.int32) // step * step
    mask = ColumnMask(lts)
    clean, clean_lse = attend(q, k, v, mask, return_lse=True)
    k[some] = bad
    out, lse = attend(q, k, v, mask, return_lse=True)
    assert torch.equal(out[:, 384:], clean[:, 384:]) and torch.equal(lse[..., 384:], clean_lse[..., 384:])
    if bad != bad:
        seen = (lts[:, 0, None, :] > torch.arange(n, device="cuda")[:, None]) & some[:, None, :]
        assert out[seen.any(-1)].isnan().all()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [1, 64])
def test_columns_that_no_row_sees(step: int, bad: float, dim: int) -> None:
    n = 777
    q, k, v = drawn(2, n, 4, 2, dim)
    lts = torch.randint(1, n // step + 1, (2, 2, n), device="cuda", dtype=torch.int32) * step
    dead = torch.rand(2, 2, n, device="cuda") < 0.1
    lts[dead] = 0
    mask = ColumnMask(lts)
    clean, clean_lse = attend(q, k, v, mask, return_lse=True)
    for t in (k, v):
        t.transpose(1, 2)[dead] = bad
    out, lse = attend(q, k, v, mask, return_lse=True)
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


def test_a_thousand_repeats() -> None:
    q, k, v = drawn(2, 1900, 8, 2, 128)
    mask = vectors(seed(), 2, 8, 1900, 1900, "lts", "lte", "uts", "ute")
    out, lse = attend(q, k, v, mask, return_lse=True)
    for _ in range(1000):
        again, lse_again = attend(q, k, v, mask, return_lse=True)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_graph() -> None:
    """Vectors that change between replays change the results: bounds are made inside of the graph."""
    q, k, v = drawn(1, 900, 4, 2, 128)
    lts = torch.randint(1, 901, (1, 1, 900), device="cuda", dtype=torch.int32)
    mask = ColumnMask(lts, causal=True)
    attend(q, k, v, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, mask)
    for _ in range(3):
        lts.copy_(torch.randint(1, 901, (1, 1, 900), device="cuda", dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, attend(q, k, v, ColumnMask(lts.clone(), causal=True)))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_new_mask_in_every_step(backend: str) -> None:
    """Calls of kept launchers, and their gradients, are those of calls that are checked and planned."""
    n = 700
    leaves = [t.requires_grad_() for t in drawn(1, n, 4, 2, 64)]
    upstream = torch.randn_like(leaves[0])

    def step(first: int) -> list[Tensor]:
        mask = masks.Document(torch.tensor([first, n - first - 30], device="cuda"))
        out, lse = warploom.attention(*leaves, mask=mask, backend=backend, deterministic=backend == "triton", return_lse=True)
        return [out, lse, *torch.autograd.grad(out, leaves, upstream)]

    found: list[list[Tensor]] = []
    want: list[list[Tensor]] = []
    for forget, results in ((False, found), (True, want)):
        for first in (100, 350, 1, 600, 222):
            if forget:
                dispatch.strict(False)
            results.append(step(first))
    for ours, theirs in zip(found, want, strict=True):
        for exact, a, b in zip((True, True, False, False, False), ours, theirs, strict=True):
            assert not a.isnan().any() and (torch.equal(a, b) if exact else torch.allclose(a, b, rtol=2e-2, atol=2e-2))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_captured_step_under_documents(backend: str) -> None:
    """Lengths on the device that change between replays change results and gradients."""
    n = 640
    leaves = [t.requires_grad_() for t in drawn(1, n, 4, 2, 64)]
    upstream, lengths = torch.randn_like(leaves[0]), torch.tensor([100, 540], device="cuda")

    def step(lengths: Tensor) -> list[Tensor]:
        out = warploom.attention(*leaves, mask=masks.Document(lengths), backend=backend)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step(lengths)
    for first in (1, 320, 639):
        lengths.copy_(torch.tensor([first, n - first]))
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(found, step(lengths.clone()), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
