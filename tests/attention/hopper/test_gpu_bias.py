"""Biases of the Hopper kernels on an H100 or H200: the criterion, both passes here, slopes of any sign, tables, bits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import warploom
from tests.attention.biased import check, check_frozen
from tests.attention.harness import Call
from tests.attention.measured import check_largest
from warploom.attention import hopper
from warploom.attention.hopper import plan
from warploom.bias import ALiBi, Relative

MISSING = hopper.BACKEND.available()
NEXT = hopper._next
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("here", "poisoned_gpu_memory"),
    pytest.mark.skipif(MISSING is not None, reason=f"the hopper backend cannot run: {MISSING}"),
]

BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (170, 0)},
    "two-sided window": {"window": (170, 90)},
}
ANY_ORDER: dict[str, Any] = {"deterministic": False}  # in which a table's gradient is added up; poisoned memory asks for one
KINDS = ["alibi", "alibi of batches"]
SLOPES = [0.5, -0.05, 0.0, 1e-3, -1e-6, 0.9, 0.004, -0.01]


def seed() -> int:
    return random.randrange(2**31)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_both_passes(kind: str, head_dim: int, band: str) -> None:
    for seqlen_k in (700, 481, 333):
        call = Call(seed(), 2, 500, seqlen_k, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords=BANDS[band])
        check_frozen(call, kind, "hopper")


@pytest.mark.parametrize("head_dim", [40, 96])
def test_other_head_dims(head_dim: int) -> None:
    call = Call(seed(), 2, 300, 400, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords={"causal": True})
    check_frozen(call, "alibi", "hopper")


@pytest.mark.parametrize("heads", [(32, 4), (28, 4)], ids=str)
@pytest.mark.parametrize("queries", [1, 7, 30])
def test_few_queries_of_groups(queries: int, heads: tuple[int, int]) -> None:
    """Tiles of several heads, each with its own slope, and split ones."""
    call = Call(seed(), 2, queries, 3000, *heads, 128, dtype=torch.bfloat16, device="cuda", keywords={"causal": True})
    check_frozen(call, "alibi", "hopper")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_calls_of_slopes_of_any_sign(deterministic: bool, head_dim: int) -> None:
    """Against Triton, in whose tiles every element has its own distance; deterministic gradients have the same bits again."""
    q, k, v = (torch.randn(1, 2500, h, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    bias = ALiBi(torch.tensor(SLOPES, device="cuda"))
    found = []
    for backend in ("hopper", "triton"):
        out = warploom.attention(q, k, v, bias=bias, causal=True, deterministic=deterministic, backend=backend)
        dout = torch.ones_like(out) + out.detach()
        found.append((out, *torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)))
        again = torch.autograd.grad(out, (q, k, v), dout)
        assert not deterministic or all(torch.equal(a, b) for a, b in zip(found[-1][1:], again, strict=True))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() <= 8e-3 * b.float().norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1300, 1300), (500, 1700), (1700, 500)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_too_far_away_to_count(
    head_dim: int, lengths: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is missing of out and gradients; what is not finite, however far away, comes through."""
    monkeypatch.setattr(plan, "REACH", 1)
    seqlen_q, seqlen_k = lengths
    shapes = (seqlen_q, 8), (seqlen_k, 4), (seqlen_k, 4)
    leaves = [torch.randn(2, n, h, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n, h in shapes]
    slopes = torch.tensor([3.0, 0.7, 10.0, -0.2, 0.5, 1.0, 0.3, 0.0], device="cuda")
    dout = torch.randn(2, seqlen_q, 8, head_dim, device="cuda", dtype=torch.bfloat16)

    def passes(backend: str, dout: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
        out = warploom.attention(*leaves, bias=ALiBi(slopes), causal=causal, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    wide = [t.detach().double().requires_grad_() for t in leaves]
    for found, want in zip(passes("hopper", dout, *leaves), passes("reference", dout.double(), *wide), strict=True):
        assert (found - want).norm() <= 8e-3 * want.norm()
    for place in range(3):  # the first key, its value, the last query's dO: of a head whose slope leaves out most
        given = [*leaves, dout]
        spoilt = given[place + 1].detach().clone()
        spoilt[0, 0 if place < 2 else -1, 0, 5] = float("nan")
        given[place + 1] = spoilt.requires_grad_(place < 2)
        *tensors, gradient = given
        out, _, dk, _ = passes("hopper", gradient, *tensors)
        seeing = slice(max(seqlen_q - seqlen_k, 0), None)
        assert out[0, seeing, 0].isnan().any(-1).all() if place < 2 else dk[0, 0, 0].isnan().all()


def test_packed() -> None:
    """Sequences have slopes of their own, and distances count within each."""
    lengths, cu = [100, 0, 612, 33, 500], torch.tensor([0, 100, 100, 712, 745, 1245], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1245, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    slopes = torch.rand(5, 4, device="cuda") - 0.1
    out = warploom.attention_varlen(q, k, v, cu, max_seqlen_q=612, bias=ALiBi(slopes), causal=True, backend="hopper")
    dout = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    for n, (length, start) in enumerate(zip(lengths, cu.tolist(), strict=False)):
        if not length:
            continue
        part = slice(start, start + length)
        alone = [t[None, part].detach().double().requires_grad_() for t in (q, k, v)]
        want = warploom.attention(*alone, bias=ALiBi(slopes[n].double()), causal=True, backend="reference")
        wanted = [want, *torch.autograd.grad(want, alone, dout[None, part].double())]
        for a, b in zip(found, wanted, strict=True):
            assert (a[part] - b[0]).norm() <= 8e-3 * b.norm()


def test_slopes_that_ask_for_a_gradient_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """To Triton, with the out and lse of these kernels."""
    monkeypatch.setattr(hopper, "_next", NEXT)
    q = torch.randn(1, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    grads = []
    for backend in ("hopper", "triton"):
        out = warploom.attention(q, q, q, bias=ALiBi(slopes), causal=True, backend=backend)
        grads.append(torch.autograd.grad(out.float().square().sum(), slopes)[0])
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


TABLES = ["relative", "relative, one side", "t5", "t5, one side", "relative, long", "relative, constant"]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", TABLES)
def test_tables(kind: str, head_dim: int, band: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles far left, near and far right, and partial ones of each; the gradient of the table too. In one order Triton's."""
    call = Call(seed(), 2, 260, 610, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords=BANDS[band] | ANY_ORDER)
    check(call, kind, "hopper", torch.float32)
    check_frozen(call, kind, "hopper")
    monkeypatch.setattr(hopper, "_next", NEXT)
    call = Call(seed(), 2, 500, 333, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords=BANDS[band])
    check_frozen(call, kind, "hopper")


@pytest.mark.parametrize("head_dim", [40, 104])
def test_tables_of_other_head_dims(head_dim: int) -> None:
    call = Call(seed(), 2, 200, 300, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", keywords={"causal": True} | ANY_ORDER)
    check(call, "t5", "hopper", torch.float32)


def test_tables_of_packed_calls() -> None:
    cu = torch.tensor([0, 100, 100, 712, 745, 1245], dtype=torch.int32, device="cuda")
    for table, options in ((101, {"causal": True}), (1201, {}), (31, {"window": (100, 40)})):
        leaves = [torch.randn(1245, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)]
        leaves.append(torch.randn(4, table, device="cuda", requires_grad=True))
        wide = [t.detach().double().requires_grad_() for t in leaves]
        found = []
        for (q, k, v, leaf), backend in ((leaves, "hopper"), (wide, "reference")):
            given: dict[str, Any] = {"bias": Relative(leaf), "backend": backend, **options, **ANY_ORDER}
            out = warploom.attention_varlen(q, k, v, cu, max_seqlen_q=612, **given)
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
            found.append([out, *torch.autograd.grad(out, [q, k, v, leaf], dout)])
        for a, b in zip(*found, strict=True):
            assert (a - b).norm() <= 8e-3 * b.norm()


def test_minus_infinity_in_a_table_hides() -> None:
    """Near and far, and all keys of a head."""
    q, k, v = (torch.randn(1, 800, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    table = torch.randn(4, 601, device="cuda")
    table[:, 320:360] = table[1, -1] = table[2] = table[3, 0] = -math.inf
    for causal in (False, True):
        out, lse = warploom.attention(q, k, v, bias=Relative(table), causal=causal, return_lse=True, backend="hopper")
        wide = [t.double() for t in (q, k, v)]
        want = warploom.attention(*wide, bias=Relative(table.double()), causal=causal, return_lse=True, backend="reference")
        torch.testing.assert_close(out.double(), want[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, want[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("window", [(None, 0), (None, None), (200, 0)], ids=str)
def test_entries_that_no_pair_reaches_have_no_gradient(window: tuple[int | None, int | None]) -> None:
    """The far left's too, of which the kernel takes what all others get."""
    leaves = [torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    for reach in (299, 300, 450):
        table = torch.randn(2, 2 * reach + 1, device="cuda", requires_grad=True)
        out = warploom.attention(*leaves, bias=Relative(table), window=window, backend="hopper", **ANY_ORDER)
        (gradient,) = torch.autograd.grad(out, table, torch.randn_like(out))
        farthest = 299 if window[0] is None else window[0]
        assert gradient[:, reach : reach + farthest + 1].any() and not gradient[:, reach + farthest + 1 :].any()


def passes(tensors: list[torch.Tensor], table: torch.Tensor, dout: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    """Out and the gradients of q, k, v and the table."""
    leaves = [t.detach().requires_grad_() for t in (*tensors, table)]
    out = warploom.attention(*leaves[:3], bias=Relative(leaves[3]), causal=causal, backend="hopper", **ANY_ORDER)
    return [out, *torch.autograd.grad(out, leaves, dout)]


HIDING = ["keys", "queries", "a head"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("hiding", HIDING)
def test_minus_infinity_in_a_table_hides_nan_behind_it(hiding: str, head_dim: int, causal: bool) -> None:
    """In both passes: in keys that no query sees, and in queries that see none, of all heads or of one of a group."""
    rows, cols = (300, 900) if hiding == "keys" else (700, 700)
    clean = [torch.randn(2, n, h, head_dim, device="cuda", dtype=torch.bfloat16) for n, h in ((rows, 4), (cols, 2), (cols, 2))]
    table, dout = torch.randn(4, 601, device="cuda"), torch.randn_like(clean[0])
    (q, k, v), spoiled = [t.clone() for t in clean], dout.clone()
    if hiding == "keys":  # those 100 and more before a query, the first of which is at 600
        table[:, 400:] = -math.inf
        for t in (k, v):
            t[0, :450], t[1, 100:480] = math.nan, math.inf
    elif hiding == "queries":  # which see keys 150 and more before them: neither the first ones nor the last keys are seen
        table[:, :450] = -math.inf
        q[0, :140] = q[1, 3:9] = spoiled[0, 2:150] = spoiled[1, 130:150:3] = k[:, 560:] = v[:, 560:] = math.nan
    else:
        table[1] = table[3, :310] = -math.inf
        q[:, :, 1] = spoiled[:, :, 1] = math.nan
    want = passes(clean, table, dout, causal)
    found = passes([q, k, v], table, spoiled, causal)
    for a, b in zip(found, want, strict=True):
        assert torch.isfinite(a).all() and (a - b).float().norm() <= 5e-4 * b.float().norm()
    assert not found[4][table.isinf()].any()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"seqlen_q": 300, "seqlen_k": 5000}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_largest_logits(head_dim: int, options: dict[str, Any]) -> None:
    """Beside out and lse, whose bits stay; of queries that see nothing, and of logits below 0."""
    check_largest(seed(), "hopper", head_dim=head_dim, **options)
