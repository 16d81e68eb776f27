"""A process that compiles modules: it alone imports the compiler, for one architecture, and may die without harm.

It reads one spec a line from stdin and answers each with one line of JSON on stdout: facts, or the error. It imports
nothing from the current folder, and all that it writes lies in a scratch folder of the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from warploom.runtime import cache, module_spec
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.trust import CacheError

_PACKAGE = Path(__file__).parents[1]
# The package is loaded from its files: on the path in front of all else, its folder would lend Python what lies beside it.
_START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
package, scratch, *last = sys.argv[1:]
spec = spec_from_file_location("warploom", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["warploom"] = module_from_spec(spec)
sys.path += last
spec.loader.exec_module(sys.modules["warploom"])
from warploom.runtime.module_worker import main
main(scratch)
"""


class Worker:
    """The process, started lazily; ``build`` compiles a spec into the cache and returns its facts."""

    def __init__(self, arch: str) -> None:
        """Raises RuntimeError, a CacheError where the cache must not or cannot be used."""
        if not sys.executable:
            raise RuntimeError("the compiler runs in a process of its own, and sys.executable names no Python to run it with")
        with contextlib.ExitStack() as opened:
            self._folder = opened.enter_context(cache.open_cache(make=True))
            with cache.written(self._folder, "scratch"):
                cache.sweep(self._folder)
                scratch = cache.Scratch(self._folder)
            opened.callback(scratch.close)
            # Ctrl-C in a terminal is ours to answer: the process inherits the mask.
            unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process = subprocess.Popen(
                    _command(scratch.path),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=scratch.path,
                    env=_environment(arch, scratch.path),
                    pass_fds=[scratch.lock],
                )
            except OSError as error:
                raise RuntimeError(f"the compiler's process does not start: {error}") from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
            self._opened = opened.pop_all()

    def build(self, spec: ModuleSpec) -> dict[str, Any]:
        """Raises RuntimeError with the compiler's message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(module_spec.to_json(spec) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # nothing, or what it wrote before it died
            raise RuntimeError(f"{spec.name}: the compiler's process died with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise CacheError(answer["refused"])
        if "error" in answer:
            raise RuntimeError(f"{spec.name} does not compile: {answer['error']}")
        return answer

    def kill(self) -> None:
        """End the process at once; from any thread, and whoever waits for its answer finds it dead."""
        self._process.kill()

    def close(self) -> None:
        """End the process once it has answered, and remove what it wrote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # of a line that it died without reading
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._opened.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.kill()  # we were interrupted, and nobody waits for its answer
        self.close()


def _command(scratch: Path) -> list[str]:
    """Python without the current folder on its path, which it would have with -m and with -c."""
    ours = [("-I", sys.flags.isolated), ("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)]
    last = [] if _is_current(_PACKAGE.parent) else [str(_PACKAGE.parent)]  # what is installed beside us
    options = [option for option, given in ours if given]
    return [sys.executable, "-P", *options, "-c", _START, str(_PACKAGE), str(scratch), *last]


def _is_current(folder: Path) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False  # the current folder is gone


def _environment(arch: str, scratch: Path) -> dict[str, str]:
    """Our environment, its relative paths gone or made absolute, and all temporary files in ``scratch``.

    An empty entry of PYTHONPATH is the current folder. The DSL keeps what it has parsed in a folder of /tmp that others
    could make first, unless it is told another.
    """
    environment = {**os.environ, "CUTE_DSL_ARCH": arch, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    entries = [entry for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    if environment.get("WARPLOOM_KEEP_CUBIN"):
        environment["WARPLOOM_KEEP_CUBIN"] = os.path.abspath(os.path.expanduser(environment["WARPLOOM_KEEP_CUBIN"]))
    places = {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP", "CUTE_DSL_CACHE_DIR")}
    return {**environment, **places, "WARPLOOM_CACHE": str(cache.cache_root())}


def compile_spec(spec: ModuleSpec) -> dict[str, Any]:
    """Build and store one module in this process."""
    module, _, function = spec.builder.partition(":")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{spec.name}.so"
        facts: dict[str, Any] = getattr(import_module(module), function)(dict(spec.config), spec.name, library)
        facts["seconds"] = round(time.perf_counter() - start, 2)
        module_spec.store(spec, library, facts)
    return facts


def main(scratch: str) -> None:
    """Answer specs until there are no more, then leave nothing in ``scratch``: whoever started us may be gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints goes to stderr
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for line in sys.stdin:
            try:
                answer = compile_spec(module_spec.from_json(line))
            except CacheError as error:
                answer = {"refused": str(error)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
