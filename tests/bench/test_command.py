"""`warploom bench` from end to end on a CPU, and the page it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warploom.bench import report
from warploom.cli import main

QUICK = ["bench", "--device", "cpu", "--quick", "--repeats", "2"]
EVERY = ["--suite", "forward", "--suite", "backward", "--suite", "masks", "--suite", "decode"]


def test_runs_every_suite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results" / "run.json"
    assert main([*QUICK, *EVERY, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "D16 S128 causal, backward: warploom" in printed and "tree, B1 S256, forward" in printed
    run = json.loads(out.read_text())
    measures = {(row["suite"], row["measure"]) for row in run["rows"]}
    assert measures == {(s, m) for s in ("dense", "masks") for m in ("forward", "backward")} | {("decode", "graph")}
    for row in run["rows"]:
        assert row["contenders"]["warploom"]["ms"] > 0, row
        assert not any("wrong" in found for found in row["contenders"].values()), row
    assert run["roofs"]["gemm_tflops"] > 0 and "seed" in run and run["torch"]


def test_json_and_choice(capsys: pytest.CaptureFixture) -> None:
    assert main([*QUICK, "--suite", "masks", "--only", "tree", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert {row["case"] for row in run["rows"]} == {"tree, B1 S256"}


def test_budget_stops_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run.json"
    assert main([*QUICK, *EVERY, "--budget", "0", "--out", str(out)]) == 0
    assert "cases left out" in capsys.readouterr().err


def test_lists_without_a_device(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "--suite", "masks", "--suite", "decode", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 18 + 7 and "masks   window 1024, B1 S32768" in names
    assert main(["bench", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 18


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["bench", "--only", "nothing", "--list"], "--only nothing: no case"),
        (["bench", "--repeats", "0", "--list"], "--repeats must be at least 1"),
        (["bench", "run", "x.json", "--list"], "a run takes no files"),
    ],
)
def test_errors(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def contender(ms: float, **more: Any) -> dict[str, Any]:
    return {"ms": ms, "p20": ms, "p80": ms, **more}


def row(suite: str, measure: str, case: str, **contenders: dict[str, Any]) -> dict[str, Any]:
    return {"suite": suite, "measure": measure, "case": case, "contenders": contenders}


def test_report_of_made_up_numbers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = {
        "device": "Some GPU",
        "date": "2020-01-01",
        "commit": "abc",
        "torch": "2.11",
        "roofs": {"gemm_tflops": 700.0, "copy_gb_s": 3000.0},
        "left_out": ["later"],
        "rows": [
            row("masks", "forward", "a", warploom=contender(1, tflops=400), FlexAttention=contender(2, tflops=200)),
            row("masks", "forward", "b", warploom=contender(1, tflops=400), FlexAttention=contender(0.5, tflops=800)),
            row("masks", "forward", "c", warploom=contender(1, tflops=400), FlexAttention={"wrong": "far away"}),
            row("masks", "mask", "a", warploom=contender(0.025), FlexAttention=contender(5)),
            row("decode", "graph", "B1 KV8k 32/8", warploom=contender(0.02), cuDNN=contender(0.025)),
            {"suite": "masks", "case": "d", "failed": "RuntimeError: no"},
        ],
    }
    data = tmp_path / "masks.json"
    data.write_text(json.dumps(run))
    assert main(["bench", "report", str(data), "--docs", str(tmp_path)]) == 0
    page = (tmp_path / "performance.md").read_text()
    for line in (
        "| FlexAttention over ours, mean | 1.15 | 1.00 | missed |",
        "| FlexAttention over ours, the worst case | 0.97 | 0.50 | missed |",
        "| 50 us over the slowest preparation of a mask | 1.00 | 2.00 | met |",
        "| cuDNN over ours, B1 KV8k | 1.20 | 1.25 | met |",
        "| contiguous over paged, the worst case | 0.90 | – | not measured |",
        "| a | 1.00 ms, 400 TFLOP/s | 2.00 ms, 200 TFLOP/s (2.00×) |",
        "| c | 1.00 ms, 400 TFLOP/s | wrong |",
        "| B1 KV8k 32/8 | 20.0 us | 25.0 us (1.25×) |",
        "d failed: RuntimeError: no.",
        "Left out for want of time: later.",
        "- FlexAttention does not appear everywhere: c: far away",
    ):
        assert line in page, line
    picture = tmp_path / "images" / "performance-masks-forward.svg"
    assert picture.read_text().startswith("<?xml") and "images/performance-masks-forward.svg" in page
    assert "No run on a GPU" not in page


def test_report_without_a_gpu(tmp_path: Path) -> None:
    known = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu-attention.json"
    report.write([known], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "## Attention on a CPU" in page and "No run on a GPU is among the files" in page


def test_mean_is_geometric() -> None:
    assert report.mean([4.0, 1.0]) == pytest.approx(2.0)
