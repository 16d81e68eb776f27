"""What explain() and the benchmark's rho are told of the tiles of both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom import masks
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


TREE = masks.Tree(torch.arange(-1, 4095))


def told(dim: int, heads: int = 2, seqlen: int = 4096, **call: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """The tiles that are computed or skipped, and those that keys are loaded for."""
    q, k = (torch.empty(1, seqlen, n, dim, dtype=torch.bfloat16) for n in (heads, 2))
    args = dense_args(q, k, k, **call)
    return hopper.BACKEND.tiles(args)[0], hopper.BACKEND.loaded_tile(args)


@pytest.mark.parametrize(
    ("dim", "call", "computed", "loaded"),
    [
        (64, {"mask": TREE}, (64, 128), (192, 128)),
        (64, {"mask": TREE, "softcap": 5.0}, (128, 128), (128, 128)),
        (128, {"mask": TREE}, (128, 128), (128, 128)),
        (256, {"mask": TREE}, (128, 64), (128, 64)),
        (64, {"causal": True}, (64, 128), (192, 128)),
        (128, {"window": (100, 0)}, (64, 128), (128, 128)),
        (128, {}, (128, 128), (128, 128)),
        (128, {"heads": 16, "seqlen": 8, "causal": True}, (8, 128), (8, 128)),
    ],
)
def test_a_warpgroup_s_rows_where_each_goes_by_its_own(
    dim: int, call: dict[str, Any], computed: tuple[int, int], loaded: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a band each does, under a column mask three do; then explain() and rho count 64 rows."""
    monkeypatch.setattr(hopper.modules, "cannot_come", lambda spec: None)
    assert told(dim, **call) == (computed, loaded)


@pytest.mark.parametrize(("call", "computed"), [({"causal": True}, 64), ({"mask": TREE}, 192), ({}, 192)])
def test_fp8_goes_by_a_warpgroup_s_rows_under_a_band(call: dict[str, Any], computed: int) -> None:
    """Its consumers are those of 16-bit calls; under a column mask they go together."""
    q = torch.empty(1, 4096, 2, 128, dtype=torch.bfloat16)
    args = dense_args(q, q, q, **call)
    args = args._replace(**{name: getattr(args, name).to(torch.float8_e4m3fn) for name in "qkv"})
    assert hopper.BACKEND.tiles(args)[0] == (computed, 128)
    assert hopper.BACKEND.loaded_tile(args) == (192, 128)
