"""The harness on calls of known time and result."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.bench import captured, harness
from warploom.bench.harness import Case, Comparison, Own, Timer, WrongResult, compare, run_case
from warploom.bench.patience import PATIENCE

CPU = torch.device("cpu")


class Clock:
    """A clock that only its calls move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 0.0, []
        monkeypatch.setattr(harness.time, "perf_counter", lambda: self.now)

    def call(self, name: str, *durations: float) -> harness.Call:
        left = list(durations)

        def run() -> str:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return name

        return run


def right(_: Any) -> float:
    return 0.5


def test_interleaves_and_takes_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {"a": clock.call("a", 0.02), "b": clock.call("b", 0.04, 0.04, 0.03, 0.03, 0.9, 0.03, 0.03)}
    found = compare(Comparison(calls, right, flops=1e12), Timer(CPU))["contenders"]
    assert "".join(clock.log) == "ab" + "ab" + ("abba" * harness.FEWEST)[: 2 * harness.FEWEST]
    assert found["a"]["ms"] == pytest.approx(20) and found["b"]["ms"] == pytest.approx(30)
    assert found["b"]["p80"] > 100 and found["a"]["p80"] == pytest.approx(20)
    assert found["a"]["tflops"] == pytest.approx(50) and found["a"]["error"] == 0.5


@pytest.mark.parametrize("count", range(1, 8))
def test_each_contender_follows_each_other_equally_often(count: int) -> None:
    turns = count * (1 + count % 2)
    orders = [harness.order_of(turn, count) for turn in range(turns)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == count * (count - 1) and len(set(follows.values())) <= 1
    assert Counter(order[0] for order in orders) == dict.fromkeys(range(count), turns // count)


def test_fast_calls_get_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = compare(Comparison({"a": clock.call("a", 1e-4)}, right), Timer(CPU))["contenders"]
    assert found["a"]["rounds"] == harness.MOST


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def check(result: str) -> float:
        if result == "bad":
            raise WrongResult("far away")
        return 0.0

    calls = {"good": clock.call("good", 0.1), "bad": clock.call("bad", 0.1), "broken": lambda: torch.empty(2) @ torch.empty(3)}
    found = compare(Comparison(calls, check, refused={"absent": "not installed"}), Timer(CPU))["contenders"]
    assert found["bad"] == {"wrong": "far away"} and clock.log.count("bad") == 1
    assert found["broken"]["refused"].startswith("RuntimeError") and found["absent"] == {"refused": "not installed"}
    assert found["good"]["ms"] == pytest.approx(100)


def test_a_case_that_cannot_be_built_says_why() -> None:
    def build(_: torch.device) -> Iterator[tuple[str, Comparison]]:
        yield "forward", Comparison({"a": lambda: None}, right)
        raise RuntimeError("out of memory\nlong trace")

    rows = list(run_case(Case("s", "c", {"batch": 1}, build), Timer(CPU)))
    assert rows[0]["measure"] == "forward" and rows[0]["batch"] == 1
    assert rows[1] == {"suite": "s", "case": "c", "batch": 1, "failed": "RuntimeError: out of memory"}


def test_divides_what_is_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    found = compare(Comparison({"a": clock.call("a", 0.32)}, right, divide=32, bytes=1e9), Timer(CPU))["contenders"]
    assert found["a"]["ms"] == pytest.approx(10) and found["a"]["gb_s"] == pytest.approx(100)


def test_a_call_of_its_own_has_its_own_check_and_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {"ours": clock.call("ours", 0.1), "other": clock.call("other", 0.2)}
    own = {"other": Own(lambda result: 0.25 if result == "other" else 1.0, 4e12)}
    comparison = Comparison(calls, right, flops=1e12, own=own, verdict=lambda found: {"names": sorted(found)})
    row = compare(comparison, Timer(CPU))
    assert row["contenders"]["ours"]["tflops"] == pytest.approx(10) and row["contenders"]["ours"]["error"] == 0.5
    assert row["contenders"]["other"]["tflops"] == pytest.approx(20) and row["contenders"]["other"]["error"] == 0.25
    assert row["verdict"] == {"names": ["other", "ours"]} and row["flops"] == 1e12


def test_host_time_waits_for_the_device_before_a_call_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def wait() -> None:
        clock.now += 5.0
        clock.log.append("wait")

    monkeypatch.setattr(harness.torch.cuda, "synchronize", wait)
    calls = {"a": clock.call("a", 0.01), "b": clock.call("b", 0.02, 0.02, 0.7, 0.02)}
    found = compare(Comparison(calls, right, clock=harness.issue), Timer(CPU))["contenders"]
    assert found["a"]["ms"] == pytest.approx(10) and found["b"]["ms"] == pytest.approx(20)
    assert clock.log[2:8] == ["wait", "a", "wait", "b", "wait", "a"]


def test_host_time_in_a_row_leaves_out_the_first_call_after_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(harness.torch.cuda, "synchronize", lambda: clock.log.append("wait"))
    calls = {"a": clock.call("a", 0.5, 0.9, 0.01, 0.01, 0.01)}
    assert harness.in_a_row(calls, rounds=1, row=4)["a"] == pytest.approx([900, 10, 10])
    assert clock.log == ["wait", "a", "a", "a", "a", "wait"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_an_installed_package_told_the_commit_of_another_project(tmp_path: Path) -> None:
    """As in an environment within the folder of whoever uses it."""
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *own, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    packages = tmp_path / "site-packages"
    packages.mkdir()
    assert harness._commit(packages) is None
    assert re.fullmatch(r"[0-9a-f]{7,}", harness._commit(tmp_path) or "")


def test_graphs_of_peers_that_nobody_asked_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "capture", lambda call: call)
    calls = {"warploom": lambda: None, "warploom, paged": lambda: None, "peer": lambda: None, "another": lambda: None}
    for peers, want in ((None, set(calls)), (["peer"], set(calls) - {"another"}), ([], {"warploom", "warploom, paged"})):
        monkeypatch.setattr(PATIENCE, "peers", peers)
        assert set(captured.captured(dict(calls), right, torch.device("cuda")).calls) == want


def test_a_graph_keeps_what_its_call_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else others' tensors come to lie where its kernels read a mask's positions."""
    replayed: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replayed.append("graph")))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())

    def made() -> tuple[Callable[[], torch.Tensor], weakref.ref[torch.Tensor]]:
        read = torch.arange(3)
        return captured.capture(lambda: read + 1), weakref.ref(read)

    call, read = made()
    assert read() is not None
    assert call().tolist() == [1, 2, 3] and replayed == ["graph"]


def test_a_peer_that_takes_too_long_is_left_out_and_ours_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass too, which torch might run in a thread that no signal reaches; and it is not asked twice in a case."""
    asked: list[str] = []
    unlimited = signal.getsignal(signal.SIGALRM)

    def slow(name: str) -> None:
        """What takes longer than the limit: its alarm goes off here, and not by the clock."""
        asked.append(name)
        assert signal.getsignal(signal.SIGALRM) is not unlimited and threading.current_thread() is threading.main_thread()
        signal.raise_signal(signal.SIGALRM)

    def ours() -> None:
        assert signal.getsignal(signal.SIGALRM) is unlimited

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            slow("backward")
            return gradient

    leaf = torch.zeros(1, requires_grad=True)
    calls = {
        "warploom": ours,
        "peer": lambda: slow("forward"),
        "another": lambda: torch.autograd.grad(Slow.apply(leaf), leaf),
        "quick": lambda: None,
    }

    def build(device: torch.device) -> Iterator[tuple[str, Comparison]]:
        for measure in ("forward", "backward"):
            yield measure, Comparison(dict(calls), lambda _: 0.0)

    monkeypatch.setattr(PATIENCE, "seconds", 3600.0)
    rows = list(run_case(Case("suite", "case", {}, build), Timer(CPU, seconds=0.0)))
    assert asked == ["forward", "backward"]
    for row, why in zip(rows, ("its first call took", "took"), strict=True):
        found = row["contenders"]
        assert all("ms" in found[name] for name in ("warploom", "quick")), found
        for name in ("peer", "another"):
            assert f"{why} more than the 3600 s of --peer-seconds" in found[name]["refused"]
    list(run_case(Case("suite", "another case", {}, build), Timer(CPU, seconds=0.0)))
    assert asked == ["forward", "backward"] * 2
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
