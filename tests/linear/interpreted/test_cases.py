"""The Triton kernels in the interpreter: every kind of call, in one pass and in segments."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch

from tests.linear.triton_cases import Case, check
from warploom.linear.triton import call
from warploom.linear.triton.config import Config, Tiling

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unnormalized": {"normalize": False, "scale": 0.3},
    "identity": {"normalize": False, "map_q": "identity", "map_k": "identity"},
    "relu": {"map_q": "elu+1", "map_k": "relu", "scale": 0.3},
    "state": {"state": True},
    "wide state": {"state": True, "e": 32, "m": 48},
    "odd dims": {"e": 20, "m": 7},
    "grouped": {"heads": 6, "heads_kv": 2, "state": True},
    "fewer queries": {"rows": 37, "keys": 70, "state": True},
    "fewer keys": {"rows": 70, "keys": 37, "state": True},
    "lengths": {"lengths": (70, 33), "state": True},
    "no keys": {"lengths": (0, 5)},
    "packed": {"sequences": (0, 33, 1, 32, 0), "rows": 70, "heads": 4, "heads_kv": 2, "state": True},
    "packed without tail": {"sequences": (33, 37), "rows": 70},
    "bidirectional": {"causal": False, "rows": 37, "keys": 70, "heads": 4, "heads_kv": 2, "state": True},
    "bidirectional lengths": {"causal": False, "lengths": (70, 33), "normalize": False},
    "bidirectional packed": {"causal": False, "sequences": (0, 33, 1, 32, 0), "rows": 70},
    "one token": {"rows": 1},
}


def configure(monkeypatch: pytest.MonkeyPatch, *, cut: bool, blocks: bool) -> None:
    """Chunks of 16; segments of 32 tokens; blocks of 16 columns where the state is wider."""
    t = Tiling(16, 16 if blocks else 64, 4, 1)
    small = Config(t, t, t, None if blocks else t, t, t, segment=32, fill=1e9 if cut else 0.0)
    monkeypatch.setattr(call, "config", lambda *_: small)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=cut, blocks=name in ("wide state", "grouped"))
    check(Case(secrets.randbelow(2**31), **CASES[name]))
    if name in ("plain", "state"):
        check(Case(secrets.randbelow(2**31), **CASES[name]), gradients_of_state=False)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_half_precision(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=cut, blocks=False)
    check(Case(secrets.randbelow(2**31), dtype=torch.float16, state=True, batch=1))
