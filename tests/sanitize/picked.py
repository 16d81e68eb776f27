"""Problems picked by hand: what variants of the fuzzer do not name, and the schedules of the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import warploom
from tests.attention.cases import case, masked
from tests.attention.harness import results
from tests.attention.packed import PACKED, Packed
from tests.decode.cases import case as decode_case
from tests.decode.harness import run

DENSE = [
    "causal, queries that see nothing",
    "head_dim 128",
    "group of 7",
    "softcap, sink and lse",
    "dropout",
    "strided",
    "head_dim 72",
]
MASKED = ["Document", "GlobalWindow", "Padding anywhere"]
VARLEN = ["empty sequences", "used keys", "four vectors", "pages of 16"]
DECODE = ["one query", "group of 7, 5 queries, batch 3", "pages of 16", "empty sequences"]
# Of the Hopper forward: no mask in turns and pieces merged; several heads a tile, split; whole rounds before split tiles.
# Queries, keys, heads and their groups' number, head_dim, causal.
HOPPER = [(400, 3000, 2, 1, 64, False), (5, 3000, 8, 2, 128, True), (1100, 3000, 17, 17, 128, False)]
# Of linear attention past head_dim 128 on Hopper: batch, tokens, heads, E, M. Clusters and none, several waves, ragged ends.
LINEAR = [(2, 200, 3, 256, 256), (1, 129, 2, 136, 192), (4, 100, 40, 256, 200)]
MAPS = (("identity", False), ("identity", True), ("elu+1", True))
# The same with a decay whose logs have a gradient: walks of keys' and values' gradients side by side and, of more heads, one
# after the other, the state in two warpgroups; and sequences cut into segments.
FADING = [(2, 200, 3, 128, 128), (1, 130, 70, 128, 128), (1, 2100, 9, 64, 64)]
# Of the delta rule at widths that have tiles of their own: tokens in three sequences, heads_qk, group, E, M.
DELTA = {
    "triton": [((70, 0, 29), 2, 2, 128, 128), ((40, 1, 30), 1, 4, 256, 200)],
    "hopper": [((70, 0, 29), 2, 2, 128, 128), ((40, 1, 30), 1, 4, 64, 72)],
}
# What the others refuse.
TRITON_ONLY = ("dropout", "four vectors", "pages of 16")
HALF = torch.bfloat16

Problem = Callable[[torch.device], list[torch.Tensor]]


def problems(backend: str) -> dict[str, Problem]:
    """By name, functions that run one on a device and return its results."""
    found: dict[str, Problem] = {}
    triton = backend == "triton"
    for name in DENSE:
        if triton or name not in TRITON_ONLY:
            found[f"dense, {name}"] = lambda device, name=name: list(
                results(case(name, 1, dtype=HALF, device=str(device)), backend).values()
            )
    for name in VARLEN if backend != "ampere" else []:
        if triton or name not in TRITON_ONLY:
            found[f"varlen, {name}"] = lambda device, name=name: list(
                Packed(seed=1, dtype=HALF, device=str(device), **PACKED[name]).results(backend).values()
            )
    if triton:
        for name in MASKED:
            found[f"mask, {name}"] = lambda device, name=name: list(
                results(masked(name, 1, str(device), dtype=HALF), backend).values()
            )
        for name in DECODE:
            found[f"decode, {name}"] = lambda device, name=name: list(
                run(replace(decode_case(name, 1), dtype=HALF, device=str(device)), backend)
            )
    for shape in DELTA.get(backend, []):
        found[f"delta, {shape[3]} × {shape[4]}"] = lambda device, shape=shape: _delta(device, backend, *shape)
    if backend == "hopper":
        for shape in HOPPER:
            found[f"hopper, {shape[0]} × {shape[1]}"] = lambda device, shape=shape: _forward(device, *shape)
        for shape in LINEAR:
            for map_name, normalize in MAPS:
                name = f"linear, {shape[3]} × {shape[4]}, {map_name}{', normalized' * normalize}"
                found[name] = lambda device, of=(*shape, map_name, normalize): _linear(device, *of)
        for shape in FADING:
            for each in ("head", "token"):
                name = f"linear, {shape[0]} × {shape[2]} heads of {shape[3]}, a decay a {each}"
                found[name] = lambda device, of=(*shape, "identity", False, each): _linear(device, *of)
    return found


def _forward(
    device: torch.device, queries: int, keys: int, heads: int, heads_kv: int, dim: int, causal: bool
) -> list[torch.Tensor]:
    shapes = (1, queries, heads, dim), (1, keys, heads_kv, dim), (1, keys, heads_kv, dim)
    q, k, v = (torch.randn(shape, device=device, dtype=HALF) for shape in shapes)
    return list(warploom.attention(q, k, v, causal=causal, return_lse=True, backend="hopper"))


def _linear(
    device: torch.device,
    batch: int,
    tokens: int,
    heads: int,
    e: int,
    m: int,
    map_name: str,
    normalize: bool,
    decay: str | None = None,
) -> list[torch.Tensor]:
    """The Hopper walks and what surrounds them, forward and backward."""
    from warploom.linear import hopper
    from warploom.linear.problem import LinearCall

    q, k, v, dout = (torch.rand(batch, tokens, heads, dim, device=device, dtype=HALF) for dim in (e, e, m, m))
    call = LinearCall(q, k, v, map_name, map_name, True, normalize, 1e-6, 1.0, None, None, None, None)
    if decay is not None:
        logs = -torch.rand(heads if decay == "head" else (batch, tokens, heads), device=device)
        call = replace(call, decay=logs, decay_grad=True)
    out, norm, *_ = hopper.BACKEND.forward(call, False)
    return [out, *[t for t in hopper.BACKEND.backward(call, dout, norm, None, None) if t is not None]]


def _delta(
    device: torch.device, backend: str, tokens: tuple[int, ...], heads: int, group: int, e: int, m: int
) -> list[torch.Tensor]:
    """Out, the last states and all gradients of packed sequences, then a step in place, which Triton alone has."""
    total, heads_v = sum(tokens), group * heads
    q, k = (torch.randn(total, heads, e, device=device, dtype=HALF) for _ in range(2))
    v, dout = (torch.randn(total, heads_v, m, device=device, dtype=HALF) for _ in range(2))
    beta, decay = torch.rand(total, heads_v, device=device), -torch.rand(total, heads_v, device=device)
    state = torch.randn(len(tokens), heads_v, e, m, device=device)
    starts = torch.tensor([0, *tokens], device=device).cumsum(0).int()
    leaves = [t.requires_grad_() for t in (q, k, v, beta, decay, state)]
    options = {"normalize_qk": True, "backend": backend if device.type == "cuda" else None}
    out, last = warploom.gated_delta_rule(*leaves[:5], state=state, return_state=True, cu_seqlens=starts, **options)
    gradients = torch.autograd.grad((out, last), leaves, (dout, torch.ones_like(last)))
    if backend != "triton":
        return [out, last, *gradients]
    with torch.no_grad():
        row = [t[: len(tokens)] for t in (q, k, v, beta)]
        stepped = warploom.gated_delta_step(*row, state, decay[: len(tokens)], inplace=True, **options)
    return [out, last, *gradients, *stepped]
