"""Shared prefixes in the interpreter: bits of plain decode, what is read once, and calls that go the plain way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.decode.interpreted.test_kernels import fresh_plans, shrink
from tests.decode.prefixes import Alike, check_bits
from warploom.bias import ALiBi, Key, Relative
from warploom.decode.arguments import decode_args
from warploom.decode.cache import KVCache
from warploom.decode.triton import launch, plan

__all__ = ["fresh_plans"]

pytestmark = pytest.mark.usefixtures("products_in_order")


def drawn(lengths: list[int], common: list[int], **changes: Any) -> Alike:
    return Alike(random.randrange(2**31), lengths, common, **changes)


def args_of(c: Alike, cache: Any, prefix: Any) -> Any:
    keywords = {"scale": None, "softcap": 0.0, "window": None, "sink": None, "tree": None, "bias": None, **c.keywords}
    return decode_args(c.q(), cache, **keywords, prefix=prefix)


def short(monkeypatch: pytest.MonkeyPatch, split: int = 16, max_splits: int = 16, **constants: int) -> None:
    """Splits of a tile, which makes groups of 128 keys."""
    shrink(monkeypatch, **constants)
    small = plan.config
    monkeypatch.setattr(plan, "config", lambda *sizes: replace(small(*sizes), split=split, max_splits=max_splits))


# All begin alike, ragged; two groups and a lone sequence between them.
ALL = ([60, 49, 140], [0, 48, 48])
GROUPS = ([40, 38, 20, 150, 147], [0, 32, 0, 0, 144])
GROUPED = {"full": 0}


@pytest.mark.parametrize(
    "page_size,which,constants",
    [(None, ALL, {}), (8, GROUPS, GROUPED), (16, ALL, GROUPED), (64, ([150, 140], [0, 128]), {}), (1, ([33, 40], [0, 33]), {})],
    ids=str,
)
def test_bits(page_size: int | None, which: Any, constants: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, **constants)
    check_bits(drawn(*which, page_size=page_size))


@pytest.mark.parametrize(
    "lengths,common,constants",
    [
        ([60, 20, 0, 66, 9], [0, 48, 48, 48, 48], {}),  # sequences shorter than the prefix, and an empty one
        ([0, 0], [0, 0], {}),
        ([48, 48, 48], [0, 48, 48], GROUPED),  # everything
        ([40, 50], [0, 0], {}),  # nothing
        ([60], [0], {}),
    ],
)
def test_bits_of_ragged_lengths(
    lengths: list[int], common: list[int], constants: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    short(monkeypatch, **constants)
    check_bits(drawn(lengths, common))


@pytest.mark.parametrize("constants", [{}, {"full": 0, "_PROGRAMS": 0}], ids=["splits", "grouped, by one program"])
def test_bits_of_longer_splits(constants: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of 32 keys a split and one of 48, which shares nothing with them."""
    short(monkeypatch, max_splits=8, **constants)
    check_bits(drawn([150, 140, 270], [0, 128, 128]))


@pytest.mark.parametrize(
    "lengths,common,page_size",
    [
        ([60, 0, 66, 33, 90, 12], [0, 0, 0, 32, 0, 0], 8),  # two share, an empty sequence and others do not
        ([40, 33, 128, 20, 100, 90], [0, 32, 0, 0, 0, 80], 1),
        ([128, 128], [0, 112], 64),
        ([30, 50], [0, 0], 16),  # nothing
        ([64, 70, 64], [0, 64, 64], None),  # all of two
    ],
)
@pytest.mark.parametrize("merging", [2, 1024])
def test_bits_of_crowds_whose_sequences_are_one_unit(
    lengths: list[int], common: list[int], page_size: int | None, merging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decode writes results without a merge: so do sequences that share nothing, and programs merge several rows."""
    short(monkeypatch, full=0, _MERGING=merging)
    c = drawn(lengths, common, page_size=page_size, keywords={"sink": torch.tensor([1.0, -1.0])})
    cache = c.cache()
    p, _, _ = launch._plan_of(args_of(c, cache, c.hint(cache) or 1))
    assert p.whole and p.merge is not None and p.merge_grid[0] == min(2 * len(lengths), merging)
    check_bits(c)


@pytest.mark.parametrize("constants", [{"crowd": 10**6}, {"crowd": 0}, {"full": 0}, {"full": 0, "_PROGRAMS": 0}], ids=str)
@pytest.mark.parametrize(
    "lengths,common,page_size",
    [
        ([120, 128, 70], [0, 96, 50], 16),  # three halves and more
        ([120, 140, 150, 128], [0, 112, 128, 128], 16),  # to 128 keys and past them: those two share, of whole splits
        ([250, 20, 33, 260], [0, 16, 16, 32], 8),
        ([64, 60, 0, 61], [0, 48, 0, 0], None),
        ([127, 127], [0, 127], 1),
    ],
)
def test_bits_of_halves(
    lengths: list[int], common: list[int], page_size: int | None, constants: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits of 32 keys, of 16 in sequences to 128 keys."""
    shrink(monkeypatch, halved=128, **constants)
    check_bits(drawn(lengths, common, page_size=page_size))


def test_halves_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 keys three halves: those of the second sequence may hold anything."""
    shrink(monkeypatch, halved=128)
    c = drawn([70, 60], [0, 48], page_size=None)
    cache = c.cache()
    assert isinstance(cache, KVCache)
    want = c.run(None, cache=cache)
    args = args_of(c, cache, 48)
    cache.k[1, :48], cache.v[1, :48] = float("nan"), float("nan")
    for a, b in zip(want, launch.forward(args), strict=True):
        assert torch.equal(a, b), c


def test_own_keys_are_read_as_by_plain_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of what nobody shares takes the tiles and stages of plain decode, whose memory lets as many programs run.

    Its programs keep the loop that plain ones of one unit are spared.
    """
    for constants in ({}, GROUPED):
        short(monkeypatch, **constants)
        c = drawn([140, 140], [0, 64])
        cache = c.cache()
        found, plain = (launch._plan_of(args_of(c, cache, prefix))[0] for prefix in (cache.shared_prefix(), None))
        assert found.share is not None and found.grid == plain.grid
        assert found.split._constants | {"SHARED": False, "ONCE": True} == plain.split._constants


def test_bits_of_splits_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, split=48)
    check_bits(drawn([120, 110], [0, 104], page_size=8))


@pytest.mark.parametrize(
    "changes",
    [
        # Two chunks of 20 rows in fp32.
        {"lengths": [36, 34, 38, 35], "common": [0, 32, 32, 32], "queries": 2, "heads_q": 5, "dtype": torch.float32},
        {"queries": 3, "heads_q": 7},  # 21 rows: tiles of 32
        {"heads_q": 4, "heads_kv": 2, "head_dim": 24},
        {"keywords": {"softcap": 2.0, "sink": torch.ones(2)}},
        {"queries": 4, "keywords": {"window": (None, -3)}},
        {"queries": 4, "keywords": {"tree": torch.tensor([[-1, 0, 0, 1]]), "bias": ALiBi(torch.ones(2) / 9)}},
        {"queries": 2, "keywords": {"bias": ALiBi(torch.tensor([[0.1, 0.2]]) * torch.arange(1, 3)[:, None])}},
    ],
    ids=str,
)
def test_bits_of_options(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, full=6)
    check_bits(drawn(**{"lengths": [34, 40], "common": [0, 32], "dtype": torch.float16, **changes}))


@pytest.mark.parametrize("granularity,page_size", [("token", 16), ("token", None), ("head", 64)])
def test_bits_of_fp8(granularity: Any, page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch)
    c = drawn([34, 33, 40], [0, 32, 32], page_size=page_size)
    made = c.cache()
    k, v = (made.k, made.v) if isinstance(made, KVCache) else (made.k_pages, made.v_pages)
    scales = [torch.rand(k.shape[:3]) if granularity == "token" else torch.rand(1) for _ in range(2)]
    if page_size is None:  # rows that begin alike have like scales
        for scale in scales:
            scale[1:, :32] = scale[:1, :32]
    parts = [t.nan_to_num(3.0).to(torch.float8_e4m3fn) for t in (k, v)]
    rest = [made.lengths] if page_size is None else [made.block_table, made.lengths]
    cache = type(made)(*parts, *rest, *scales, hadamard_seed=0)
    for a, b in zip(c.run(None, cache=cache), c.run(c.hint(cache), cache=cache), strict=True):
        assert torch.equal(a, b), c


@pytest.mark.parametrize("queries,heads_q,chunk", [(1, 2, 4), (5, 2, 2)])
def test_what_is_shared_is_read_once(queries: int, heads_q: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk reads its first sequence's keys: those of the others may hold anything up to the last whole split."""
    short(monkeypatch)
    c = drawn([70, 49, 53, 60], [0, 48, 48, 48], page_size=None, queries=queries, heads_q=heads_q)
    cache = c.cache()
    assert isinstance(cache, KVCache)
    want = c.run(None, cache=cache)
    args = args_of(c, cache, 48)
    assert launch._plan_of(args)[0].chunk == chunk
    for b in range(4):
        # Of 49 keys five queries all see 45: two whole splits, and the third is the sequence's own.
        whole = 32 if b == 1 and queries == 5 else 48
        if b % chunk:
            cache.k[b, :whole], cache.v[b, :whole] = float("nan"), float("nan")
    for a, b in zip(want, launch.forward(args), strict=True):
        assert torch.equal(a, b), c


@pytest.mark.parametrize(
    "changes",
    [
        {"keywords": {"window": (40, 0)}},
        {"keywords": {"bias": Key(torch.zeros(1, 1, 80))}},
        {"keywords": {"bias": Relative(torch.zeros(2, 5))}},
        {"queries": 16, "heads_q": 3},  # the rows of one sequence fill a program
    ],
    ids=str,
)
def test_the_plain_way(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch)
    c = drawn([70, 49, 60], [0, 48, 48], **changes)
    cache = c.cache()
    found, _, numbers = launch._plan_of(args_of(c, cache, cache.shared_prefix()))
    plain, _, without = launch._plan_of(args_of(c, cache, None))
    assert found.chunk == 0 and numbers == without and found.split._constants == plain.split._constants


def test_bad_contents_stay_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table, lengths and a prefix that say anything."""
    short(monkeypatch)
    c = drawn([40, 30, 36], [0, 16, 16])
    cache = c.cache()
    cache.k_pages.nan_to_num_(1.0)
    cache.v_pages.nan_to_num_(1.0)
    args = args_of(c, cache, cache.shared_prefix())
    cache.block_table.copy_(torch.tensor([[-7, 2**31 - 1, 99]] * 3))
    cache.lengths.copy_(torch.tensor([2**30, -4, 2**30]))
    for keys in ([0, 2**31 - 1, -5, 2**31 - 1], [9, 99, 99, -1]):
        prefix = torch.tensor(keys, dtype=torch.int32)
        out, _ = launch.forward(args._replace(prefix=prefix))
        assert out.isfinite().all() and out[0].any() and not out[1].any()


def test_chunks_are_even() -> None:
    c = drawn([600] * 17, [0, *[512] * 16], heads_q=4, dtype=torch.float16)
    args = args_of(c, c.cache(), 512)
    p, _, numbers = launch._plan_of(args)
    assert p.chunk == 9 and numbers.sequences == 17 and numbers.prefix_keys == 512
    assert p.share is not None and p.share._constants["BLOCKS"] == 4
