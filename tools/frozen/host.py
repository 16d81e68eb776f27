"""The part `host`: median time that a call keeps the host, by family, of small calls: forward, with gradients, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import warploom

Case = tuple[Callable[..., Any], tuple[Tensor, ...], bool]  # the call, its tensors, whether it has gradients in them


def _cases(device: torch.device) -> dict[str, Case]:
    """Calls so small that the host's work is nearly all there is."""
    on_gpu = device.type == "cuda"
    dtype, tokens = (torch.bfloat16, 128) if on_gpu else (torch.float32, 8)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    q, k, v = (rows(2, tokens, 4, 64) for _ in range(3))
    packed = tuple(t.flatten(0, 1) for t in (q, k, v))
    starts = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32, device=device)
    heads_first = tuple(t.transpose(1, 2) for t in (q, k, v))
    lengths = torch.full((2,), tokens, dtype=torch.int32, device=device)
    cache = warploom.KVCache(k.contiguous(), v.contiguous(), lengths)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return warploom.attention_varlen(q, k, v, starts, causal=True, max_seqlen_q=tokens, max_seqlen_k=tokens)

    return {
        "attention": (partial(warploom.attention, causal=True), (q, k, v), True),
        "varlen": (varlen, packed, True),
        "sdpa": (partial(warploom.scaled_dot_product_attention, is_causal=True), heads_first, True),
        "decode": (lambda t: warploom.decode(t, cache), (rows(2, 1, 4, 64),), False),
        "linear": (partial(warploom.linear_attention, causal=True), (q, k, v), True),
    }


def record(device: str, calls: int = 300) -> dict[str, Any]:
    """Microseconds a call. Under torch.compile by Inductor on a GPU; on a CPU by "aot_eager", which needs no C++ compiler."""
    where = torch.device(device)
    found: dict[str, Any] = {}
    for name, (call, tensors, differentiable) in _cases(where).items():
        compiled = torch.compile(call, backend="inductor" if where.type == "cuda" else "aot_eager")
        found[f"{name} forward"] = _microseconds(partial(call, *tensors), where, calls)
        found[f"{name} compiled"] = _microseconds(partial(compiled, *tensors), where, calls)
        if differentiable:
            for word, function in (("gradients", call), ("gradients, compiled", compiled)):
                found[f"{name} {word}"] = _microseconds(_with_gradients(function, tensors), where, calls)
    return {"device": torch.cuda.get_device_name() if where.type == "cuda" else device, "entries": found}


def _with_gradients(call: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Callable[[], Any]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    upstream = torch.ones_like(call(*tensors))
    return lambda: torch.autograd.grad(call(*leaves), leaves, upstream)


def _microseconds(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """The median, with an idle device before every few calls."""
    for _ in range(5):
        call()
    taken = []
    for n in range(calls):
        if n % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start) / 1000)
    return round(median(taken), 2)
