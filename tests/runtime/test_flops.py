"""torch.utils.flop_counter counts every op of ours, by torch's own convention for scaled_dot_product_attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import warploom
from warploom import masks

ROOT = Path(__file__).parents[2]
OPS = torch.ops.warploom


def counted(run: Any) -> dict[Any, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    return dict(counter.get_flop_counts().get("Global", {}))


def qkv(batch: int = 2, seqlen_q: int = 8, seqlen_k: int = 12, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, seqlen_q, 4, 16, **options)
    return q, torch.randn(batch, seqlen_k, 2, 16, **options), torch.randn(batch, seqlen_k, 2, 24, **options)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """What torch counts of the same call to its own fused kernels, forward and backward; older ones take no grouped heads."""
    shapes = [(t.shape[0], q.shape[2], t.shape[1], t.shape[3]) for t in (q, k, v)]
    grad = (*shapes[0][:3], v.shape[-1])
    return sdpa_flop_count(*shapes), sdpa_backward_flop_count(grad, *shapes)


def test_every_op_has_a_formula() -> None:
    """An op without one would be counted as nothing, in words or not."""
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("warploom::")}
    assert {"attention", "attention_backward", "decode", "gated_delta_rule", "linear_attention", "column_bounds"} <= names
    assert [name for name in sorted(names) if getattr(OPS, name) not in flop_registry] == []


@pytest.mark.parametrize("keywords", [{}, {"causal": True}, {"mask": masks.Document([5, 3])}], ids=["full", "causal", "mask"])
def test_dense_calls_count_as_torch_counts_its_own(keywords: dict[str, Any]) -> None:
    q, k, v = qkv(requires_grad=True)
    if "mask" in keywords:
        q, k, v = qkv(seqlen_k=8, requires_grad=True)
    forward, backward = sdpa(q, k, v)
    found = counted(lambda: warploom.attention(q, k, v, **keywords).sum().backward())
    assert found == {OPS.attention: forward, OPS.attention_backward: backward}


def test_the_reference_counts_as_torch_s_products() -> None:
    q, k, v = qkv()
    found = counted(lambda: warploom.attention(q, k, v, backend="reference"))
    assert sum(found.values()) == sdpa(q, k, v)[0] and OPS.attention not in found


def test_packed_calls_count_their_lengths() -> None:
    q, k, v = (t[0].requires_grad_() for t in qkv(seqlen_q=8, seqlen_k=8))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    found = counted(lambda: warploom.attention_varlen(q, k, v, cu).sum().backward())
    scores = 4 * (3 * 3 + 5 * 5)
    assert found == {OPS.attention: 2 * scores * (16 + 24), OPS.attention_backward: 2 * scores * (3 * 16 + 2 * 24)}


def test_packed_calls_count_the_keys_that_are_used() -> None:
    q, k, v = (t[0] for t in qkv(seqlen_q=8, seqlen_k=8))
    cu, used = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
    found = counted(lambda: warploom.attention_varlen(q, k, v, cu, seqused_k=used))
    assert found == {OPS.attention: 2 * 4 * (3 * 1 + 5 * 4) * (16 + 24)}


def test_fake_tensors_count_the_same_and_lengths_that_nobody_knows_as_the_longest() -> None:
    real = qkv(requires_grad=True)
    with FakeTensorMode():
        q, k, v = (torch.empty(t.shape, requires_grad=True) for t in real)
        found = counted(lambda: warploom.attention(q, k, v, causal=True).sum().backward())
        cu = torch.empty(3, dtype=torch.int32)
        packed = counted(lambda: warploom.attention_varlen(q[0], k[0, :8], v[0, :8], cu, max_seqlen_q=5, max_seqlen_k=6))
    assert found == dict(zip((OPS.attention, OPS.attention_backward), sdpa(*real), strict=True))
    assert packed == {OPS.attention: 2 * 4 * (2 * 5 * 6) * (16 + 24)}


def test_decode_counts_the_keys_of_each_sequence_and_an_append_nothing() -> None:
    q, k, v = qkv(seqlen_q=1)
    cache = warploom.KVCache(k, v, torch.tensor([9, 4], dtype=torch.int32))

    def run() -> None:
        cache.append(k[:, :1], v[:, :1])
        warploom.decode(q, cache)

    found = counted(run)
    assert {op: flops for op, flops in found.items() if flops} == {OPS.decode: 2 * 4 * (10 + 5) * (16 + 24)}


def test_linear_attention_counts_its_recurrence() -> None:
    q, k, v = qkv(requires_grad=True)
    found = counted(lambda: warploom.linear_attention(q, k, v).sum().backward())
    # A causal call without a state computes nothing of keys past the last query.
    queries, keys, product = 2 * 8 * 4, 2 * 8 * 2, 2 * 16 * 24
    assert found == {
        OPS.linear_attention: product * (queries + keys),
        OPS.linear_attention_backward: product * (2 * queries + 3 * keys),
    }
    q, k, v = (t.detach()[:, 0] for t in (q, k, v))
    state = warploom.LinearState.zeros(2, 2, 16, 24)
    assert counted(lambda: warploom.linear_attention_step(q, k, v, state)) == {OPS.linear_attention_step: product * 2 * (4 + 2)}


def test_the_gated_delta_rule_counts_its_recurrence() -> None:
    q, _, v = qkv(seqlen_q=12, requires_grad=True)
    k, beta = q[:, :, :1].detach(), torch.rand(v.shape[:3])
    found = counted(lambda: warploom.gated_delta_rule(k, k, v, beta).sum().backward())
    product = 2 * v.numel() * 16
    assert found == {OPS.gated_delta_rule: 3 * product, OPS.gated_delta_rule_backward: 8 * product}
    state = torch.zeros(2, v.shape[2], 16, 24)
    step = [t.detach()[:, 0] for t in (k, k, v, beta)]
    for name, inplace in (("gated_delta_step", False), ("gated_delta_step_inplace", True)):
        product = 2 * step[2].numel() * 16
        assert counted(lambda inplace=inplace: warploom.gated_delta_step(*step, state, inplace=inplace)) == {
            getattr(OPS, name): 3 * product
        }


def test_bounds_of_a_mask_have_no_products() -> None:
    vector = torch.zeros(1, 1, 8, dtype=torch.int32)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(vector)
        cu = mode.from_tensor(torch.zeros(3, dtype=torch.int32))
        found = counted(
            lambda: (
                OPS.column_bounds(fake, None, None, None, None, 0, 8),
                OPS.packed_column_bounds(fake, None, None, None, None, 0, 8, cu, None, None),
            )
        )
    assert found == {OPS.column_bounds: 0, OPS.packed_column_bounds: 0}


@pytest.mark.parametrize("order", ["counter first", "warploom first"])
def test_formulas_are_there_in_either_order_and_nobody_pays_for_the_counter(order: str) -> None:
    first, second = ("torch.utils.flop_counter", "warploom")[:: 1 if order == "counter first" else -1]
    code = (
        f"import sys, torch, {first}\n"
        f"assert ('torch.utils.flop_counter' in sys.modules) is {order == 'counter first'}\n"
        f"import {second}\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "q = torch.randn(1, 8, 2, 16)\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    warploom.attention(q, q, q)\n"
        "print(counter.get_total_flops())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == 2 * 2 * 8 * 8 * (16 + 16)
