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
from warploom.cli import main

QUICK = ["bench", "distributed", "--device", "cpu", "--quick", "--repeats", "2"]


def test_command_writes_rows_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results" / "run.json"
    assert main([*QUICK, "--only", "documents, 128 tokens a rank", "--out", str(out), "--peers", "all-gather + SDPA"]) == 0
    assert not dist.is_initialized()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == distributed.HEAD and len(printed) == 1 + 2 * 6
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


def test_cases_are_listed_and_chosen(capsys: pytest.CaptureFixture) -> None:
    assert main([*QUICK, "--list"]) == 0
    listed = capsys.readouterr().out
    for name in distributed.MASKS:
        assert f"{name}, 128 tokens a rank" in listed
    for options, words in (
        (["--only", "nothing"], "no case of these suites has that in its name"),
        (["--suite", "forward"], "the distributed suite runs alone, under torchrun"),
        (["--budget", "3"], "--warm and --budget are not for the distributed suite"),
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
