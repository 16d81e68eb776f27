"""A builder that the worker process can import: it writes no machine code, and fails as its configuration asks.

Where BUILDER_GATE names a pipe it says on stderr that it builds, and waits until somebody opens the pipe to write.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def build(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    width = config["width"]
    if width < 0:
        os.kill(os.getpid(), -width)
    if width > 9:
        raise ValueError(f"width must be at most 9, got {width}")
    with open(os.environ["BUILDER_LOG"], "a") as log:
        log.write(name + "\n")
    if gate := os.environ.get("BUILDER_GATE"):
        print("builds", file=sys.stderr, flush=True)
        open(gate).close()
    library.write_bytes(b"machine code of width %d" % width)
    return {"width": width}


def places(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Where the process works and puts temporary files, who may read those, and what it has imported from where."""
    library.write_bytes(b"machine code")
    return {
        "folder": os.getcwd(),
        "temporary": tempfile.gettempdir(),
        "mode": os.stat(tempfile.gettempdir()).st_mode & 0o777,
        "path": sys.path,
        "modules": {found: getattr(module, "__file__", None) for found, module in sys.modules.items()},
    }
