"""The judge lets a correct kernel pass and no wrong one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from warploom.attention.judge import LowPrecision, judge, low_precision
from warploom.commands.selftest_cases import CASES, Call


def named(name: str) -> Call:
    (case,) = [case for case in CASES if case.name == name]
    seed = torch.seed() % 2**31
    print("seed", seed)
    return Call(case, torch.bfloat16, "cpu", seed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_model_in_fp64_is_the_reference(case) -> None:
    """The model's formulas, without its rounding, give what autograd gives of the reference."""
    seed = torch.seed() % 2**31
    print("seed", seed)
    call = Call(case, torch.float64, "cpu", seed)
    wanted, model = call.results("reference", torch.float64), call.model()
    assert wanted.keys() == model.keys()
    torch.testing.assert_close(model.pop("lse").float(), wanted.pop("lse"), atol=2e-6, rtol=0)  # fp32 by contract
    if "dsink" in model:  # carries the roundings of an fp32 sum by design
        torch.testing.assert_close(model.pop("dsink"), wanted.pop("dsink").double(), atol=1e-6, rtol=1e-6)
    for name, tensor in wanted.items():
        torch.testing.assert_close(model[name], tensor.double(), atol=1e-11, rtol=1e-11)


def verdicts(call: Call, got: dict[str, torch.Tensor]) -> dict[str, bool]:
    wanted, model = call.results("reference", torch.float64), call.model()
    return {name: judge(name, got[name], wanted[name], model[name], call.dtype).passed for name in wanted}


def test_reference_in_bf16_passes() -> None:
    call = named("causal")
    assert all(verdicts(call, call.results("reference", torch.bfloat16)).values())


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({"causal": False}, {"out", "lse", "dq", "dk", "dv"}),
        ({"causal": True, "window": (90, 0)}, {"out", "dk", "dv"}),  # 15 hidden elements of 4656
        ({"causal": True, "scale": 0.1275}, {"out", "lse", "dq", "dk"}),  # 2 % off
        ({"causal": True, "softcap": 8.0}, {"out", "lse", "dq", "dk"}),
        ({"causal": True, "dropout_p": 0.01, "dropout_seed": 3}, {"out", "dq", "dk", "dv"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_faults_are_seen(fault: dict, seen: set[str]) -> None:
    call = named("causal")
    wanted, model = call.results("reference", torch.float64), call.model()
    call.case = replace(call.case, keywords=fault)
    got = call.results("reference", torch.bfloat16)
    failed = {name for name in wanted if not judge(name, got[name], wanted[name], model[name], call.dtype).passed}
    assert seen <= failed


def test_lse_gradient_is_judged() -> None:
    """dlse left out of the backward shows in dq and dk."""
    call = named("full")
    wanted, model = call.results("reference", torch.float64), call.model()
    call.dlse.zero_()
    got = call.results("reference", torch.bfloat16)
    for name in ("dq", "dk"):
        assert not judge(name, got[name], wanted[name], model[name], call.dtype).passed


def test_nan_fails() -> None:
    ref = torch.zeros(3, dtype=torch.float64)
    assert not judge("out", torch.tensor([0.0, math.nan, 0.0]), ref, ref, torch.float32).passed


def test_infinity_must_be_the_reference_s() -> None:
    ref = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    assert judge("lse", ref.float(), ref, ref, torch.float32).passed
    assert not judge("lse", torch.tensor([0.0, -1e30]), ref, ref, torch.float32).passed
    assert not judge("lse", torch.tensor([-math.inf, -math.inf]), ref, ref, torch.float32).passed


def test_shape_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        judge("out", torch.zeros(2), torch.zeros(3), torch.zeros(3), torch.float32)


def one_key(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LowPrecision]:
    """dq of one query and one key under dropout, as a kernel has it that scales out last; of out unscaled; exact; a model."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(2, 1, 4, 128, generator=generator).to(dtype) for _ in range(4))
    keep = (torch.rand(2, 4, 1, 1, generator=generator) > 0.3) / 0.7
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    low = low_precision(q, k, v, dout, torch.zeros(2, 4, 1), seen, scale=0.1, keep=keep)
    exact, weight = (v.float() * keep.transpose(1, 2)), keep.transpose(1, 2)
    found = []
    for out in (exact.to(dtype).float(), exact / weight.clamp(min=1.0)):
        slope = weight * (dout.float() * v.float()).sum(-1, keepdim=True) - (dout.float() * out).sum(-1, keepdim=True)
        found.append((slope.to(dtype).float() * k.float() * 0.1).to(dtype))
    return found[0], found[1], torch.zeros(q.shape, dtype=torch.float64), low


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_cancels_in_a_few_rows_is_not_left_to_luck(dtype: torch.dtype) -> None:
    """dq is 0 where a row sees one key: what rounding leaves of it in the model may be next to nothing."""
    first = torch.seed() % 2**31
    print("seed", first)
    right, wrong = 0, 0
    for seed in range(first, first + 200):
        good, bad, exact, low = one_key(dtype, seed)
        right += judge("dq", good, exact, low.dq, dtype).passed
        wrong += judge("dq", bad, exact, low.dq, dtype).passed
    assert right >= 198 and wrong <= 2  # by the model as it falls 188 are right; where all keys are dropped both are 0
