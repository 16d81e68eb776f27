"""Dispatch is an ordered list of refusals; explain() prints that list."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import warploom
from warploom import masks
from warploom.attention.arguments import dense_args
from warploom.attention.calls import key_of, problem_of
from warploom.runtime import dispatch
from warploom.runtime.backend import Backend


def qkv(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 256, 4, 16, dtype=dtype) for _ in range(3)]


def test_a_keyword_that_no_call_has_was_named_by_a_function_within() -> None:
    q, k, v = qkv()
    starts = torch.tensor([0, 256], dtype=torch.int32)
    for function in (warploom.explain, warploom.prepare):
        for keyword in ("casual", "resolved"):
            with pytest.raises(TypeError, match=rf"^attention\(\) got an unexpected keyword argument '{keyword}'"):
                function(q, k, v, **{keyword: True})
            with pytest.raises(TypeError, match=rf"^attention_varlen\(\) got an unexpected keyword argument '{keyword}'"):
                function(q[0], k[0], v[0], starts, **{keyword: True})
        assert function(q, k, v, causal=True, return_lse=True, return_stats=("max_logits",)).implementation == "cpu"
        with pytest.raises(TypeError, match="return_lse must be True or False, got int 1"):
            function(q, k, v, return_lse=1)


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


class Pretend(Backend):
    """Takes everything, if it is there."""

    def __init__(self, name: str, missing: str | None = None) -> None:
        self.name, self.missing = name, missing
        self.device = "cpu" if name == "cpu" else None

    def available(self) -> str | None:
        return self.missing

    def supports(self, problem: Any) -> str | None:
        return None

    def forward(self, args: Any, *options: Any) -> Any:
        raise AssertionError("nothing runs here")


class Fast(Pretend):
    """Refuses odd problems."""

    def supports(self, problem: Any) -> str | None:
        return "odd" if problem.odd else None


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch):
    """Two implementations on a pretend GPU: the fast one refuses odd problems."""
    monkeypatch.setattr(dispatch, "_families", dict(dispatch._families))
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "_strict", False)
    dispatch.register("pretend", Pretend("absent", "not installed"), Fast("fast"), Pretend("slow"))
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

    monkeypatch.setattr(cpu.BACKEND, "forward", fail)
    warploom.explain(*qkv(), causal=True)


@pytest.mark.parametrize(("faster", "remembered"), [(None, None), ("no such GPU", "slow")])
def test_a_choice_is_settled_where_no_faster_one_can_run(
    monkeypatch: pytest.MonkeyPatch, faster: str | None, remembered: str | None
) -> None:
    ordered = [("cpu", None), ("fast", faster), ("slow", None)]
    implementations = tuple([Pretend(name, reason) for name, reason in ordered])
    monkeypatch.setattr(dispatch, "_families", {"attention": implementations})
    monkeypatch.setattr(dispatch, "_settled", {})
    dispatch.settle("call", "slow")
    assert dispatch.settled("call") == remembered
    dispatch.strict(False)
    assert dispatch.settled("call") is None


def test_the_key_of_a_call_tells_problems_apart() -> None:
    """Every argument that changes the problem changes the key, and lengths of cu_seqlens count, not contents."""
    q, k = torch.zeros(1, 20, 4, 16), torch.zeros(1, 30, 2, 16)
    base: dict[str, Any] = {"q": q, "k": k, "v": k}
    changes: list[dict[str, Any]] = [
        {}, {"q": q[:, :7]}, {"q": q[:, :, :2]}, {"k": k[:, :9], "v": k[:, :9]}, {"v": torch.zeros(1, 30, 2, 8)},
        {"causal": True}, {"window": (3, None)}, {"window": (3, 0)}, {"softcap": 2.0}, {"sink": torch.zeros(4)},
        {"dropout_p": 0.5}, {"deterministic": True}, {"q": q.half(), "k": k.half(), "v": k.half()},
        {"q": q.clone().requires_grad_()}, {"mask": masks.ColumnMask(torch.full((1, 1, 30), 20, dtype=torch.int32))},
    ]  # fmt: skip
    made = [dense_args(**{**base, **change}) for change in changes]
    keys, problems = [key_of(args, None) for args in made], [problem_of(args) for args in made]
    assert len(set(keys)) == len(set(problems)) == len(changes) and len({*keys, key_of(made[0], "cpu")}) == len(changes) + 1


def test_a_backend_without_supports_or_forward_is_none() -> None:
    class Half(Backend):
        name = "half"

        def supports(self, problem: Any) -> str | None:
            return None

    with pytest.raises(TypeError, match="forward"):
        Half()  # type: ignore[abstract]
