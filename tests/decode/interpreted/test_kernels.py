"""The Triton kernels in the interpreter: every case, bits, poison, and the append kernel against torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.decode.cases import BROAD, CASES, DEEP, case
from tests.decode.harness import Case, check, run
from tests.decode.paths import check_paths, random_trees
from warploom.decode.api import decode
from warploom.decode.append import append as torch_append
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.problem import AppendArgs, DecodeArgs
from warploom.decode.triton import launch, parts, plan
from warploom.decode.triton.config import Config, config
from warploom.decode.triton.parts import takes_groups
from warploom.decode.triton.tokens import append as triton_append


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


def shrink(monkeypatch: pytest.MonkeyPatch, full: int = 400, halved: int = 0, crowd: int = 128, **constants: int) -> None:
    """Splits of 32 keys, at most 16 of them: small cases then have many splits, groups of them, and long splits."""

    def small(rows: int, *_: int) -> Config:
        block_m = config(rows, 16, 16, 2, 8).block_m
        return Config(block_m=block_m, block_n=16, split=32, max_splits=16, warps=4, stages=2, full=full)

    def with_halves(rows: int, *_: int) -> Config:
        c = small(rows)
        return c if c.block_m == 64 else replace(c, halved=halved, crowd=crowd)

    monkeypatch.setattr(plan, "config", with_halves)
    monkeypatch.setattr(plan, "latent_config", small)
    for name, value in constants.items():
        monkeypatch.setattr(plan, name, value)


# Halves as units, as pairs, and in groups; walked by few programs.
HALVES: list[dict[str, int]] = [
    {"halved": 128, "crowd": 10**6},
    {"halved": 128, "crowd": 0},
    {"halved": 512, "full": 0},
    {"halved": 128, "crowd": 10**6, "_PROGRAMS": 0},
    {"halved": 128, "crowd": 0, "_PROGRAMS": 0},
]

TWO_HEADS = ["scale and sink", "pages of 16", "bfloat16"]


def interpretable(name: str) -> Case:
    """The case in float16 where it has bfloat16, which the interpreter multiplies as integers; mostly one kv head."""
    c = case(name, random.randrange(2**31))
    if c.dtype == torch.bfloat16:
        c = replace(c, dtype=torch.float16)
    return c if name in TWO_HEADS else replace(c, heads_q=c.heads_q // c.heads_kv, heads_kv=1)


@pytest.mark.parametrize("name", ["one query", "float16", "head_dim 256", "pages of 16", "pages of 256", "latent"])
def test_case_as_configured(name: str) -> None:
    check(interpretable(name), "triton")


@pytest.mark.parametrize("name", CASES)
def test_case_in_short_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    check(interpretable(name), "triton")


@pytest.mark.parametrize("name", ["empty sequences", "scale and sink", "window", "pages of 16"])
@pytest.mark.parametrize("constants", [{"full": 0}, {"full": 0, "_PROGRAMS": 0}, *HALVES], ids=str)
def test_grouped_and_walking(name: str, constants: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, **constants)
    check(interpretable(name), "triton")


@pytest.mark.parametrize("length,queries,heads", [(250, 1, 2), (700, 1, 2), (250, 12, 4), (700, 12, 4)])
def test_bits_do_not_depend_on_programs(length: int, queries: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 rows are a tile of 64, which has a loop for each split."""
    c = Case(random.randrange(2**31), [length], queries=queries, heads_q=heads, heads_kv=1, sink=True, capacity=704)
    results = []
    for constants in ({"full": 10**9}, {"full": 0}, {"full": 0, "_PROGRAMS": 0}, {"full": 10**9, "_PROGRAMS": 0}):
        shrink(monkeypatch, **constants)
        plan.plan.cache_clear()
        results.append(run(c, "triton"))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), c


@pytest.mark.parametrize("length", [1, 16, 17, 33, 96, 127, 128, 129, 250])
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_bits_of_halves_do_not_depend_on_programs(length: int, page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths about 128, to which splits are halved here; with more capacity and less."""
    c = Case(random.randrange(2**31), [length], heads_q=2, heads_kv=1, sink=True, capacity=256, page_size=page_size)
    results = []
    for constants in (*({**h, "halved": 128} for h in HALVES), {"halved": 128, "full": 0, "_PROGRAMS": 0}):
        shrink(monkeypatch, **constants)
        for capacity in (256, -(-length // 16) * 16):
            plan.plan.cache_clear()
            results.append(run(replace(c, capacity=capacity), "triton"))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), c


def test_bits_of_halves_do_not_depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd's sequences alone: halved or not, in units of halves alone and of pairs or groups in the crowd."""
    lengths = [120, 5, 128, 0, 129, 300, 70]
    seed = random.randrange(2**31)
    c = Case(seed, lengths, queries=2, heads_q=2, heads_kv=1, page_size=16, capacity=304)
    q, cache = c.q(), c.cache()
    assert isinstance(cache, PagedKVCache)
    crowds = []
    for full in (10**9, 0):
        shrink(monkeypatch, halved=128, crowd=8, full=full)
        plan.plan.cache_clear()
        crowds.append(decode(q, cache, return_lse=True, backend="triton"))
    shrink(monkeypatch, halved=128, crowd=8)
    for b in range(len(lengths)):
        plan.plan.cache_clear()
        lone = PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table[b : b + 1], cache.lengths[b : b + 1])
        want = decode(q[b : b + 1], lone, return_lse=True, backend="triton")
        for crowd in crowds:
            for one, several in zip(want, crowd, strict=True):
                assert torch.equal(one[0], several[b]), (seed, b)


def test_sequences_are_cut_by_their_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units and places for parts: of halves up to 128 keys, of pairs where a batch has programs enough, of groups."""
    shrink(monkeypatch, halved=128, crowd=8)

    def planned(batch: int, capacity: int) -> plan.Plan:
        c = Case(0, [capacity] * batch, heads_q=2, heads_kv=1)
        return launch._plan_of(_args(c.q(), c.cache()))[0]

    assert [(p.programs, p.max_units, p.crowded, p.grouped) for p in (planned(1, 128), planned(8, 128), planned(1, 512))] == [
        (8, 8, 256, 0), (4, 8, 32, 0), (16, 16, 256, 0),
    ]  # fmt: skip
    one = planned(3, 32)
    assert one.grouped and one.merge is None  # both halves are one program's, which writes the result


@triton.jit
def _asks(lengths_ptr, found_ptr, grouped, sequences, capacity):
    tl.store(found_ptr, takes_groups(grouped, lengths_ptr, sequences, capacity))


@pytest.mark.parametrize("sequences", [1, 128, 300])
def test_keys_of_all_sequences(sequences: int) -> None:
    """What is said, and what is found of lengths between 0 and the capacity."""
    lengths = torch.randint(-9, 99, (sequences,), dtype=torch.int32)
    lengths[-1] = 7
    keys = int(lengths.clamp(0, 64).sum())
    found = torch.empty((), dtype=torch.int32)
    for grouped, want in ((0, 0), (1, 1), (keys, 1), (keys + 1, 0)):
        _asks[(1,)](lengths, found, grouped, sequences, 64)
        assert int(found) == want, (keys, grouped)


@pytest.mark.parametrize("page_size", [None, 16])
def test_bits_do_not_depend_on_who_takes_groups(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the capacity no program, and by the keys of all: from 1,024 on, which the last sequence has or has not."""
    seed = random.randrange(2**31)
    results = []
    for many, length in ((10**9, 4), (4, 4), (4, 3)):
        shrink(monkeypatch, _MANY=many)
        plan.plan.cache_clear()
        c = Case(seed, [500, 20, 500, length], queries=2, heads_q=2, heads_kv=1, capacity=512, page_size=page_size)
        p = launch._plan_of(_args(c.q(), c.cache()))[0]
        assert p.merge is not None and p.grouped == (1024 if many == 4 else 0)
        results.append(run(c, "triton"))
    for out, lse in results[1:]:
        assert torch.equal(out[:3], results[0][0][:3]) and torch.equal(lse[:3], results[0][1][:3]), seed


@pytest.mark.parametrize("halved", [0, 128])
def test_bits_do_not_depend_on_who_takes_whole_sequences(halved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of one group, taken whole by no program, and from seven eighths of the capacity on, or a key less.

    Over pages numbers of heads that are powers of two are never taken so, and rows only on a GPU.
    """
    seed = random.randrange(2**31)
    results = []
    for alike, length in ((10**9, 126), (4, 126), (4, 125)):
        shrink(monkeypatch, halved=halved, crowd=8, _ALIKE=alike)
        plan.plan.cache_clear()
        lengths = [256, 0, 130, *[256] * 12, length]
        c = Case(seed, lengths, queries=2, heads_q=3, heads_kv=1, sink=True, capacity=256, page_size=16)
        p = launch._plan_of(_args(c.q(), c.cache()))[0]
        assert p.merge is not None and p.whole == (alike == 4) and p.grouped == (3584 if alike == 4 else 0)
        for other in (replace(c, heads_q=2), replace(c, page_size=None)):
            assert not launch._plan_of(_args(other.q(), other.cache()))[0].whole
        results.append(run(c, "triton"))
    for out, lse in results[1:]:
        assert torch.equal(out[:15], results[0][0][:15]) and torch.equal(lse[:15], results[0][1][:15]), seed


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("constants", [{}, {"halved": 128}, {"halved": 128, "crowd": 0}, {"full": 0}], ids=str)
def test_bits_do_not_depend_on_a_loop_over_one_unit(
    constants: dict[str, int], page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of one unit at the most, which take it in a loop or without one; of short sequences many have none."""
    seed = random.randrange(2**31)
    results = []
    for once in (True, False):
        shrink(monkeypatch, **constants)
        monkeypatch.setattr(plan, "_at_once", lambda s, programs, once=once: once)
        plan.plan.cache_clear()
        c = Case(seed, [500, 20, 0, 130], queries=2, heads_q=3, heads_kv=1, sink=True, capacity=512, page_size=page_size)
        p = launch._plan_of(_args(c.q(), c.cache()))[0]
        assert p.split._constants["ONCE"] == once
        results.append(run(c, "triton"))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), seed


@pytest.mark.parametrize(
    "batch,programs,head_dim,major",
    [(1, 16, 128, 9), (2, 16, 128, 9), (3, 8, 128, 9), (3, 10, 64, 9), (3, 10, 128, 10), (4, 10, 128, 9), (64, 10, 64, 9),
     (205, 9, 64, 9)],
)  # fmt: skip
def test_first_programs_walk_two_units(
    batch: int, programs: int, head_dim: int, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sequence's 16 splits, times a key head and the batch, are more than 36: three programs on 12 multiprocessors.

    All walk two where that makes two programs on each at the most, of middle head dims on Hopper.
    """
    shrink(monkeypatch)
    monkeypatch.setattr(plan, "_processors", lambda device: 12)
    monkeypatch.setattr(plan, "_PROGRAMS", 2048)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(launch, "plan", lambda shape: plan.plan(shape._replace(device=0)))
    c = Case(0, [512] * batch, heads_q=2, heads_kv=1, head_dim=head_dim, dtype=torch.float16)
    assert launch._plan_of(_args(c.q(), c.cache()))[0].programs == programs


@pytest.mark.parametrize(
    "processors,head_dim,pages,stages",
    [(9, 128, 0, 2), (10, 128, 0, 3), (13, 128, 0, 3), (14, 128, 0, 2), (15, 128, 0, 2), (12, 64, 0, 2), (12, 128, 1, 2)],
)
def test_a_stage_more_where_it_saves_a_round(
    processors: int, head_dim: int, pages: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 programs, of which a multiprocessor holds two with it and three without; of middle head dims, not over pages."""
    shrink(monkeypatch)
    monkeypatch.setattr(plan, "_processors", lambda device: processors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "plan", lambda shape: plan.plan(shape._replace(device=0, table_width=pages)))
    c = Case(0, [512] * 4, heads_q=2, heads_kv=1, head_dim=head_dim, dtype=torch.float16)
    p = launch._plan_of(_args(c.q(), c.cache()))[0]
    assert p.grid == (4, 10) and p.split._constants["num_stages"] == stages


@pytest.mark.parametrize(
    "batch,head_dim,pages,whole",
    [(24, 128, 0, True), (23, 128, 0, False), (27, 128, 0, False), (24, 64, 0, False), (24, 128, 1, False)],
)
def test_whole_sequences_of_rows_where_all_run_at_once(
    batch: int, head_dim: int, pages: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 13 multiprocessors two programs on each, and from 24 of them on; with a stage more than splits would have."""
    shrink(monkeypatch, _ALIKE=24)
    monkeypatch.setattr(plan, "_processors", lambda device: 13)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "plan", lambda shape: plan.plan(shape._replace(device=0, table_width=pages)))
    c = Case(0, [256] * batch, heads_q=2, heads_kv=1, head_dim=head_dim, dtype=torch.float16)
    p = launch._plan_of(_args(c.q(), c.cache()))[0]
    assert p.whole == whole and p.grouped == (256 * batch // 8 * 7 if whole else 0)
    assert p.split._constants["num_stages"] == 2 + whole


def test_bits_do_not_depend_on_neighbours_or_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, full=6)
    seed = random.randrange(2**31)
    lone = run(Case(seed, [150], queries=2), "triton")
    for capacity, page_size in ((2048, None), (256, 16), (160, 1)):
        crowd = run(Case(seed, [150, 5, 90, 0, 1], queries=2, capacity=capacity, page_size=page_size), "triton")
        for a, b in zip(lone, crowd, strict=True):
            assert torch.equal(a[0], b[0]), (seed, capacity, page_size)


@pytest.mark.parametrize("window", [(None, 0), (150, 0)])
def test_bits_do_not_depend_on_how_often_the_table_is_asked(window: tuple[int | None, int]) -> None:
    """Of wide rows once for 16 keys, where pages have as many; a tile's 64 keys lie in several pages."""
    seed = random.randrange(2**31)
    shape: dict[str, Any] = {"heads_q": 2, "heads_kv": 2, "head_dim": 128, "dtype": torch.float16}
    shape["keywords"] = {"window": window}
    want = run(Case(seed, [600, 70, 0], capacity=640, **shape), "triton")
    for page_size, keys in ((8, 1), (16, 16), (32, 16), (64, 1)):
        plan.plan.cache_clear()
        c = Case(seed, [600, 70, 0], capacity=640, page_size=page_size, **shape)
        assert launch._plan_of(_args(c.q(), c.cache()))[0].split._constants["STEP"] == keys
        for one, other in zip(run(c, "triton"), want, strict=True):
            assert torch.equal(one, other), (seed, page_size)


def test_bad_contents_stay_in_bounds() -> None:
    c = Case(random.randrange(2**31), [70, 30], page_size=16)
    cache = c.cache(poison=1.0)
    cache.block_table.copy_(torch.tensor([[-7, 2**31 - 1, 5, 99, 0], [1, 1, 1, 1, 1]]))
    cache.lengths.copy_(torch.tensor([2**30, -4]))
    out, lse = launch.forward(_args(c.q(), cache))
    assert out.isfinite().all() and out[0].any() and not out[1].any()
    assert lse[0].isfinite().all() and (lse[1] == float("-inf")).all()


@pytest.mark.parametrize("left", [None, 20])
@pytest.mark.parametrize("tree", [[[6, 5, 4, 3, 2, 1, 0]], [[0, 1, 2, 3, 4, 5, 6]], [[2**31 - 1, -(2**31), 0, 99, 1, 2, 5]]])
def test_bad_trees_stay_in_bounds(tree: list[list[int]], left: int | None) -> None:
    """A parent that is no earlier token makes a root."""
    c = Case(random.randrange(2**31), [70, 5], queries=7, heads_q=1, heads_kv=1)
    out, lse = launch.forward(_args(c.q(), c.cache())._replace(tree=torch.tensor(tree, dtype=torch.int32), left=left))
    rooted = [parent if 0 <= parent < t else -1 for t, parent in enumerate(tree[0])]
    options = {"tree": torch.tensor([rooted]), "window": (left, 0)}
    want = decode(c.q(), c.cache(), return_lse=True, backend="reference", **options)
    assert torch.allclose(out, want[0], rtol=1e-5, atol=1e-6) and torch.allclose(lse, want[1], rtol=1e-5, atol=1e-6), c


def test_bits_of_a_tree_do_not_depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, full=6)
    seed = random.randrange(2**31)
    shape: dict[str, Any] = {"queries": 7, "heads_q": 2, "heads_kv": 1}
    lone = run(Case(seed, [150], tree=[BROAD], **shape), "triton")
    crowd = run(Case(seed, [150, 5, 9], tree=[BROAD, DEEP, DEEP], capacity=176, page_size=16, **shape), "triton")
    for a, b in zip(lone, crowd, strict=True):
        assert torch.equal(a[0], b[0]), seed


@pytest.mark.parametrize("page_size,window", [(None, (9, -1)), (64, (2, 0)), (16, (63, 0)), (1, (None, -2))])
def test_a_window_shows_a_tree_what_plain_decode_of_a_path_sees(
    page_size: int | None, window: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    check_paths(replace(random_trees(page_size, window), heads_q=1), "triton")


def test_a_window_that_keeps_no_key_reads_none() -> None:
    """NaN in keys that every query's window hides once reached the result."""
    cache = Case(0, [40, 3], queries=4).cache()
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("inf"))
    for window in ((-1, None), (0, -1)):
        out, lse = decode(torch.ones(2, 4, 4, 16), cache, window=window, return_lse=True, backend="triton")
        assert not out.any() and bool((lse == float("-inf")).all()), window


def test_a_sink_of_any_stride() -> None:
    """Every second number of a tensor was once read as if they lay side by side."""
    c = Case(random.randrange(2**31), [40, 3])
    sinks = torch.randn(8)
    want = decode(c.q(), c.cache(), sink=sinks[::2].clone(), backend="triton")
    assert torch.equal(decode(c.q(), c.cache(), sink=sinks[::2], backend="triton"), want)


def test_a_visible_nan_stays() -> None:
    c = Case(random.randrange(2**31), [130, 130])
    for name in ("k", "v"):
        cache = c.cache()
        getattr(cache, name)[0, 77, 1, 3] = float("nan")
        out, _ = launch.forward(_args(c.q(), cache))
        assert out[0, :, 2:].isnan().any(-1).all() and out[0, :, :2].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("advance", [False, True])
def test_append(page_size: int | None, tokens: int, slots: bool, advance: bool) -> None:
    if slots and page_size is None:
        page_size = 4
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    drawn = Case(seed, [3, 60, 64, 0], capacity=64, page_size=page_size, head_dim=24, head_dim_v=8).cache(poison=7.0)
    k, v = (torch.randn(4, 2, tokens, dim, generator=generator).transpose(1, 2) for dim in (24, 8))
    table = None if page_size is None else drawn.block_table
    if table is not None:
        table[3, 0] = -1
    mapping = None
    if slots:
        pool = drawn.k_pages.shape[0] * page_size
        mapping = torch.randperm(pool, generator=generator)[: 4 * tokens].view(4, tokens) - 5
    kept = []
    for run_append in (torch_append, triton_append):
        caches = (drawn.k, drawn.v) if page_size is None else (drawn.k_pages, drawn.v_pages)
        state = [t.clone() for t in (*caches, drawn.lengths)]
        run_append(AppendArgs(*state, table, mapping, k, v, advance))
        kept.append(state)
    for torchs, tritons in zip(*kept, strict=True):
        assert torch.equal(torchs, tritons), seed


def _args(q: torch.Tensor, cache: KVCache | PagedKVCache) -> DecodeArgs:
    """Validated arguments without the checks of contents."""
    paged = isinstance(cache, PagedKVCache)
    k, v = (cache.k_pages, cache.v_pages) if paged else (cache.k, cache.v)
    table = cache.block_table if paged else None
    return DecodeArgs(q, k, v, cache.lengths, table, *[None] * 5, 0, 0.25, 0.0, "triton")


def test_what_holds_distances_of_keys() -> None:
    """32 bits to the last key of the last page, then their products, then 64; of k, v and scales whichever is furthest."""
    key, page = 8, 16 * 8
    last = 2**31 // page  # with so many pages the last key's distance is 2^31 - 8
    near, narrow, wide = parts.NEAR.value, parts.NARROW.value, parts.WIDE.value
    assert launch._places(last, 16, ((page, key), (page, key))) == near
    assert launch._places(last + 1, 16, ((page, key), (1, 1))) == narrow
    assert launch._places(last + 1, 16, ((1, 1), (page, key))) == narrow
    assert launch._places(2, 16, ((2**31 - 1, 1), (0, 0))) == narrow
    assert launch._places(1, 16, ((2**31 - 1, 1), (0, 0))) == near
    assert launch._places(1, 16, ((2**31, 1), (0, 0))) == wide


def test_keys_that_a_window_hides_from_every_path_may_hold_anything() -> None:
    """Of a root and two guesses, under a window that ends two tokens back: the three keys of their own."""
    q, k, v = (torch.randn(1, n, 1, 16) for n in (3, 40, 40))
    k[:, -4:], v[:, -4:] = float("nan"), float("nan")
    k[:, -4], v[:, -4] = 0.5, 0.5  # which the guesses see
    cache = KVCache(k, v, torch.tensor([40], dtype=torch.int32))
    options: dict[str, Any] = {"tree": torch.tensor([[-1, 0, 0]]), "window": (9, -2)}
    out, want = (decode(q, cache, backend=backend, **options) for backend in ("triton", "reference"))
    assert out.isfinite().all() and torch.allclose(out, want, rtol=1e-5, atol=1e-6)
