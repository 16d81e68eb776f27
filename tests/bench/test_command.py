"""`warploom bench` from end to end on a CPU, and the page it makes."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warploom.bench import report
from warploom.bench.patience import PATIENCE
from warploom.cli import main
from warploom.commands import bench

QUICK = ["bench", "--device", "cpu", "--quick", "--repeats", "2"]
EVERY = ["--suite", "forward", "--suite", "backward", "--suite", "masks", "--suite", "decode", "--suite", "linear"]
EVERY += ["--suite", "fp8", "--suite", "training", "--suite", "serving", "--suite", "bias"]


def test_runs_every_suite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results" / "run.json"
    assert main([*QUICK, *EVERY, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "D16 S128 causal, backward: warploom" in printed and "tree, B1 S256 H2 D16, forward" in printed
    run = json.loads(out.read_text())
    measures = {(row["suite"], row["measure"]) for row in run["rows"]}
    wanted = {(s, m) for s in ("dense", "masks", "linear") for m in ("forward", "backward")}
    wanted |= {("masks", each) for each in ("deterministic", "dropout forward", "dropout backward")}
    wanted |= {("linear", "forward, normalized"), ("linear", "backward, normalized"), ("linear", "graph")}
    wanted |= {("linear", f"{each}, delta rule") for each in ("forward", "backward", "graph")}
    wanted |= {("linear", f"{each}, decay a {kind}") for each in ("forward", "backward") for kind in ("head", "token")}
    wanted |= {("decode", f"graph{each}") for each in ("", ", FP8 cache", ", latent", ", prefill over pages", ", few keys")}
    wanted |= {("decode", f"graph, {each}") for each in ("shared prefix", "nothing shared", "batch invariant")}
    wanted |= {("serving", "step"), ("fp8", "forward"), ("fp8", "quantising"), ("training", "step")}
    wanted |= {("bias", each) for each in ("forward", "forward and backward", "forward, stats", "encoder step")}
    assert measures == wanted
    for row in run["rows"]:
        assert row["contenders"]["warploom"]["ms"] > 0, row
        assert not any("wrong" in found for found in row["contenders"].values()), row
    assert run["roofs"]["gemm_tflops"] > 0 and "seed" in run and run["torch"]


def test_no_rate_is_shown_as_none(capsys: pytest.CaptureFixture) -> None:
    """Cases of --quick are so small that whole TFLOP/s are 0; and no line is empty."""
    assert main([*QUICK, "--only", "D16 S128 full"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert " TFLOP/s" in line and " 0 TFLOP/s" not in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_waits_for_a_named_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Also beside --json, whose rows come at the end."""
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    assert main([*QUICK, "--only", "D16 S128 full", "--json"]) == 0
    assert "[1/1] D16 S128 full …" in shown.getvalue() and shown.getvalue().endswith("\r\x1b[K")
    assert json.loads(capsys.readouterr().out)["rows"]


def test_json_and_choice(capsys: pytest.CaptureFixture) -> None:
    assert main([*QUICK, "--suite", "masks", "--only", "tree", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert {row["case"] for row in run["rows"]} == {"tree, B1 S256 H2 D16"}


def test_a_peer_that_no_case_has_is_named(capsys: pytest.CaptureFixture) -> None:
    chosen = ["--only", "D16 S128 full", "--peers", "SPDA", "SDPA"]
    assert main([*QUICK, *chosen, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.endswith("--peers SPDA: no case of this run has it\n") and "peers SDPA" not in printed.err
    assert "SDPA" in json.loads(printed.out)["rows"][0]["contenders"]


@pytest.mark.parametrize("peer", ["SDPA, dense mask", "nobody"])
def test_against_some_peers(peer: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*QUICK, "--suite", "masks", "--only", "tree", "--against", peer, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    there = {"warploom", "warploom, dense causal", peer} - {"nobody"}
    assert [set(row["contenders"]) for row in rows] == [there, there]  # forward and backward
    assert PATIENCE.peers is None, "the next run of this process would ask these alone"


def test_budget_stops_cleanly(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run.json"
    assert main([*QUICK, *EVERY, "--budget", "0", "--out", str(out)]) == 0
    assert "cases left out" in capsys.readouterr().err
    run = json.loads(out.read_text())
    assert run["rows"] == [] and "tree, B1 S256 H2 D16" in run["left_out"]
    assert len(run["left_out"]) == 2 + 3 + 14 + 9 + 5 + 3 + 1 + 1 + 8


def test_a_case_that_would_pass_the_budget_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Cases of 40 s and 100 s: the second ends the run, since a third might take as long."""
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "roofs", lambda timer: {})

    def run_case(case: Any, timer: Any) -> Iterator[dict[str, Any]]:
        now[0] += 100 if now[0] else 40
        yield {"suite": case.suite, "case": case.name, "failed": "made up"}

    monkeypatch.setattr(bench, "run_case", run_case)
    out = tmp_path / "run.json"
    assert main([*QUICK, "--suite", "masks", "--budget", "230", "--out", str(out)]) == 0
    run = json.loads(out.read_text())
    assert (len(run["rows"]), len(run["left_out"])) == (2, 12)
    assert "stopped after 140 s: 12 cases left out" in capsys.readouterr().err


def test_a_killed_run_leaves_whole_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_case(case: Any, timer: Any) -> Iterator[dict[str, Any]]:
        yield {"suite": case.suite, "case": case.name, "failed": "made up"}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_case", run_case)
    out = tmp_path / "run.json"
    assert main([*QUICK, "--suite", "decode", "--out", str(out)]) == 130
    assert len(json.loads(out.read_text())["rows"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_warming_survives_a_case_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A case that fails beside the others is tried again alone; one that fails then too is named."""
    jobs: list[int] = []

    def in_turn(function: Any, names: list[str], at_once: int) -> Iterator[tuple[str, str]]:
        jobs.append(at_once)
        yield from ((name, function(name)) for name in names)

    def builds(case: Any, device: Any) -> Any:
        def once() -> None:
            if "tree" in case.name or ("prefix" in case.name and len(jobs) == 1):
                raise RuntimeError("out of memory")

        return once

    monkeypatch.setattr(bench, "in_processes", in_turn)
    monkeypatch.setattr(bench, "builds", builds)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert main([*QUICK, "--suite", "masks", "--warm", "3", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["failed"] == {"tree, B1 S256 H2 D16": "RuntimeError: out of memory"} and len(said["compiled"]) == 13
    assert jobs == [3, 1]


def test_lists_without_a_device(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "--suite", "masks", "--suite", "decode", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 56 + 67 + 2
    for name in ("masks   window 1024, B1 S32768 H64/8 D128", "decode  B1 KV8k 32/8", "decode  B4 KV8k 32/8, 4 queries"):
        assert any(re.fullmatch(re.escape(name) + r"  \(\d+ s\)", line) for line in names), name
    for line, count in zip(names[-2:], ("56 cases of the masks", "67 cases of the decode"), strict=True):
        assert line.startswith("about ") and count in line
    assert main(["bench", "training", "--list"]) == 0
    assert capsys.readouterr().out.startswith("training 4 layers")
    assert main(["bench", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 18 + 16 + 5


def test_cases_by_several_parts_of_names(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "linear", "--only", "delta", "decay", "--list"]) == 0
    kinds = [line.removeprefix("linear  ").partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert kinds == 3 * ["decay"] + 5 * ["delta rule"] + 2 * ["delta step"]


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["bench", "--only", "nothing", "--list"], "--only nothing: no case"),
        (["bench", "linear", "--only", "delta", "nothing", "--list"], "--only nothing: no case"),
        (["bench", "linear", "--peer-seconds", "0", "--list"], "--peer-seconds must be a positive number of seconds, got 0.0"),
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


def reported(rows: list[dict[str, Any]], folder: Path) -> tuple[dict[str, Any], str]:
    """A run of the linear suite with these rows, and the page that is made of it."""
    run = {"roofs": {"gemm_tflops": 1.0, "copy_gb_s": 1.0}, "device": "Some GPU", "date": "today", "commit": "0", "rows": rows}
    data = folder / "linear.json"
    data.write_text(json.dumps(run))
    report.write([data], folder)
    return run, (folder / "performance.md").read_text()


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
            row("masks", "mask", "a", **{"warploom, with the vectors": contender(0.02)}, FlexAttention=contender(5)),
            row("decode", "graph", "B1 KV8k 32/8", warploom=contender(0.02), cuDNN=contender(0.025)),
            {"suite": "masks", "case": "d", "failed": "RuntimeError: no"},
        ],
    }
    data = tmp_path / "masks.json"
    data.write_text(json.dumps(run))
    assert main(["bench", "report", str(data), "--docs", str(tmp_path)]) == 0
    page = (tmp_path / "performance.md").read_text()
    for line in (
        "| FlexAttention over ours, mean | 1.70 | 1.00 | missed |",
        "| cuDNN-Flex over ours, mean | 1.05 | – | not measured |",
        "| 30 us over a mask from lengths on the device, the worst | 1.00 | 1.50 | met |",
        "| cuDNN over ours, B1 KV8k 32/8 | 1.25 | 1.25 | met |",
        "| contiguous over pages of 16, the worst | 0.97 | – | not measured |",
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


def test_report_of_linear_attention(tmp_path: Path) -> None:
    """The better of fla's kernels counts, and a copy's time over ours is the share of the bandwidth."""

    def row(case: str, measure: str, **ms: float) -> dict[str, Any]:
        contenders = {name.replace("_", ", "): {"ms": value} for name, value in ms.items()}
        return {"suite": "linear", "case": case, "measure": measure, "contenders": contenders}

    rows = [
        row("B8 H16 L2048 D64", "forward", warploom=1.0, fla_chunk=4.0, fla_fused=2.0, copy=0.7),
        row("B1 H16 L16384 D64", "forward", warploom=1.0, fla_chunk=8.0, copy=0.5),
        row("B1 H16 L16384 D128", "forward", warploom=1.0, copy=0.4),
        row("B8 H16 L2048 D64", "backward", warploom=1.0, fla_chunk=1.5),
        row("step, B64 H16 D128", "graph", warploom=1.0, copy=0.9),
    ]
    _, page = reported(rows, tmp_path)
    for line in (
        "| the better fla kernel over ours, mean | 2.00 | 4.00 | met |",
        "| the better fla kernel over ours, the worst case | 1.00 | 2.00 | met |",
        "| copy over ours, B8 H16 L2048 D64 | 0.65 | 0.70 | met |",
        "| copy over ours, B4 H32 L8192 D128 | 0.65 | – | not measured |",
        "| copy over ours, B1 H16 L16384, the worse head_dim | 0.45 | 0.40 | missed |",
        "| the better fla kernel over ours, mean | 1.70 | 1.50 | missed |",
        "| copy of the state over ours | 0.80 | 0.90 | met |",
    ):
        assert line in page, line


def test_report_of_decays_and_of_the_delta_rule(tmp_path: Path) -> None:
    """Milliseconds asked of a case, times the plain call's, the host's microseconds; what did not run is not measured."""

    def delta(case: str, measure: str, ours: float, **ms: float) -> dict[str, Any]:
        more = {"fla, chunk" if name == "fla" else name: contender(value) for name, value in ms.items()}
        return row("linear", f"{measure}, delta rule", case, warploom=contender(ours), **more)

    def decayed(measure: str, ours: float, plain: float) -> dict[str, Any]:
        more = {"warploom, plain": contender(plain), "fla, simple GLA": contender(3 * ours)}
        return row("linear", measure, "decay, B4 H32 L8192 D128", warploom=contender(ours), **more)

    refusing = delta("delta rule, B1 H16/32 L8192 D128", "backward", 0.5, copy=0.1)
    refusing["contenders"]["fla, chunk"] = {"refused": "RuntimeError: wrong gradients"}
    host = row("linear", "host, decay", "decay, B4 H32 L8192 D128", **{"warploom, a head": contender(0.02)})
    host["contenders"]["warploom"] = contender(0.04)
    rows = [
        delta("delta rule, B1 H16/64 L32768 D128", "forward", 1.0, fla=3.0),
        delta("delta rule, B4 H16/64 L8192 D128", "forward", 1.0, fla=3.0),
        delta("delta rule, B1 H16/32 L262144 D128", "forward", 5.0),
        refusing,
        delta("delta step, B32 H16/32 D128", "graph", 1.0, copy=0.9),
        delta("delta rule, B1 H16/64 L32768 D128", "host", 0.02),
        decayed("forward, decay a head", 1.0, 0.95),
        decayed("forward, decay a token", 1.0, 0.7),
        host,
    ]
    run, page = reported(rows, tmp_path)
    for line in (
        "### Forward, delta rule",
        "| 1.25 ms over ours, B1 H16/64 L32768 D128 | 1.00 | 1.25 | met |",
        "| 0.85 ms over ours, B4 H16/64 L8192 D128 | 1.00 | 0.85 | missed |",
        "| fla over ours, mean | 2.50 | 3.00 | met |",
        "| 256k tokens in one call, right and timed | 1.00 | 1.00 | met |",
        "| 0.65 ms over ours, B1 H16/32 L8192 D128 | 1.00 | 1.30 | met |",
        "| 2.1 ms over ours, B1 H16/32 L32768 D128 | 1.00 | – | not measured |",
        "- fla, chunk does not appear everywhere: delta rule, B1 H16/32 L8192 D128: RuntimeError: wrong gradients",
        "### A step of the delta rule, replayed from a graph",
        "| copy of the state over ours | 0.80 | 0.90 | met |",
        "### Host time of a call, delta rule",
        "| 25 us over the host time of a forward call, the worst | 1.00 | 1.25 | met |",
        "| 25 us over the host time of a forward call, the worst | 1.00 | 0.62 | missed |",
        "| 1.10 of the same call without a decay over ours, the worst case | 1.00 | 1.04 | met |",
        "| 1.25 of the same call without a decay over ours, the worst case | 1.00 | 0.87 | missed |",
        "| Gated delta rule | fla's chunk kernel | 3.00 (3.00) | – | Some GPU | 2 |",
        "| Linear, decay a head | fla's simple GLA | 3.00 (3.00) | – | Some GPU | 1 |",
    ):
        assert line in page, line
    rows[2]["contenders"]["warploom"] = {"refused": "out of memory"}
    found = {bar["bar"]: bar["met"] for bar in report.judged(run)}
    assert found["256k tokens in one call, right and timed"] is False


def test_report_of_the_hopper_kernels(tmp_path: Path) -> None:
    """Without FlexAttention in the run its dense rows are held to the bars of the Hopper kernels."""

    def dense(measure: str, case: str, cudnn: float, fa4: float, tflops: float = 600.0) -> dict[str, Any]:
        peers = {"cuDNN": contender(cudnn), "FA4": contender(fa4)}
        return row("dense", measure, case, warploom=contender(1.0, tflops=tflops), **peers)

    rows = [
        dense("forward", "D128 S16384 full", 1.21, 1.0, 630.0),
        dense("forward", "D64 S1024 causal", 2.0, 1.44),
        dense("forward", "D128 S8192 heads 32/8 full", 0.9, 2.0),
        dense("forward", "D96 S4096 causal", 0.5, 1.1),
        dense("forward", "D80 S4096 full", 1.2, 1.3),
        dense("forward", "D64 S197 causal", 1.1, 0.97),
        dense("forward", "D128, 64 documents of 100 to 4000 full", 0.5, 1.05),
        dense("backward", "D128 S16384 full", 1.0, 1.5),
        dense("backward", "D256 S4096 full", 1.3, 1.44),
        dense("backward", "D256 S16384 window 1024", 0.5, 1.02),
        dense("backward", "D128 S8192 heads 32/8 full", 1.0, 1.0, 570.0),
        dense("backward", "D128 S8192 full", 0.4, 0.4, 600.0),
        dense("backward", "D128 S8192 heads 32/8 causal", 1.0, 1.0, 588.0),
        dense("backward", "D128 S8192 causal", 0.4, 0.4, 600.0),
    ]
    for each, theirs, ours in zip(rows[-4:-2], (300, 330), (300, 320), strict=True):
        each["contenders"]["FA4"]["peak_bytes"], each["contenders"]["warploom"]["peak_bytes"] = theirs, ours
    run = {
        "roofs": {"gemm_tflops": 700.0, "copy_gb_s": 1.0},
        "device": "Some GPU",
        "date": "today",
        "commit": "0",
        "rows": rows,
    }
    data = tmp_path / "dense.json"
    data.write_text(json.dumps(run))
    report.write([data], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    for line in (
        "| the better of cuDNN and FA4 over ours, mean of D64, D128, D256 | 1.03 | 1.20 | met |",
        "| the same, the worst case | 0.98 | 1.00 | met |",
        "| the same, the worst of grouped heads and D192/128 | 0.98 | 0.90 | missed |",
        "| FA4 over ours, the worst of D96, D192, window, documents | 1.00 | 1.05 | met |",
        "| the better of cuDNN and FA4 over ours, the worst of D80, 128 and 197 tokens | 1.00 | 0.97 | missed |",
        "| D128 S16384 full over the product's rate | 0.80 | 0.90 | met |",
        "| the better of cuDNN and FA4 over ours, mean of D64, D128, D256 | 1.08 | 1.14 | met |",
        "| the better of cuDNN and FA4 over ours, the worst of D256 | 1.25 | 1.30 | met |",
        "| D128 S16384 full over 600 TFLOP/s | 1.00 | 1.00 | met |",
        "| heads 32/8 over heads 32/32 (D128 S8192), the worse of full and causal | 1.00 | 0.95 | missed |",
        "| FA4's peak memory over ours, the worst case | 1.00 | 1.00 | met |",
    ):
        assert line in page, line


def test_report_without_a_gpu(tmp_path: Path) -> None:
    known = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu-attention.json"
    report.write([known], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "## Attention on a CPU" in page and "No run on a GPU is among the files" in page


def test_report_of_bank_counters_and_of_unknown_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = tmp_path / "banks.json"
    data.write_text(json.dumps({"device": "Some GPU", "kernels": 7, "agree": 6}))
    report.write([data], tmp_path)
    assert "predicted the counters of 6 of 7 kernels" in (tmp_path / "performance.md").read_text()
    large = {"kernel": "product", "work": "large", "predicted_excess": 1234, "excess": 1235, "agrees": True}
    data.write_text(json.dumps({"device": "Some GPU", "kernels": 8, "agree": 7, "large": [large]}))
    report.write([data], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "predicted the counters of 6 of 7 kernels" in page and "| product | large | 1,234 | 1,235 |" in page
    ours = {"kernel": "ours", "excess": 5678, "ms": 0.35, "tflops": 392.7}
    trial = {"work": "a product", "kernels": [ours, {"kernel": "theirs", "refused": "no"}]}
    data.write_text(json.dumps({"device": "Some GPU", "trials": [trial]}))
    report.write([data], tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "| ours | 5,678 | 350.0 | 393 |" in page and "| theirs | – | no | – |" in page
    data.write_text(json.dumps({"device": "Some GPU", "loss": {"fp32": [4.0, 2.0], "hopper": [4.5, 2.25]}}))
    report.write([data], tmp_path)
    assert "| hopper | 2.2500 | 0.37500 |" in (tmp_path / "performance.md").read_text()
    data.write_text("{}")
    assert main(["bench", "report", str(data), "--docs", str(tmp_path)]) == 2
    assert "banks.json is no file of" in capsys.readouterr().err


def test_mean_is_geometric() -> None:
    assert report.mean([4.0, 1.0]) == pytest.approx(2.0)


PART = "<!-- bench: {} -->"
PAGE = f"before\n{PART.format('headline, written by `warploom bench report`')}\n{PART.format('end')}\nafter\n"


def results(folder: Path) -> Path:
    run = {
        "device": "NVIDIA H100",
        "date": "today",
        "commit": "0",
        "roofs": {"gemm_tflops": 700.0, "copy_gb_s": 3000.0},
        "rows": [row("dense", "forward", "a", warploom=contender(1.0), cuDNN=contender(1.5))],
    }
    (folder / "benchmarks" / "results").mkdir(parents=True)
    data = folder / "benchmarks" / "results" / "dense.json"
    data.write_text(json.dumps(run))
    return data


def test_report_writes_the_table_of_other_pages(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = results(tmp_path)
    (tmp_path / "docs").mkdir()
    readme, home = tmp_path / "README.md", tmp_path / "docs" / "index.md"
    readme.write_text(PAGE)
    home.write_text("no part of the report\n")
    with contextlib.chdir(tmp_path):
        assert main(["bench", "report", str(data)]) == 0
        assert readme.read_text() == PAGE  # a table of some files would be a part of itself
        capsys.readouterr()
        assert main(["bench", "report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == ["docs/performance.md", "README.md"]
    text = readme.read_text()
    assert "| Dense, Hopper | torch's cuDNN | 1.50 (1.50) |" in text
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert report.fill(text, report.read([data])) == text  # again: nothing changes
    assert home.read_text() == "no part of the report\n"


def test_a_part_that_the_report_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asks for the part 'tail' of the report; there is headline"):
        report.fill(PAGE.replace("headline", "tail"), {})


def test_runs_of_one_suite_stand_under_one_title(tmp_path: Path) -> None:
    """The Hopper kernels' run before the Triton kernels', whatever their files are called; passes before the rest."""
    data = results(tmp_path)
    run = json.loads(data.read_text())
    other, third = data.with_name("a-triton.json"), data.with_name("masks.json")
    other.write_text(json.dumps(run))
    run["rows"] = [row("masks", measure, "a", warploom=contender(1.0)) for measure in ("host", "mask", "backward", "forward")]
    third.write_text(json.dumps(run))
    page = report.write(sorted(data.parent.glob("*.json")), tmp_path)[0].read_text()
    titles = [line for line in page.splitlines() if line.startswith("#")]
    assert titles == [
        "# Performance",
        "## Summary",
        "## Dense attention",
        "### Hopper kernels: forward",
        "### Triton kernels: forward",
        "## Column masks",
        "### Hopper kernels: forward",
        "### Hopper kernels: backward",
        "### Hopper kernels: host time of a call",
        "### Hopper kernels: preparing a mask",
    ]
    again = report.write([data, data.with_name("dense.json")], tmp_path)[0].read_text()
    assert again.count("### Hopper kernels: forward") == 1
    twice = data.with_name("later.json")
    twice.write_text(data.read_text())
    assert "### Hopper kernels: forward, later\n" in report.write([data, twice], tmp_path)[0].read_text()


def test_the_report_of_this_repository_is_the_one_that_is_committed(tmp_path: Path) -> None:
    """What fuzzers, sanitizers and sweeps wrote lies beside the runs and has no section."""
    root = Path(__file__).parents[2]
    files = sorted((root / "benchmarks" / "results").glob("*.json"))
    runs = [path.relative_to(root) for path in files if report.is_run(path)]
    assert 0 < len(runs) < len(files)
    with contextlib.chdir(root):
        pages = report.write(runs, tmp_path)
    for page in pages:
        assert page.read_text() == (root / "docs" / page.relative_to(tmp_path)).read_text(), page
    drawn = {page.name for page in pages if page.name.startswith("performance-")}
    assert drawn == {path.name for path in (root / "docs" / "images").glob("performance-*")}, "a picture of no run"


@pytest.mark.gpu
def test_decode_and_serving_on_a_gpu(tmp_path: Path) -> None:
    """Small shapes, captured: none of ours is wrong or refused but for the Hopper kernel, which has none of these heads."""
    out = tmp_path / "run.json"
    command = ["bench", "--device", "cuda", "--quick", "--repeats", "2", "--suite", "decode", "--suite", "serving"]
    assert main([*command, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6 and not any("failed" in row for row in rows), rows
    for row in rows:
        for name, found in row["contenders"].items():
            if name.startswith("warploom") and name != "warploom, hopper":
                assert "ms" in found, (row["case"], name, found)
            assert name != "warploom, hopper" or "wrong" not in found, (row["case"], found)
    assert all("floor_ms" in row for row in rows if row["measure"] in ("graph", "graph, latent"))
