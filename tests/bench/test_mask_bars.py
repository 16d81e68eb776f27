"""What the masks suite asks of rows and runs, on made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import warploom
from warploom import masks
from warploom.bench import mask_bars, report
from warploom.bench.mask_bars import DENSE, NEW, PLAIN, UNMASKED, VECTORS, Share, share, verdict
from warploom.commands.bench import describe
from warploom.runtime.plan import Plan

SEQLEN = 512


def plan(tile: tuple[int, int] | None, backward: dict[str, tuple[int, int]]) -> Any:
    counts = None if tile is None else {"hidden": 1, "partial": 1, "full": 1}
    return lambda *_, **__: Plan("a call", "hopper", "because", tile, tuple(backward.items()), counts)


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Document([100, 300, 112]), masks.Full()])
def test_rho_is_visible_over_processed_elements(mask: masks.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, SEQLEN, 2, 16)
    monkeypatch.setattr(warploom, "explain", plan((128, 128), {"dq": (64, 128), "dk": (64, 128)}))
    dense = mask.dense(SEQLEN, SEQLEN)[0, 0]
    for measure, rows in (("forward", 128), ("backward", 64)):
        visible = dense.view(SEQLEN // rows, rows, SEQLEN // 128, 128).any(3).any(1).sum() * rows * 128
        found = share(measure, mask, SEQLEN, q, q, q)
        assert found.backend == "hopper" and found.rho == pytest.approx(float(dense.sum() / visible)), measure


def test_tiles_that_begin_where_documents_do_have_no_rho(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, SEQLEN, 2, 16)
    monkeypatch.setattr(warploom, "explain", lambda *_, **__: Plan("a call", "hopper", "because", (128, 128)))
    assert share("forward", masks.Document([512]), SEQLEN, q, q, q) == Share("hopper", {"out": [128, 128]}, None)


def test_rho_of_gradients_in_different_tiles_is_of_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, SEQLEN, 2, 16)
    monkeypatch.setattr(warploom, "explain", plan(None, {"dq": (512, 128), "dk": (64, 128), "dv": (64, 128)}))
    found = share("backward", masks.Causal(), SEQLEN, q, q, q)
    processed = (SEQLEN**2 + sum(64 * 128 * -(-64 * (m + 1) // 128) for m in range(8))) / 2
    assert found.rho == pytest.approx(SEQLEN * (SEQLEN + 1) / 2 / processed)
    assert share("forward", masks.Causal(), SEQLEN, q, q, q) == Share("hopper", {}, None)


def test_narrow_tiles_under_vectors_are_counted_by_blocks_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, SEQLEN, 2, 16)
    monkeypatch.setattr(warploom, "explain", plan((64, 32), {}))
    document = masks.Document([64 + 16] * 6 + [32], causal=False)
    by_32, by_64 = ((t.partial + t.full).item() for t in (document.tiles(64, n) for n in (32, 64)))
    assert 2 * by_64 > by_32
    visible = document.density(SEQLEN, SEQLEN) * SEQLEN**2
    assert share("forward", document, SEQLEN, q, q, q).rho == pytest.approx(visible / (by_64 * 64 * 64))


def contenders(**tflops: float) -> dict[str, dict[str, Any]]:
    names = {"ours": "warploom", "dense": DENSE, "cudnn": "cuDNN-Flex", "flex": "FlexAttention"}
    return {names[name]: {"ms": 1000 / rate, "tflops": rate} for name, rate in tflops.items()}


@pytest.mark.parametrize(
    "rates,attained,met",
    [
        ({"ours": 610, "dense": 700, "cudnn": 600}, 610 / 630, True),
        ({"ours": 600, "dense": 700, "cudnn": 500}, 600 / 630, False),  # 0.952 of what its tiles allow
        ({"ours": 610, "dense": 700, "cudnn": 611}, 610 / 630, False),  # slower than cuDNN
        ({"ours": 610, "dense": 700}, 610 / 630, True),
        ({"ours": 610, "cudnn": 600}, None, True),
        ({"ours": 610, "flex": 900}, None, None),
        ({"dense": 700, "cudnn": 600}, None, None),
    ],
)
def test_verdict(rates: dict[str, float], attained: float | None, met: bool | None) -> None:
    found = verdict("forward", Share("hopper", {"out": [128, 128]}, 0.9), contenders(**rates))
    assert found["attained"] == (None if attained is None else pytest.approx(attained))
    assert found["met"] is met and found["at_least"] == 0.96
    assert set(found["ratios"]) <= {"cuDNN-Flex", "FlexAttention"}


def test_backward_asks_less_of_the_dense_rate() -> None:
    rates = contenders(ours=500, dense=600)
    assert verdict("backward", Share("hopper", {}, 0.9), rates)["met"] is True
    assert verdict("forward", Share("hopper", {}, 0.9), rates)["met"] is False
    assert verdict("backward", Share("hopper", {}, None), rates)["met"] is None


def row(measure: str, case: str, **more: Any) -> dict[str, Any]:
    return {"suite": "masks", "measure": measure, "case": case, "head_dim": 128, **more}


def made_up() -> dict[str, Any]:
    part = Share("hopper", {"out": [128, 128]}, 0.9)
    first, second = contenders(ours=650, dense=720, cudnn=600, flex=300), contenders(ours=640, dense=720, cudnn=660, flex=400)
    nothing = {"warploom": {"ms": 1.02}, UNMASKED: {"ms": 1.0}}
    short = {"warploom": {"ms": 0.15}, UNMASKED: {"ms": 0.1}}  # too short to count
    prepared = {"warploom": {"ms": 0.010}, VECTORS: {"ms": 0.025}, "cuDNN-Flex": {"ms": 1.0}}
    rows = [
        row("forward", "a", contenders=first, verdict=verdict("forward", part, first)),
        row("forward", "b", contenders=second, verdict=verdict("forward", part, second)),
        row("forward", "nothing hidden", contenders=nothing),
        row("forward", "nothing hidden, short", contenders=short),
        row("mask", "a", contenders=prepared, vector_bytes=4_000_000, bound_bytes=500_000),
        row("host", "a", contenders={"warploom": {"ms": 0.018}, NEW: {"ms": 0.040}}),
        row("deterministic", "a", contenders={"warploom": {"ms": 1.07}, PLAIN: {"ms": 1.0}}),
        row("dropout forward", "a", contenders={"warploom": {"ms": 1.5}, PLAIN: {"ms": 1.0}}),
        row("dropout forward", "c", contenders={"warploom": {"ms": 1.6}, PLAIN: {"ms": 1.0}}) | {"head_dim": 64},
    ]
    roofs = {"gemm_tflops": 700.0, "copy_gb_s": 1000.0}
    return {"device": "Some GPU", "date": "today", "commit": "0", "roofs": roofs, "rows": rows}


def test_bars_of_a_run() -> None:
    found = {(each["measure"], each["bar"]): (each["found"], each["met"]) for each in report.judged(made_up())}
    want = {
        ("forward", "cuDNN-Flex over ours, mean"): ((650 / 600 * 640 / 660) ** 0.5, False),
        ("forward", "the same, the worst case"): (640 / 660, False),
        ("forward", "FlexAttention over ours, mean"): ((650 / 300 * 640 / 400) ** 0.5, True),
        ("forward", "our rate over rho × the dense rate, the worst case"): (640 / 648, True),
        ("forward", "no mask over one that hides nothing, the worst case"): (1 / 1.02, True),
        ("mask", "6 us and the bytes' copy over a mask from its vectors, the worst"): (10.5 / 10, True),
        ("mask", "30 us over a mask from lengths on the device, the worst"): (30 / 25, True),
        ("host", "20 us over the host time of a masked call, the worst"): (20 / 18, True),
        ("host", "30 us over the host time of a new mask's first call, the worst"): (30 / 40, False),
        ("deterministic", "without over deterministic, D128, the worst case"): (1 / 1.07, True),
        ("dropout forward", "without over dropout, D64, the worst case"): (1 / 1.6, True),
        ("dropout forward", "without over dropout, D128, the worst case"): (1 / 1.5, False),
    }
    assert {name: met for name, (_, met) in found.items()} == {name: met for name, (_, met) in want.items()}
    for name, (value, _) in want.items():
        assert found[name][0] == pytest.approx(value), name


def test_the_page_shows_verdicts(tmp_path: Path) -> None:
    data = tmp_path / "masks.json"
    data.write_text(json.dumps(made_up()))
    report.write([data], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    for line in (
        "| case | warploom | cuDNN-Flex | FlexAttention | warploom, no mask | dense TFLOP/s | rho | of rho × dense | bars |",
        "| a | 1.54 ms, 650 TFLOP/s | 1.67 ms, 600 TFLOP/s (1.08×) | 3.33 ms, 300 TFLOP/s (2.17×) | – | 720 | 0.900 | 1.003 | ",
        "(0.97×) | 2.50 ms, 400 TFLOP/s (1.60×) | – | 720 | 0.900 | 0.988 | missed |",
        "| the same, the worst case | 1.00 | 0.96 | missed |",
    ):
        assert line in page, line


def test_a_row_is_told_with_its_verdict() -> None:
    first, second = made_up()["rows"][:2]
    assert describe(first).endswith("; rho 0.900 (hopper), 1.003 of rho × dense, 0.96 asked, met")
    assert describe(second).endswith("0.988 of rho × dense, 0.96 asked, missed")
    assert f"{DENSE} 1.389 ms 720 TFLOP/s;" in describe(first)  # another call: no ratio of times
    assert mask_bars.cells(None) == ["–"] * len(mask_bars.COLUMNS)
