"""The part `host`: median time that a call keeps the host, by family, of small calls: forward, with gradients, compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import warploom

Case = tuple[Callable[..., Tensor], tuple[Tensor, ...], bool]  # the call, what it differentiates in, whether it can


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
    longest = {"max_seqlen_q": tokens, "max_seqlen_k": tokens}
    return {
        "attention": (lambda *t: warploom.attention(*t, causal=True), (q, k, v), True),
        "varlen": (lambda *t: warploom.attention_varlen(*t, starts, causal=True, **longest), packed, True),
        "sdpa": (lambda *t: warploom.scaled_dot_product_attention(*t, is_causal=True), heads_first, True),
        "decode": (lambda t: warploom.decode(t, cache), (rows(2, 1, 4, 64),), False),
        "linear": (lambda *t: warploom.linear_attention(*t, causal=True), (q, k, v), True),
    }


def record(device: str, calls: int = 300) -> dict[str, Any]:
    """Microseconds a call. Under torch.compile by Inductor on a GPU; on a CPU by "aot_eager", which needs no C++ compiler."""
    where = torch.device(device)
    found: dict[str, Any] = {}
    for name, (call, tensors, differentiable) in _cases(where).items():
        compiled = torch.compile(call, backend="inductor" if where.type == "cuda" else "aot_eager")
        found[f"{name} forward"] = _microseconds(lambda call=call, tensors=tensors: call(*tensors), where, calls)
        found[f"{name} compiled"] = _microseconds(lambda call=compiled, tensors=tensors: call(*tensors), where, calls)
        if differentiable:
            for word, function in (("gradients", call), ("gradients, compiled", compiled)):
                found[f"{name} {word}"] = _microseconds(_with_gradients(function, tensors), where, calls)
    return {"device": torch.cuda.get_device_name() if where.type == "cuda" else device, "entries": found}


def _with_gradients(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[[], Any]:
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
