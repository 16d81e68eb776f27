"""Batch-invariant calls on Hopper: tiles, key tiles and splits that depend on a sequence alone, from the plan to the launch."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.attention.hopper.test_plan import problem
from tests.plain import plain
from warploom.attention import hopper
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.band import seen
from warploom.attention.features import Features
from warploom.attention.hopper import plan, run
from warploom.attention.hopper.plan import TILINGS, config_for, invariance_refusal, named_set
from warploom.runtime import modules

LAYOUTS = ("dense", "varlen")
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"right": 0}, {"right": 0, "left": 100}, {"softcap": True}, {"columns": ("lts",)}, {"dropout": True, "right": 0},
    {"sink": True, "right": 0}, {"softcap": True, "columns": ("lts", "ute")}, {"softcap": True, "dropout": True},
)  # fmt: skip


def tiles(**changes: Any) -> dict[str, Any]:
    """What of a variant decides how its results are rounded: all but how it finds its tiles."""
    found = asdict(config_for(problem(batch_invariant=True, deterministic=True, **changes)))
    return {name: value for name, value in found.items() if name not in ("varlen", "used", "split")}


@pytest.mark.parametrize("dims", TILINGS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tiles_are_the_same_for_all_lengths_and_layouts(dims: tuple[int, int], options: dict[str, Any]) -> None:
    shape = {"head_dim": dims[0], "head_dim_v": dims[1], **options}
    found = [
        tiles(layout=layout, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=batch, heads_q=8, **shape)
        for layout, seqlen_q, seqlen_k, batch in product(LAYOUTS, (1, 8, 197, 4096), (60, 197, 2047, 50_000), (1, 64))
    ]
    assert all(each == found[0] for each in found)


def test_other_calls_have_tiles_by_their_lengths() -> None:
    """Else there would be nothing to promise."""
    found = {
        config_for(
            problem(layout=layout, seqlen_q=seqlen_q, seqlen_k=seqlen_k, right=right, heads_q=8, head_dim=d, head_dim_v=d)
        )
        for layout, seqlen_q, seqlen_k, right, d in product(
            LAYOUTS, (1, 197, 4096), (60, 197, 2047, 50_000), (None, 0), (64, 256)
        )
    }
    assert len({(each.head_dim, each.tile_n) for each in found}) > 2 and {each.pack_gqa for each in found} > {0}


def test_modules_of_plain_batch_invariant_calls_are_prepared() -> None:
    names = {each.name for each in named_set()}
    for layout, right, dims in product(LAYOUTS, (None, 0), TILINGS):
        call = problem(layout=layout, right=right, head_dim=dims[0], head_dim_v=dims[1], batch_invariant=True)
        assert config_for(call).name in names


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bias": "alibi"}, "without a bias"),
        ({"dropout": True, "left": 100}, "dropout under a window"),
        ({"dropout": True}, None),
        ({"columns": ("lts",)}, None),
    ],
)
def test_what_is_not_promised_is_refused(changes: dict[str, Any], words: str | None) -> None:
    found = invariance_refusal(problem(batch_invariant=True, **changes))
    assert found is None if words is None else found is not None and words in found


def test_a_batch_too_long_for_the_kernel_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calls of such batches go to another implementation, with its bits."""
    monkeypatch.setattr(hopper, "MOST_KEYS", 19)
    t, starts = torch.zeros(20, 1, 64, dtype=torch.float16), torch.tensor([0, 10, 20], dtype=torch.int32)
    with pytest.raises(ValueError, match="20 packed tokens, and hopper"):
        hopper.BACKEND.prepare(varlen_args(t, t, t, starts, batch_invariant=True))
    assert hopper.BACKEND.prepare(varlen_args(t, t, t, starts)).k is t
    hopper.BACKEND.prepare(dense_args(*[torch.zeros(1, 20, 1, 64, dtype=torch.float16)] * 3, batch_invariant=True))


@pytest.mark.parametrize("left, right", [(None, None), (None, 0), (30, 0), (30, None), (5, 3), (0, -20), (100, -3)])
def test_dense_and_packed_calls_count_key_tiles_from_the_same_key(left: int | None, right: int | None) -> None:
    """Of those that the band shows to some query."""
    seen_end = plain("kernels/cute/packed.py", "seen_end")
    seen_keys = plain("kernels/cute/packed.py", "seen_keys", seen_end=seen_end)
    draw = random.Random(3)
    for _ in range(300):
        seqlen_q, seqlen_k = draw.randint(1, 200), draw.randint(1, 200)
        first, end = seen(seqlen_q, seqlen_k, left, right)
        if first >= end:
            continue
        features = Features(torch.float16, 64, 64, right=right is not None, left=left is not None)
        start, length, _, _ = seen_keys(features, 1000, seqlen_k, seqlen_k - seqlen_q, left, right)
        assert (start - 1000, start - 1000 + length) == (first, end)


def launched(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> tuple[str, int, int]:
    """Name of the module, key tiles that are shared out, and queries of a tile, of few queries on many keys."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(run, "_ready", {})
    monkeypatch.setattr(run, "processors", lambda index: 132)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(run, "_first_launch", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(modules, "at_hand", lambda spec: True)
    monkeypatch.setattr(modules, "fetch", lambda spec: lambda *given: calls.append((spec.name, given)))
    q, k = torch.zeros(1, 64, 8, 64, dtype=torch.float16), torch.zeros(1, 30_000, 2, 64, dtype=torch.float16)
    args = dense_args(q, k, k, batch_invariant=batch_invariant)
    run.forward(args)
    (name, given), *others = calls
    assert not others
    return name, given[-2], int("packgqa" in name)


def test_nothing_is_split_and_heads_have_tiles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, False)[1:] > (0, 0)
    assert launched(monkeypatch, True)[1:] == (0, 0)


def test_features_of_a_batch_invariant_call_choose_the_module_that_dispatch_looked_for() -> None:
    call = problem(batch_invariant=True, seqlen_k=60, right=0, head_dim=256, head_dim_v=256)
    assert plan.config(Features.of(call), False) == plan.config(Features.of(call), True) == config_for(call)
    assert config_for(replace(call, batch_invariant=False)) != config_for(call)
