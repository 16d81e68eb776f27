"""Run every check that `make test` promises and print one summary; the exit status is 1 if any failed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

CHECKS = {
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    # Halves, so that a file's tests and what they share stay in one process; who is done takes from the other's.
    "tests": ["pytest", "-n", "2", "--dist", "worksteal", "-q"],
    "docs": ["mkdocs", "build", "--strict", "--quiet"],
}
BESIDE = "types"  # takes one processor for most of a minute the first time: the tests begin meanwhile


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        print(f"check: no check named {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        return 2
    # Two test workers share two cores: more threads each would only fight.
    environment = {
        "OMP_NUM_THREADS": "1",
        "NO_MKDOCS_2_WARNING": "1",
        "WARPLOOM_TEST_MODULES": os.path.abspath(".modules"),  # kernels that did not change are not compiled again
        **os.environ,
    }
    # Each pytest that a test starts would compile and rewrite hypothesis and the tests' helpers anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    chosen = names or [*CHECKS]
    early = [BESIDE] if {BESIDE, "tests"} <= set(chosen) else []
    running: dict[str, tuple[float, subprocess.Popen[bytes]]] = {}
    results: dict[str, tuple[int, float]] = {}

    def begin(name: str, **options: Any) -> None:
        start = time.perf_counter()
        running[name] = start, subprocess.Popen([sys.executable, "-m", *CHECKS[name]], env=environment, **options)

    def end(name: str) -> None:
        start, process = running[name]
        results[name] = process.wait(), time.perf_counter() - start
        del running[name]

    with tempfile.TemporaryFile() as said:
        try:
            for name in early:
                begin(name, stdout=said, stderr=subprocess.STDOUT)
            for name in [each for each in chosen if each not in early]:
                print(f"== {name}: {' '.join(CHECKS[name])}", flush=True)
                begin(name)
                end(name)
            for name in early:
                end(name)
                said.seek(0)
                print(f"== {name}: {' '.join(CHECKS[name])}\n{said.read().decode(errors='replace')}", end="", flush=True)
        except KeyboardInterrupt:
            name = [*running][-1]
            for _, process in running.values():
                process.wait()  # Ctrl-C reached it too: what it has to clean up and to say comes first
            print(f"check: interrupted in {name}", flush=True)
            return 130

    print("\n== summary")
    for name in chosen:
        status, seconds = results[name]
        took = "beside the others" if name in early else f"{seconds:6.1f} s"  # nobody looked when it ended
        print(f"{name:<8}{'ok' if status == 0 else f'FAILED (exit {status})':<18}{took}")
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
