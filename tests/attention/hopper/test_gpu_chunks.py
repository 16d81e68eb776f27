"""Query offsets on Hopper, on an H100 or H200: every case, tiling and drawn problem, equal runs, contents out of range."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.attention import gpu_chunks
from tests.attention.chunked import CHUNKED, Chunked, chunked
from tests.attention.gpu_chunks import MASKED, NEEDS_HOPPER, inputs, masked, offsets
from tests.attention.harness import Call
from warploom.masks import ColumnMask

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory"), NEEDS_HOPPER]

results = partial(gpu_chunks.results, backend="hopper")

# Dropout is another implementation's, and so is what has no positive scale.
CASES = [name for name in CHUNKED if "dropout" not in name and name != "negative scale"]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


def seed() -> int:
    return random.randrange(2**31)


def check(given: Chunked, deterministic: bool) -> None:
    """Whether dQ is added in any order or in that of keys; else torch's own setting would say."""
    given.keywords["deterministic"] = deterministic
    given.check("hopper")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, deterministic: bool) -> None:
    check(chunked(name, seed(), dtype=torch.bfloat16, device="cuda"), deterministic)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(
    "name", ["no band", "causal", "window", "documents", "four vectors", "four vectors of each entry, causal"]
)
def test_case_in_every_tiling(name: str, dims: tuple[int, int]) -> None:
    dtype = torch.float16 if dims in ((96, 96), (192, 192)) else torch.bfloat16
    for deterministic in (False, True):
        given = chunked(name, seed(), dtype=dtype, device="cuda", head_dim=dims[0], head_dim_v=dims[1])
        check(given, deterministic)


def drawn(dim: int, draw: random.Random) -> Chunked:
    """Any rows of any whole, beyond the keys too, under a band, vectors, both or nothing."""
    rows, keys = draw.randrange(1, 500), draw.randrange(1, 700)
    whole = rows + draw.choice((0, 1, 64, 300, 900))
    first = [draw.choice((0, whole - rows, draw.randrange(whole - rows + 1))) for _ in range(draw.randrange(1, 5))]
    heads_kv, group = draw.choice((1, 2)), draw.choice((1, 2, 7))
    keywords: dict[str, Any] = {}
    if draw.random() < 0.7:
        names = draw.choice([("lts",), ("ute",), ("lts", "lte"), ("lts", "ute"), ("lts", "lte", "uts", "ute")])
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        shape = draw.choice((1, len(first))), draw.choice((1, heads_kv, heads_kv * group)), keys
        vectors = {n: torch.randint(-9, whole + 9, shape, generator=generator, dtype=torch.int32).to("cuda") for n in names}
        keywords["mask"] = ColumnMask(vectors.pop("lts", None), **vectors)
    band = draw.random()
    if band < 0.4:
        keywords["causal"] = True
    elif band < 0.8:
        keywords["window"] = draw.choice((0, 20, 150, -30)), draw.choice((0, 40))
    return Chunked(
        Call(
            draw.randrange(2**31),
            seqlen_q=rows,
            seqlen_k=keys,
            heads_q=heads_kv * group,
            heads_kv=heads_kv,
            head_dim=dim,
            dtype=torch.bfloat16,
            device="cuda",
            sink=dim == 64 and draw.random() < 0.3,
            lse_gradient=dim == 64 and draw.random() < 0.3,
            strided=draw.random() < 0.3,
            keywords=keywords,
        ),
        whole,
        tuple(first),
        shared=draw.random() < 0.2,
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_drawn(dim: int) -> None:
    number = seed()
    print(f"seed {number}")
    draw = random.Random(number)
    for _ in range(12):
        check(drawn(dim, draw), dim == 128)


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_equal_runs(name: str, dim: int) -> None:
    """Deterministic gradients, and out and lse whatever the gradients are."""
    given, at, options = inputs(dim), offsets(1300, 40), masked(name)
    want = results(*given, at, **options)
    for _ in range(20):
        for a, b in zip(results(*given, at, **options), want, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(results(*given, at, **{**options, "deterministic": False})[:2], want, strict=False):
            assert torch.equal(a, b)


@pytest.mark.parametrize("offset", [-5, 2**31 - 1, -(2**31)])
def test_offsets_out_of_range_are_held_to_it(offset: int) -> None:
    """A device's contents are not looked at."""
    held = min(max(offset, 0), 2**29)
    for options in ({"causal": True}, {"window": (2**20, 0)}, masked("documents")):
        found = [results(*given, offsets(7, at), **options) for given in [inputs(64)] for at in (offset, held)]
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def test_offsets_need_not_lie_together() -> None:
    given, at = inputs(64), offsets(100, 700)
    apart = torch.stack([at, at + 13], dim=1)[:, 0]
    for a, b in zip(results(*given, apart, causal=True), results(*given, at, causal=True), strict=True):
        assert torch.equal(a, b)


def test_dispatch_takes_them() -> None:
    """In training too; with dropout the next implementation does."""
    given = inputs()
    found = results(*given, offsets(0, 700), causal=True, backend=None)
    for a, b in zip(found, results(*given, offsets(0, 700), causal=True), strict=True):
        assert torch.equal(a, b)
    options: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 3, "causal": True}
    dropped = [results(*given, offsets(0, 700), backend=name, **options) for name in (None, "triton")]
    for a, b in zip(*dropped, strict=True):
        assert torch.equal(a, b)
