"""explain() and prepare() of decode() calls: what runs over a cache, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.invariance import same
from warploom import KVCache, PagedKVCache
from warploom.bias import ALiBi, Key, Relative
from warploom.decode import triton
from warploom.decode.cpu import Cpu
from warploom.decode.problem import DecodeArgs, DecodeProblem


def pages(dtype: torch.dtype = torch.float32) -> PagedKVCache:
    cache = PagedKVCache.allocate(2, 100, 2, 32, page_size=16, dtype=dtype)
    cache.append(*torch.randn(2, 2, 40, 2, 32))
    return cache


def test_a_plan_names_the_call_what_runs_and_who_refused() -> None:
    plan = warploom.explain(torch.randn(2, 3, 8, 32), pages(), window=(50, 0), sink=torch.zeros(8), softcap=3.0)
    assert plan.call == (
        "decode float32 on cpu; batch 2, 3 queries over 112 keys, heads 8/2, head_dim 32; pages of 16; "
        "window (left 50, right 0); softcap; sink"
    )
    assert plan.implementation == "cpu" and plan.reason == "the first that does not refuse"
    assert [name for name, _ in plan.refused] == ["hopper", "triton"]
    assert plan.batch_invariant and plan.to_dict()["call"] == plan.call and "refused   triton: " in str(plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "1 query over"),
        ({"bias": ALiBi.standard(8)}, "bias (ALiBi)"),
        ({"bias": Relative(torch.zeros(8, 5))}, "bias (Relative)"),
        ({"bias": Key(torch.zeros(1, 1, 112))}, "bias (Key)"),
        ({"tree": torch.tensor([[-1]])}, "; tree"),
        ({"prefix": 0}, "pages of 16 in FP8"),
    ],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else "",
)
def test_what_a_call_carries(options: dict[str, Any], words: str) -> None:
    cache = pages(torch.float8_e4m3fn) if "FP8" in words else pages()
    assert words in warploom.explain(torch.randn(2, 1, 8, 32), cache, **options).call


def test_caches_that_are_contiguous_latent_or_empty() -> None:
    latent = KVCache.allocate(1, 20, 1, 48, head_dim_v=32, dtype=torch.float32, latent=True)
    assert "head_dim 48/32; a contiguous cache, latent" in warploom.explain(torch.randn(1, 1, 4, 48), latent).call
    nothing = KVCache.allocate(1, 0, 2, 32, dtype=torch.float32)
    assert warploom.explain(torch.randn(1, 1, 4, 32), nothing).implementation == "none"


def test_a_prefix_that_is_not_shared_is_said_to_be_read_by_each() -> None:
    cache, q = pages(), torch.randn(2, 1, 8, 32)
    plan = warploom.explain(q, cache, prefix=cache.shared_prefix())
    assert plan.call.endswith("shared prefix") and plan.reason.endswith("each sequence reads the prefix itself")
    assert "reads the prefix itself" in warploom.explain(q, cache, prefix=cache.shared_prefix(), backend="reference").reason


def problem(**changes: Any) -> DecodeProblem:
    sizes = {"batch": 20, "queries": 1, "capacity": 4096, "heads_q": 32, "heads_kv": 8, "head_dim": 128, "head_dim_v": 128}
    return DecodeProblem(**{"device": "cuda", "dtype": torch.bfloat16, "prefix": True, "page_size": 16, **sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "the prefix's whole splits are read once for up to 16 sequences"),
        ({"batch": 4, "capacity": 16384}, "up to 4 sequences"),
        ({"batch": 3, "capacity": 16384}, "each sequence reads the prefix itself"),
        ({"batch": 8, "capacity": 4080}, "each sequence reads the prefix itself"),
        ({"batch": 8}, "up to 8 sequences"),
        ({"batch": 8, "fp8": True}, "each sequence reads the prefix itself"),
        ({"head_dim": 256}, "up to 8 sequences"),
        ({"queries": 16}, "each sequence reads the prefix itself"),
        ({"left": 100}, "each sequence reads the prefix itself"),
        ({"bias": "key"}, "each sequence reads the prefix itself"),
        ({"bias": "alibi", "tree": True}, "up to 16 sequences"),
        ({"capacity": 512}, "each sequence reads the prefix itself"),
        ({"prefix": False}, "splits of 256 keys, 512 past 4096, longer ones past 16384, 16 rows × 64 keys a tile"),
    ],
    ids=str,
)
def test_what_triton_shares(changes: dict[str, Any], words: str) -> None:
    pytest.importorskip("triton")
    assert triton.BACKEND.describe(problem(**changes)).endswith(words)


def test_under_the_switch_the_chunk_that_runs_is_described() -> None:
    cache, q = pages(), torch.randn(2, 1, 8, 32)
    with warploom.batch_invariant():
        plan = warploom.explain(q, cache, bias=ALiBi.standard(8))
        tree = warploom.explain(q, cache, tree=torch.tensor([[-1]]))
        with pytest.raises(ValueError, match="backend='hopper' cannot run this call"):
            warploom.explain(q, cache, backend="hopper")
    assert plan.call.startswith("decode float32") and plan.implementation == "cpu" and plan.batch_invariant
    assert "each sequence by itself" in plan.reason and "attention_varlen() over the cache's pages" in plan.reason
    assert "attention_varlen" not in tree.reason and tree.batch_invariant


def test_a_call_of_attention_varlen_over_the_cache_stays_one() -> None:
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    for plan in (
        warploom.explain(torch.randn(2, 8, 32), pages(), cu_seqlens_q=starts),
        warploom.explain(torch.randn(2, 8, 32), pages(), None, starts),
    ):
        assert plan.call.startswith("paged float32")


@pytest.mark.parametrize("function", [warploom.explain, warploom.prepare])
def test_what_decode_does_not_take_is_refused_as_it_would_be(function: Any) -> None:
    q, cache = torch.randn(2, 1, 8, 32), pages()
    for name, value in (("causal", True), ("v", cache.v_pages), ("return_stats", ("max_logits",))):
        with pytest.raises(TypeError, match=f"{name} is no argument of decode.*cu_seqlens_q"):
            function(q, cache, **{name: value})
    with pytest.raises(TypeError, match="is no argument of decode"):
        warploom.explain(q, cache, attn_mask=torch.ones(1, 112))
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        function(q[0], cache)
    with pytest.raises(ValueError, match="backend='hopper' cannot run this call: "):
        function(q, cache, backend="hopper")


def test_prepare_runs_the_call_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = Cpu.forward

    def noted(self: Cpu, args: DecodeArgs) -> tuple[Tensor, Tensor]:
        seen.append(args.q.shape[1])
        return forward(self, args)

    monkeypatch.setattr(Cpu, "forward", noted)
    cache = pages()
    before = cache.k_pages.clone()
    plan = warploom.prepare(torch.empty(2, 4, 8, 32), cache, tree=torch.tensor([[-1, 0, 0, 1]]))
    assert seen == [4] and "tree" in plan.call and same(cache.k_pages, before)
