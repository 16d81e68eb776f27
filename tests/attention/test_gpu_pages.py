"""Kept launchers of calls over pages on a CUDA device: the bits of the checked way, whatever table and lengths hold."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.invariance import same
from warploom.attention import api, launcher
from warploom.runtime import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

BATCH, PAGE, WIDTH = 3, 16, 40
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and softcap": {"window": (200, 0), "softcap": 20.0},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 7},
    "batch_invariant": {"batch_invariant": True},
    "sink": {"sink": torch.ones(8)},
}


class Chunks:
    """Three sequences' chunks over one pool, whose table, lengths and numbers are new in every call."""

    def __init__(self, seed: int, shift: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        pages = BATCH * WIDTH

        def drawn(*shape: int) -> Tensor:
            found = torch.randn(*shape[:-1], shape[-1] + 8, generator=generator, device="cuda").bfloat16()
            return found.flatten()[shift : shift + torch.Size(shape).numel()].view(shape)

        self.q = drawn(300, 8, 64)
        table = torch.randperm(pages, generator=generator, device="cuda").view(BATCH, WIDTH).int()
        lengths = torch.randint(100, PAGE * WIDTH, (BATCH,), generator=generator, device="cuda").int()
        self.cache = warploom.PagedKVCache(drawn(pages, PAGE, 2, 64), drawn(pages, PAGE, 2, 64), table, lengths)
        cuts = torch.randint(1, 299, (2,), generator=generator, device="cuda").sort().values
        ends = torch.tensor([300], device="cuda")
        self.starts = torch.cat([ends - 300, cuts, ends]).int()

    def tensors(self) -> tuple[Tensor, ...]:
        """All that a graph reads."""
        cache = self.cache
        return self.q, self.starts, cache.block_table, cache.lengths, cache.k_pages, cache.v_pages

    def run(self, whole: bool, **options: Any) -> tuple[Tensor, Tensor]:
        options = {"causal": True, "return_lse": True, "max_seqlen_q": 300, "backend": "triton", **options}
        if "sink" in options:
            options["sink"] = options["sink"].cuda()
        if whole:
            return warploom.attention_varlen(self.q, self.cache, cu_seqlens_q=self.starts, **options)
        k, v, table, lengths = self.cache.k_pages, self.cache.v_pages, self.cache.block_table, self.cache.lengths
        return warploom.attention_varlen(self.q, k, v, self.starts, seqused_k=lengths, block_table=table, **options)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    dispatch.strict(False)


def skip_without(backend: str) -> None:
    refused = dispatch.find(backend).available()
    if refused is not None:
        pytest.skip(refused)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("whole", [False, True], ids=["pages", "cache"])
@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "triton") for name in OPTIONS), *((name, "hopper") for name in OPTIONS if name != "dropout")]
)
def test_the_bits_of_the_checked_way(name: str, backend: str, whole: bool, shift: int) -> None:
    skip_without(backend)
    for seed in range(6):
        chunks = Chunks(seed, shift)
        with patch.object(launcher, "find", lambda *_, **__: launcher.NOTHING):
            want = chunks.run(whole, backend=backend, **OPTIONS[name])
        again = AssertionError("checked again") if seed > 2 and not shift else None
        with patch.object(api, "varlen_args", side_effect=again, wraps=api.varlen_args):
            got = chunks.run(whole, backend=backend, **OPTIONS[name])
        assert all(same(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("whole", [False, True], ids=["pages", "cache"])
def test_a_graph_follows_table_and_lengths(whole: bool, backend: str) -> None:
    skip_without(backend)
    chunks = Chunks(0)
    for _ in range(3):
        chunks.run(whole, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chunks.run(whole, backend=backend)
    for seed in (1, 2):
        other = Chunks(seed)
        for mine, theirs in zip(chunks.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)
        graph.replay()
        assert all(same(a, b) for a, b in zip(got, other.run(whole, backend=backend), strict=True))


@pytest.mark.parametrize("backend", ["triton", "hopper", "ampere"])
def test_sinks_with_gaps_and_expanded(backend: str) -> None:
    """Triton read both as if their logits lay side by side."""
    q, k, v = (torch.randn(2, 300, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2))
    numbers = torch.full((64,), float("nan"), device="cuda")
    numbers[:24] = torch.randn(24, device="cuda")
    skip_without(backend)
    for sink in (numbers[:24:3], numbers[:1].expand(8)):
        for _ in range(3):
            got = warploom.attention(q, k, v, causal=True, sink=sink, backend=backend, return_lse=True)
            want = warploom.attention(q, k, v, causal=True, sink=sink.clone(), backend=backend, return_lse=True)
            assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_tables_with_gaps_between_columns() -> None:
    """They were read as if they had none."""
    chunks = Chunks(0)
    pools, table, used = (chunks.cache.k_pages, chunks.cache.v_pages), chunks.cache.block_table, chunks.cache.lengths
    wide = torch.full((BATCH, 2 * WIDTH), -1, dtype=torch.int32, device="cuda")
    wide[:, ::2] = table
    want, _ = chunks.run(False)
    for given in (wide[:, ::2], table.t().contiguous().t()):
        for _ in range(4):
            options = {"seqused_k": used, "causal": True, "max_seqlen_q": 300, "backend": "triton"}
            assert same(warploom.attention_varlen(chunks.q, *pools, chunks.starts, block_table=given, **options), want)


def test_decode_with_a_prefix_by_the_short_way() -> None:
    cache = warploom.PagedKVCache.allocate(4, 2048, 2, 64, device="cuda")
    for seed in range(5):
        torch.manual_seed(seed)
        cache.k_pages.normal_()
        cache.v_pages.normal_()
        cache.block_table[1:, : 32 * seed] = cache.block_table[0, : 32 * seed]
        cache.lengths.copy_(torch.tensor([2000, 1900, 1999, 1500]))
        q = torch.randn(4, 1, 8, 64, device="cuda").bfloat16()
        want = warploom.decode(q, cache, return_lse=True, backend="triton")
        for prefix in (cache.shared_prefix(), 512 * (seed > 0)):
            got = warploom.decode(q, cache, prefix=prefix, return_lse=True, backend="triton")
            assert all(same(a, b) for a, b in zip(got, want, strict=True)), (seed, prefix)
