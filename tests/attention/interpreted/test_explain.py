"""What explain() says of the Triton kernels is what they do: the tiles of the call, and which of them it skips."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import warploom
from warploom import masks
from warploom.attention.triton import call, run
from warploom.attention.triton.config import Tiling
from warploom.cli import main, make_parser
from warploom.commands.explain import make_plan
from warploom.runtime.plan import Plan

HALF, SINGLE = torch.float16, torch.float32
SHAPE = (1, 150, 2)  # batch, seqlen, heads
DOCUMENTS = masks.Document([40, 90, 20])


@dataclass
class Launched:
    """The tilings of the calls' launches, the last of each kind."""

    forward: Tiling | None = None
    gradients: dict[str, Tiling] = field(default_factory=dict)


class Nothing:
    """A launch that computes nothing."""

    def __call__(self, *arguments: Any) -> None: ...

    def kept(self, *arguments: Any) -> Nothing:
        return self


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What calls launch, which then compute nothing."""
    found = Launched()

    nothing = Nothing()

    def forward(variant: Any, tiling: Tiling) -> Any:
        found.forward = tiling
        return nothing

    def dkdv(variant: Any, tiling: Tiling, part: str, edges: bool) -> Any:
        found.gradients |= {f"d{letter}": tiling for letter in part}
        return nothing

    def dq(variant: Any, tiling: Tiling, row_tile: int) -> Any:
        found.gradients["dq"] = tiling
        return nothing

    monkeypatch.setattr(run, "_forward_launch", forward)
    monkeypatch.setattr(run, "_rows_launch", lambda *arguments: nothing)
    monkeypatch.setattr(run, "_dkdv_launch", dkdv)
    monkeypatch.setattr(run, "_dq_launch", dq)
    return found


def inputs(dtype: torch.dtype, dim: int, dim_v: int, layout: str) -> list[torch.Tensor]:
    if layout == "packed":
        return [torch.zeros(150, 2, d, dtype=dtype) for d in (dim, dim, dim_v)]
    wide = 5 if layout == "odd strides" else 0
    return [torch.zeros(*SHAPE, d + wide, dtype=dtype)[..., :d] for d in (dim, dim, dim_v)]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("mask", [None, DOCUMENTS], ids=["band", "columns"])
@pytest.mark.parametrize("layout", ["contiguous", "odd strides", "packed"])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (72, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_explain_told_64x64_tiles_whatever_ran(
    dtype: torch.dtype,
    dims: tuple[int, int],
    layout: str,
    mask: masks.Mask | None,
    capability: int,
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing at all of packed calls' tiles and of the backward's."""
    monkeypatch.setattr(call, "capability", lambda device: capability)
    q, k, v = inputs(dtype, *dims, layout)
    options: dict[str, Any] = {"mask": mask, "causal": mask is None, "backend": "triton"}
    attention = warploom.attention
    if layout == "packed":
        attention = warploom.attention_varlen  # type: ignore[assignment]
        options["cu_seqlens_q"] = torch.tensor([0, 150], dtype=torch.int32)
        options["mask"] = mask and masks.ColumnMask(torch.full((1, 1, 150), 90, dtype=torch.int32))
    plan = warploom.explain(q, k, v, **options)
    attention(q, k, v, **options)
    assert launched.forward is not None and plan.tile == (launched.forward.m, launched.forward.n)
    assert (plan.tiles is None) == (layout == "packed")
    assert f"tiles     {launched.forward.m}×{launched.forward.n}" in str(plan) and "backward  " not in str(plan)

    leaves = [t.requires_grad_() for t in (q, k, v)]
    plan = warploom.explain(*leaves, **options)
    out = attention(*leaves, **options)
    torch.autograd.grad(out, leaves, torch.zeros_like(out))
    assert dict(plan.backward_tiles) == {name: (tiling.m, tiling.n) for name, tiling in launched.gradients.items()}
    dq, dk, dv = (launched.gradients[name] for name in ("dq", "dk", "dv"))
    assert f"backward  dq {dq.m}×{dq.n}, dk {dk.m}×{dk.n}, dv {dv.m}×{dv.n}" in str(plan).splitlines()
    assert plan.to_dict()["backward_tiles"] == {"dq": [dq.m, dq.n], "dk": [dk.m, dk.n], "dv": [dv.m, dv.n]}


def test_all_kinds_of_tiles_were_met(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides, dtypes, head dims and devices make a difference; else the test above would see none."""
    ways: dict[str, dict[str, Any]] = {"plain": {}, "odd": {"layout": "odd strides"}, "single": {"dtype": SINGLE}}
    ways |= {"columns": {"mask": DOCUMENTS}, "wide": {"dim": 256}, "old": {"capability": 80}}
    found = {}
    for name, way in ways.items():
        monkeypatch.setattr(call, "capability", lambda device, way=way: way.get("capability", 90))
        dim = way.get("dim", 64)
        q, k, v = inputs(way.get("dtype", HALF), dim, dim, way.get("layout", "contiguous"))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        plan = warploom.explain(*leaves, mask=way.get("mask"), causal="mask" not in way, backend="triton")
        found[name] = (plan.tile, plan.backward_tiles)
    for part in range(2):
        assert len({found[way][part] for way in ("plain", "odd", "single")}) == 3, found
        assert found["plain"][part] != found["wide"][part] and found["plain"][part] != found["old"][part], found


def visited(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Which tiles the forward kernel folds in, (batch, heads, row tiles, key tiles): a NaN in one's values reaches all rows."""
    rows, keys = plan.tile or (0, 0)
    found = []
    for first in range(0, k.shape[1], keys):
        poisoned = v.clone()
        poisoned[:, first : first + keys] = float("nan")
        out = warploom.attention(q, k, poisoned, backend="triton", **options)[..., 0].isnan()
        blocks = [part.any(1) for part in out.split(rows, dim=1)]
        assert all(torch.equal(part.all(1), any_) for part, any_ in zip(out.split(rows, dim=1), blocks, strict=True))
        found.append(torch.stack(blocks, dim=-1))
    return torch.stack(found, dim=-1)


@pytest.mark.parametrize(
    ("dtype", "batch", "options"),
    [
        (HALF, 1, {"causal": True}),
        (HALF, 1, {"mask": masks.PrefixLM(20)}),
        (HALF, 1, {"mask": DOCUMENTS, "window": (30, 0)}),
        (SINGLE, 1, {"causal": True}),
        (SINGLE, 1, {"window": (70, 10)}),
        (SINGLE, 1, {"mask": masks.Document([40, 90, 20], causal=False)}),
        (SINGLE, 2, {"mask": masks.Document([[150, 0], [100, 50]])}),
    ],
    ids=str,
)
def test_the_skipped_tiles_are_those_that_the_kernel_skips(dtype: torch.dtype, batch: int, options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(batch, 150, 1, 32).to(dtype) for _ in range(3))
    plan = warploom.explain(q, k, v, backend="triton", **options)
    reached = visited(plan, q, k, v, **options)
    assert plan.skipped == pytest.approx(1 - reached.double().mean().item())
    assert plan.tiles is not None
    total = sum(plan.tiles.values())
    assert total in (reached[0].numel(), reached.numel()) and plan.tiles["hidden"] == round(plan.skipped * total)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("mask", [[], ["--mask", "Document([100, 50])"]], ids=["band", "columns"])
@pytest.mark.parametrize("dim", [64, 256])
def test_shapes_alone_tell_the_tiles_of_contiguous_tensors(dtype: str, mask: list[str], dim: int) -> None:
    sizes = ["--batch", "2", "--seqlen", "150", "--heads", "4", "--kv-heads", "2", "--head-dim", str(dim)]
    options = make_parser().parse_args(
        ["explain", "--device", "cpu", "--dtype", dtype, "--backend", "triton", "--causal", *sizes, *mask]
    )
    q = torch.zeros(2, 150, 4, dim, dtype=HALF if dtype == "fp16" else SINGLE)
    k = torch.zeros(2, 150, 2, dim, dtype=q.dtype)
    plan = warploom.explain(q, k, k, mask=masks.Document([100, 50]) if mask else None, causal=True, backend="triton")
    assert make_plan(options).to_dict() == plan.to_dict()
    assert main(["explain", "--device", "cpu", "--seqlen", "0", "--heads", "2"]) == 0
