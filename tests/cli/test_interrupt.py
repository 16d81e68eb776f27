"""Ctrl-C, as a terminal sends it to the whole process group: one line, status 130, nobody left at work, nothing left behind.

Reading both streams to their end also waits for every process that inherited them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from warploom.commands import build
from warploom.runtime import modules
from warploom.runtime.module_spec import ModuleSpec
source = ("tests.runtime.builders:build", (("width", 1),), ("runtime/cubin.py",))
specs = [ModuleSpec(f"kernel_{i}", "sm_90a", *source) for i in range(4)]
build.named_kinds = lambda arch: {"forward": specs}
modules.cannot_build = lambda: None
from warploom.cli import main
sys.exit(main(sys.argv[1:]))
"""


def interrupted(stream: str, sign: Callable[[str], bool], *arguments: str, **environment: str) -> tuple[str, str]:
    """What a command printed on stdout and stderr, interrupted once a line of `stream` shows the sign."""
    command = [sys.executable, *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=variables
    )
    watched = process.stderr if stream == "stderr" else process.stdout
    assert watched is not None
    before = []
    try:
        for line in iter(watched.readline, ""):
            before.append(line)
            if sign(line):
                break
        else:
            pytest.fail(f"it ended without a sign: {''.join(before)} {process.communicate()}")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "Traceback" not in out
    return out, err


def last_line(text: str) -> str:
    return text.splitlines()[-1]


@pytest.mark.parametrize("command", [["doctor"], ["explain", "--seqlen=8", "--heads=1"], ["bench", "--list"]], ids=" ".join)
def test_while_torch_is_imported(command: list[str]) -> None:
    importing = ("-X", "importtime", "-m", "warploom", *command)
    _, err = interrupted("stderr", lambda line: "| " in line and " torch." in line, *importing)
    words = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert words == ["warploom: interrupted"]


def test_while_modules_are_compiled(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    places = {"WARPLOOM_CACHE": str(tmp_path / "cache"), "BUILDER_GATE": str(gate), "BUILDER_LOG": str(tmp_path / "log")}
    _, err = interrupted("stderr", lambda line: line == "builds\n", "-c", BUILD, "build", "--jobs", "2", **places)
    assert last_line(err) == "warploom build: interrupted"
    assert [line for line in err.splitlines()[:-1] if line != "builds"] == []
    left = [path.name for path in (tmp_path / "cache" / "modules").iterdir() if path.suffix != ".lock"]
    assert left == []


def test_while_a_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ("bench", "--device", "cpu", "--quick", "--suite", "forward", "--suite", "linear", "--out", str(out))
    _, err = interrupted("stdout", lambda line: line.startswith("[1/"), "-m", "warploom", *arguments)
    assert last_line(err) == "warploom bench: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert json.loads(out.read_text())["rows"]


def test_while_other_processes_compile_for_a_benchmark() -> None:
    arguments = ("bench", "--device", "cpu", "--quick", "--suite", "linear", "--warm", "2")
    _, err = interrupted("stderr", lambda line: ": compiled, " in line, "-m", "warploom", *arguments)
    words = [line for line in err.splitlines() if ": compiled, " not in line]
    assert words == ["warploom bench: interrupted"]
