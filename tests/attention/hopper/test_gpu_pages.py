"""Calls over pages on Hopper: judged against fp64, with the bits of packed calls, and NaN where no query looks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import warploom
from tests.attention.invariance import same
from tests.attention.packed import Packed
from warploom.attention.hopper import plan, run
from warploom.runtime import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

BF16 = torch.bfloat16
BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 0)},
    "open": {"window": (90, None)},
    "around": {"window": (33, 7)},
    "far": {"window": (50, -20)},
}
# Head dims, keys of a page, band, and more.
CASES: list[tuple[tuple[int, int], int, str, dict[str, Any]]] = [
    *(((d, d), size, band, {}) for d in (64, 128) for size in (16, 64, 256) for band in ("full", "causal", "window")),
    *(((d, d), size, "causal", {}) for d in (64, 128) for size in (32, 48, 128)),
    *(((128, 128), size, band, {}) for size, band in ((16, "open"), (64, "around"), (128, "far"))),
    *(((d, d), size, "causal", {}) for d in (96, 192, 256) for size in (16, 128)),
    *(((d, d), 64, "window", {}) for d in (96, 192, 256)),
    ((192, 128), 64, "causal", {}),
    ((72, 40), 16, "causal", {}),
    ((128, 128), 16, "causal", {"dtype": torch.float16}),
    ((128, 128), 16, "causal", {"softcap": 20.0}),
    ((64, 64), 64, "window", {"sink": True, "softcap": 5.0}),
    ((128, 128), 64, "full", {"sink": True}),
]


@pytest.fixture(autouse=True)
def device() -> None:
    refused = dispatch.find("hopper").available()
    if refused is not None:
        pytest.skip(refused)


def drawn(seed: int, dims: tuple[int, int], size: int, band: str, more: dict[str, Any]) -> Packed:
    """Sequences of chunks, with fewer queries than keys or more, some without either."""
    draw = random.Random(seed)
    count, heads_kv = draw.randint(1, 5), draw.choice((1, 2))
    keywords = dict(BANDS[band])
    if "softcap" in more:
        keywords["softcap"] = more["softcap"]
    return Packed(
        seed,
        lengths_q=[draw.choice((1, draw.randint(0, 300))) for _ in range(count)],
        lengths_k=[draw.choice((0, size, draw.randint(1, 900))) for _ in range(count)],
        page_size=size,
        heads_q=heads_kv * draw.choice((1, 2, 4, 7)),
        heads_kv=heads_kv,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=more.get("dtype", BF16),
        device="cuda",
        sink="sink" in more,
        keywords=keywords,
    )


def hide(call: Packed) -> None:
    """NaN in slots whose keys no query sees: those behind a sequence's last one hold it already."""
    for n, (queries, used) in enumerate(zip(call.lengths_q, call.seen, strict=True)):
        hidden = torch.ones(used, dtype=torch.bool)
        if queries and used:
            hidden = ~call._visible(queries, slice(0, used))[0].any(0).any(0).cpu()
        for j in hidden.nonzero().flatten().tolist():
            at = int(call.table[n, j // call.page_size]), j % call.page_size
            call.k_pages[at] = call.v_pages[at] = float("nan")


@pytest.mark.parametrize(("dims", "size", "band", "more"), CASES, ids=str)
def test_pages(dims: tuple[int, int], size: int, band: str, more: dict[str, Any]) -> None:
    first = random.randrange(2**20)
    for seed in range(first, first + 4):
        call = drawn(seed, dims, size, band, more)
        hide(call)
        call.check("hopper")


@pytest.mark.parametrize(("dims", "size", "band", "more"), [case for case in CASES if case[2] in ("full", "causal")], ids=str)
def test_the_bits_of_packed_keys(dims: tuple[int, int], size: int, band: str, more: dict[str, Any]) -> None:
    first = random.randrange(2**20)
    for seed in range(first, first + 4):
        call = drawn(seed, dims, size, band, more)
        got = call.results("hopper")
        starts, used = (call._starts(n) for n in (call.lengths_q, call.keys)), torch.tensor(call.seen, device="cuda").int()
        options = {**call.keywords, "sink": call.sinks, "return_lse": True, "backend": "hopper"}
        want = warploom.attention_varlen(call.q, call.k, call.v, *starts, seqused_k=used, **options)
        assert same(got["out"], want[0]) and same(got["lse"], want[1]), f"{call.seed}: {call.lengths_q} {call.lengths_k}"


def test_pools_as_views_and_single_pages_of_any_size() -> None:
    q, starts = torch.randn(70, 4, 64, device="cuda").to(BF16), torch.tensor([0, 5, 70], dtype=torch.int32, device="cuda")
    used = torch.tensor([300, 77], dtype=torch.int32, device="cuda")
    options = {"seqused_k": used, "causal": True, "backend": "hopper", "batch_invariant": True}
    both = torch.randn(2, 2, 333, 2, 64, device="cuda").to(BF16)  # k and v, a page a sequence
    alone = torch.arange(2, dtype=torch.int32, device="cuda")[:, None]
    want = warploom.attention_varlen(q, both[0], both[1], starts, block_table=alone, **options)
    for build in (
        lambda pool: pool,
        lambda pool: torch.stack([pool, pool], 1)[:, 1],  # keys beside values
        lambda pool: pool.transpose(1, 2).contiguous().transpose(1, 2),  # heads before keys
        lambda pool: torch.nn.functional.pad(pool, (0, 8))[..., :-8],
    ):
        pages = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, 3)).unflatten(2, (21, 16)).flatten(1, 2)
        table = torch.arange(42, dtype=torch.int32, device="cuda").view(2, 21)
        got = warploom.attention_varlen(q, build(pages[0]), build(pages[1]), starts, block_table=table, **options)
        assert same(got, want)


def test_numbers_past_the_pool_and_lengths_past_the_table_are_clamped() -> None:
    pages = torch.randn(2, 5, 16, 2, 128, device="cuda").to(BF16)
    q, starts = torch.randn(40, 4, 128, device="cuda").to(BF16), torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    found = []
    for table, used in (([3, 2**31 - 1, -(2**31)], 2**31 - 1), ([3, 4, 0], 48)):
        where = {"block_table": torch.tensor([table]).int().cuda(), "seqused_k": torch.tensor([used]).int().cuda()}
        found.append(warploom.attention_varlen(q, *pages, starts, **where, causal=True, backend="hopper"))
    assert same(*found)


# Head dims, keys of a page, band, and more, of few queries on many keys.
FEW: list[tuple[tuple[int, int], int, str, dict[str, Any]]] = [
    *(((d, d), size, "causal", {}) for d in (64, 128, 256) for size in (16, 64, 256)),
    *(((128, 128), size, band, {}) for size, band in ((16, "full"), (64, "window"), (16, "around"))),
    ((128, 128), 16, "causal", {"softcap": 20.0}),
    ((128, 128), 64, "full", {"sink": True}),
    ((192, 128), 64, "causal", {}),
    ((72, 40), 16, "causal", {}),
    ((128, 128), 16, "causal", {"dtype": torch.float16}),
]


@pytest.mark.parametrize(("dims", "size", "band", "more"), FEW, ids=str)
def test_few_queries_and_shares_of_key_tiles(
    dims: tuple[int, int], size: int, band: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths far apart, so that blocks take shares of the longest: mostly where one key tile more than a share is too many."""
    first, usual = random.randrange(2**20), plan.SPLIT_COST
    for seed, cost in zip(range(first, first + 4), (usual, 1, 1, 1), strict=True):
        for module in (plan, run):
            monkeypatch.setattr(module, "SPLIT_COST", cost)
        draw = random.Random(seed)
        count, heads_kv = draw.randint(0, 40), draw.choice((1, 2))
        call = Packed(
            seed,
            lengths_q=[*(draw.choice((0, 1, 1, draw.randint(1, 70))) for _ in range(count)), draw.randint(1, 70)],
            lengths_k=[*(draw.choice((0, size, draw.randint(1, 400), draw.randint(1, 400))) for _ in range(count)), 3000],
            page_size=size,
            heads_q=heads_kv * draw.choice((1, 4, 7, 20)),
            heads_kv=heads_kv,
            head_dim=dims[0],
            head_dim_v=dims[1],
            dtype=more.get("dtype", BF16),
            device="cuda",
            sink="sink" in more,
            keywords=BANDS[band] | ({"softcap": more["softcap"]} if "softcap" in more else {}),
        )
        hide(call)
        call.check("hopper")
