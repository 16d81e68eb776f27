"""Who holds what: even work, equal tokens, nothing twice, in any length; and the mask of one rank's rows."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import warploom
from tests.masks import samples
from warploom import distributed, masks
from warploom.distributed import groups
from warploom.distributed.api import _sharded, _whole
from warploom.distributed.collectives import Sum, sums_of
from warploom.distributed.layout import joined, split
from warploom.distributed.plan import planned
from warploom.distributed.whole import Whole, resolved
from warploom.masks.visible import visible


def documents(seed: int, total: int) -> list[int]:
    rng, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(rng.randint(50, 6000), total - sum(lengths)))
    return lengths


def options(kind: str, seqlen: int, seed: int) -> dict[str, Any]:
    return {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": (4096, 0)},
        "short window": {"window": (200, 100)},
        "documents": {"mask": masks.Document(documents(seed, seqlen))},
        "documents, both ways": {"mask": masks.Document(documents(seed, seqlen), causal=False)},
        "prefix": {"mask": masks.PrefixLM(seqlen // 3)},
        "packed": {"causal": True, "cu_seqlens": torch.tensor([0, *documents(seed, seqlen)]).cumsum(0)},
    }[kind]


KINDS = ("none", "causal", "window", "short window", "documents", "documents, both ways", "prefix", "packed")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_work_is_even_and_tokens_are_equal(kind: str, ranks: int) -> None:
    seed = random.randrange(2**31)
    for seqlen in (8192 * ranks, 30000, 12345):
        plan = planned(seqlen, ranks, 0, **options(kind, seqlen, seed))
        assert plan.imbalance <= 0.03, f"seed {seed}\n{plan}"
        assert max(plan.tokens) - min(plan.tokens) <= (0 if seqlen % (512 * ranks) == 0 else plan.chunk), plan
        assert plan.chunk <= 512
        held = torch.cat([plan.positions(rank) for rank in range(ranks)])
        assert torch.equal(held.sort().values, torch.arange(seqlen))


def test_a_causal_mask_gives_the_zigzag() -> None:
    plan = planned(4096, 2, 0, causal=True)
    assert plan.queries.runs == (((0, 1024), (3072, 4096)), ((1024, 3072),))
    assert plan.imbalance == 0.0


@pytest.mark.parametrize("seqlen", [0, 1, 2, 3, 7, 16, 17, 63])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_length_is_dealt_out_once(seqlen: int, ranks: int) -> None:
    plan = planned(seqlen, ranks, 0, causal=True)
    assert sum(plan.tokens) == seqlen and max(plan.tokens) - min(plan.tokens) <= plan.chunk
    assert torch.equal(torch.cat([plan.positions(rank) for rank in range(ranks)]).sort().values, torch.arange(seqlen))
    assert plan.queries.places.unique().numel() == seqlen


@pytest.mark.parametrize("name", samples.SAMPLERS)
def test_work_and_what_ranks_see_are_those_of_the_mask(name: str) -> None:
    seed = random.randrange(2**31)
    rng = random.Random(seed)
    for _ in range(10):
        sample = samples.SAMPLERS[name](rng)
        dense = sample.dense()
        q, k = sample.seqlen_q, sample.seqlen_k
        whole = Whole.of(resolved(sample.mask, False, None, q, k, False), q, k, None)
        vectors = max(t.shape[0] * t.shape[1] for t in [whole.shown[0], *(a for a, _ in whole.shown[2])])
        shown = whole.work_of_rows()
        assert torch.equal(shown * dense.shape[0] * dense.shape[1], dense.sum((0, 1, 3)) * vectors), f"seed {seed}"
        layout = split(q, 2)
        for rank in range(2):
            rows = layout.positions(rank)
            assert torch.equal(whole.seen_by(layout, rank), dense[:, :, rows].any(2).any(0).any(0)), f"seed {seed}"
            mask = whole.of_rows(layout, rank)
            if mask is not None:
                shown = visible(mask, torch.arange(len(rows)), torch.arange(k), 0)
                assert torch.equal(shown.expand(dense[:, :, rows].shape), dense[:, :, rows]), f"seed {seed}"


def test_two_runs_of_a_band_stay_a_band() -> None:
    """Kernels know it better than columns."""
    plan = planned(4096, 2, 0, causal=True)
    pieces = _sharded(plan, _whole(plan, None, True, None), torch.device("cpu")).gathered(False)
    assert [(piece.rows, piece.keys) for piece in pieces] == [((0, 1024), (0, 1024)), ((1024, 2048), (0, 4096))]
    assert [(piece.mask.left, piece.mask.right) for piece in pieces] == [(None, 0), (None, 0)]
    assert all(vector is None for piece in pieces for vector in piece.mask.vectors)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "length": ({"seqlen_q": -1}, ValueError, "seqlen_q must be at least 0, got -1"),
    "chunk": ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
    "method": ({"method": "tree"}, ValueError, "method must be one of gather, heads, ring, gather-heads or auto, got 'tree'"),
    "no starts": ({"cu_seqlens": []}, ValueError, "cu_seqlens must ascend from 0 to at most seqlen_q, 64"),
    "starts that descend": ({"cu_seqlens": [0, 9, 5]}, ValueError, "cu_seqlens must ascend"),
    "starts past the end": ({"cu_seqlens": torch.tensor([0, 65])}, ValueError, "cu_seqlens must ascend"),
    "starts of floats": (
        {"cu_seqlens": torch.zeros(2)},
        TypeError,
        "cu_seqlens must be a list of ints or a vector of integers",
    ),
    "packed keys": ({"cu_seqlens": [0, 64], "seqlen_k": 65}, ValueError, "seqlen_k must be 64, got 65"),
    "packed builder": ({"cu_seqlens": [0, 64], "mask": masks.PrefixLM(3)}, ValueError, "with cu_seqlens mask takes a band"),
    "dense mask": ({"mask": torch.ones(64, 64, dtype=torch.bool)}, TypeError, "ColumnMask.from_dense"),
    "mask of other keys": ({"mask": masks.Document([70])}, ValueError, "64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    keywords, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        planned(**{"seqlen_q": 64, "ranks": 2, "rank": 0, **keywords})


def test_a_plan_asks_for_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.shard_plan(64, None)


def test_a_torch_without_distributed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"this torch is built without torch\.distributed"):
        distributed.shard_plan(64, None)


def test_ranks_without_numpy_ended_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install numpy"):
        groups.needs_numpy()


def test_a_group_of_one_is_one_device(tmp_path: Path) -> None:
    """Without a collective; and what is no group is refused."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="group_or_mesh must be a ProcessGroup, a DeviceMesh or None, got int 3"):
            distributed.shard_plan(64, 3)
        q = torch.randn(1, 64, 2, 8, requires_grad=True)
        for method in ("gather", "heads", "ring", "gather-heads", "auto"):
            plan = distributed.shard_plan(64, None, causal=True, method=method)
            out = distributed.attention(q, q, q, plan=plan, causal=True)
            want = warploom.attention(q, q, q, causal=True)
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), q)[0] for t in (out, want)))
            assert torch.equal(plan.unshard(out, 1), out)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(distributed.attention(q, q, q, plan=plan).sum(), q, create_graph=True)
    finally:
        dist.destroy_process_group()


def test_plans_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = planned(3000, 3, 0, mask=masks.Document([1000, 700, 1300]))
    for suffix in ("svg", "png"):
        plan.draw(tmp_path / f"plan.{suffix}")
        assert (tmp_path / f"plan.{suffix}").stat().st_size > 4000
    planned(300, 16, 0, causal=True).draw(tmp_path / "many.svg")
    fills = set(re.findall(r"fill: (#[0-9a-f]{6})", (tmp_path / "many.svg").read_text()))
    assert len(fills - {"#ffffff"}) >= 16  # a colour of its own for each bar
    with pytest.raises(ValueError, match=r"path takes a name ending in .svg or .png"):
        plan.draw(tmp_path / "plan.txt")
    with pytest.raises(ValueError, match=r"path .*absent/plan\.svg cannot be written: there is no folder .*absent$"):
        plan.draw(tmp_path / "absent" / "plan.svg")
    with pytest.raises(ValueError, match="there is nothing to draw"):
        planned(0, 2, 0).draw(tmp_path / "plan.svg")


def test_documents_in_a_row_are_found() -> None:
    """Of nothing else: what is taken for documents runs without its mask's vectors."""
    lengths, starts = [700, 0, 300, 24], (0, 700, 1000, 1024)
    ends = torch.tensor([700] * 700 + [1000] * 300 + [1024] * 24)
    found: dict[str, tuple[dict[str, Any], tuple[int, ...] | None]] = {
        "causal": ({"mask": masks.Document(lengths)}, starts),
        "both ways": ({"mask": masks.Document(lengths, causal=False)}, starts),
        "columns": ({"mask": masks.ColumnMask(ends, causal=True)}, starts),
        "packed": ({"cu_seqlens": list(starts), "causal": True}, starts),
        "columns that end elsewhere": ({"mask": masks.ColumnMask(ends.roll(1), causal=True)}, None),
        "columns without a start": ({"mask": masks.ColumnMask(ends)}, None),
        "a window": ({"mask": masks.Document(lengths), "window": (100, 0)}, None),
        "tokens behind the last": ({"cu_seqlens": [0, 700, 1000], "causal": True}, None),
        "prefixes": ({"mask": masks.PrefixDocument([700, 324], [10, 20])}, None),
        "packed columns": ({"cu_seqlens": list(starts), "mask": masks.ColumnMask(ends)}, None),
        "no documents": ({"causal": True}, None),
    }
    for name, (keywords, want) in found.items():
        assert planned(1024, 2, 0, **keywords).whole.documents == want, name


def test_sums_of_gradients_have_each_term_once() -> None:
    """Rows that a rank sees itself, others' and nobody's, in runs as they come: by runs as row by row."""
    for _ in range(50):
        count, ranks = random.randint(1, 40), random.randint(1, 4)
        seen = [torch.rand(count) < random.random() for _ in range(ranks + 1)]
        runs = [[(int(a), int(a) + 1) for a in each.nonzero()] for each in seen]
        runs = [list(joined(each)) for each in runs]
        own, given = runs[0], [run for each in runs[1:] for run in each]
        sums = sums_of(count, own, given)
        if sums is None:
            continue
        assert [start for (start, _), *_ in sums] + [count] == [0] + [end for (_, end), *_ in sums]
        numbers = [torch.cat([torch.arange(0), *[torch.arange(a, b) for a, b in some]]) for some in (own, given)]
        found: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(2)]
        for (a, b), here, others in sums:
            for row in range(a, b):
                for kind, places in enumerate(((here,), others)):
                    found[kind][row] += [place + row - a for place in places if place is not None]
        for kind, places in enumerate(numbers):
            assert found[kind] == [(places == row).nonzero().flatten().tolist() for row in range(count)]
    assert sums_of(200, [], [(n, n + 1) for n in range(0, 200, 2)]) is None
    assert sums_of(8, [(0, 8)], [(0, 4), (2, 6)]) == [
        Sum((0, 2), 0, (0,)),
        Sum((2, 4), 2, (2, 4)),
        Sum((4, 6), 4, (6,)),
        Sum((6, 8), 6, ()),
    ]
