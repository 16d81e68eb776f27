"""The Triton kernels in the interpreter: every kind of call, in every chunk, in one range and in several."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.delta.cases import CASES, Case, check
from warploom.delta.problem import DeltaCall
from warploom.delta.triton import BACKEND
from warploom.delta.triton import call as call_module
from warploom.delta.triton.call import Call, Ranges
from warploom.delta.triton.config import Config, Launches

# For chunks of 16 and blocks of 16 value columns.
MORE: dict[str, dict[str, Any]] = {
    "blocks": {"m": 48, "e": 20, "tokens": 40, "state": True},
    "half precision": {"dtype": torch.float16, "state": True, "tokens": 48, "heads": 3, "m": 24},
    "equal keys, half precision": {"dtype": torch.float16, "keys": "equal", "decay": None, "tokens": 140, "heads": 4},
    "lengths": {"tokens": 50, "batch": 3, "lengths": (50, 17, 0), "state": True, "hidden": float("nan"), "group": 2},
    "packed": {"tokens": 80, "sequences": (0, 21, 1, 49, 0), "state": True, "hidden": float("nan")},
    "many short sequences": {"tokens": 60, "sequences": (7, 0, 9, 16, 1, 1, 17), "state": True},
    "one token each": {"tokens": 6, "sequences": (1, 0, 1, 1, 1), "group": 2},
    "one chunk each": {"tokens": 16, "batch": 3, "state": True},
    "dims past 128": {"tokens": 20, "e": 136, "m": 24, "state": True},
}


def configure(monkeypatch: pytest.MonkeyPatch, chunk: int, block: int = 16) -> None:
    """Chunks of so many tokens and blocks of so many value columns."""
    one = Launches(4)
    monkeypatch.setattr(call_module, "config", lambda *_: Config(chunk, block, one, one, one, one, one))


def cut(monkeypatch: pytest.MonkeyPatch, per_sequence: bool, wanted: int) -> list[Ranges]:
    """Backward passes in so many ranges; those that were made."""
    made = []

    def ranges(call: Call) -> Ranges:
        made.append(call.cut(per_sequence and not call.packed, wanted))
        return made[-1]

    monkeypatch.setattr(Call, "ranges", ranges)
    return made


# Not bf16, which the interpreter does not multiply; packed sequences are below.
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.get("dtype") != torch.bfloat16 and n != "packed"])
def test_as_configured(name: str) -> None:
    # Gradients of the final state are given below, and with a state.
    c = Case(random.randrange(2**31), **CASES[name])
    check(c, BACKEND, gradient_of_state=c.state)


# 32 is the configuration's for fp32 and few dims.
@pytest.mark.parametrize(("name", "chunk"), [("blocks", 64), ("packed", 64), ("dims past 128", 16)])
def test_chunks(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, chunk)
    check(Case(random.randrange(2**31), **MORE[name]), BACKEND)


@pytest.mark.parametrize(
    ("name", "per_sequence", "wanted"),
    [
        ("blocks", True, 2),
        ("half precision", True, 3),
        ("lengths", True, 2),
        ("lengths", False, 64),
        ("packed", False, 2),
        ("packed", False, 64),
        ("many short sequences", False, 3),
        ("one chunk each", False, 2),
    ],
)
def test_ranges(name: str, per_sequence: bool, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 16)
    made = cut(monkeypatch, per_sequence, wanted)
    check(Case(random.randrange(2**31), **MORE[name]), BACKEND)
    assert made[0].number > 1


def results(call: DeltaCall, dout: torch.Tensor, dstate: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *BACKEND.forward(call, True), *BACKEND.backward(call, dout, dstate)


def test_ranges_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 16)
    call, dout, dstate = Case(random.randrange(2**31), tokens=40, batch=2, state=True).call()
    cut(monkeypatch, True, 1)
    want = results(call, dout, dstate)
    for per_sequence in (True, False):
        cut(monkeypatch, per_sequence, 3)
        for got, one in zip(results(call, dout, dstate), want, strict=True):
            assert got is not None and one is not None and torch.equal(got, one)


def test_state_or_not_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, 16)
    call, *_ = Case(random.randrange(2**31), tokens=40).call()
    out, _ = BACKEND.forward(call, True)
    alone, none = BACKEND.forward(call, False)
    assert torch.equal(out, alone) and none is None


def test_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices, transposed and expanded tensors, a last dimension that is not contiguous."""
    configure(monkeypatch, 16)
    call, dout, dstate = Case(random.randrange(2**31), tokens=12, heads=2, batch=2, state=True).call()
    assert call.state is not None and call.decay is not None
    k, state = call.k[:1].expand_as(call.k), call.state[:1].expand_as(call.state)
    want = results(replace(call, k=k.clone(), state=state.clone()), dout, dstate)
    odd = replace(
        call,
        q=torch.cat([call.q, call.q[..., :3]], -1)[..., :16],
        k=k,
        v=call.v.transpose(1, 3).contiguous().transpose(1, 3),
        beta=call.beta.transpose(1, 2).contiguous().transpose(1, 2),
        decay=torch.stack([call.decay, call.decay], -1)[..., 0],
        state=state,
    )
    for got, one in zip(results(odd, dout.transpose(1, 2).contiguous().transpose(1, 2), dstate), want, strict=True):
        assert got is not None and one is not None and torch.equal(got, one)


def test_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tokens have that are far apart."""
    call, dout, dstate = Case(random.randrange(2**31), tokens=20, state=True).call()
    want = results(call, dout, dstate)
    narrow = Call.of

    def wide(c: DeltaCall, dout: torch.Tensor | None = None) -> Call:
        found = narrow(c, dout)
        assert not found.variant.wide
        return replace(found, variant=found.variant._replace(wide=True))

    monkeypatch.setattr(Call, "of", wide)
    for got, one in zip(results(call, dout, dstate), want, strict=True):
        assert got is not None and one is not None and torch.equal(got, one)


@pytest.mark.parametrize("starts", [(-3, 50, 20, 40), (40, 0, 99, 40)], ids=str)
def test_bad_starts_reach_nothing_outside(starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of device tensors are not checked; what lies round the tensors must stay as it is, and out of the results."""
    configure(monkeypatch, 16)
    call, dout, dstate = Case(random.randrange(2**31), tokens=40, sequences=(13, 13, 14), state=True).call()
    nan = torch.full_like(call.q, float("nan"))
    names = ("q", "k", "v")
    hidden = {n: torch.cat([nan, getattr(call, n), nan], 1)[:, 40:80] for n in names}
    poisoned = replace(call, cu_seqlens=torch.tensor(starts, dtype=torch.int32), **hidden)
    for t in (BACKEND.forward(poisoned, True)[1], BACKEND.backward(poisoned, dout, dstate)[5]):
        assert t is not None and t.shape == dstate.shape


SHAPES = [(e, m, group) for e, m in ((64, 64), (128, 128), (256, 256), (64, 256), (256, 64)) for group in (1, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("e", "m", "group"), SHAPES)
def test_room_is_no_more_than_the_tensors(e: int, m: int, group: int, dtype: torch.dtype) -> None:
    """Of long, short and packed sequences: a backward pass takes no more beside its results than q, k, v and out."""
    for batch, tokens, packed in ((1, 32768, 0), (4, 8192, 0), (64, 256, 0), (1, 32768, 4), (1, 32768, 16)):
        q = torch.empty(batch, tokens, 16 // group, e, dtype=dtype, device="meta")
        v = torch.empty(batch, tokens, 16, m, dtype=dtype, device="meta")
        beta = torch.empty(batch, tokens, 16, device="meta")
        cu = torch.empty(packed + 1, dtype=torch.int32, device="meta") if packed else None
        call = Call.of(DeltaCall(q, q, v, beta, beta, 1.0, True, 1e-6, None, None, cu))
        cut = call.ranges()
        assert call.room(cut) <= 2 * (q.numel() + v.numel()) * q.element_size(), (batch, tokens, packed, cut)
