"""Modules of the CuTe DSL compiled for tests, without a GPU, and their machine code."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.sm90.launch import Traced, read
from warploom.runtime.module_worker import Worker


class Compiler:
    """A process that compiles into one folder; it lives as long as pytest's, since it takes seconds to start."""

    _running: ClassVar[dict[Path, Compiler]] = {}

    @classmethod
    def of(cls, folder: Path, arch: str) -> Compiler:
        """The folder's, which is started when it is first asked for."""
        if folder not in cls._running:
            cls._running[folder] = cls(folder, arch)
        return cls._running[folder]

    @classmethod
    def close_all(cls) -> None:
        while cls._running:
            cls._running.popitem()[1].worker.close()

    def __init__(self, folder: Path, arch: str) -> None:
        self.folder = folder
        self.dumps = Path(tempfile.mkdtemp(prefix="traced-", dir=folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WARPLOOM_CACHE", str(folder))
            patch.setenv("WARPLOOM_KEEP_CUBIN", str(folder))
            # The DSL names what it keeps after the kernel, not after the configuration.
            patch.setenv("CUTE_DSL_KEEP", "ir")
            patch.setenv("CUTE_DSL_DUMP_DIR", str(self.dumps))
            self.worker = Worker(arch)

    def build(self, config: Any) -> dict[str, int]:
        """Compile one into the folder; RuntimeError with the compiler's message."""
        for left in self.dumps.glob("*.mlir"):  # by one that did not compile
            left.unlink()
        facts = self.worker.build(config.spec)
        (module,) = self.dumps.glob("*.mlir")
        module.rename(self.folder / f"{config.name}.mlir")
        return facts


class Built:
    """Of each name its configuration, what its build reports, and the file of its GPU code; ``traced`` is its kernel.

    A module is compiled when a test first asks for it, and once in a run, whichever of the run's processes needs it.
    """

    def __init__(self, configs: Mapping[str, Any], arch: str, folders: pytest.TempPathFactory) -> None:
        shared = folders.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            shared = shared.parent  # each process has a folder of its own in the run's
        self.configs, self.arch, self.folder = configs, arch, shared / f"modules-{arch}"
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # a cache, whatever the umask

    def traced(self, name: str, part: str = "kernel_cutlass_kernel") -> Traced:
        """A kernel, by what its name begins with, as it was traced and compiled."""
        config = self[name][0]
        return read(self.folder / f"{config.name}.mlir", self.folder / f"{config.name}.ptx", part)

    def __getitem__(self, name: str) -> tuple[Any, dict[str, int], Path]:
        config = self.configs[name]
        facts = self.folder / f"{config.name}.facts"
        with open(self.folder / f"{config.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not facts.exists():
                facts.write_text(json.dumps(Compiler.of(self.folder, self.arch).build(config)))
        return config, json.loads(facts.read_text()), self.folder / f"{config.name}.cubin"


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
