"""What explain() and the benchmark's rho are told of the tiles of the backward pass."""

from __future__ import annotations

import pytest
import torch

from warploom.attention import hopper
from warploom.attention.arguments import dense_args
from warploom.attention.hopper.plan import backward_config_for
from warploom.attention.problem import AttentionProblem


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_the_module_that_runs(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_no_backward", lambda problem: None)
    args = dense_args(*torch.empty(3, 1, 256, 2, dim, dtype=torch.bfloat16), causal=True)
    variant = backward_config_for(AttentionProblem.from_args(args, True))
    found = hopper.BACKEND.backward_tiles(args)
    assert found == {name: (variant.tile_m, variant.tile_n) for name in ("dq", "dk", "dv")}
    assert all(f"{m}x{n}" in variant.name for m, n in found.values())


def test_tiles_of_who_runs_it_where_no_module_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def backward_tiles(self, args: object) -> dict[str, tuple[int, int]]:
            return {"dq": (64, 32)}

    monkeypatch.setattr(hopper, "_no_backward", lambda problem: "has none")
    monkeypatch.setattr(hopper, "_next", lambda args, backward: Other())
    args = dense_args(*torch.empty(3, 1, 256, 2, 64, dtype=torch.bfloat16))
    assert hopper.BACKEND.backward_tiles(args) == {"dq": (64, 32)}
