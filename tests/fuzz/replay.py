"""Problems kept as JSON, checked again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.check import Outcome, check
from tests.fuzz.problem import from_json

KEPT = Path(__file__).parent / "replays"


def load(path: Path | str) -> dict[str, Any]:
    """The file's fields, with the problem as the family takes it."""
    from tests.fuzz import families

    kept: dict[str, Any] = json.loads(Path(path).read_text())
    families.load(kept["family"])  # which registers its problems
    return {**kept, "problem": from_json(kept["problem"])}


def again(kept: dict[str, Any], backend: str, device: str) -> Outcome:
    return check(kept["family"], kept["problem"], backend, torch.device(device))


def replay_files(paths: Iterable[str], backends: list[str], device: str) -> int:
    """Print what each comes to, on its own backend or those given; 1 where one fails."""
    failed = 0
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests import interpreter_patches

        interpreter_patches.apply_for_any_problem()
    for path in paths:
        kept = load(path)
        for backend in backends or [kept["backend"]]:
            outcome = again(kept, backend, device)
            failed += outcome.failed
            print(f"{outcome.status:8} {backend:10} {path}")
            for words in outcome.words:
                print(f"    {words}", file=sys.stderr)
    return int(failed > 0)
