"""What no GPU test has confirmed since it changed is left to the next implementation, and the refusal says so."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from warploom.attention import ampere, hopper
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.problem import AttentionProblem
from warploom.runtime import modules


def problems() -> dict[str, AttentionProblem]:
    q = torch.randn(1, 20, 2, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 20], dtype=torch.int32)
    packed = AttentionProblem.from_args(varlen_args(q[0], q[0], q[0], cu), False)
    return {"packed": packed, "backward": AttentionProblem.from_args(dense_args(q, q, q), True)}


@pytest.mark.parametrize("allowed", [False, True])
def test_refusals(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    monkeypatch.setattr(modules, "UNCONFIRMED", allowed)
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    monkeypatch.setattr(ampere, "_capabilities", lambda: ((8, 0),))
    packed, training = (dataclasses.replace(p, device="cuda") for p in problems().values())
    words = [hopper.supports(packed), hopper._no_backward(training), ampere.declines()]
    for said in words:
        assert said is None if allowed else "WARPLOOM_UNCONFIRMED=1" in str(said)
