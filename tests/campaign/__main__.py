"""GPU tests in several processes on one device, results in a file as they come: `python -m tests.campaign --results FILE`.

One process of pytest leaves a GPU idle while Python prepares the next call. Here each process collects all chosen tests and
takes one after another that no other has taken. One that says nothing for too long is ended, its test counts as hung, and
another process goes on; so it does after a test that has lost the device.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import SEED

ROOT = Path(__file__).parents[2]
COLLECTING = 300.0  # seconds that a process may take until its first test
LOST = 3  # exit status of a process whose device is lost
LOSSES = "CUDA error", "AcceleratorError", "device-side assert", "illegal memory access"


class Taking:
    """A plugin of pytest: of all collected tests those that no other process takes, each with fixtures of its own."""

    def __init__(self, taken: Path, results: Path, state: Path, until: float) -> None:
        self.taken, self.results, self.state, self.until = taken, results, state, until
        self.lost = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for number, item in enumerate(session.items):
            if self.lost or time.time() > self.until:
                break
            try:
                os.close(os.open(self.taken / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            self.state.write_text(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self.state.write_text("")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            words = f"{report.outcome} {report.nodeid} {report.duration:.2f} s"
            if report.failed:
                words += "\n" + "\n".join(f"    {line}" for line in report.longreprtext.splitlines()[-12:])
                self.lost = self.lost or any(loss in report.longreprtext for loss in LOSSES)
            write(self.results, words)


@dataclass
class Process:
    """One that runs tests, and where it says which."""

    running: subprocess.Popen[bytes]
    state: Path
    begun: float

    @property
    def test(self) -> str:
        return self.state.read_text() if self.state.exists() else ""

    def hangs(self, seconds: float) -> bool:
        """Whether it began or ended no test for so long."""
        if self.state.exists():
            return time.time() - self.state.stat().st_mtime > seconds
        return time.time() - self.begun > COLLECTING

    def end(self) -> None:
        """It and what it has started: a kernel that hangs goes on after a gentler signal."""
        if self.running.poll() is None:
            os.killpg(self.running.pid, signal.SIGKILL)
        self.running.wait()


def write(path: Path, words: str) -> None:
    """One line or more at the end of a file that others write to as well."""
    with open(path, "a") as file:
        file.write(words + "\n")
        file.flush()


def work(given: argparse.Namespace) -> int:
    """What a process does."""
    taken, state, until = given.work
    plugin = Taking(Path(taken), Path(given.results), Path(state), float(until))
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-m", given.mark]
    if given.k:
        options += ["-k", given.k]
    status = pytest.main([*options, *given.paths], plugins=[plugin])
    return LOST if plugin.lost else int(status)


def start(given: argparse.Namespace, folder: Path, number: int, until: float) -> Process:
    """The ``number``-th process."""
    state, log = folder / f"state-{number}", folder / f"log-{number}"
    command = [sys.executable, "-m", "tests.campaign", "--results", given.results, "--mark", given.mark, "-k", given.k]
    command += ["--work", str(folder / "taken"), str(state), str(until), *given.paths]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, SEED: str(given.seed), "PYTHONPATH": paths}
    with open(log, "wb") as out:
        running = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Process(running, state, time.time())


def run(given: argparse.Namespace, folder: Path) -> None:
    """All tests, or those that begin in time."""
    (folder / "taken").mkdir()
    until = time.time() + given.seconds
    alive = [start(given, folder, number, until) for number in range(given.processes)]
    count = len(alive)
    try:
        while alive:
            time.sleep(0.2)
            for process in list(alive):
                status, test = process.running.poll(), process.test
                if status is None and not process.hangs(given.hang):
                    continue
                process.end()
                alive.remove(process)
                if status is None:
                    write(Path(given.results), f"hung {test or 'no test'}")
                elif test:
                    write(Path(given.results), f"died {test} exit status {status}")
                if (test or status == LOST) and time.time() < until:
                    alive.append(start(given, folder, count, until))
                    count += 1
    finally:
        for process in alive:
            process.end()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--results", required=True, metavar="FILE", help="a line a test, in the order in which they end")
    parser.add_argument("--processes", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no test later; default %(default)s")
    parser.add_argument("--hang", type=float, default=90.0, help="seconds of a process without a word; default %(default)s")
    parser.add_argument("--mark", default="gpu", help="as pytest's -m; default %(default)s")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="of what tests draw; default: another each time"
    )
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="as pytest's")
    parser.add_argument("paths", nargs="*", default=["tests"], help="files, or tests by their ids; default: all")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.results = os.path.abspath(given.results)
    if given.work:
        return work(given)
    Path(given.results).write_text("")
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        run(given, Path(folder))
    lines = [line for line in Path(given.results).read_text().splitlines() if not line.startswith("    ")]
    counts = Counter(line.split()[0] for line in lines)
    print("\n".join(line for line in lines if line.split()[0] not in ("passed", "skipped")))
    print(
        f"seed {given.seed}: "
        + ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
        + f" in {time.time() - begun:.0f} s"
    )
    return int(counts["passed"] == 0 or any(counts[word] for word in ("failed", "hung", "died")))


if __name__ == "__main__":
    sys.exit(main())
