"""GPUs by name: what `warploom explain --device` knows of those that are not here."""

from __future__ import annotations

import re

from warploom.runtime.suggest import meant

# NVIDIA's table of compute capabilities.
CAPABILITIES = {
    **dict.fromkeys(("a100", "a30"), (8, 0)),
    **dict.fromkeys(("a10", "a10g", "a40", "a6000", "rtx3090"), (8, 6)),
    "orin": (8, 7),
    **dict.fromkeys(("l4", "l40", "l40s", "rtx4090"), (8, 9)),
    **dict.fromkeys(("h100", "h200", "h20", "gh200"), (9, 0)),
    **dict.fromkeys(("b200", "gb200"), (10, 0)),
    **dict.fromkeys(("b300", "gb300"), (10, 3)),
    "rtx5090": (12, 0),
}
NAMES = ", ".join(CAPABILITIES)


def capability(name: str) -> tuple[int, int]:
    """The compute capability of a GPU's name, or of one such as sm_90, without regard to case, spaces and hyphens.

    Raises:
        ValueError: the name is none of these; the message lists them.
    """
    plain = re.sub(r"[\s_-]", "", name.lower())
    found = re.fullmatch(r"sm([1-9]\d?)(\d)[af]?", plain)
    if found:
        return int(found[1]), int(found[2])
    if plain not in CAPABILITIES:
        near = meant(name, ["cpu", "cuda", *CAPABILITIES])
        raise ValueError(f"--device takes cpu, cuda, one of {NAMES}, or a compute capability such as sm_90, got {name!r}{near}")
    return CAPABILITIES[plain]
