"""The Triton kernels in the interpreter: NaN, strides, exact answers, what is skipped and what is prepared once."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

import warploom
from tests.attention.cases import case, masked
from warploom import masks
from warploom.attention import bounds
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.triton import BACKEND
from warploom.kernels.triton import bounds as bounds_kernel

NAN = float("nan")
HALF = torch.float16  # the interpreter multiplies bfloat16 as integers


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = warploom.attention(*leaves, return_lse=True, backend="triton", **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def drawn(seqlen_q: int, seqlen_k: int, heads: int = 2, dim: int = 16) -> list[torch.Tensor]:
    shapes = ((seqlen_q, heads), (seqlen_k, 1), (seqlen_k, 1), (seqlen_q, heads))
    return [torch.randn(2, s, h, dim).to(HALF) for s, h in shapes]


@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_hidden_keys_may_hold_anything(poison: float) -> None:
    visible = torch.ones(2, 200, dtype=torch.bool)
    visible[0, 150:], visible[1, ::7] = False, False
    q, k, v, dout = drawn(200, 200)
    options = {"mask": masks.Padding(visible), "causal": True}
    clean = gradients(q, k, v, dout, **options)
    k[~visible], v[~visible] = poison, poison
    for a, b in zip(gradients(q, k, v, dout, **options), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mask", [None, masks.Document([100, 20]), masks.Padding(torch.tensor([0, 30]))])
def test_queries_that_see_nothing_may_hold_anything(mask: masks.Mask | None) -> None:
    q, k, v, dout = drawn(200, 120)
    options = {"mask": mask, "causal": True}
    clean = gradients(q, k, v, dout, **options)
    blind = (clean[1] == float("-inf")).transpose(1, 2)
    assert blind.any() and not clean[0][blind].any()
    q[blind], dout[blind] = NAN, NAN
    for a, b in zip(gradients(q, k, v, dout, **options), clean, strict=True):
        assert torch.equal(a, b)


def test_a_visible_nan_stays() -> None:
    q, k, v, dout = drawn(70, 70)
    k[0, 40, 0, 3] = NAN
    out, lse, *_ = gradients(q, k, v, dout, causal=True)
    assert out[0, 40:].isnan().all() and lse[0, :, 40:].isnan().all() and out[1].isfinite().all()


def test_slices_of_one_projection() -> None:
    packed = torch.randn(2, 70, 3, 2, 24).to(HALF)
    q, k, v = packed[..., :16].unbind(2)
    dout = torch.randn(2, 2, 70, 16).to(HALF).transpose(1, 2)
    want = gradients(q.contiguous(), k.contiguous(), v.contiguous(), dout.contiguous(), causal=True)
    for a, b in zip(gradients(q, k, v, dout, causal=True), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    q, k, v, dout = drawn(*shape)
    out, lse, dq, dk, dv = gradients(q, k, v, dout, causal=True)
    assert not out.any() and (lse == float("-inf")).all() and not any(t.any() for t in (dq, dk, dv))


def test_small_integers_are_exact() -> None:
    """One key each: every weight is exactly 1."""
    q, k, v, dout = (torch.randint(-4, 5, t.shape).to(HALF) for t in drawn(130, 130, heads=1))
    out, _, dq, dk, dv = gradients(q, k, v, dout, window=(0, 0))
    assert torch.equal(out, v) and torch.equal(dv, dout) and not dq.any() and not dk.any()


def test_ones_in_give_ones_out() -> None:
    q, k, v, dout = drawn(130, 200)
    out, *_ = gradients(q, k, torch.ones_like(v), dout, mask=masks.Document([100, 100]))
    assert torch.equal(out, torch.ones_like(out))


def test_kernels_know_the_block_of_the_bounds() -> None:
    assert bounds_kernel.BOUND_BLOCK.value == bounds.BLOCK


class Launches:
    """Counts launches of the kernel that prepares a mask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        prepare = bounds._column_bounds

        def counted(*given: Any) -> Any:
            self.count += 1
            return prepare(*given)

        monkeypatch.setattr(bounds, "_column_bounds", counted)


def test_twelve_layers_prepare_a_mask_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    starts = torch.full((1, 1, 40), 40, dtype=torch.int32)
    x = torch.randn(1, 40, 1, 16, dtype=HALF, requires_grad=True)
    for step in range(3):
        starts[..., :20] = 20 + step  # the next batch's documents, in place
        mask = masks.ColumnMask(starts, causal=True)
        layers = [x]
        for _ in range(12):
            layers.append(warploom.attention(layers[-1], layers[-1], layers[-1], mask=mask, backend="triton"))
        layers[-1].sum().backward()
        assert launches.count == step + 1
    # Layer by layer: twelve in a row make up to sixty times as much of one's rounding.
    for given, found in pairwise(layers):
        want = warploom.attention(given, given, given, mask=mask, backend="reference")
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3)


def test_equal_lengths_of_another_call_prepare_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds depend on the band and on the queries' number too."""
    launches = Launches(monkeypatch)
    mask = masks.ColumnMask(torch.full((1, 1, 40), 30, dtype=torch.int32))
    k = torch.randn(1, 40, 1, 16, dtype=HALF)
    for seqlen_q, options in ((40, {}), (40, {"causal": True}), (33, {}), (40, {}), (33, {}), (40, {"causal": True})):
        q = torch.randn(1, seqlen_q, 1, 16, dtype=HALF)
        out = warploom.attention(q, k, k, mask=mask, backend="triton", **options)
        want = warploom.attention(q, k, k, mask=mask, backend="reference", **options)
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    assert launches.count == 3


@pytest.mark.parametrize("width", [64, 128, 256])
def test_hidden_tiles_are_never_read(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN beyond what any query of a tile sees reaches no one: neither pass reads hidden tiles."""
    lengths = [256, 256, 128]
    q, k, v, dout = (t[:1] for t in drawn(640, 640, heads=1, dim=width))
    mask = masks.Document(lengths)
    clean = gradients(q, k, v, dout, mask=mask)
    k[:, 256:512] = NAN
    found = gradients(q, k, v, dout, mask=mask)
    for name, a, b in zip(("out", "dq"), (found[0], found[2]), (clean[0], clean[2]), strict=True):
        for rows in (slice(0, 256), slice(512, 640)):
            assert torch.equal(a[:, rows], b[:, rows]), name
    for a, b in zip(found[3:], clean[3:], strict=True):
        assert torch.equal(a[:, :256], b[:, :256]) and torch.equal(a[:, 512:], b[:, 512:])


LAUNCHED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "causal": (None, {"causal": True}),
    "boxes": (None, {}),
    "a mask": ("Document", {}),
    "a mask for each head": ("lts and lte, per head", {}),
    "packed": (None, {"causal": True}),
    "dropout": (None, {"causal": True, "dropout_p": 0.4}),
    "Document, dropout": ("Document", {"dropout_p": 0.4}),
    "packed, dropout": (None, {"dropout_p": 0.4}),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_kept_launchers_serve_other_tensors(name: str) -> None:
    """And other seeds, and keep none of the first call's alive; one that is not aligned goes another way."""
    mask, options = LAUNCHED[name]
    found = []
    for seed in (3, 4):
        if "dropout_p" in options:
            options = options | {"dropout_seed": seed}
        call = case("full", seed, dtype=HALF) if mask is None else masked(mask, seed, dtype=HALF)
        q, k, v, _ = call.tensors()
        if "packed" in name:
            starts = torch.tensor([0, 5 * seed, q.shape[0] * q.shape[1]], dtype=torch.int32)
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            args = varlen_args(q, k, v, starts, starts, **options)
        else:
            args = BACKEND.prepare(dense_args(q, k, v, **options, **call.keywords))
        out, lse = BACKEND.forward(args)
        found.append((args, out, lse, torch.randn_like(out)))
    del call, args, q, k, v
    (first, out, lse, dout), (second, want, want_lse, upstream) = found
    launch, launch_backward = BACKEND.bind(first), BACKEND.bind_backward(first, dout, None, out, lse)
    assert launch is not None and launch_backward is not None
    alive = [weakref.ref(t) for t in (dout, *first.tensors()) if t is not None]
    if "packed" in name:
        del starts
    del first, out, lse, dout, found
    bounds._kept.clear()
    gc.collect()
    assert not any([ref() is not None for ref in alive])
    q, *others = second.tensors()
    assert q is not None
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    for each in (q, shifted):
        args = second._replace(q=each)
        for a, b in zip(launch(each, *others), BACKEND.forward(args), strict=True):
            assert torch.equal(a, b)
        gradients = BACKEND.backward(args, upstream, None, want, want_lse)
        for a, b in zip(launch_backward(upstream, None, want, want_lse, each, *others), gradients, strict=True):
            assert torch.equal(a, b)
