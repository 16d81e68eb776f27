"""Dispatch is an ordered list of refusals; explain() prints that list."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import warploom
from warploom import masks
from warploom.runtime import dispatch


def qkv(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 256, 4, 16, dtype=dtype) for _ in range(3)]


def test_explain_prints_the_choice_the_tiles_and_the_refusals() -> None:
    q, k, v = qkv()
    text = str(warploom.explain(q, k, v, mask=masks.Document([128, 128]), softcap=2.0))
    assert "dense float32 on cpu; batch 2, seqlen 256×256, heads 4/4, head_dim 16; causal" in text
    assert "runs      cpu: the first that does not refuse" in text and "50.0% skipped" in text
    plan = warploom.explain(*qkv(torch.float64))
    assert plan.implementation == "reference"
    assert ("cpu", "accumulates in fp32; float64 runs on the reference") in plan.refused
    assert "refused   cpu: accumulates in fp32" in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["implementation"] == "reference"


def test_explain_of_packed_calls_and_of_gradients() -> None:
    q, k, v = (t.flatten(0, 1).requires_grad_() for t in qkv())
    plan = warploom.explain(q, k, v, torch.tensor([0, 256, 512], dtype=torch.int32), causal=True)
    assert "varlen" in plan.call and plan.call.endswith("forward + backward")


def test_forcing_a_backend_that_cannot_raises_its_refusal() -> None:
    with pytest.raises(ValueError, match="backend='cpu' cannot run this call: accumulates in fp32"):
        warploom.attention(*qkv(torch.float64), backend="cpu")
    with pytest.raises(ValueError, match="backend='cpu' cannot run this call"):
        warploom.explain(*qkv(torch.float64), backend="cpu")


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch):
    """Two implementations on a pretend GPU: the fast one refuses odd problems."""
    monkeypatch.setattr(dispatch, "_families", dict(dispatch._families))
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "_strict", False)
    fast = SimpleNamespace(available=lambda: None, supports=lambda p: "odd" if p.odd else None)
    slow = SimpleNamespace(available=lambda: None, supports=lambda p: None)
    absent = SimpleNamespace(available=lambda: "not installed", supports=lambda p: None)
    dispatch.register(
        "pretend",
        *(dispatch.Implementation(n, m) for n, m in (("absent", absent), ("fast", fast), ("slow", slow))),
    )
    return lambda odd: dispatch.choose(SimpleNamespace(device="cuda", odd=odd), family="pretend")


def test_a_slower_implementation_on_a_gpu_warns_once(family, recwarn: pytest.WarningsRecorder) -> None:
    assert family(odd=False) == "fast" and not recwarn.list
    assert family(odd=True) == "slow" and family(odd=True) == "slow"
    assert [str(w.message) for w in recwarn.list] == ["warploom runs the slower 'slow' here (fast: odd)"]


def test_strict_makes_it_an_error(family) -> None:
    warploom.strict()
    with pytest.raises(RuntimeError, match=r"strict\(\).*slower 'slow' \(fast: odd\)"):
        family(odd=True)
    warploom.strict(False)
    with pytest.warns(UserWarning):
        assert family(odd=True) == "slow"


def test_explain_does_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.attention import cpu

    def fail(*_: object) -> None:
        raise AssertionError("explain ran the kernel")

    monkeypatch.setattr(cpu, "forward", fail)
    warploom.explain(*qkv(), causal=True)
