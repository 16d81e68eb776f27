"""No test looks at a clock: a busy machine is no defect. What is to be light is counted, what is to be fast is benchmarked."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLOCKS = {"time", "timeit", "sched", "datetime"}
READS = {
    *("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns", "thread_time"),
    *("thread_time_ns", "default_timer", "sleep", "getrusage", "elapsed_time", "setitimer", "alarm"),
}
# Of pytest-timeout, subprocess, threading, queue, hypothesis. With None none of them waits for a clock.
LIMITS = {"timeout", "deadline"}
WAITS = {"join", "wait", "communicate", "timeout"}
DURATIONS = {"seconds", "ms", "elapsed", "duration", "duration_ms", "wall", "wall_s"}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
HOUR = 3600
# Commands with a budget of seconds, which end what hangs; only their tests are meant. The last one's subject is a timeout,
# which begins when nothing else can end its call.
COMMANDS = {ROOT / "tests" / name for name in ("campaign", "fuzz", "sanitize", "integrations/sweep", "distributed/stuck.py")}


def collected() -> list[Path]:
    """What pytest collects, and the configuration and the helpers beside it; commands of their own are no tests."""
    files = sorted(set((ROOT / "tests").rglob("*.py")) - {Path(__file__)})  # whose samples look at clocks
    return [f for f in files if not COMMANDS & {f, *f.parents} or f.name.startswith(("test_", "conftest"))]


def clocks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and words of each look at a clock, also in the code that strings hold."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from ((line, f"imports {a.name}") for a in node.names if a.name.partition(".")[0] in CLOCKS)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in CLOCKS:
            yield line, f"imports from {node.module}"
        elif isinstance(node, ast.ImportFrom):
            yield from ((line, f"imports {a.name}") for a in node.names if a.name in READS)
        elif isinstance(node, ast.Attribute) and node.attr in READS:
            yield line, f"reads {node.attr}"
        elif isinstance(node, ast.Call):
            yield from ((line, f"sets {k.arg}") for k in node.keywords if k.arg in LIMITS and not is_none(k.value))
            waits = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and node.args
            if waits and is_number(node.args[0]):
                yield line, f"limits {ast.unparse(node.func)}"
        elif isinstance(node, ast.Compare) and any(isinstance(op, ORDERED) for op in node.ops):
            sides = [node.left, *node.comparators]
            limits = any(is_number(side) and ast.literal_eval(side) != 0 for side in sides)
            if limits and any(name in DURATIONS for side in sides for name in names(side)):
                yield line, f"bounds a duration: {ast.unparse(node)}"
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and (inner := code(node)) is not None:
            yield from ((line, f"in a string {words}") for _, words in clocks(inner))


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_number(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)


def names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def code(node: ast.Constant | ast.JoinedStr) -> ast.AST | None:
    """The Python that a string holds, with x for what is filled in; None for other strings."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "x" for p in parts)
    if "import" not in text:
        return None
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


@pytest.mark.parametrize("file", collected(), ids=lambda file: file.relative_to(ROOT / "tests").as_posix())
def test_no_test_looks_at_a_clock(file: Path) -> None:
    found = [f"{file.name}:{line} {words}" for line, words in clocks(ast.parse(file.read_text()))]
    assert not found, "count instead (calls, modules, operations), or wait for an event; see CONTRIBUTING.md"


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os, timeit as t",
        "from time import perf_counter",
        "from warploom.demo.pipeline import perf_counter",
        "harness.time.perf_counter()",
        "start.elapsed_time(stop)",
        "subprocess.run(command, timeout=60)",
        "@pytest.mark.timeout(300)\ndef test(): ...",
        "@settings(deadline=200)\ndef test(): ...",
        "thread.join(5)",
        "process.communicate(None); event.wait(0.5)",
        "assert found['seconds'] < 10",
        "assert 0.3 > statistics.median(ms for ms in runs)",
        "python('''\nimport time\nassert 1\n''')",
        "python(f'import {name}; from time import sleep')",
    ],
)
def test_a_look_at_a_clock_is_found(source: str) -> None:
    assert len(list(clocks(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "monkeypatch.setattr(harness.time, 'perf_counter', lambda: now[0])",
        "subprocess.run(command, timeout=None)",
        "', '.join(names); thread.join(); process.wait()",
        "torch.cuda._sleep(10**6)",
        "assert min(timing.seconds) > 0 and timing.seconds == [3.0]",
        "'takes time, which is important'",
    ],
)
def test_what_no_clock_decides_is_left_alone(source: str) -> None:
    assert list(clocks(ast.parse(source))) == []


def test_only_hangs_reach_the_guard() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["timeout"] >= HOUR


def test_examples_may_take_as_long_as_they_need() -> None:
    from hypothesis import HealthCheck, settings

    assert settings().deadline is None and HealthCheck.too_slow in settings().suppress_health_check
