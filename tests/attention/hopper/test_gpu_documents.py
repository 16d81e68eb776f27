"""Masks of documents in a row on an H100 or H200, which run as packed sequences: against the fp64 reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.harness import Call, model, results
from warploom import masks
from warploom.attention import hopper
from warploom.attention.judge import judge

MISSING = hopper.BACKEND.available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("here", "poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

BF16 = torch.bfloat16
SEQLEN = 1800
LENGTHS = {
    "one": [SEQLEN],
    "three": [1000, 37, 763],
    "padding behind": [500, 300],
    "nothing but padding": [0, 0],
    "empty ones": [0, 700, 0, 0, 1100],
    "past the end": [900, 600],  # and 600 more on the device, where nobody looks
}


def seed() -> int:
    return random.randrange(2**31)


def check(keywords: dict[str, Any], dim: int = 128, dtype: torch.dtype = BF16, **changes: Any) -> None:
    call = Call(seed(), 1, SEQLEN, SEQLEN, 4, 2, dim, dtype=dtype, device="cuda", keywords=keywords, **changes)
    want, low, found = results(call, "reference", torch.float64), model(call), results(call, "hopper")
    for name, value in found.items():
        verdict = judge(name, value, want[name], low[name], call.dtype)
        assert verdict.passed, f"{verdict}\n{call}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name: str, causal: bool) -> None:
    lengths = torch.tensor(LENGTHS[name], device="cuda")
    if name == "past the end":
        lengths = torch.cat([lengths, lengths[1:]])
    check({"mask": masks.Document(lengths, causal)})


@pytest.mark.parametrize("dim", [40, 64, 96, 128, 192, 256])
def test_head_dims(dim: int) -> None:
    check({"mask": masks.Document([1000, 37, 763])}, dim, torch.float16)


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"window": (300, 0)},
        {"window": (100, 50)},
        {"softcap": 3.0},
        {"dropout_p": 0.2, "dropout_seed": 7},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    check({"mask": masks.Document([1000, 37, 663]), **options}, 64)


@pytest.mark.parametrize("changes", [{"sink": True}, {"lse_gradient": True}, {"strided": True}], ids=str)
def test_features(changes: dict[str, Any]) -> None:
    check({"mask": masks.Document([1000, 37, 663], causal=False)}, **changes)


def test_launchers_and_graphs_see_new_lengths() -> None:
    """From the third call of a kind on nothing is checked, and a graph reads the lengths that are there when it is replayed."""
    q, k, v, _ = Call(seed(), 1, SEQLEN, SEQLEN, 4, 2, 128, dtype=BF16, device="cuda").tensors()

    def attend(mask: masks.Mask) -> Tensor:
        return warploom.attention(q, k, v, mask=mask, backend="hopper")

    def want(first: int) -> Tensor:
        found: Tensor = warploom.attention(q, k, v, mask=masks.Document([first, SEQLEN - first]), backend="triton")
        return found

    for first in (100, 1000, 1500, 3, 800):
        torch.testing.assert_close(attend(masks.Document([first, SEQLEN - first])), want(first), atol=2e-2, rtol=2e-2)
    lengths = torch.tensor([500, SEQLEN - 500], device="cuda")
    mask = masks.Document(lengths)
    attend(mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(mask)
    for first in (500, 1200):
        lengths.copy_(torch.tensor([first, SEQLEN - first]))
        graph.replay()
        torch.testing.assert_close(out, want(first), atol=2e-2, rtol=2e-2)


def test_deterministic_gradients_have_equal_bits() -> None:
    tensors = Call(0, 1, SEQLEN, SEQLEN, 4, 2, 128, dtype=BF16, device="cuda").tensors()[:3]
    q, k, v = (t.requires_grad_() for t in tensors if t is not None)
    mask = masks.Document([300, 700, 37, 763])
    out = warploom.attention(q, k, v, mask=mask, deterministic=True, backend="hopper")
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(100):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
