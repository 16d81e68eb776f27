"""Modules of the CuTe DSL compiled for a test, without a GPU, and their machine code."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from warploom.runtime.module_worker import Worker

Built = dict[str, tuple[Any, dict[str, int], Path]]


def built(configs: Mapping[str, Any], arch: str, folder: Path) -> Built:
    """Of each name its configuration, what its build reports, and the file of its GPU code in an empty ``folder``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARPLOOM_CACHE", str(folder))
        patch.setenv("WARPLOOM_KEEP_CUBIN", str(folder))
        with Worker(arch) as worker:
            return {name: (c, worker.build(c.spec), folder / f"{c.name}.cubin") for name, c in configs.items()}


def machine_code(cubin: Path) -> str:
    """The listing of nvdisasm, which comes with Triton; without it the test is skipped."""
    triton = find_spec("triton")
    tool = Path(triton.origin or "").parent / "backends" / "nvidia" / "bin" / "nvdisasm" if triton else Path()
    if not tool.is_file():
        pytest.skip("nvdisasm is not here")
    return subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
