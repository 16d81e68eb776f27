"""Timing: contenders checked, interleaved, L2 emptied before every call, medians and the spread between p20 and p80."""

from __future__ import annotations

import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from warploom.bench.choice import MOST
from warploom.bench.patience import PATIENCE

Call = Callable[[], Any]
Clock = Callable[[dict[str, Call]], dict[str, list[float]]]

# Seconds that the rounds of one comparison may take, and rounds at the least.
SECONDS, FEWEST = 0.3, 5
# Read before every call: five times an H100's L2, so that neither inputs nor unwritten lines are left there.
FLUSH_BYTES = 2**28
# Clock cycles for which the device is held back, so that the host has queued a call before it begins.
HEAD_START = 1_000_000


class WrongResult(Exception):
    """A contender whose result is not the reference's."""


@dataclass(frozen=True)
class Own:
    """The check, the FLOPs and the bytes of a contender that is a call of its own."""

    check: Callable[[Any], float]
    flops: float | None = None
    bytes: float | None = None  # None: the comparison's


@dataclass
class Comparison:
    """Contenders for one call, built: `check` raises WrongResult, or returns the error of a result."""

    calls: dict[str, Call]
    check: Callable[[Any], float]
    flops: float | None = None
    bytes: float | None = None
    refused: dict[str, str] = field(default_factory=dict)
    divide: int = 1  # a call is so many of what is measured
    more: dict[str, Any] = field(default_factory=dict)
    clock: Clock | None = None  # measures the calls; None: the run's timer, the time on the device
    own: dict[str, Own] = field(default_factory=dict)  # contenders that compute something else, to compare speeds with
    verdict: Callable[[dict[str, dict[str, Any]]], dict[str, Any]] | None = None  # what follows from the contenders' rows
    tokens: int | None = None  # what is measured makes so many
    latency: float | None = None  # seconds of an empty call: with `bytes` at the rate of a copy, no call is faster


@dataclass(frozen=True)
class Case:
    """One line of a suite. `build` allocates, and yields its comparisons by what they measure ("forward", ...)."""

    suite: str
    name: str
    shape: dict[str, Any]
    build: Callable[[torch.device], Iterator[tuple[str, Comparison]]]
    seconds: float | None = None  # about what it takes on a GPU, where somebody reckoned


def asked_of(case: Case, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """What the case compares, of the contenders that the run asks."""
    PATIENCE.begin()
    for measure, found in case.build(device):
        calls = {name: call for name, call in found.calls.items() if PATIENCE.asks(name)}
        refused = {name: why for name, why in found.refused.items() if PATIENCE.asks(name)}
        yield measure, replace(found, calls=calls, refused=refused)


class Timer:
    """Milliseconds of interleaved calls on a device; on a CPU by the wall clock."""

    def __init__(self, device: torch.device, seconds: float = SECONDS) -> None:
        self.device, self.seconds = device, seconds
        self.copy_gb_s: float | None = None  # of a large copy on this device, once somebody measured it
        self.scratch = None
        if device.type == "cuda":
            self.scratch = torch.randint(0, 9, (FLUSH_BYTES // 4,), dtype=torch.int32, device=device)

    def __call__(self, calls: dict[str, Call], most: int = MOST) -> dict[str, list[float]]:
        first = {name: self.once([call])[0] for name, call in calls.items()}
        rounds = int(self.seconds * 1e3 / max(sum(first.values()), 1e-6))
        rounds = min(max(rounds, FEWEST), most)
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(rounds):
            order = [names[i] for i in order_of(turn, len(names))]
            for name, ms in zip(order, self.once([calls[name] for name in order]), strict=True):
                times[name].append(ms)
        return times

    def once(self, calls: list[Call]) -> list[float]:
        if self.scratch is None:
            found = []
            for call in calls:
                begin = time.perf_counter()
                call()
                found.append((time.perf_counter() - begin) * 1e3)
            return found
        events = []
        for call in calls:
            self.scratch.view(-1, 4096).amax(1)
            torch.cuda._sleep(HEAD_START)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]


def order_of(turn: int, count: int) -> list[int]:
    """The order in which contenders are timed in a round: over the rounds, each follows each other equally often.

    A chip that a heavy kernel has just warmed clocks lower for the next one (Williams, Experimental designs balanced for
    the estimation of residual effects of treatments, 1949).
    """
    zigzag = [i // 2 if i % 2 == 0 else count - (i + 1) // 2 for i in range(count)]
    if count % 2 and turn // count % 2:
        zigzag.reverse()
    return [(i + turn) % count for i in zigzag]


def wall(calls: dict[str, Call], count: int = 200, rounds: int = 5) -> dict[str, list[float]]:
    """Milliseconds of a call when calls are queued one behind the other: the host's time, where the device takes less."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(10):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / count * 1e3)
    return times


def issue(calls: dict[str, Call], rounds: int = 7) -> dict[str, list[float]]:
    """Milliseconds until a call returns to an idle device's host: what it costs the host, however long the device runs.

    The device is waited for before each call, so that no full queue holds the host.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return times


def in_a_row(calls: dict[str, Call], rounds: int = 7, row: int = 10) -> dict[str, list[float]]:
    """The same of calls one after the other, as a model makes them, without the first, which finds the caches cold."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            call()
            for _ in range(1, row):
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return times


def host(
    calls: dict[str, Call],
    check: Callable[[Any], float],
    refused: dict[str, str],
    own: dict[str, Own] | None = None,
    more: dict[str, Any] | None = None,
    clock: Clock = issue,
) -> Comparison:
    """What calls cost the host, once they are compiled and past the first two of their shapes."""
    calls, refused = dict(calls), dict(refused)
    for name, call in list(calls.items()):
        try:
            PATIENCE.first(name, call)
            for _ in range(2):
                call()
        except Exception as error:  # a peer may fail in any way
            refused[name] = first_line(error)
            del calls[name]
    return Comparison(calls, check, refused=refused, own=own or {}, more=more or {}, clock=clock)


def run_case(case: Case, timer: Timer) -> Iterator[dict[str, Any]]:
    """One row for each of the case's comparisons; a comparison that fails gives a row that says so."""
    try:
        for measure, comparison in asked_of(case, timer.device):
            yield {"suite": case.suite, "case": case.name, "measure": measure, **case.shape, **compare(comparison, timer)}
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        yield {"suite": case.suite, "case": case.name, **case.shape, "failed": first_line(error)}


def compare(comparison: Comparison, timer: Timer) -> dict[str, Any]:
    """Check every contender, then time those that are right."""
    found: dict[str, dict[str, Any]] = {name: {"refused": why} for name, why in comparison.refused.items()}
    right: dict[str, Call] = {}
    for name, call in comparison.calls.items():
        try:
            memory = _Peak(timer.device)
            result = PATIENCE.first(name, call)
            check = comparison.own[name].check if name in comparison.own else comparison.check
            found[name] = {"peak_bytes": memory.stop(), "error": check(result)}
            right[name] = call
            del result
        except WrongResult as error:
            found[name] = {"wrong": str(error)}
        except Exception as error:  # a peer may fail in any way
            found[name] = {"refused": first_line(error)}
    times = (comparison.clock or timer)(right) if right else {}
    for name, each in times.items():
        ms = [t / comparison.divide for t in each]
        cuts = statistics.quantiles(ms, n=5) if len(ms) > 1 else [ms[0]] * 4
        timed = {"ms": statistics.median(ms), "p20": cuts[0], "p80": cuts[3], "rounds": len(ms)}
        flops = comparison.own[name].flops if name in comparison.own else comparison.flops
        if flops is not None:
            timed["tflops"] = flops / timed["ms"] / 1e9
        own_bytes = comparison.own[name].bytes if name in comparison.own else None
        moved = comparison.bytes if own_bytes is None else own_bytes
        if moved is not None:
            timed["gb_s"] = moved / timed["ms"] / 1e6
        if comparison.tokens is not None:
            timed["tokens_s"] = comparison.tokens / timed["ms"] * 1e3
        found[name].update(timed)
    amounts = {"flops": comparison.flops, "bytes": comparison.bytes}
    if comparison.latency is not None and comparison.bytes is not None and timer.copy_gb_s is not None:
        amounts["floor_ms"] = floor_ms(comparison.latency, comparison.bytes, timer.copy_gb_s)
    row: dict[str, Any] = {**{n: x for n, x in amounts.items() if x is not None}, **comparison.more, "contenders": found}
    if comparison.verdict is not None:
        row["verdict"] = comparison.verdict(found)
    return row


def floor_ms(latency: float, amount: float, copy_gb_s: float) -> float:
    """Milliseconds that a call takes at the least: those of an empty one, and its bytes at the rate of a copy."""
    return latency * 1e3 + amount / copy_gb_s / 1e6


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


class _Peak:
    """Bytes allocated beyond those held before."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def stop(self) -> int | None:
        return torch.cuda.max_memory_allocated() - self.before if self.cuda else None


def roofs(timer: Timer) -> dict[str, float]:
    """What bounds any kernel here: a large bf16 product (TFLOP/s) and a large copy (GB/s, read and written)."""
    size, elements = (8192, 2**29) if timer.device.type == "cuda" else (512, 2**22)
    a, b = (torch.randn(size, size, device=timer.device).bfloat16() for _ in range(2))
    source = torch.randn(elements, device=timer.device).bfloat16()
    target = torch.empty_like(source)
    times = timer({"gemm": lambda: a @ b, "copy": lambda: target.copy_(source)})
    gemm, copy = (statistics.median(times[name]) for name in ("gemm", "copy"))
    return {"gemm_tflops": 2 * size**3 / gemm / 1e9, "copy_gb_s": 4 * elements / copy / 1e6}


def environment(device: torch.device) -> dict[str, Any]:
    """Where and with what a run was made."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        import triton

        found |= {
            "device": torch.cuda.get_device_name(device),
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        threads = torch.get_num_threads()
        found |= {"device": f"CPU, {threads} thread{'s' * (threads != 1)}"}
    return found


def _commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Of the checkout that the package runs from, if it does: an installed package may lie in one of something else."""
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    top, _, commit = done.stdout.strip().partition("\n")
    return commit if commit and Path(top).resolve() == root.resolve() else None
