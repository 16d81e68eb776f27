"""Python programs in processes of their own that find torch and warploom imported, which takes seconds each otherwise.

A process that has imported them and done nothing else forks for each program. POSIX only, as the tests are.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[1]


class Forks:
    """Runs programs as ``python`` would, but for the imports: of warploom, and of ``modules``."""

    def __init__(self, *modules: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.forks", *modules]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: Sequence[str], folder: Path, text: str = "") -> subprocess.CompletedProcess[str]:
        """As ``python ARGUMENTS`` with ``text`` as its input: ["-m", module, ...] or [file, ...], in ``folder``."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.TemporaryDirectory() as place:
            streams = [Path(place) / name for name in ("in", "out", "err")]
            streams[0].write_text(text)
            work = {"arguments": list(arguments), "folder": str(folder), "streams": [str(path) for path in streams]}
            print(json.dumps(work), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
            assert answer, f"the forking process ended with status {self.process.wait()}"
            return subprocess.CompletedProcess(arguments, int(answer), streams[1].read_text(), streams[2].read_text())

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def program(arguments: list[str], folder: str, streams: list[str]) -> int:
    """The exit status of a program run in this process."""
    os.chdir(folder)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    for module in ("warploom.cli", *sys.argv[1:]):
        importlib.import_module(module)

    answers = os.dup(1)
    # Lines as they come: what Python reads ahead would be a child's too.
    for line in iter(sys.stdin.readline, ""):
        work = json.loads(line)
        child = os.fork()
        if child == 0:
            status = program(**work)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
