"""Column masks of packed sequences on the Hopper forward, on an H100 or H200: the criterion, lists, bits, graphs, compile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.packed import Packed
from tests.attention.packed_bounds import packed_bounds
from warploom.attention import hopper
from warploom.attention.arguments import varlen_args
from warploom.attention.hopper import run
from warploom.masks import ColumnMask
from warploom.runtime import dispatch

MISSING = hopper.BACKEND.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

NAMES = {
    "lts": ("lts",),
    "ute": ("ute",),
    "lts+ute": ("lts", "ute"),
    "lts+lte": ("lts", "lte"),
    "four": ("lts", "lte", "uts", "ute"),
}


def seed() -> int:
    return random.randrange(2**31)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the forward's modules, none of which is another implementation's."""
    found: list[str] = []
    plain = run._function

    def noted(*arguments: Any) -> Any:
        function, variant = plain(*arguments)
        found.append(variant.name)
        return function, variant

    monkeypatch.setattr(run, "_function", noted)
    return found


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_vectors(causal: bool, names: str, dims: tuple[int, int], launched: list[str]) -> None:
    """Empty sequences, without queries, without keys; one mask, one for each key head, one for each query head."""
    for mask_heads, lengths_k in ((1, None), (2, [0, 417, 130, 5, 0, 700, 1]), (6, [333, 70, 0, 64, 200, 129, 65])):
        Packed(
            seed(), [0, 333, 129, 1, 70, 200, 0], lengths_k, vectors=len(NAMES[names]), names=NAMES[names],
            mask_heads=mask_heads, heads_q=6, heads_kv=2, head_dim=dims[0], head_dim_v=dims[1], extra=90, hostile=True,
            dtype=torch.bfloat16, device="cuda", keywords={"causal": causal},
        ).check("hopper")  # fmt: skip
    assert launched and all("_columns_" in name and "_varlen" in name for name in launched)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"keywords": {"window": (70, 30)}},
    "window to the left": {"keywords": {"window": (40, None)}},
    "softcap, sink, lse": {"keywords": {"softcap": 2.0}, "sink": True, "lse_gradient": True},
    "dropout": {"keywords": {"dropout_p": 0.3, "dropout_seed": 77, "causal": True}},
    "dropout, window, sink": {"keywords": {"dropout_p": 0.3, "dropout_seed": 77, "window": (90, 0)}, "sink": True},
    "all": {"keywords": {"dropout_p": 0.1, "dropout_seed": 5, "softcap": 3.0, "window": (200, 40)}, "sink": True},
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_with_bands_and_features(name: str, dim: int, used: bool) -> None:
    """Groups of 7; keys that end early, at once too."""
    Packed(
        seed(), [250, 0, 129, 300, 3], [450, 64, 129, 0, 400], [300, 64, 0, 0, 399] if used else None, vectors=2,
        names=("lts", "ute"), mask_heads=7, heads_q=7, head_dim=dim, head_dim_v=dim, hostile=True, dtype=torch.float16,
        device="cuda", **FEATURES[name],
    ).check("hopper")  # fmt: skip


def drawn(total_q: int, total_k: int, heads: int, kv: int, dim: int) -> list[Tensor]:
    shapes = ((total_q, heads, dim), (total_k, kv, dim), (total_k, kv, dim))
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def intervals(heads: int, rows: list[int], keys: list[int]) -> ColumnMask:
    """Documents within each sequence, of lengths that heads do not share."""
    parts = []
    for n, m in zip(rows, keys, strict=True):
        at = torch.arange(m, device="cuda")
        size = torch.arange(1, heads + 1, device="cuda")[:, None] * max(n // 7, 1)
        parts.append(((at // size + 1) * size).clamp(max=n))
    return ColumnMask(torch.cat(parts, dim=1)[None].int(), causal=True)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_several_lists_of_tiles(dim: int) -> None:
    """More than 32 key tiles in a sequence, against Triton; many short sequences beside; the same bits in every run."""
    long = 9000 if dim < 256 else 4500
    lengths = [long, 5, 0, *[70] * 40, 3000]
    q, k, v = drawn(sum(lengths) + 11, sum(lengths) + 11, 4, 2, dim)
    tail = torch.zeros(1, 4, 11, dtype=torch.int32, device="cuda")
    lts = intervals(4, lengths, lengths).resolve(sum(lengths), sum(lengths)).lts
    assert lts is not None
    mask, cu = ColumnMask(torch.cat([lts, tail], dim=2), causal=True), starts(*lengths)
    out, lse = warploom.attention_varlen(q, k, v, cu, mask=mask, return_lse=True, backend="hopper")
    want, want_lse = warploom.attention_varlen(q, k, v, cu, mask=mask, return_lse=True, backend="triton")
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, want, rtol=3e-2, atol=1e-2)
    for _ in range(50):
        again, lse_again = warploom.attention_varlen(q, k, v, cu, mask=mask, return_lse=True, backend="hopper")
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_a_sequence_has_the_bits_that_it_has_alone() -> None:
    """Its neighbours, and where it lies, are no matter: dense of one batch entry, and packed behind others."""
    n = 900
    q, k, v = drawn(n, n, 4, 2, 128)
    mask = intervals(2, [n], [n])
    lts = mask.resolve(n, n).lts
    assert lts is not None
    alone = warploom.attention(*(t[None] for t in (q, k, v)), mask=mask, backend="hopper")[0]
    for before in (1, 64, 777):
        others = drawn(before, before, 4, 2, 128)
        both = [torch.cat(pair) for pair in zip(others, (q, k, v), strict=True)]
        rows = torch.randint(0, before + 1, (1, 2, before), device="cuda", dtype=torch.int32)
        found = warploom.attention_varlen(
            *both, starts(before, n), mask=ColumnMask(torch.cat([rows, lts], dim=2), causal=True), backend="hopper"
        )
        assert torch.equal(found[before:], alone)


@pytest.mark.parametrize("contents", [[0, 500, 300, 900], [-5, 100, 2**31 - 1, 700], [900, 900, 900, 900]], ids=str)
def test_starts_that_are_wrong_reach_nothing_outside(contents: list[int]) -> None:
    """Results are anything; memory beside them stays."""
    q, k, v = drawn(900, 900, 2, 1, 64)
    cu = torch.tensor(contents, dtype=torch.int32, device="cuda")
    mask = ColumnMask(torch.randint(0, 400, (1, 1, 900), device="cuda", dtype=torch.int32))
    warploom.attention_varlen(q, k, v, cu, mask=mask, backend="hopper")
    torch.cuda.synchronize()


def test_bounds_are_those_of_the_definition() -> None:
    lengths_q, lengths_k, used = [300, 0, 70, 1000], [5000, 7, 0, 2500], [4900, 7, 0, 64]
    q, k, v = drawn(sum(lengths_q) + 5, sum(lengths_k) + 70, 4, 2, 64)
    shape = (1, 4, k.shape[0])
    vectors = [torch.randint(-5, 1100, shape, device="cuda", dtype=torch.int32) for _ in range(4)]
    options: dict[str, Any] = {"seqused_k": torch.tensor(used, dtype=torch.int32, device="cuda"), "window": (300, 40)}
    args = varlen_args(q, k, v, starts(*lengths_q), starts(*lengths_k), mask=ColumnMask(*vectors), **options)
    found = hopper.BACKEND.prepare(args).bounds
    assert found is not None
    mask = args.mask._replace(**{n: t.cpu() for n, t in zip(("lts", "lte", "uts", "ute"), vectors, strict=True)})
    want, written = packed_bounds(mask, starts(*lengths_q).tolist(), starts(*lengths_k).tolist(), used)
    assert torch.equal(found.cpu()[:, :, written], want[:, :, written])


def test_graph() -> None:
    """Starts and vectors that change between replays change the results: bounds are made inside of the graph."""
    total = 900
    q, k, v = drawn(total, total, 4, 2, 128)
    lts = torch.randint(1, total, (1, 1, total), device="cuda", dtype=torch.int32)
    cu = starts(300, 500, 60)
    mask = ColumnMask(lts, causal=True)
    options: dict[str, Any] = {"max_seqlen_q": total, "max_seqlen_k": total, "backend": "hopper"}
    warploom.attention_varlen(q, k, v, cu, mask=mask, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention_varlen(q, k, v, cu, mask=mask, **options)
    for lengths in ((1, 800, 99), (0, 0, 900), (450, 0, 449)):
        lts.copy_(torch.randint(1, total, (1, 1, total), device="cuda", dtype=torch.int32))
        cu.copy_(starts(*lengths))
        graph.replay()
        want = warploom.attention_varlen(q, k, v, cu.clone(), mask=ColumnMask(lts.clone(), causal=True), **options)
        assert torch.equal(out, want)


def test_a_new_mask_in_every_step() -> None:
    """Calls of kept launchers, and their gradients, are those of calls that are checked and planned."""
    n = 700
    leaves = [t.requires_grad_() for t in drawn(n, n, 4, 2, 64)]
    upstream = torch.randn_like(leaves[0])

    def step(first: int) -> list[Tensor]:
        lts = torch.full((1, 1, n), first // 2 + 1, device="cuda", dtype=torch.int32)
        options: dict[str, Any] = {"max_seqlen_q": n, "max_seqlen_k": n, "deterministic": False, "backend": "hopper"}
        cu, mask = starts(first, n - first - 30), ColumnMask(lts, causal=True)
        out, lse = warploom.attention_varlen(*leaves, cu, mask=mask, return_lse=True, **options)
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


def test_compiles_whole() -> None:
    leaves = [t.requires_grad_() for t in drawn(500, 500, 4, 2, 64)]
    lts = torch.randint(1, 300, (1, 1, 500), device="cuda", dtype=torch.int32)

    def loss(q: Tensor, k: Tensor, v: Tensor, lts: Tensor, cu: Tensor) -> Tensor:
        mask = ColumnMask(lts, causal=True)
        out = warploom.attention_varlen(q, k, v, cu, mask=mask, max_seqlen_q=300, max_seqlen_k=300, backend="hopper")
        return out.float().square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    for cu in (starts(300, 190), starts(10, 290)):
        got, want = compiled(*leaves, lts, cu), loss(*leaves, lts, cu)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_prepare_makes_it_ready_for_a_capture(launched: list[str]) -> None:
    q, k, v = drawn(200, 200, 2, 1, 96)
    cu, mask = starts(50, 140), ColumnMask(torch.full((1, 1, 200), 30, dtype=torch.int32, device="cuda"))
    plan = warploom.prepare(q, k, v, cu, mask=mask, window=(50, 9), backend="hopper")
    assert plan.implementation == "hopper" and "_columns_varlen" in str(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention_varlen(q, k, v, cu, mask=mask, window=(50, 9), backend="hopper")
    graph.replay()
    want = warploom.attention_varlen(q, k, v, cu, mask=mask, window=(50, 9), backend="triton")
    torch.testing.assert_close(out, want, rtol=3e-2, atol=1e-2)
