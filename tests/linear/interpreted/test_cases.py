"""The Triton kernels in the interpreter: every kind of call, in one pass and in segments."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.linear.triton_cases import CASES, DECAY, WHOLE, Case, check
from warploom import linear_attention
from warploom.linear import reference
from warploom.linear.problem import StepArgs
from warploom.linear.triton import BACKEND
from warploom.linear.triton import call as call_module
from warploom.linear.triton.config import Config, Tiling


def configure(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cut: bool,
    blocks: bool,
    lookback: bool = True,
    paired: bool = False,
    by_rows: bool = False,
) -> None:
    """Chunks of 16; segments of 32 tokens; blocks of 16 columns where the state is wider."""
    t = Tiling(16, 16 if blocks else 64, 4, 1)
    together = None if blocks and not paired else t
    fill = 1e9 if cut else 0.0
    small = Config(t, t, replace(t, columns=paired), together, t, t, paired, 32, fill, lookback=lookback, by_rows=by_rows)
    monkeypatch.setattr(call_module, "config", lambda *_: small)


@pytest.mark.parametrize("name", CASES)
def test_cut_into_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=True, blocks=name.startswith("blocks"))
    check(Case(random.randrange(2**31), **CASES[name]))


@pytest.mark.parametrize("sequences", [None, (0, 70, 1, 529, 0)], ids=["one sequence", "packed"])
def test_looking_back_on_groups_of_segments(sequences: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More segments than one group has, from a state, to a state; dQ with a denominator does not look back."""
    configure(monkeypatch, cut=True, blocks=False)
    assert 600 > 18 * call_module.config().segment > 16 * call_module.config().segment
    check(Case(random.randrange(2**31), rows=600, sequences=sequences, state=True, normalize=sequences is None))


@pytest.mark.parametrize("name", ["plain", "blocks", "lengths", "fewer keys"])
def test_segments_in_launches_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=True, blocks=name == "blocks", lookback=False)
    check(Case(random.randrange(2**31), **CASES[name]))


@pytest.mark.parametrize("name", ["plain", "blocks", "grouped", "lengths", "half precision"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_pairs_of_programs(name: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """dK and dV by programs of their own in one launch, where E and M differ of unequal numbers; z of dQ in columns."""
    configure(monkeypatch, cut=cut, blocks=name.startswith("blocks"), paired=True)
    check(Case(random.randrange(2**31), **CASES[name]))


@pytest.mark.parametrize("name", CASES | WHOLE)
def test_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=False, blocks=name.startswith("blocks"))
    # Gradients of the final state are given above, and with a state.
    c = Case(random.randrange(2**31), **(CASES | WHOLE)[name])
    check(c, gradients_of_state=c.state)


@pytest.mark.parametrize("name", DECAY)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_decay(name: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of columns with dK and dV apart where the sequence is whole, in pairs where it is cut."""
    configure(monkeypatch, cut=cut, blocks="blocks" in name, paired=cut)
    check(Case(random.randrange(2**31), **DECAY[name]))


BY_ROWS = ("decay", True), ("decay of heads, blocks", False), ("decay, grouped", True), ("decay, lengths", False)


@pytest.mark.parametrize(("name", "cut"), BY_ROWS)
def test_decay_by_rows(name: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments look back where there are as many keys as queries, and heads of both."""
    configure(monkeypatch, cut=cut, blocks="blocks" in name, paired=cut, by_rows=True)
    check(Case(random.randrange(2**31), **DECAY[name]))


@pytest.mark.parametrize("decay", ["head", "token"])
def test_looking_back_on_what_faded(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More segments than one group has, of which the last sums fade slowly enough to tell."""
    configure(monkeypatch, cut=True, blocks=False, by_rows=True)
    case = Case(random.randrange(2**31), rows=600, decay=decay, state=True, normalize=False)
    call, *_ = case.call()
    assert call.decay is not None
    call = replace(call, decay=call.decay * 5e-3, decay_grad=False)
    assert call_module.Call.of(call).looks_back(1)
    wide = {name: getattr(call, name).double() for name in ("q", "k", "v", "s", "z", "decay")}
    for found, want in zip(BACKEND.forward(call, True), reference.BACKEND.forward(replace(call, **wide), True), strict=True):
        assert found is None or want is None or (found - want).abs().max() <= 2e-6 * want.abs().max(), case


def test_a_chunk_too_steep_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of its rows would pass fp32; programs of other heads go by rows."""
    configure(monkeypatch, cut=False, blocks=False, by_rows=True)
    case = Case(random.randrange(2**31), decay="token", heads=2)
    call, dout, *_ = case.call()
    assert call.decay is not None
    logs = call.decay.clone()
    logs[..., 0] -= 8.0
    assert 15 * 8 / 0.6931 > 120
    call = replace(call, decay=logs)
    wide = {name: getattr(call, name).double() for name in ("q", "k", "v", "decay")}
    for backend in (BACKEND, reference.BACKEND):
        given = call if backend is BACKEND else replace(call, **wide)
        _, norm, *_ = backend.forward(given, False)
        gradients = backend.backward(given, dout.to(given.q.dtype), norm, None, None)
        if backend is BACKEND:
            found = gradients
    for name, a, b in zip(("dq", "dk", "dv", "ds", "dz", "ddecay"), found, gradients, strict=True):
        assert a is None or (b is not None and (a - b).abs().max() <= 1e-5 * b.abs().max()), (name, case)


@pytest.mark.parametrize("first", [-torch.inf, -20.0])
def test_small_logs_behind_large_ones_keep_their_bits(first: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of one running fp32 sum would have lost what 50 logs of a thousandth add up to."""
    t = Tiling(64, 64, 4, 1)
    monkeypatch.setattr(call_module, "config", lambda *_: Config(t, t, t, t, t, t, fill=0.0, lookback=False))
    call, *_ = Case(random.randrange(2**31), rows=64, decay="token").call()
    logs = torch.full((1, 64, 1), -1e-3)
    logs[:, 1:13] = first
    out, *_ = BACKEND.forward(replace(call, decay=logs), False)
    wide = {name: getattr(call, name).double() for name in ("q", "k", "v")}
    want, *_ = reference.BACKEND.forward(replace(call, **wide, decay=logs.double()), False)
    assert (out - want).abs().max() <= 2e-6 * want.abs().max(), call


def test_a_decay_that_asks_for_no_gradient_leaves_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the others are bit for bit those beside it."""
    configure(monkeypatch, cut=True, blocks=False)
    call, dout, ds, dz = Case(random.randrange(2**31), decay="token", state=True).call()
    _, norm, *_ = BACKEND.forward(call, True)
    *whole, logs = BACKEND.backward(call, dout, norm, ds, dz)
    *others, nothing = BACKEND.backward(replace(call, decay_grad=False), dout, norm, ds, dz)
    assert nothing is None and logs is not None and logs.isfinite().all()
    for a, b in zip(others, whole, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_state_or_not_changes_no_bit(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=cut, blocks=False)
    call, *_ = Case(random.randrange(2**31)).call()
    out, norm, *_ = BACKEND.forward(call, True)
    alone, norm_alone, *none = BACKEND.forward(call, False)
    assert torch.equal(out, alone) and torch.equal(norm, norm_alone) and none == [None, None]


@pytest.mark.parametrize("decay", ["", "head", "token that forgets"])
def test_steps_continue_a_prefill(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=False, blocks=False)
    options = {"e": 20, "m": 7, "batch": 2, "scale": 0.4, "decay": decay}
    call, *_ = Case(random.randrange(2**31), rows=9, heads=4, heads_kv=2, **options).call()
    full, _, s_full, z_full = BACKEND.forward(call, True)
    each = ("q", "k", "v", "decay") if call.decay is not None and call.decay.ndim == 3 else ("q", "k", "v")
    first = replace(call, **{name: getattr(call, name)[:, :7] for name in each})
    _, _, s, z = BACKEND.forward(first, True)
    before = s.clone()
    numbers = (call.map_q, call.map_k, True, call.eps, call.scale, "triton")
    for t in range(7, 9):
        logs = call.decay[:, t] if "decay" in each and call.decay is not None else call.decay
        out, s, z = BACKEND.step(StepArgs(call.q[:, t], call.k[:, t], call.v[:, t], s, z, *numbers, logs))
        torch.testing.assert_close(out, full[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((s, z), (s_full, z_full), rtol=1e-5, atol=1e-5)
    assert torch.equal(before, BACKEND.forward(first, True)[2])


def test_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices, transposed and expanded inputs, a last dimension that is not contiguous."""
    configure(monkeypatch, cut=False, blocks=False)
    call, dout, *_ = Case(random.randrange(2**31), rows=20, heads=2, batch=2).call()
    want = (BACKEND.forward(call, False)[0], *BACKEND.backward(call, dout, BACKEND.forward(call, False)[1], None, None)[:3])
    odd = replace(
        call,
        q=torch.cat([call.q, call.q[..., :3]], -1)[..., :16],
        k=call.k.transpose(1, 2).contiguous().transpose(1, 2),
        v=call.v.transpose(1, 3).contiguous().transpose(1, 3),
    )
    out, norm, *_ = BACKEND.forward(odd, False)
    got = (out, *BACKEND.backward(odd, dout.transpose(1, 2).contiguous().transpose(1, 2), norm, None, None)[:3])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_hidden_nan_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, cut=False, blocks=False)
    call, dout, *_ = Case(random.randrange(2**31), batch=2, lengths=(40, 17), rows=33, keys=40).call()
    out, norm, *_ = BACKEND.forward(call, False)
    want = (out, *BACKEND.backward(call, dout, norm, None, None)[:3])
    k, v = call.k.clone(), call.v.clone()
    k[1, 17:], v[1, 17:] = float("nan"), float("inf")
    poisoned = replace(call, k=k, v=v)
    out, norm, *_ = BACKEND.forward(poisoned, False)
    for a, b in zip((out, *BACKEND.backward(poisoned, dout, norm, None, None)[:3]), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("packed", [False, True], ids=["lengths", "cu_seqlens"])
def test_lengths_of_any_stride(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second number of a tensor was once read as if they lay side by side."""
    configure(monkeypatch, cut=False, blocks=False)
    numbers = torch.tensor([0, 2**30, 13, -7, 30, 99], dtype=torch.int32)
    q, k, v = (torch.randn(1 if packed else 3, 30, 1, 16) for _ in range(3))
    name = "cu_seqlens" if packed else "lengths"
    got, want = (linear_attention(q, k, v, backend="triton", **{name: t}) for t in (numbers[::2], numbers[::2].clone()))
    assert torch.equal(got, want)
