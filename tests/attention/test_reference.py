"""The specification itself: its derivatives, its exactness per element, its dropout bits."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom import masks
from warploom.attention import philox

NAN = float("nan")


def double(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "column mask": {"mask": masks.Document([2, 3])},
    "rows that see nothing": {"window": (None, -2)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 9},
    "scale": {"scale": -0.3},
}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, **keywords: object):
    """out and a finite function of lse (fp64, past the public function's fp32)."""
    from warploom.attention.arguments import dense_args
    from warploom.attention.reference import BACKEND

    out, lse = BACKEND.forward(dense_args(q, k, v, sink=sink, **keywords))
    return out, lse


@pytest.mark.parametrize("name", FEATURES)
def test_first_and_second_derivatives(name: str) -> None:
    q, k, v, sink = double(1, 5, 2, 3), double(1, 5, 1, 3, seed=1), double(1, 5, 1, 2, seed=2), double(2, seed=3)

    def call(*inputs: torch.Tensor):
        return reference(*inputs, **FEATURES[name])

    assert torch.autograd.gradcheck(call, (q, k, v, sink), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (q, k, v, sink))


def test_rows_that_see_nothing_have_zero_derivatives_without_a_sink() -> None:
    q, k, v = double(1, 4, 1, 3), double(1, 2, 1, 3, seed=1), double(1, 2, 1, 3, seed=2)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return warploom.attention(*inputs, causal=True, backend="reference")

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert not torch.autograd.grad(call(q, k, v).sum(), q)[0][:, :2].any()


def test_a_nan_reaches_only_the_rows_that_see_it() -> None:
    """Per element, forward and backward: key 3 is NaN and causal rows 0…2 do not see it."""
    q, k, v = (double(1, 6, 2, 4, seed=s) for s in range(3))
    clean = warploom.attention(q, k, v, causal=True, backend="reference")
    clean_dq = torch.autograd.grad(clean[:, :3].sum(), q)[0]
    for tensor in (k, v):
        with torch.no_grad():
            tensor[:, 3] = NAN
    out = warploom.attention(q, k, v, causal=True, backend="reference")
    torch.testing.assert_close(out[:, :3], clean[:, :3])
    assert out[:, 3:].isnan().all()
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    torch.testing.assert_close(dq[:, :3], clean_dq[:, :3])
    assert dq[:, 3:].isnan().all() and dk[:, :4].isnan().any()


def test_an_infinite_visible_value_gives_infinity() -> None:
    q, k, v = (double(1, 3, 1, 2, seed=s).detach() for s in range(3))
    v[0, 1, 0, 0] = float("inf")
    out = warploom.attention(q, k, v, backend="reference")
    assert (out[0, :, 0, 0] == float("inf")).all() and torch.isfinite(out[0, :, 0, 1]).all()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Vectors published with Random123 (Salmon et al., 2011)."""
    seed = key[0] | key[1] << 32
    signed = seed - 2**64 if seed >= 2**63 else seed
    got = philox.philox(torch.tensor(signed), tuple(torch.tensor(c) for c in counter))
    assert tuple(int(w) for w in got) == words


def test_dropout_keeps_the_stated_share_and_depends_on_every_index() -> None:
    index = torch.arange(64)
    keep = philox.keep_mask(torch.tensor(7), 0.3, index[:2], index[:3], index, index)
    assert abs(float(keep.float().mean()) - 0.7) < 0.01
    for other in (keep[1, 0], keep[0, 1], keep[0, 0].T, keep[0, 0].roll(1, 0), keep[0, 0].roll(1, 1)):
        assert 0.5 < float((other == keep[0, 0]).float().mean()) < 0.66  # independent: 0.7² + 0.3² = 0.58


@pytest.mark.parametrize("name", FEATURES)
def test_closed_form_gradients_are_those_of_autograd(name: str) -> None:
    """Kernels without a backward pass for a call, Ampere's at head_dim 8, send it to the reference's."""
    from warploom.attention.arguments import dense_args
    from warploom.attention.reference import BACKEND as implementation

    q, k, v = double(2, 5, 4, 8), double(2, 5, 2, 8, seed=1), double(2, 5, 2, 12, seed=2)
    sink, dout, dlse = double(4, seed=3), double(2, 5, 4, 12, seed=4), double(2, 4, 5, seed=5)
    args = dense_args(q, k, v, sink=sink, **FEATURES[name])
    out, lse = implementation.forward(args)
    wanted = torch.autograd.grad([out, lse], [q, k, v, sink], [dout, dlse])
    with torch.no_grad():
        found = implementation.backward(args, dout, dlse, out, lse)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_closed_form_gradients_of_packed_calls_are_those_of_autograd() -> None:
    from warploom.attention.arguments import varlen_args
    from warploom.attention.reference import BACKEND as implementation

    q, k, v = double(12, 2, 8), double(12, 2, 8, seed=1), double(12, 2, 8, seed=2)
    args = varlen_args(q, k, v, torch.tensor([0, 3, 3, 11]), causal=True, dropout_p=0.3, dropout_seed=5)
    out, lse = implementation.forward(args)
    dout = double(12, 2, 8, seed=3)
    wanted = torch.autograd.grad(out, [q, k, v], dout)
    with torch.no_grad():
        *found, dsink = implementation.backward(args, dout, None, out, lse)
    assert dsink.numel() == 0
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
