"""Linking object files into shared libraries, with whatever linker there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def link(objects: Path, library: Path) -> None:
    """Make a shared library of an object file; RuntimeError names what would do where there is no linker."""
    commands = [[path] for path in map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang", "ld")) if path]
    if find_spec("ziglang") is not None:
        commands.append([sys.executable, "-P", "-m", "ziglang", "cc"])
    if not commands:
        raise RuntimeError("no linker found; install gcc, clang or binutils, or pip install ziglang")
    run = subprocess.run([*commands[0], "-shared", "-o", str(library), str(objects)], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{commands[0][0]} failed with status {run.returncode}: {run.stderr.strip()}")
