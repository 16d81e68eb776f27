"""A process that compiles modules: it alone imports the compiler, for one architecture, and may die without harm.

It reads one spec a line from stdin and answers each with one line of JSON on stdout: facts, or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from warploom.runtime import modules
from warploom.runtime.modules import ModuleSpec


class Worker:
    """The process, started lazily; ``build`` compiles a spec into the cache and returns its facts."""

    def __init__(self, arch: str) -> None:
        environment = {**os.environ, "CUTE_DSL_ARCH": arch, "OMP_NUM_THREADS": "1"}
        package = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "warploom.runtime.module_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def build(self, spec: ModuleSpec) -> dict[str, Any]:
        """Raises RuntimeError with the compiler's message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(modules.to_json(spec) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{spec.name}: the compiler's process died with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{spec.name} does not compile: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process once it has answered."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def compile_spec(spec: ModuleSpec) -> dict[str, Any]:
    """Build and store one module in this process."""
    module, _, function = spec.builder.partition(":")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{spec.name}.so"
        facts: dict[str, Any] = getattr(import_module(module), function)(dict(spec.config), spec.name, library)
        facts["seconds"] = round(time.perf_counter() - start, 2)
        modules.store(spec, library, facts)
    return facts


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints goes to stderr
    for line in sys.stdin:
        try:
            answer = compile_spec(modules.from_json(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
