"""A builder that the worker process can import: it writes no machine code, and fails as its configuration asks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def build(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    width = config["width"]
    if width < 0:
        os._exit(7)
    if width > 9:
        raise ValueError(f"width must be at most 9, got {width}")
    with open(os.environ["BUILDER_LOG"], "a") as log:
        log.write(name + "\n")
    time.sleep(float(os.environ.get("BUILDER_SECONDS", "0")))
    library.write_bytes(b"machine code of width %d" % width)
    return {"width": width}
