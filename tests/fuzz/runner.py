"""The parent of the workers: hands out problems, survives what they die of, keeps count."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz import plan
from tests.fuzz.coverage import Coverage
from tests.fuzz.plan import Options

ROOT = Path(__file__).parents[2]
# Seconds without a word after which a worker counts as hung: compiling a variant's kernels takes up to a minute.
PATIENCE = {"cpu": 120.0, "cuda": 200.0}
# Seconds past the run's end that a problem in hand is given.
GRACE = 30.0


@dataclass
class Failure:
    """A problem that is wrong, raised, crashed or hung."""

    number: int
    family: str
    backend: str
    variant: int
    status: str
    words: list[str]
    problem: Any
    shrunk: Any = None
    shrunk_words: list[str] = field(default_factory=list)


@dataclass
class Tally:
    """All that a run has found so far."""

    options: Options
    began: float = field(default_factory=time.time)
    commit: str = field(default_factory=lambda: commit())
    statuses: Counter[str] = field(default_factory=Counter)
    backends: Counter[str] = field(default_factory=Counter)
    variants: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)
    failures: dict[int, Failure] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.coverage.device = self.options.device

    @property
    def done(self) -> int:
        return sum(self.statuses.values())

    def add(self, said: dict[str, Any]) -> None:
        family, backend, index = said["job"]
        status = said["status"]
        self.statuses[status] += 1
        if status == "refused":
            self.refused[f"{family}/{backend}: {said['words'][0][:80]}"] += 1
            return
        self.backends[f"{family}/{backend}"] += 1
        self.variants[f"{family}/{backend}/{index}"] += 1
        self.coverage.add(family, said["features"])
        key = f"{family}/{backend}"
        if status == "right":
            self.worst[key] = max(self.worst.get(key, 0.0), said.get("worst", 0.0))
        else:
            self.failures[said["end"]] = Failure(
                said["end"], family, backend, index, status, said["words"], said.get("problem")
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "device": device_name(self.options.device),
            "commit": self.commit,
            "command": f"python -m tests.fuzz {self.options.words()}",
            "seed": self.options.seed,
            "problems": self.done,
            "statuses": dict(self.statuses),
            "backends": dict(sorted(self.backends.items())),
            "variants": dict(sorted(self.variants.items())),
            "refused": dict(self.refused.most_common()),
            "largest_share_of_bound": {k: round(v, 3) for k, v in sorted(self.worst.items())},
            "coverage": self.coverage.to_json(),
            "failures": [vars(f) for _, f in sorted(self.failures.items())],
            "seconds": round(time.time() - self.began, 1),
        }


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def commit() -> str:
    """Of the tree; '+' marks changes that are not committed. Where there is no git, FUZZ_COMMIT says it."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD") or os.environ.get("FUZZ_COMMIT", "unknown")
    return head + ("+" if git("status", "--porcelain") else "")


class Worker:
    """One process and the thread that reads what it says."""

    def __init__(self, options: Options, shrink_seconds: float, news: queue.Queue[tuple[Worker, dict[str, Any]]]) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.numbers: list[int] = []
        self.current: int | None = None
        self.shrinking: int | None = None
        self.last = time.monotonic()
        self.errors: list[str] = []
        self._news = news
        self.tell({"options": options.to_json(), "shrink": shrink_seconds})
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def tell(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            pass  # its end is news of its own

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._news.put((self, json.loads(line)))
        self._news.put((self, {"died": self.process.wait()}))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = [*self.errors[-30:], line.rstrip()]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()


class Run:
    """All problems with numbers below `problems`, or those given, until `seconds` have passed."""

    def __init__(
        self,
        options: Options,
        *,
        problems: int,
        seconds: float,
        workers: int,
        numbers: list[int] | None = None,
        shrink_seconds: float = 10.0,
        folder: Path | None = None,
        json_path: Path | None = None,
        quiet: bool = False,
    ) -> None:
        self.options, self.workers, self.shrink_seconds, self.quiet = options, workers, shrink_seconds, quiet
        self.folder, self.json_path = folder, json_path
        self.until = time.time() + seconds
        self.tally = Tally(options)
        self.units = _units(options, list(range(problems)) if numbers is None else numbers, workers)
        self.total = sum(map(len, self.units))
        self.news: queue.Queue[tuple[Worker, dict[str, Any]]] = queue.Queue()
        self.alive: list[Worker] = []

    def run(self) -> Tally:
        self.alive = [self._worker() for _ in range(min(self.workers, max(1, len(self.units))))]
        shown = saved = time.monotonic()
        while self.alive:
            try:
                worker, said = self.news.get(timeout=1.0)
                self._heard(worker, said)
            except queue.Empty:
                pass
            self._watch()
            now = time.monotonic()
            if now - shown > 5 and not self.quiet:
                shown = now
                self._progress()
            if now - saved > 30:
                saved = now
                self._save()
        if not self.quiet:
            self._progress()
            print(file=sys.stderr)
        self._save()
        return self.tally

    def _worker(self) -> Worker:
        return Worker(self.options, self.shrink_seconds, self.news)

    def _heard(self, worker: Worker, said: dict[str, Any]) -> None:
        worker.last = time.monotonic()
        if "start" in said:
            worker.current = said["start"]
        elif "end" in said:
            worker.current = None
            if said["end"] in worker.numbers:
                worker.numbers.remove(said["end"])
            self.tally.add(said)
            if said["end"] in self.tally.failures:
                self._report(self.tally.failures[said["end"]])
        elif "shrinking" in said:
            worker.shrinking = said["shrinking"]
        elif "shrunk" in said:
            worker.shrinking = None
            failure = self.tally.failures[said["shrunk"]]
            failure.shrunk, failure.shrunk_words = said["problem"], said["words"]
            self._write(failure)
        elif "idle" in said:
            self._feed(worker)
        elif "died" in said:
            self._buried(worker, said["died"])

    def _feed(self, worker: Worker) -> None:
        worker.numbers = []
        if self.units and time.time() < self.until:
            worker.numbers = self.units.pop(0)
            worker.tell({"numbers": worker.numbers, "until": self.until})
        elif worker in self.alive:
            self.alive.remove(worker)
            worker.end()

    def _buried(self, worker: Worker, status: int, hung: bool = False) -> None:
        if worker not in self.alive:
            return
        self.alive.remove(worker)
        left = list(worker.numbers)
        if worker.current is not None:
            self._lost(worker, "hang" if hung else "crash", status)
            left = [n for n in left if n != worker.current]
        if left:
            self.units.insert(0, left)
        if self.units and time.time() < self.until:
            self.alive.append(self._worker())

    def _lost(self, worker: Worker, status: str, code: int) -> None:
        assert worker.current is not None
        from tests.fuzz import families
        from tests.fuzz.problem import to_json

        number = worker.current
        job, problem = plan.problem(self.options, number)
        words = [f"the worker's process ended with status {code}" if status == "crash" else "no answer", *worker.errors[-6:]]
        features = sorted(families.load(job.family).features(problem))
        self.tally.add(
            {
                "end": number,
                "job": [job.family, job.backend, job.index],
                "features": features,
                "status": status,
                "words": words,
                "problem": to_json(problem),
            }
        )
        self._report(self.tally.failures[number])

    def _watch(self) -> None:
        if time.time() > self.until + GRACE:
            for worker in self.alive:
                worker.end()
            self.alive.clear()
        limit = PATIENCE[self.options.device]
        for worker in list(self.alive):
            if worker.numbers and time.monotonic() - worker.last > limit + (self.shrink_seconds if worker.shrinking else 0):
                worker.end()
                self._buried(worker, -9, hung=True)

    def _report(self, failure: Failure) -> None:
        again = f"python -m tests.fuzz {self.options.words()} --only {failure.number}"
        print(f"\n{failure.status}: {failure.family}/{failure.backend} problem {failure.number}: {again}", file=sys.stderr)
        for line in failure.words[:6]:
            print(f"    {line}", file=sys.stderr)
        self._write(failure)

    def _write(self, failure: Failure) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{failure.family}-{failure.backend}-{self.options.seed}-{failure.number}.json"
        (self.folder / name).write_text(json.dumps(replay(failure, self.options), indent=1) + "\n")

    def _progress(self) -> None:
        tally, passed = self.tally, time.time() - self.tally.began
        counts = ", ".join(f"{n} {s}" for s, n in sorted(tally.statuses.items()))
        line = f"[{passed:5.0f} s] {tally.done} of {self.total} problems ({counts}), {len(self.alive)} workers"
        print(f"\r{line:<110}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def _save(self) -> None:
        if self.json_path is not None:
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            self.json_path.write_text(json.dumps(self.tally.to_json(), indent=1) + "\n")


def replay(failure: Failure, options: Options) -> dict[str, Any]:
    """A failure as tests/fuzz/replays keeps it."""
    return {
        "family": failure.family,
        "backend": failure.backend,
        "device": options.device,
        "status": failure.status,
        "words": failure.shrunk_words or failure.words,
        "problem": failure.shrunk or failure.problem,
        "drawn": f"python -m tests.fuzz {options.words()} --only {failure.number}",
        "unshrunk": failure.problem if failure.shrunk else None,
    }


def _units(options: Options, numbers: list[int], workers: int) -> list[list[int]]:
    """Numbers by variant: those that compile whole and first, others in portions that keep all workers busy."""
    every = plan.jobs(options)
    slow_by: dict[Any, list[int]] = {}
    quick_by: dict[int, list[int]] = {}
    for n in numbers:
        job = every[n % len(every)]
        if job.compiles:
            slow_by.setdefault((job.family, job.backend, job.index), []).append(n)
        else:
            quick_by.setdefault(n % len(every), []).append(n)
    slow, quick = list(slow_by.values()), list(quick_by.values())
    size = max(1, min(200, sum(map(len, quick)) // (4 * workers) or 1))
    portions = [group[at : at + size] for group in quick for at in range(0, len(group), size)]
    portions.sort(key=lambda group: group[0])
    return slow + portions
