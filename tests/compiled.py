"""Modules of the CuTe DSL compiled for tests, without a GPU, and their machine code."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.sm90.launch import Traced, read
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.module_worker import Worker

KEPT = "WARPLOOM_TEST_MODULES"  # a folder that outlives the run
PARTS = "mlir", "ptx", "cubin"


class Compiler:
    """A process that compiles for an architecture; it lives as long as pytest's, since it takes seconds to start."""

    _running: ClassVar[dict[str, Compiler]] = {}

    @classmethod
    def of(cls, arch: str) -> Compiler:
        """The architecture's, which is started when it is first asked for."""
        if arch not in cls._running:
            cls._running[arch] = cls(arch)
        return cls._running[arch]

    @classmethod
    def close_all(cls) -> None:
        while cls._running:
            cls._running.popitem()[1]._close()

    def __init__(self, arch: str) -> None:
        self._opened = tempfile.TemporaryDirectory(prefix="compiler-")
        self._folder = Path(self._opened.name)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("WARPLOOM_CACHE", "WARPLOOM_KEEP_CUBIN", "CUTE_DSL_DUMP_DIR"):
                patch.setenv(name, str(self._folder))
            # The DSL names what it keeps after the kernel, not after the configuration.
            patch.setenv("CUTE_DSL_KEEP", "ir")
            self._worker = Worker(arch)

    def build(self, spec: ModuleSpec, into: Path) -> None:
        """Compile one, and put what it was traced and compiled to beside ``into``, its facts; RuntimeError with the reason."""
        for left in self._folder.glob("*.mlir"):  # by one that did not compile
            left.unlink()
        facts = self._worker.build(spec)
        (traced,) = self._folder.glob("*.mlir")
        traced.rename(self._folder / f"{spec.name}.mlir")
        for part in PARTS:
            shutil.move(self._folder / f"{spec.name}.{part}", into.with_suffix(f".{part}"))
        whole = into.with_suffix(".new")
        whole.write_text(json.dumps(facts))
        whole.rename(into)

    def _close(self) -> None:
        self._worker.close()
        self._opened.cleanup()


class Built:
    """Of each name its configuration, what its build reports, and the file of its GPU code; ``traced`` is its kernel.

    A module is compiled when a test first asks for it, and once in a run, whichever of the run's processes needs it; with
    WARPLOOM_TEST_MODULES once as long as neither its sources nor the compiler change, by which files there are named.
    """

    def __init__(self, configs: Mapping[str, Any], arch: str, folders: pytest.TempPathFactory) -> None:
        shared = folders.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            shared = shared.parent  # each process has a folder of its own in the run's
        self.configs, self.arch, self.folder = configs, arch, Path(os.environ.get(KEPT) or shared / "modules").absolute()
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # a cache, whatever the umask

    def traced(self, name: str, part: str = "kernel_cutlass_kernel") -> Traced:
        """A kernel, by what its name begins with, as it was traced and compiled."""
        code = self[name][2]
        return read(code.with_suffix(".mlir"), code.with_suffix(".ptx"), part)

    def __getitem__(self, name: str) -> tuple[Any, dict[str, int], Path]:
        config = self.configs[name]
        spec = config.spec
        facts = self.folder / f"{spec.stem()}.facts"
        with open(self.folder / f"{spec.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not facts.exists():
                for old in self.folder.glob(f"{spec.name}-*"):  # of other sources
                    old.unlink()
                Compiler.of(self.arch).build(spec, facts)
        return config, json.loads(facts.read_text()), facts.with_suffix(".cubin")


def kernels_of(cubin: Path) -> dict[str, str]:
    """The listing of each kernel of a module, by its name."""
    parts = re.split(r"^\s*\.section\s+\.text\.([\w$]+)", machine_code(cubin), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def machine_code(cubin: Path) -> str:
    """The listing of nvdisasm, which comes with Triton; without it the test is skipped."""
    triton = find_spec("triton")
    tool = Path(triton.origin or "").parent / "backends" / "nvidia" / "bin" / "nvdisasm" if triton else Path()
    if not tool.is_file():
        pytest.skip("nvdisasm is not here")
    return subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
