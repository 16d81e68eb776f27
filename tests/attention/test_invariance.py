"""batch_invariant: a sequence's bits on the CPU, the switch, what dispatch, compilers and explain() make of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.invariance import check, differs, same
from warploom.attention.ampere import BACKEND as AMPERE
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.cpu import Cpu
from warploom.attention.hopper.fp8_plan import problem_refusal
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.runtime import invariance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sequence_has_one_set_of_bits(backend: str, dtype: torch.dtype) -> None:
    check(range(2), backend, dtype=dtype, longest=60)


def test_these_batches_tell_whether_the_switch_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "asked", lambda value: False)
    assert differs(range(3), "reference", longest=60)


@pytest.mark.parametrize("bias", ["tensor", "alibi", "relative"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_biases_of_batch_entries(backend: str, bias: str) -> None:
    """And dropout, by which a sequence keeps its bits in its place."""
    q, k, v = (torch.randn(3, 40, heads, 16) for heads in (4, 2, 2))

    def part(entries: slice) -> Any:
        if bias == "tensor":
            return matrix[entries]
        return warploom.bias.ALiBi(slopes[entries]) if bias == "alibi" else warploom.bias.Relative(table)

    matrix, slopes, table = torch.randn(3, 4, 40, 40), torch.rand(3, 4), torch.randn(4, 31)
    options: dict[str, Any] = {"batch_invariant": True, "backend": backend, "return_lse": True}
    out, lse = warploom.attention(q, k, v, bias=part(slice(None)), **options)
    for b in range(3):
        at = slice(b, b + 1)
        own = warploom.attention(q[at], k[at], v[at], bias=part(at), **options)
        assert same(out[at], own[0]) and same(lse[at], own[1])
    dropped = {"dropout_p": 0.3, "dropout_seed": 5, **options}
    out, _ = warploom.attention(q, k, v, **dropped)
    neighbours = torch.randn(3, 40, 4, 16)
    neighbours[1] = q[1]
    assert same(warploom.attention(neighbours, k, v, **dropped)[0][1], out[1])


def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What calls on the CPU are told, as they come."""
    found: list[bool] = []
    forward = Cpu.forward

    def noted(self: Cpu, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        found.append(args.batch_invariant)
        return forward(self, args)

    monkeypatch.setattr(Cpu, "forward", noted)
    return found


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    found, t = seen(monkeypatch), torch.randn(1, 5, 1, 16)
    starts = torch.tensor([0, 5], dtype=torch.int32)

    def call(**options: Any) -> bool:
        warploom.attention(t, t, t, **options)
        warploom.attention_varlen(t[0], t[0], t[0], starts, **options)
        assert found[-2] == found[-1]
        return found[-1]

    assert not call() and call(batch_invariant=True)
    with warploom.batch_invariant():
        assert call() and call(batch_invariant=None) and not call(batch_invariant=False)
        with warploom.batch_invariant(False):
            assert not call()
        assert call()
    assert not call()
    with pytest.raises(KeyError), warploom.batch_invariant():
        raise KeyError
    assert not call()
    try:
        warploom.batch_invariant()
        assert call()
    finally:
        warploom.batch_invariant(False)
    assert not call()


def test_an_object_of_the_switch_serves_many_blocks() -> None:
    """An inner block of one object once ended the outer one's promise, and a later block that of what was before it."""
    switch = warploom.batch_invariant()
    with switch:
        with switch:
            assert invariance.enabled
        assert invariance.enabled
    assert not invariance.enabled
    with warploom.batch_invariant():
        with switch:
            assert invariance.enabled
        assert invariance.enabled
        with warploom.batch_invariant(False), switch:
            assert invariance.enabled
        assert invariance.enabled
    assert not invariance.enabled


def test_blocks_of_two_threads_end_in_any_order() -> None:
    """The first to end once ended the other's promise, and the other left the switch on."""
    for begun in (False, True):  # the other's block begins before or after the first one's end
        one = warploom.batch_invariant()
        one.__enter__()
        other = warploom.batch_invariant()
        if begun:
            other.__enter__()
        one.__exit__(None, None, None)
        assert invariance.enabled == begun
        if not begun:
            other.__enter__()
        assert invariance.enabled
        other.__exit__(None, None, None)
        assert not invariance.enabled
    for first in (0, 1):
        both = warploom.batch_invariant(), warploom.batch_invariant()
        both[1].__enter__()
        both[0].__enter__()
        both[first].__exit__(None, None, None)
        assert invariance.enabled
        both[1 - first].__exit__(None, None, None)
        assert not invariance.enabled

    def request(barrier: threading.Barrier, found: list[bool]) -> None:
        barrier.wait()
        for _ in range(200):
            with warploom.batch_invariant():
                barrier.wait()  # so that all are within, and end in any order
                found.append(invariance.enabled)

    barrier = threading.Barrier(4)
    found: list[bool] = []
    threads = [threading.Thread(target=request, args=(barrier, found)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found) and len(found) == 800 and not invariance.enabled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_calls_over_a_cache_heed_the_keyword(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """They once took the switch alone, and explain() said what the keyword asked for."""
    found, q = seen(monkeypatch), torch.randn(5, 1, 16)
    cache = warploom.PagedKVCache.allocate(1, 32, 1, 16, dtype=dtype)
    cache.append(*torch.randn(2, 1, 9, 1, 16))
    starts = torch.tensor([0, 5], dtype=torch.int32)
    for held in (False, True):
        with warploom.batch_invariant(held):
            for asked in (None, False, True):
                call = {"cu_seqlens_q": starts, "batch_invariant": asked}
                warploom.attention_varlen(q, cache, **call)
                assert found[-1] == (held if asked is None else asked) == warploom.explain(q, cache, **call).batch_invariant
    with pytest.raises(TypeError, match="batch_invariant must be"):
        warploom.attention_varlen(q, cache, cu_seqlens_q=starts, batch_invariant=1)  # type: ignore[call-overload]


@pytest.mark.parametrize("value", [1, "yes", 0.0])
def test_it_is_a_flag(value: object) -> None:
    t = torch.randn(1, 5, 1, 16)
    with pytest.raises(TypeError, match="batch_invariant must be True, False or None"):
        warploom.attention(t, t, t, batch_invariant=value)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="enabled must be True or False"):
        warploom.batch_invariant(value)  # type: ignore[arg-type]
    assert not invariance.enabled


def test_compiled_calls_follow_the_switch_and_a_block_within(monkeypatch: pytest.MonkeyPatch) -> None:
    found, t = seen(monkeypatch), torch.randn(1, 5, 1, 16)

    def both(t: Tensor) -> Tensor:
        with warploom.batch_invariant():
            within = warploom.attention(t, t, t)
        return within + warploom.attention(t, t, t)

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(both, fullgraph=True, backend=backend)
    compiled(t)
    with warploom.batch_invariant():
        compiled(t)
    compiled(t)
    assert found == [True, False, True, True, True, False] and not invariance.enabled
    with warploom.batch_invariant(), warploom.batch_invariant():
        compiled(t)
    assert len(graphs) == 2 and not invariance.enabled


def test_explain_says_so() -> None:
    t = torch.randn(1, 5, 1, 16)
    plan = warploom.explain(t, t, t, batch_invariant=True)
    assert plan.batch_invariant and plan.to_dict()["batch_invariant"] is True
    assert "batch-invariant" in plan.call and "each sequence by itself" in plan.reason and "deterministic" in plan.call
    plain = warploom.explain(t, t, t)
    assert not plain.batch_invariant and "batch-invariant" not in str(plain)
    with warploom.batch_invariant():
        assert warploom.explain(t, t, t, backend="reference").batch_invariant


def test_gradients_are_deterministic() -> None:
    t = torch.randn(1, 5, 1, 16)
    assert dense_args(t, t, t, batch_invariant=True, deterministic=False).deterministic
    assert not dense_args(t, t, t, batch_invariant=False).deterministic
    leaves = [torch.randn(2, 40, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    for backend in ("cpu", "reference"):
        once, again = (
            torch.autograd.grad(warploom.attention(*leaves, batch_invariant=True, backend=backend).square().sum(), leaves)
            for _ in range(2)
        )
        assert all(same(a, b) for a, b in zip(once, again, strict=True))


def problem(**changes: Any) -> AttentionProblem:
    t = torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16)
    return replace(AttentionProblem.from_args(dense_args(t, t, t, batch_invariant=True), False), device="cuda", **changes)


def test_who_does_not_promise_it_refuses_in_words() -> None:
    assert "no batch invariance" in (AMPERE.supports(problem()) or "")
    assert "no batch invariance in FP8" in (problem_refusal(problem(dtype=torch.float8_e4m3fn)) or "")


def test_what_torch_runs_is_refused_under_the_switch() -> None:
    q = torch.randn(1, 2, 5, 16)
    mask = torch.rand(5, 5) > 0.3
    warploom.scaled_dot_product_attention(q, q, q, mask)
    with warploom.batch_invariant():
        warploom.scaled_dot_product_attention(q, q, q, is_causal=True)
        for function in (warploom.scaled_dot_product_attention, warploom.explain):
            with pytest.raises(ValueError, match="batch_invariant: torch's function"):
                function(q, q, q, attn_mask=mask)


def cache_of(k: Tensor, v: Tensor, lengths: Tensor, paged: bool) -> warploom.KVCache | warploom.PagedKVCache:
    if not paged:
        return warploom.KVCache(k, v, lengths)
    pools = [t.unflatten(1, (-1, 8)).flatten(0, 1) for t in (k, v)]
    count = k.shape[1] // 8
    table = torch.arange(k.shape[0] * count, dtype=torch.int32).view(-1, count)
    return warploom.PagedKVCache(*pools, table, lengths)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_decode_runs_the_call_of_a_chunk(backend: str, paged: bool) -> None:
    """Of equal queries and keys it has equal bits: on the CPU no more is promised."""
    q = torch.randn(3, 2, 4, 16)
    k, v = (torch.randn(3, 40, 2, 16) for _ in range(2))
    lengths = torch.tensor([40, 1, 0], dtype=torch.int32)
    cache = cache_of(k, v, lengths, paged)
    for options in ({}, {"window": (9, 0), "softcap": 3.0, "sink": torch.randn(4), "scale": 0.3}, {"window": (2, -5)}):
        options = {"return_lse": True, "backend": backend, **options}
        plain = warploom.decode(q, cache, **options)
        with warploom.batch_invariant():
            out, lse = warploom.decode(q, cache, **options)
        for got, want in zip((out, lse), plain, strict=True):
            torch.testing.assert_close(got, want)
        if options.get("window") != (2, -5):
            chunk, _ = warploom.attention(q[:1], k[:1], v[:1], **options, causal=True, batch_invariant=True)
            assert same(out[:1], chunk)


@pytest.mark.parametrize("granularity", ["token", "tensor"])
@pytest.mark.parametrize("paged", [False, True])
def test_decode_over_fp8_runs_the_call_of_a_chunk(paged: bool, granularity: str) -> None:
    kind: Any = warploom.PagedKVCache if paged else warploom.KVCache
    cache = kind.allocate(3, 48, 2, 16, dtype=torch.float8_e4m3fn, granularity=granularity)
    cache.append(*torch.randn(2, 3, 40, 2, 16))
    cache.lengths.copy_(torch.tensor([40, 1, 0]))
    q = torch.randn(3, 2, 4, 16)
    plain = warploom.decode(q, cache, return_lse=True)
    with warploom.batch_invariant():
        out, lse = warploom.decode(q, cache, return_lse=True)
        if paged:
            starts = torch.arange(0, 8, 2, dtype=torch.int32)
            chunk = warploom.attention_varlen(q.flatten(0, 1), cache, cu_seqlens_q=starts, causal=True)
            assert same(out.flatten(0, 1), chunk)
    torch.testing.assert_close((out, lse), plain)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("bias", ["alibi", "alibi of batches", "distance", "one side", "key", "key of batches"])
def test_decode_with_a_bias_runs_the_call_of_a_chunk(bias: str, paged: bool) -> None:
    q, k, v = torch.randn(2, 2, 4, 16), *(torch.randn(2, 40, 2, 16) for _ in range(2))
    lengths = torch.tensor([40, 23], dtype=torch.int32)
    given = {
        "alibi": warploom.bias.ALiBi(torch.rand(4)),
        "alibi of batches": warploom.bias.ALiBi(torch.rand(2, 4)),
        "distance": warploom.bias.Relative(torch.randn(4, 7)),
        "one side": warploom.bias.Relative(torch.randn(1, 32), buckets="t5", bidirectional=False),
        "key": warploom.bias.Key(torch.randn(1, 1, 50)),
        "key of batches": warploom.bias.Key(torch.randn(2, 4, 50).masked_fill(torch.rand(2, 4, 50) < 0.3, float("-inf"))),
    }[bias]
    options: dict[str, Any] = {"bias": given, "return_lse": True}
    plain = warploom.decode(q, cache_of(k, v, lengths, paged), **options)
    with warploom.batch_invariant():
        out, lse = warploom.decode(q, cache_of(k, v, lengths, paged), **options)
        one = slice(0, 1)
        alone = warploom.decode(q[one], cache_of(k[one], v[one], lengths[one], paged), **options | {"bias": first_of(given)})
    torch.testing.assert_close((out, lse), plain)
    assert same(out[one], alone[0]) and same(lse[one], alone[1])


def first_of(bias: Any) -> Any:
    """The bias of the first of the batch's sequences."""
    if isinstance(bias, warploom.bias.ALiBi) and bias.slopes.ndim == 2:
        return warploom.bias.ALiBi(bias.slopes[:1])
    return warploom.bias.Key(bias.values[:1]) if isinstance(bias, warploom.bias.Key) else bias


def test_decode_keeps_its_kernels_for_what_no_prompt_has() -> None:
    q, tree = torch.randn(1, 3, 4, 16), torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    cache = warploom.KVCache(torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16), torch.tensor([30], dtype=torch.int32))
    empty = warploom.KVCache.allocate(1, 0, 2, 16, dtype=torch.float32)
    want = warploom.decode(q, cache, tree=tree)
    with warploom.batch_invariant():
        assert same(warploom.decode(q, cache, tree=tree), want)
    with warploom.batch_invariant():
        assert not warploom.decode(q, empty).any()
        with pytest.raises(ValueError, match="hopper"):
            warploom.decode(q, cache, backend="hopper")


def test_packed_tokens_of_no_sequence() -> None:
    t, starts = torch.randn(9, 2, 16), torch.tensor([0, 4, 4], dtype=torch.int32)
    for backend in ("cpu", "reference"):
        out, lse = warploom.attention_varlen(t, t, t, starts, batch_invariant=True, backend=backend, return_lse=True)
        assert not out[4:].any() and (lse[:, 4:] == float("-inf")).all()
    assert varlen_args(t, t, t, starts, batch_invariant=True).batch_invariant
    nobody = torch.randn(0, 5, 2, 16)
    for backend in ("cpu", "reference"):
        assert warploom.attention(nobody, nobody, nobody, batch_invariant=True, backend=backend).shape == nobody.shape
