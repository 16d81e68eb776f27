"""decode under torch's machinery: the ops' contracts, compile, autocast, empty inputs, layouts and poison."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.decode.harness import Case, run
from warploom import KVCache, PagedKVCache, decode


def drawn(page_size: int | None = None, dtype: torch.dtype = torch.float32) -> Case:
    return Case(random.randrange(2**31), [40, 7, 0], queries=2, page_size=page_size, capacity=64, dtype=dtype, sink=True)


@pytest.mark.parametrize("page_size", [None, 8])
def test_opcheck(page_size: int | None) -> None:
    c = drawn(page_size)
    cache = c.cache(poison=0.0)
    table = None if page_size is None else cache.block_table
    k, v = (cache.k, cache.v) if page_size is None else (cache.k_pages, cache.v_pages)
    permuted = c.q().transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.rand(3, 1, 70).half()
    roots = torch.tensor([[-1, -1]], dtype=torch.int32)
    for q, tree, given in ((c.q(), None, (None, "", 0)), (permuted, roots, (bias, "key", 0))):
        args = (q, k, v, cache.lengths, table, c.sinks(), tree, None, None, 20, 0, 0.25, 0.0, "cpu", *given, False, None, 0)
        torch.library.opcheck(torch.ops.warploom.decode.default, args)
    new = torch.randn(3, 2, 2, 16)
    torch.library.opcheck(torch.ops.warploom.decode_append.default, (k, v, cache.lengths, table, None, new, new, True))


@pytest.mark.parametrize("page_size", [None, 8])
def test_compiled_steps(page_size: int | None) -> None:
    """Three steps of append and decode in one graph, which no length and no step recompiles."""
    c = drawn(page_size)
    caches = [c.cache(poison=0.0) for _ in range(2)]
    generator = torch.Generator().manual_seed(c.seed)

    def step(q: torch.Tensor, cache: KVCache | PagedKVCache, k: torch.Tensor) -> torch.Tensor:
        cache.append(k, 2 * k)
        return decode(q, cache, window=(30, 0))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in range(3):
        q, k = torch.randn(3, 1, 4, 16, generator=generator), torch.randn(3, 1, 2, 16, generator=generator)
        with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
            assert torch.equal(compiled(q, caches[0], k), step(q, caches[1], k)), c
    assert torch.equal(caches[0].lengths, caches[1].lengths)


def test_compile_that_builds_the_cache() -> None:
    c = drawn()
    held = c.cache(poison=0.0)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return decode(q, KVCache(k, v, lengths), return_lse=True)[1]

    args = (c.q(), held.k, held.v, held.lengths)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*args), step(*args))


def test_autocast_casts_the_query() -> None:
    c = drawn(dtype=torch.bfloat16)
    cache = c.cache()
    with torch.autocast("cpu", torch.bfloat16):
        out = decode(c.q().float(), cache)
    assert out.dtype == torch.bfloat16 and torch.equal(out, decode(c.q(), cache))


def test_dispatch_modes_see_the_op() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    c = drawn()
    with Record():
        decode(c.q(), c.cache())
    assert "warploom.decode.default" in seen


@pytest.mark.parametrize("shape", [(0, 1, 4, 16), (2, 0, 4, 16), (2, 1, 0, 16)])
def test_empty_queries(shape: tuple[int, ...]) -> None:
    cache = KVCache.allocate(shape[0], 8, 2, 16, dtype=torch.float32)
    out, lse = decode(torch.zeros(shape), cache, return_lse=True)
    assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_room_at_all(backend: str) -> None:
    sink = torch.tensor([1.0, -2.0, 0.0, 3.0])
    lengths = torch.zeros(2, dtype=torch.int32)
    pages = torch.zeros(0, 8, 2, 16)
    nowhere = PagedKVCache(pages, pages, torch.zeros(2, 3, dtype=torch.int32), lengths)
    no_table = PagedKVCache(torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 16), torch.zeros(2, 0, dtype=torch.int32), lengths)
    for cache in (KVCache.allocate(2, 0, 2, 16, dtype=torch.float32), nowhere, no_table):
        out, lse = decode(torch.randn(2, 1, 4, 16), cache, sink=sink, return_lse=True, backend=backend)
        assert not out.any() and torch.equal(lse, sink.expand(2, 4)[..., None])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strided_query_and_cache(backend: str) -> None:
    c = Case(random.randrange(2**31), [40, 7], queries=3)
    q, cache = c.q(), c.cache(poison=0.0)
    want = decode(q, cache, backend=backend)
    turned = q.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (cache.k, cache.v)]
    got = decode(turned, KVCache(*heads_first, cache.lengths), backend=backend)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), c


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_visible_nan_stays_in_its_sequence_and_heads(backend: str, name: str) -> None:
    c = Case(random.randrange(2**31), [1200, 40])
    cache = c.cache()
    getattr(cache, name)[0, 77, 1, 3] = float("nan")
    out = decode(c.q(), cache, backend=backend)
    assert out[0, :, 2:].isnan().any(-1).all() and out[0, :, :2].isfinite().all() and out[1].isfinite().all(), c


def test_the_reference_hides_exactly() -> None:
    """A NaN that query 1 sees and query 0 does not reaches query 1 alone."""
    c = Case(random.randrange(2**31), [40], queries=2)
    cache = c.cache()
    cache.k[0, 39] = float("nan")
    out = decode(c.q(), cache, backend="reference")
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all(), c


def test_matches_a_prefill_step_by_step() -> None:
    """Growing the cache token by token gives the rows of one causal attention call."""
    from warploom import attention

    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 30, heads, 16, generator=generator) for heads in (4, 2, 2))
    cache = KVCache.allocate(1, 30, 2, 16, dtype=torch.float32)
    rows = []
    for token in range(30):
        cache.append(k[:, token : token + 1], v[:, token : token + 1])
        rows.append(decode(q[:, token : token + 1], cache))
    want = attention(q.double(), k.double(), v.double(), causal=True, backend="reference")
    assert torch.allclose(torch.cat(rows, 1).double(), want, rtol=1e-5, atol=1e-5), seed


def test_bfloat16_of_a_sequence_alone() -> None:
    c = Case(random.randrange(2**31), [900, 3, 55], dtype=torch.bfloat16)
    together = run(c, "cpu")
    alone = run(replace(c, lengths=[900]), "cpu")
    # The first query of a batch and of a batch of one are drawn alike.
    assert torch.equal(together[0][0], alone[0][0]) and torch.equal(together[1][0], alone[1][0]), c
