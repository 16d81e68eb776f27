"""Dropout of the Hopper kernels on an H100 or H200: the criterion, and the same elements as Triton's and the definition's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.harness import Call, check
from tests.attention.packed import Packed
from warploom import masks
from warploom.attention import hopper
from warploom.attention.philox import keep_mask

MISSING = hopper.BACKEND.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("here", "poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

HALVES = [torch.float16, torch.bfloat16]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72)]
BANDS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": (70, 30)}}
NEXT = hopper._next


def seed() -> int:
    return random.randrange(2**31)


def drops(dropout_p: float = 0.3) -> dict[str, Any]:
    return {"dropout_p": dropout_p, "dropout_seed": random.randrange(2**64) - 2**63}


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_lengths(dtype: torch.dtype, band: str, dims: tuple[int, int]) -> None:
    """Forward and backward; key heads of their own and groups."""
    for seqlen, heads_kv in ((1, 4), (131, 2), (577, 4), (1000, 1)):
        shape = {"seqlen_q": seqlen, "seqlen_k": seqlen, "heads_kv": heads_kv, "head_dim": dims[0], "head_dim_v": dims[1]}
        check(Call(seed(), device="cuda", dtype=dtype, keywords={**BANDS[band], **drops()}, **shape), "hopper")  # type: ignore[arg-type]


@pytest.mark.parametrize("dropout_p", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["any order", "deterministic"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_probabilities(dim: int, options: dict[str, Any], dropout_p: float) -> None:
    shape = {"seqlen_q": 300, "seqlen_k": 515, "head_dim": dim, "sink": True, "lse_gradient": True}
    keywords = {"causal": True, **options, **drops(dropout_p)}
    check(Call(seed(), device="cuda", dtype=torch.bfloat16, keywords=keywords, **shape), "hopper")  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dims", "deterministic"),
    [(d, False) for d in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]]
    + [((64, 64), True), ((96, 96), True)],
    ids=str,
)
def test_column_masks(dims: tuple[int, int], deterministic: bool, causal: bool) -> None:
    n = 700
    mask = masks.Document(torch.tensor([[100, 450, 150], [1, 600, 99]], device="cuda"), causal=causal)
    shape = {"seqlen_q": n, "seqlen_k": n, "head_dim": dims[0], "head_dim_v": dims[1]}
    keywords = {"mask": mask, "deterministic": deterministic, **drops()}
    check(Call(seed(), device="cuda", dtype=torch.float16, keywords=keywords, **shape), "hopper")  # type: ignore[arg-type]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_packed(dims: tuple[int, int], band: str) -> None:
    options = {"head_dim": dims[0], "head_dim_v": dims[1], "dtype": torch.bfloat16, "device": "cuda"}
    Packed(seed(), lengths_q=[300, 1, 0, 129, 517], keywords={**BANDS[band], **drops()}, **options).check("hopper")  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_elements_are_those_of_the_definition(dim: int, columns: bool) -> None:
    """Equal scores: with the unit vectors of some keys as values out is 0 where they are dropped, and nowhere else."""
    batch, heads, n = 2, 3, 333
    q = torch.zeros(batch, n, heads, dim, device="cuda", dtype=torch.bfloat16)
    given = drops(0.4)
    one = torch.tensor([given["dropout_seed"]], device="cuda")
    places = [torch.arange(size, device="cuda") for size in (batch, heads, n, n)]
    kept = keep_mask(one, 0.4, *places)
    mask = masks.Document(torch.tensor([n], device="cuda"), causal=False) if columns else None
    for start in range(0, n, dim):
        v = torch.zeros(batch, n, heads, dim, device="cuda", dtype=torch.bfloat16)
        count = min(dim, n - start)
        v[:, torch.arange(start, start + count), :, torch.arange(count)] = 1.0
        found = []
        for backend in ("hopper", "triton"):
            out = warploom.attention(q, q, v, mask=mask, backend=backend, **given)
            found.append(out.transpose(1, 2)[..., :count] != 0)
        assert torch.equal(found[0], kept[..., start : start + count]) and torch.equal(*found)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_gradients_drop_what_triton_drops(dim: int) -> None:
    q, k, v, dout = (torch.randn(2, 600, 4, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def gradients(backend: str) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = warploom.attention(*leaves, causal=True, dropout_p=0.5, dropout_seed=77, backend=backend)
        return torch.autograd.grad(out, leaves, dout)

    for a, b in zip(gradients("hopper"), gradients("triton"), strict=True):
        assert (a.float() - b.float()).norm() < 0.01 * b.float().norm()


def test_windows_that_begin_between_counters_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_next", NEXT)
    for left in (56, 60, 61, 62, 63):  # the first begins at key 144, where a counter does
        shape = {"seqlen_q": 100, "seqlen_k": 300, "head_dim": 64}
        keywords = {"window": (left, 0), **drops()}
        check(Call(seed(), device="cuda", dtype=torch.bfloat16, keywords=keywords, **shape), "hopper")  # type: ignore[arg-type]


def test_a_graph_draws_what_its_seed_says() -> None:
    q = torch.randn(1, 500, 4, 128, device="cuda", dtype=torch.bfloat16)
    number = torch.tensor([5], device="cuda")
    options: dict[str, Any] = {"dropout_p": 0.3, "backend": "hopper"}
    warploom.attention(q, q, q, dropout_seed=number, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = warploom.attention(q, q, q, dropout_seed=number, **options)
    found = []
    for value in (5, 6, 2**40 + 1):
        number.fill_(value)
        graph.replay()
        assert torch.equal(out, warploom.attention(q, q, q, dropout_seed=value, **options))
        found.append(out.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
