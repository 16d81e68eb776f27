"""Running problems in several processes at once, each under a tool or none, and reading what tool and processes say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.sanitize.problems import Options
from tests.sanitize.worker import BEGIN, END, LOST

ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "tests.sanitize.worker"]
FOUND = 86  # exit status that the tool is asked for where it has found errors
GRACE = 120.0  # seconds after the last problem may begin, until what still runs counts as hung
# What the tool says where nothing is wrong.
_FINE = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY: 0 errors|(RACECHECK|LEAK) SUMMARY: 0 |Target application ")
_SUMMARY = re.compile(r"(ERROR|RACECHECK|LEAK) SUMMARY")


@dataclass
class Result:
    """Of one problem.

    status: "ran", "refused" (in words, as documented), "failed" (raised), "lost" (the context), "died" (its process), "hung".
    """

    status: str
    words: str = ""
    kernels: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)  # of the tool

    @property
    def wrong(self) -> bool:
        return self.status not in ("ran", "refused") or bool(self.reports)


@dataclass
class Stage:
    """All problems of a tool."""

    results: dict[str, Result] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)  # of no problem: a tool that does not start
    seconds: float = 0.0

    @property
    def kernels(self) -> set[str]:
        """Those of problems in which nothing was wrong."""
        return {kernel for r in self.results.values() if not r.wrong for kernel in r.kernels}


def command(tool: str | None, check: str, kernels: Sequence[str]) -> list[str]:
    """What a process is started with; ``kernels``: functions that alone are checked, all if none."""
    if tool is None:
        return []
    words = [tool, "--tool", check, "--error-exitcode", str(FOUND)]
    if check == "memcheck":
        words += ["--report-api-errors", "no"]  # a failing call raises in Python; others are asked whether they would
    for name in kernels:
        words += ["--kernel-name", f"kns={name}"]
    return words


def run(prefix: Sequence[str], options: Options, names: list[str], *, workers: int, folder: Path, until: float) -> Stage:
    """Each problem once, until the unix time ``until``; the folder keeps what was said."""
    begun, stage = time.time(), Stage()
    taken = folder / "taken"
    taken.mkdir(parents=True)
    order = folder / "order.json"
    order.write_text(json.dumps({"options": options.to_json(), "names": names, "taken": str(taken), "until": until}))
    lock = threading.Lock()

    def work(number: int) -> None:
        for attempt in range(len(names) + 1):
            place = folder / f"{number}-{attempt}"
            status = start(prefix, order, place, until)
            results, troubles = read(place, status)
            with lock:
                stage.results.update(results)
                stage.troubles += troubles
            # Only a process that died of a problem leaves others to the next.
            if not results or not (status == LOST or any(r.status in ("died", "lost") for r in results.values())):
                return

    running = [threading.Thread(target=work, args=(n,)) for n in range(min(workers, len(names)))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    stage.seconds = time.time() - begun
    return stage


def start(prefix: Sequence[str], order: Path, place: Path, until: float) -> int | None:
    """The exit status of a process, None of one that had to be ended."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        # Each tensor in an allocation of its own, so that a read past it is one past all memory.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    worker = [*WORKER, str(order), str(place.with_suffix(".jsonl"))]
    with open(place.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            [*prefix, *worker], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(max(1.0, until + GRACE - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return None


def read(place: Path, status: int | None) -> tuple[dict[str, Result], list[str]]:
    """Results by problem, and troubles of none, of one process."""
    answers, log = place.with_suffix(".jsonl"), place.with_suffix(".log").read_text(errors="replace")
    results: dict[str, Result] = {}
    current = None
    for line in answers.read_text().splitlines() if answers.exists() else []:
        said = json.loads(line)
        current = said.get("begin")
        if "end" in said:
            results[said["end"]] = Result(said["status"], said["words"], said["kernels"])
    if current is not None:
        end = "hung" if status is None else "died"
        results[current] = Result(end, f"exit status {status}; the end of its log:\n{tail(log)}")
    troubles = []
    found = reports(log)
    for name, words in found:
        if name in results:
            results[name].reports.append(words)
        else:
            troubles.append(words)
    if status is None and current is None:
        troubles.append(f"a process hung without a problem:\n{tail(log)}")
    elif status == FOUND and not found:
        troubles.append(f"the tool found errors that it does not show:\n{tail(log)}")
    elif status not in (0, None, LOST, FOUND) and current is None:
        troubles.append(f"a process ended with status {status} without a problem:\n{tail(log)}")
    return results, troubles


def tail(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-12:])


def reports(log: str) -> list[tuple[str, str]]:
    """(problem, words) of each report in what a process and its tool print; a summary counts where nothing else does."""
    found: list[tuple[str, str]] = []
    name, summary = "", ""
    for line in log.splitlines():
        if line.startswith(BEGIN):
            name = line.removeprefix(BEGIN)
        elif line.startswith(END):
            pass  # what comes late is the last problem's still
        elif line.startswith("========="):
            words = line.removeprefix("=========")
            if not words.strip() or _FINE.search(words):
                continue
            if _SUMMARY.search(words):
                summary = words.strip()
            elif words.startswith("  ") and found:
                if found[-1][1].count("\n") < 12:
                    found[-1] = found[-1][0], f"{found[-1][1]}\n  {words.strip()}"
            else:
                found.append((name, words.strip()))
    return found or ([("", summary)] if summary else [])
