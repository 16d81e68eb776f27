"""The distributed suite by one process; tests/distributed runs it by two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from warploom.bench import distributed, peers, ranks
from warploom.bench.bars import judged
from warploom.cli import main
from warploom.distributed.choice import METHODS

QUICK = ["bench", "distributed", "--device", "cpu", "--quick", "--repeats", "2"]


def test_command_writes_rows_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results" / "run.json"
    assert main([*QUICK, "--only", "documents, 128 tokens a rank", "--out", str(out), "--peers", "all-gather + SDPA"]) == 0
    assert not dist.is_initialized()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == distributed.HEAD and len(printed) == 1 + 2 * (3 + len(METHODS))
    run = json.loads(out.read_text())
    assert {(row["case"], row["measure"]) for row in run["rows"]} == {
        ("causal documents, 128 tokens a rank", measure) for measure in ("forward", "backward")
    }
    for row in run["rows"]:
        ideal, one = row["contenders"]["ideal"], row["contenders"]["warploom"]
        assert one["of_ideal"] == pytest.approx(ideal["ms"] / one["ms"])
    assert main(["bench", "report", str(out), "--docs", str(tmp_path / "docs")]) == 0
    page = (tmp_path / "docs" / "performance.md").read_text()
    section = page.partition("## Context parallel")[2]
    assert "### Forward, 1 ranks" in section and section.count("Measured on 1 × CPU") == 2
    assert section.count("| causal documents, 128 tokens a rank | ") == 2 and "| ideal |" in section


def test_a_case_of_a_fixed_length_gives_a_table_by_ranks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run.json"
    assert main([*QUICK, "--only", "causal, 256 tokens in all", "--out", str(out), "--peers", "nobody"]) == 0
    run = json.loads(out.read_text())
    for row in run["rows"]:
        one = row["contenders"]["ideal"]["ms"]
        assert row["strong"] == {"1": one}
        row["strong"] |= {"4": one / 2, "16": one / 10}
    out.write_text(json.dumps(run))
    assert main(["bench", "report", str(out), "--docs", str(tmp_path / "docs")]) == 0
    section = (tmp_path / "docs" / "performance.md").read_text().partition("### Strong scaling")[2]
    assert "| case | pass | one device | 4 ranks | 16 ranks |" in section
    assert section.count("(1.00)") == section.count("(2.00)") == section.count("(10.00)") == 2


def test_one_step_of_a_long_sequence_runs_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each pass once, alone, some of its rows checked."""
    out = tmp_path / "run.json"
    assert main([*QUICK, "--only", "512 tokens in one step", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"], row["measure"]) for row in rows] == [
        ("causal, 512 tokens in one step", measure) for measure in ("forward", "backward")
    ]
    for row in rows:
        assert list(row["contenders"]) == ["warploom"] and row["seqlen"] == 512
        assert row["contenders"]["warploom"]["rounds"] == 1 and row["contenders"]["warploom"]["ms"] > 0
    assert 0 < rows[0]["contenders"]["warploom"]["error"] < 1e-5
    assert main(["bench", "report", str(out), "--docs", str(tmp_path / "docs")]) == 0
    assert "| causal, 512 tokens in one step | " in (tmp_path / "docs" / "performance.md").read_text()


def test_one_step_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    attention = distributed.sharded.attention
    monkeypatch.setattr(distributed.sharded, "attention", lambda *tensors, **more: attention(*tensors, **more) * 1.05)
    assert main([*QUICK, "--only", "512 tokens in one step", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["contenders"]["warploom"]["wrong"].startswith("out is 0.05 of its norm away")


def test_cases_are_listed_and_chosen(capsys: pytest.CaptureFixture) -> None:
    assert main([*QUICK, "--list"]) == 0
    listed = capsys.readouterr().out
    for name in distributed.MASKS:
        assert f"{name}, 128 tokens a rank" in listed
    assert "causal, 512 tokens in one step" in listed
    for options, words in (
        (["--only", "nothing"], "no case of these suites has that in its name"),
        (["--suite", "forward"], "the distributed suite runs alone, under torchrun"),
        (["--budget", "3"], "--warm, --budget and --peer-seconds are not for the distributed suite"),
    ):
        assert main([*QUICK, *options]) == 2
        assert words in capsys.readouterr().err


def test_a_wrong_contender_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def off(mask: Any, seqlen: int, device: torch.device) -> ranks.Parts:
        parts = ranks.ours("gather", mask, seqlen, device)
        return replace(parts, attend=lambda q, k, v: parts.attend(q, k, v) * 1.05)

    def absent(mask: Any, seqlen: int, device: torch.device) -> ranks.Parts:
        raise peers.NotHere("it is not here")

    made = {"warploom": off, "warploom, gather": ranks.contenders()["warploom, gather"], "another": absent}
    monkeypatch.setattr(distributed, "contenders", lambda: made)
    assert main([*QUICK, "--only", "window", "--json"]) == 1
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["contenders"]["warploom"]["wrong"].startswith("out is 0.05 of its norm away from one device's")
        assert row["contenders"]["another"] == {"refused": "it is not here"}
        assert row["contenders"]["warploom, gather"]["ms"] > 0


def test_torch_context_parallel_shards_causal_attention_only() -> None:
    from warploom.masks import SlidingWindow

    with pytest.raises(peers.NotHere, match="causal attention only"):
        ranks.torch_context_parallel(False, SlidingWindow(3), 64, torch.device("cpu"))


def measured_row(mask: str, measure: str, number: int = 2, **more: dict[str, Any]) -> dict[str, Any]:
    shape = {"batch": 1, "seqlen": 8192 * number, "heads": 64, "heads_kv": 8, "head_dim": 128}
    case = f"{mask}, 8192 tokens a rank"
    return {"suite": "distributed", "case": case, "measure": measure, "ranks": number, **shape, "contenders": more}


@pytest.mark.parametrize("number", [2, 4, 8])
def test_bars_ask_less_of_eight_ranks(number: int) -> None:
    shares = {"causal": 0.93, "window 4096": 0.885, "causal documents": 0.875, "prefix LM": 0.86}
    rows = [
        measured_row(mask, measure, number, warploom={"ms": 1.0, "of_ideal": share, "imbalance": 0.0})
        for mask, share in shares.items()
        for measure in ("forward", "backward")
    ]
    met = {(each["measure"], each["bar"].rpartition(", ")[2]): each["met"] for each in judged({"rows": rows})}
    many = number == 8
    for (measure, mask), want in {
        ("forward", "causal"): many,
        ("forward", "window 4096"): many,
        ("forward", "causal documents"): many,
        ("forward", "prefix LM"): False,
        ("backward", "causal"): True,
        ("backward", "window 4096"): True,
        ("backward", "causal documents"): True,
        ("backward", "prefix LM"): many,
    }.items():
        assert met[measure, mask] is want, (measure, mask)


def test_bars_of_torch_of_work_and_of_memory() -> None:
    mib = 2**20

    def found(imbalance: float, theirs: float, ring: float) -> dict[str, bool]:
        more = {"torch context_parallel": {"ms": theirs}, "torch context_parallel, heads repeated": {"ms": 9.0}}
        ours = {"ms": 2.0, "of_ideal": 1.0, "imbalance": imbalance}
        rows = [measured_row("causal", "backward", warploom=ours, **more, **{"warploom, ring": {"peak_bytes": ring * mib}})]
        # Of a number of tokens in all nothing is asked.
        rows.append({**rows[0], "case": "causal, 9 tokens in all", "contenders": {"warploom": {"ms": 1.0, "of_ideal": 0.1}}})
        return {each["bar"].partition(" ")[0]: each["met"] for each in judged({"rows": rows})}

    assert found(0.03, 2.6, 345) == {"one": True, "torch's": True, "1": True, "1.2": True}
    # q, out and its gradient are 384 MiB, and 1.2 times four of these, two of keys and values and their gradients 729.6.
    assert found(0.031, 2.59, 346) == {"one": True, "torch's": False, "1": False, "1.2": False}


def test_bars_of_the_files_of_results() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    for path in folder.glob("distributed*.json"):
        assert len(judged(json.loads(path.read_text()))) >= 2 * 5, path
