"""The command with a stand-in for compute-sanitizer, on a machine without either."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sanitize import __main__ as command
from tests.sanitize import stage as stages
from tests.sanitize import worker
from tests.sanitize.problems import LONGEST, Options, Small, names, small
from tests.sanitize.stage import Result, Stage, reports

OPTIONS = Options(variants=40)
MEMCHECK = """========= COMPUTE-SANITIZER
=== begin attention/triton/1
=== end attention/triton/1
=== begin attention/triton/2
========= Invalid __shared__ read of size 1024 bytes
=========     at forward_kernel+0x1230 in standard.py:42
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x10400 is out of bounds
=========
=== end attention/triton/2
=== begin attention/triton/3
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= COMPUTE-SANITIZER
=== begin a
=== end a
========= Error: Race reported between Write access at split_kernel+0x60
=========     and Read access at split_kernel+0x100 [496 hazards]
=========
=== begin b
========= Warning: Race reported between Write access at split_kernel+0x70
=========     and Read access at split_kernel+0x110 [4 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
CLEAN = "========= COMPUTE-SANITIZER\n=== begin a\n=== end a\n========= {}\n"


def test_reports_belong_to_the_problem_before_them() -> None:
    ((name, words),) = reports(MEMCHECK)
    assert name == "attention/triton/2"
    assert words.splitlines()[:2] == [
        "Invalid __shared__ read of size 1024 bytes",
        "  at forward_kernel+0x1230 in standard.py:42",
    ]
    assert [name for name, _ in reports(RACECHECK)] == ["a", "b"]
    assert all("hazards]" in words for _, words in reports(RACECHECK))


NONE = ["ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"]


@pytest.mark.parametrize("summary", NONE)
def test_a_clean_run_has_no_report(summary: str) -> None:
    assert reports(CLEAN.format(summary)) == []


def test_a_summary_of_errors_that_nothing_shows_is_a_report() -> None:
    assert reports(CLEAN.format("ERROR SUMMARY: 10 errors")) == [("", "ERROR SUMMARY: 10 errors")]


def test_the_tool_s_command() -> None:
    words = stages.command("tool", "memcheck", ["forward_kernel", "dq_kernel"])
    assert words[:3] == ["tool", "--tool", "memcheck"] and words[-2:] == ["--kernel-name", "kns=dq_kernel"]
    assert stages.command(None, "memcheck", ["forward_kernel"]) == []


def test_problems_are_small_and_drawn_again_alike() -> None:
    from tests.sanitize.problems import _jobs

    assert len(set(names(OPTIONS))) == len(names(OPTIONS)) >= 40
    jobs = _jobs(OPTIONS)
    assert {job.family for job in jobs} >= {"attention", "varlen", "decode", "linear"}
    for job in jobs:
        problem = small(0, job)
        assert problem == small(0, job)
        if job.family == "attention":
            # Whole tiles of queries are of up to 128.
            assert 0 < problem.seqlen_q <= max(LONGEST, 128) and problem.batch and problem.heads_q <= 8, problem
    draw = Small("any")
    assert max(draw.length(1500) for _ in range(2000)) == LONGEST


def test_problems_that_bring_no_kernel_are_left_out() -> None:
    found = {"a": ["k1", "k2"], "b": ["k2"], "c": ["k3"], "d": [], "e": ["k3", "k4"]}
    compiled = Stage({name: Result("ran", "", kernels) for name, kernels in found.items()})
    compiled.results["d"] = Result("failed", "ValueError: no")
    assert command.bringing(list("abcdef"), compiled) == ["a", "c", "d", "e"]
    assert compiled.kernels == {"k1", "k2", "k3", "k4"}
    assert command.spread(list("abcdefgh"), 3) == ["a", "c", "f"] and command.spread(["a"], 3) == ["a"]


def test_kernels_are_told_by_function_and_by_what_they_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from warploom.attention.triton.forward_kernel import forward_kernel
    from warploom.decode.triton.kernels import split_kernel

    if not hasattr(forward_kernel, "device_caches"):
        pytest.skip("interpreted kernels are not compiled")
    first = SimpleNamespace(device_caches={0: ({"bf16, 64": None}, {})})
    monkeypatch.setattr(forward_kernel, "device_caches", first.device_caches)
    monkeypatch.setattr(split_kernel, "device_caches", {})
    seen = worker.Kernels()
    (one,) = [name for name in seen.new("a") if "forward_kernel" in name]
    assert one.startswith("warploom.attention.triton.forward_kernel.forward_kernel ")
    first.device_caches[0][0]["bf16, 128"] = None
    split_kernel.device_caches[0] = ({"bf16, 64": None}, {})
    later = seen.new("b")
    assert len(later) == 2 and one not in later and any("split_kernel" in name for name in later)
    assert seen.new("c") == []


# The protocol of worker.py, without what takes time; problems "bad", "lost" and "dies" are what they are named.
WORKER = """
import json, os, sys
from pathlib import Path
order, results = json.loads(Path(sys.argv[1]).read_text()), open(sys.argv[2], "a")
for number, name in enumerate(order["names"]):
    try:
        os.close(os.open(Path(order["taken"]) / str(number), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        continue
    print(json.dumps({"begin": name}), file=results, flush=True)
    print("=== begin " + name, flush=True)
    if name == "dies":
        os._exit(11)
    if name == "lost":
        print(json.dumps({"end": name, "status": "lost", "words": "no more", "kernels": []}), file=results, flush=True)
        os._exit(3)
    if name == "bad" and os.environ.get("CHECKED"):
        print("========= Invalid __global__ write of size 4 bytes", flush=True)
    print("=== end " + name, flush=True)
    status = "failed" if name == "fails" else "ran"
    print(json.dumps({"end": name, "status": status, "words": "", "kernels": [name]}), file=results, flush=True)
"""
# Sets what the worker above looks for and runs it; exits as compute-sanitizer does.
TOOL = """
import os, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("stand-in 1"))
assert words[0] == "--tool" and words[2:4] == ["--error-exitcode", "86"], words
while words[0].startswith("--"):
    words = words[2:]
print("========= COMPUTE-SANITIZER", flush=True)
run = subprocess.run(words, env={**os.environ, "CHECKED": "1"}, stdout=subprocess.PIPE, text=True)
errors = run.stdout.count("=========")
print(run.stdout + f"========= ERROR SUMMARY: {errors} errors", flush=True)
sys.exit(86 if errors else run.returncode)
"""


@pytest.fixture
def tool(tmp_path: Path) -> str:
    """An executable that stands in for compute-sanitizer."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\n{TOOL}")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(stages, "WORKER", [sys.executable, str(tmp_path / "worker.py")])


@pytest.mark.parametrize("workers", [1, 3])
def test_a_problem_that_kills_its_process_costs_itself_alone(light: None, tool: str, tmp_path: Path, workers: int) -> None:
    wanted = ["a", "dies", "b", "lost", "c", "bad", "d", "fails", "e"]
    prefix = stages.command(tool, "memcheck", ["some_kernel"])
    done = stages.run(prefix, OPTIONS, wanted, workers=workers, folder=tmp_path / "logs", until=1e12)
    assert {name: r.status for name, r in done.results.items() if r.status != "ran"} == {
        "dies": "died",
        "lost": "lost",
        "fails": "failed",
    }
    assert set(done.results) == set(wanted) and done.troubles == []
    assert done.results["bad"].reports == ["Invalid __global__ write of size 4 bytes"] and done.results["bad"].wrong
    assert done.kernels == {"a", "b", "c", "d", "e"}
    assert "exit status 11" in done.results["dies"].words


def test_a_tool_that_does_not_start_is_said_once_a_process(light: None, tmp_path: Path) -> None:
    done = stages.run([sys.executable, "-c", "exit('no device')"], OPTIONS, ["a"], workers=1, folder=tmp_path / "x", until=1e12)
    assert done.results == {} and len(done.troubles) == 1 and "no device" in done.troubles[0]


@pytest.mark.parametrize(
    ("wanted", "at_least", "status"), [(["a", "b"], 2, 0), (["a", "b"], 3, 1), (["a", "bad"], 0, 1), (["a", "dies"], 0, 1)]
)
def test_the_command_s_exit_status(
    light: None,
    tool: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    wanted: list[str],
    at_least: int,
    status: int,
) -> None:
    monkeypatch.setattr(command, "names", lambda options: wanted)
    monkeypatch.setattr(command, "find", lambda name: tool)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    out = tmp_path / "result" / "sanitize.json"
    more = ["--device", "cpu", "--folder", str(tmp_path / "kept"), "--jobs", "2", "--race", "1", "--json", str(out)]
    assert command.main([*more, "--at-least", str(at_least)]) == status
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert report["passed"] is (status == 0) and report["tool"] == "stand-in 1"
    assert ("passed" if status == 0 else "FAILED") in printed.splitlines()[-1]
    for name in set(wanted) & {"bad", "dies"}:
        (error, *_) = [e for e in report["errors"] if e["problem"] == name and e["check"] == "memcheck"]
        assert error["replay"].endswith(f"--only '{name}'") and error["replay"] in printed


def test_refusals_are_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert command.main(["--only", "attention/triton/9999"]) == 2
    monkeypatch.setattr(command, "find", lambda name: None)
    assert command.main([]) == 2
    said = capsys.readouterr().err
    assert "--only attention/triton/9999 is no problem" in said and "compute-sanitizer is neither on the PATH" in said
    assert command.main(["--list", "--variants", "40"]) == 0
    assert "picked/triton/dense, dropout" in capsys.readouterr().out.splitlines()


def test_a_real_problem_in_the_interpreter(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command to the kernels and back, with the real worker."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "find", lambda name: tool)
    name = next(n for n in names(OPTIONS) if n.startswith("attention/") and "bfloat16" not in drawn(n).dtype and width(n) <= 64)
    out = tmp_path / "sanitize.json"
    arguments = ["--variants", "40", "--device", "cpu", "--folder", str(tmp_path), "--only", name, "--json", str(out)]
    status = command.main(arguments)
    report = json.loads(out.read_text())
    assert status == 0 and report["passed"], report
    assert report["kernels"] == {"compile": 1, "memcheck": 1, "racecheck": 1} and not report["refused"]


def drawn(name: str) -> SimpleNamespace:
    from tests.sanitize.problems import _jobs

    return small(0, next(job for job in _jobs(OPTIONS) if f"{job.family}/{job.backend}/{job.index}" == name))


def width(name: str) -> int:
    problem = drawn(name)
    return max(problem.head_dim, problem.head_dim_v)
