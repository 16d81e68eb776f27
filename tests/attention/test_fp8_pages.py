"""attention_varlen() over a cache: FP8 pages as the numbers they stand for, chunks as decode, accuracy, refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.fp8_pages import CASES, Fp8Pages, same_bits
from tests.decode.test_fp8 import drawn, filled, plain, with_outliers
from warploom import PagedKVCache, attention, attention_varlen, decode, explain
from warploom.bias import ALiBi
from warploom.fp8 import quantize
from warploom.kernels.e4m3 import E4M3, rotate

GRANULARITIES = ["tensor", "head", "token"]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, backend: str) -> None:
    Fp8Pages(random.randrange(2**31), **CASES[name]).check(backend)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_pages_are_the_numbers_they_stand_for(backend: str, granularity: str) -> None:
    drawing = random.randrange(2**31)
    k, v, q = drawn(drawing, 3, 40, 2, 40), drawn(drawing + 1, 3, 40, 2, 24), drawn(drawing + 2, 30, 6, 40)
    cache = filled(k, v, granularity, 7, 8)
    cache.lengths.copy_(ints(40, 13, 0))
    starts = ints(0, 12, 25, 28)
    bias = ALiBi.standard(6)
    for options in ({"causal": True}, {"window": (9, 0), "softcap": 3.0, "sink": drawn(drawing, 6)}, {"bias": bias}):
        given: dict[str, Any] = {"return_lse": True, "backend": backend, **options}
        got = attention_varlen(q, cache, cu_seqlens_q=starts, **given)
        want = attention_varlen(rotate(q, 7), plain(cache), None, starts, **given)  # type: ignore[call-overload]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), (drawing, options)
    half = attention_varlen(q.bfloat16(), cache, cu_seqlens_q=starts, backend=backend)
    exact = attention_varlen(rotate(q.bfloat16(), 7).bfloat16().float(), plain(cache), cu_seqlens_q=starts, backend=backend)  # type: ignore[arg-type]
    assert half.dtype == torch.bfloat16 and torch.equal(half, exact.bfloat16()), drawing


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_pages_whose_heads_lie_an_element_apart(granularity: str) -> None:
    """torch's flash kernel misreads such keys, and what leaves FP8 pages lies as they do."""
    drawing = random.randrange(2**31)
    k, v, q = (drawn(drawing + n, *shape) for n, shape in enumerate(((2, 40, 2, 24), (2, 40, 2, 24), (30, 4, 24))))
    cache = filled(k, v, granularity, None, 8)
    pages, size, heads, dim = cache.k_pages.shape
    room = drawn(drawing, pages * size * heads + dim).to(E4M3)  # of numbers that several keys share
    apart = room.as_strided(cache.k_pages.shape, (size * heads, heads, 1, 1))
    found = []
    for k_pages in (apart, apart.clone(memory_format=torch.contiguous_format)):
        other = PagedKVCache(k_pages, cache.v_pages, cache.block_table, cache.lengths, cache.k_scale, cache.v_scale)
        found.append(attention_varlen(q, other, cu_seqlens_q=ints(0, 12, 30), return_lse=True, backend="cpu"))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b), drawing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_cache_is_its_pages(dtype: torch.dtype) -> None:
    """Of other dtypes too: the table and the lengths are the cache's."""
    cache = PagedKVCache.allocate(2, 30, 2, 16, page_size=8, dtype=dtype)
    cache.append(drawn(1, 2, 21, 2, 16).to(dtype), drawn(2, 2, 21, 2, 16).to(dtype))
    q, starts = drawn(3, 9, 4, 16).to(dtype), ints(0, 4, 9)
    want = attention_varlen(
        q, cache.k_pages, cache.v_pages, starts, seqused_k=cache.lengths, block_table=cache.block_table, causal=True
    )
    assert torch.equal(attention_varlen(q, cache, cu_seqlens_q=starts, causal=True), want)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_one_set_of_bits(backend: str) -> None:
    same_bits(backend, torch.float32, 300, chunks=False)


def test_the_switch_and_the_keyword_reach_a_cache() -> None:
    cache = filled(drawn(1, 1, 20, 2, 16), drawn(2, 1, 20, 2, 16), "token", None, 8)
    call: tuple[Any, ...] = (drawn(3, 5, 4, 16), cache)
    for keywords, wanted in (({}, False), ({"batch_invariant": True}, True)):
        assert explain(*call, cu_seqlens_q=ints(0, 5), **keywords).batch_invariant is wanted
    with pytest.raises(TypeError, match="batch_invariant"):
        attention_varlen(*call, cu_seqlens_q=ints(0, 5), batch_invariant=1)  # type: ignore[call-overload]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_prompt_in_chunks_is_the_prompt_and_its_last_row_is_decode(granularity: str) -> None:
    drawing = random.randrange(2**31)
    k, v, q = drawn(drawing, 2, 50, 2, 32), drawn(drawing + 1, 2, 50, 2, 32), drawn(drawing + 2, 2, 50, 4, 32)
    whole = filled(k, v, granularity, 3, 16)
    want = attention_varlen(q.flatten(0, 1), whole, cu_seqlens_q=ints(0, 50, 100), causal=True).unflatten(0, (2, 50))
    cache = PagedKVCache.allocate(2, 64, 2, 32, dtype=E4M3, granularity=granularity, hadamard_seed=3)  # type: ignore[arg-type]
    if granularity != "token":
        for own, given in ((cache.k_scale, whole.k_scale), (cache.v_scale, whole.v_scale)):
            assert own is not None
            own.copy_(given)
    for begin, end in ((0, 17), (17, 18), (18, 50)):
        cache.append(k[:, begin:end], v[:, begin:end])
        part, n = q[:, begin:end].flatten(0, 1), end - begin
        out = attention_varlen(part, cache, cu_seqlens_q=ints(0, n, 2 * n), causal=True)
        assert torch.allclose(out.unflatten(0, (2, n)), want[:, begin:end], atol=2e-5), drawing
    assert torch.allclose(decode(q[:, -1:], cache), want[:, -1:], atol=2e-5), drawing


def with_a_channel(seed: int, *shape: int) -> Tensor:
    found = drawn(seed, *shape)
    found[..., 3] *= 30
    return found


def errors(draw: Any, granularity: str, seed: int | None, drawing: int) -> tuple[float, float]:
    """Of a chunk of 32 queries over FP8 pages, and over pages of bf16: the norm of out's error over out's, against fp64."""
    q, k, v = draw(drawing, 32, 4, 128), draw(drawing + 3, 1, 512, 2, 128), draw(drawing + 6, 1, 512, 2, 128)
    want = attention(q[None].double(), k.double(), v.double(), causal=True)[0]
    half = PagedKVCache.allocate(1, 512, 2, 128)
    half.append(k.bfloat16(), v.bfloat16())
    starts = ints(0, 32)
    outs = [
        attention_varlen(q.bfloat16(), cache, cu_seqlens_q=starts, causal=True)
        for cache in (filled(k, v, granularity, seed, 16), half)
    ]
    fp8, bf16 = (((out.double() - want).norm() / want.norm()).item() for out in outs)
    return fp8, bf16


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seed", [None, 0])
def test_the_error_on_normal_numbers(granularity: str, seed: int | None) -> None:
    """Half an ulp of e4m3 is a sixteenth of a number, and errors of many numbers average out."""
    drawing = random.randrange(2**31)
    fp8, bf16 = errors(drawn, granularity, seed, drawing)
    assert bf16 < fp8 < 1 / 16, (drawing, fp8, bf16)


@pytest.mark.parametrize("draw,most", [(with_outliers, 1 / 16), (with_a_channel, 1 / 8)], ids=["outliers", "a channel"])
def test_the_error_on_outliers_with_a_scale_a_token(draw: Any, most: float) -> None:
    """In the median: of a channel that a query happens to point along, errors are several times that at times."""
    found = sorted(errors(draw, "token", 0, random.randrange(2**31))[0] for _ in range(9))
    assert found[4] < most, found


def haystack(drawing: int, length: int, needles: int = 3, dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (needles, dim), k and v (length, dim), v of one of 16 kinds; and the kind at the key that each query asks for."""
    q, k = drawn(drawing, needles, dim), drawn(drawing + 1, length, dim)
    generator = torch.Generator().manual_seed(drawing)
    places, kinds = torch.randperm(length, generator=generator)[:needles], torch.randint(16, (length,), generator=generator)
    k[places] = 2.5 * q
    return q, k, torch.nn.functional.one_hot(kinds, 16).float(), kinds[places]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_needles_in_8192_keys_are_found_over_fp8_pages(granularity: str) -> None:
    drawing = random.randrange(2**31)
    q, k, v, kinds = haystack(drawing, 8192)
    cache = filled(k[None, :, None], v[None, :, None], granularity, 0, 16)
    half = PagedKVCache.allocate(1, 8192, 1, 64, head_dim_v=16)
    half.append(k[None, :, None].bfloat16(), v[None, :, None].bfloat16())
    for each in (cache, half):
        out = attention_varlen(q[:, None].bfloat16(), each, cu_seqlens_q=ints(0, len(q)))
        assert torch.equal(out[:, 0].argmax(-1), kinds), drawing


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
def test_needles_in_8192_keys_are_found_by_quantised_calls(granularity: Any) -> None:
    drawing = random.randrange(2**31)
    q, k, v, kinds = haystack(drawing, 8192)
    given = [t[None, :, None].bfloat16() for t in (q, k, v)]
    for out in (attention(*quantize(*given, granularity=granularity)), attention(*given)):
        assert torch.equal(out[0, :, 0].argmax(-1), kinds), drawing


def test_a_nan_reaches_its_own_sequence_and_head() -> None:
    k, v, q = drawn(1, 2, 20, 2, 16), drawn(2, 2, 20, 2, 16), drawn(3, 6, 4, 16)
    k[0, 7, 1, 3] = float("nan")
    for backend in ("reference", "cpu"):
        out = attention_varlen(q, filled(k, v, "token", 0, 8), cu_seqlens_q=ints(0, 3, 6), backend=backend)
        assert out[:3, 2:].isnan().all() and out[:3, :2].isfinite().all() and out[3:].isfinite().all()


def test_compiled_chunks() -> None:
    caches = [PagedKVCache.allocate(2, 40, 2, 16, dtype=E4M3) for _ in range(2)]
    starts = ints(0, 5, 10)

    def step(q: Tensor, k: Tensor, cache: PagedKVCache) -> Tensor:
        cache.append(k, 2 * k)
        return attention_varlen(q, cache, cu_seqlens_q=starts, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in range(2):
        q, k = drawn(n, 10, 4, 16), drawn(n + 5, 2, 5, 2, 16)
        assert torch.equal(compiled(q, k, caches[0]), step(q, k, caches[1]))


def test_autocast_casts_queries_as_it_casts_others() -> None:
    cache, q = filled(drawn(1, 1, 20, 2, 16), drawn(2, 1, 20, 2, 16), "token", 0, 8), drawn(3, 5, 4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_varlen(q, cache, cu_seqlens_q=ints(0, 5))
    assert torch.equal(out, attention_varlen(q.bfloat16(), cache, cu_seqlens_q=ints(0, 5)))


def test_explain_names_the_pages() -> None:
    cache = filled(drawn(1, 1, 20, 2, 16), drawn(2, 1, 20, 2, 16), "token", 0, 8)
    plan = explain(drawn(3, 5, 4, 16), cache, cu_seqlens_q=ints(0, 5), causal=True)
    assert "pages in FP8" in plan.call and plan.implementation == "cpu"


def call(**changes: Any) -> Tensor:
    given: dict[str, Any] = {
        "q": drawn(3, 5, 4, 16),
        "k": filled(drawn(1, 1, 20, 2, 16), drawn(2, 1, 20, 2, 16), "token", 0, 8),
        "cu_seqlens_q": ints(0, 5),
    }
    return attention_varlen(**given | changes)


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"v": ints(0, 5)}, TypeError, "v comes with the cache that k is: leave it out; give cu_seqlens_q by its name"),
        ({"seqused_k": ints(20)}, TypeError, "seqused_k comes with the cache"),
        ({"block_table": ints(0)[None]}, TypeError, "block_table comes with the cache"),
        ({"cu_seqlens_k": ints(0, 20)}, TypeError, "cu_seqlens_k comes with the cache"),
        ({"descale": (torch.ones(1),) * 3}, TypeError, "descale goes with FP8 tensors, and k is a cache, which has its scales"),
        ({"out_dtype": torch.float16}, TypeError, "out_dtype goes with FP8 tensors.*out has q's dtype"),
        ({"q": drawn(3, 5, 4, 16).to(E4M3)}, TypeError, "q is of dtype torch.float8_e4m3fn; over a cache of"),
        ({"q": quantize(*[torch.zeros(1, 5, 2, 16)] * 3)[0]}, TypeError, "q is an Fp8Tensor; over a cache"),
        ({"q": drawn(3, 5, 4, 24)}, ValueError, "q and k must have the same head_dim, got 24 and 16"),
        ({"q": drawn(3, 5, 4, 16).requires_grad_()}, ValueError, "q requires grad, and attention in FP8 has no backward"),
        ({"sink": torch.zeros(4).requires_grad_()}, ValueError, "sink requires grad, and attention in FP8"),
        ({"bias": ALiBi(torch.zeros(4).requires_grad_())}, ValueError, "bias requires grad, and attention in FP8"),
        ({"cu_seqlens_q": ints(0, 2, 5)}, ValueError, "seqused_k has 1 entries but cu_seqlens_q describes 2 sequences"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q must be an int32 tensor of batch . 1 entries, got None"),
        ({"return_stats": ("max_logits",)}, ValueError, "return_stats does not take paged keys"),
        ({"backend": "hopper"}, (RuntimeError, ValueError), "hopper"),
    ],
)  # fmt: skip
def test_calls_refused(changes: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(**changes)


def test_what_is_left_out_is_named() -> None:
    q, k = drawn(1, 5, 2, 16), drawn(2, 5, 2, 16)
    with pytest.raises(TypeError, match=r"v must be a torch\.Tensor, got None"):
        attention_varlen(q, k, cu_seqlens_q=ints(0, 5))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor"):
        attention_varlen(q, k, k)  # type: ignore[call-overload]
