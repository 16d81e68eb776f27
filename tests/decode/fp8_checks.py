"""What e4m3 numbers and their scales may be, in Triton's decode kernels: every check takes the queries' dtype and a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom import KVCache
from warploom.decode.ops import append_quantized
from warploom.decode.problem import AppendFp8Args
from warploom.decode.triton.fp8_tokens import append
from warploom.kernels.e4m3 import E4M3, rotate
from warploom.kernels.triton.hadamard import rotate_rows


def decoded(q: Tensor, cache: KVCache, **options: Any) -> tuple[Tensor, Tensor]:
    return warploom.decode(q, cache, return_lse=True, backend="triton", **options)


def filled(device: str, head_dim: int = 16, granularity: Any = "token") -> KVCache:
    """Twenty tokens of two sequences and two heads, not rotated."""
    options: dict[str, Any] = {"dtype": E4M3, "device": device, "granularity": granularity, "hadamard_seed": None}
    cache = KVCache.allocate(2, 24, 2, head_dim, **options)
    cache.append(*(torch.randn(2, 20, 2, head_dim).to(device) for _ in range(2)))
    return cache


def expected(q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """What the cache's numbers stand for, in fp64."""
    assert cache.k_scale is not None and cache.v_scale is not None
    k, v = ((t.double() * s.double()[..., None])[:, :20] for t, s in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)))
    return warploom.attention(q.double(), k, v, causal=True, return_lse=True, backend="reference")


def a_visible_nan_stays(dtype: torch.dtype, device: str) -> None:
    for byte in (0x7F, 0xFF):
        cache = filled(device)
        cache.k.view(torch.uint8)[0, 3, 0, 5] = byte
        cache.v.view(torch.uint8)[1, 4, 1, 6] = byte
        out, lse = decoded(torch.randn(2, 1, 4, 16).to(device, dtype), cache)
        assert out[0, 0, :2].isnan().all() and lse[0, :2].isnan().all()
        assert out[0, 0, 2:].isfinite().all() and out[1, 0, :2].isfinite().all()
        columns = torch.arange(16) == 6
        assert out[1, 0, 2:, columns].isnan().all() and out[1, 0, 2:, ~columns].isfinite().all() and lse[1].isfinite().all()


def special_scales(dtype: torch.dtype, device: str) -> None:
    for special in (float("nan"), float("inf")):
        cache = filled(device)
        assert cache.v_scale is not None
        cache.v_scale[0, 3, 0] = special
        out, lse = decoded(torch.randn(2, 1, 4, 16).to(device, dtype), cache)
        assert not out[0, 0, :2].isfinite().any() and out[0, 0, 2:].isfinite().all() and lse.isfinite().all()


def every_number_and_scale(dtype: torch.dtype, device: str) -> None:
    """Of one visible key out is its value: each e4m3 number, at scales across fp32."""
    cache = KVCache.allocate(1, 1, 1, 256, dtype=E4M3, device=device, hadamard_seed=None)
    cache.k.view(torch.uint8).zero_()
    cache.lengths.fill_(1)
    assert cache.v_scale is not None
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    cache.v.view(torch.uint8)[:] = numbers
    for scale in (0.0, 1.5, -3.0, 2.0**-100, 2.0**90):
        cache.v_scale.fill_(scale)
        out, _ = decoded(torch.zeros(1, 1, 1, 256, dtype=dtype, device=device), cache)
        want = (numbers.view(E4M3).float() * scale).to(dtype)
        torch.testing.assert_close(out[0, 0, 0], want, rtol=0, atol=1e-30, equal_nan=True)


def queries_and_scales_of_any_size(dtype: torch.dtype, device: str) -> None:
    for size in (1e-30, 1e-3, 1e3, 1e30) if dtype == torch.bfloat16 else (1e-3, 1e3):
        cache = filled(device)
        assert cache.k_scale is not None and cache.v_scale is not None
        q = (torch.randn(2, 1, 4, 16) * size).to(device, dtype)
        cache.k_scale.div_(size)
        cache.v_scale.mul_((10.0 ** torch.randint(-3, 3, cache.v_scale.shape)).to(device))
        (out, lse), (want, want_lse) = decoded(q, cache), expected(q, cache)
        assert (out.double() - want).norm() < 4e-3 * want.norm() and (lse.double() - want_lse).abs().max() < 2e-3, size


def small_weights_of_many_keys(dtype: torch.dtype, device: str) -> None:
    """A key of weight 1 and value 0, and 20,000 of weights near 2^-20, which fp16 alone would round to a few bits."""
    n = 20_000
    cache = KVCache.allocate(1, n, 1, 16, dtype=E4M3, device=device, granularity="tensor", hadamard_seed=None)
    k, v = torch.zeros(1, n, 1, 16), torch.ones(1, n, 1, 16)
    k[:, 1:, :, 0], v[:, 0] = -13.0, 0.0
    cache.append(k.to(device), v.to(device))
    q = torch.zeros(1, 1, 1, 16, dtype=dtype, device=device)
    q[..., 0] = 1.078125
    out, _ = decoded(q, cache, scale=1.0)
    weights = (n - 1) * math.exp(-13.0 * 1.078125)
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), weights / (1 + weights)), rtol=5e-3, atol=0)


def bits_do_not_depend_on_strides(dtype: torch.dtype, device: str) -> None:
    for head_dim in (16, 24, 256):
        cache = filled(device, head_dim)
        q = torch.randn(2, 3, 4, head_dim).to(device, dtype)
        want = decoded(q, cache)
        for unit in (1, 8, 16):
            room = -(-(head_dim + 1) // unit) * unit
            k, v = (torch.empty(2, 24, 2, room, dtype=torch.uint8, device=device).view(E4M3)[..., :head_dim] for _ in range(2))
            k.copy_(cache.k)
            v.copy_(cache.v)
            for got, expect in zip(decoded(q, replace(cache, k=k, v=v)), want, strict=True):
                assert torch.equal(got, expect), (head_dim, unit)


def quantizing_append(
    device: str, dtype: torch.dtype, dims: tuple[int, int], granularity: str, paged: bool, slots: bool
) -> None:
    """The kernel writes the bytes and scales that torch writes, of zeros and of what is not finite too."""
    for tokens in (1, 3, 20):
        k, v = (torch.randn(2, tokens, 3, dim) * torch.randn(2, tokens, 3, 1).exp() for dim in dims)
        k[0, 0, 1], v[1, 0, 2], k[0, 0, 2, 3], v[1, 0, 0, 5] = 0.0, 0.0, float("nan"), float("inf")
        k, v = (t.to(device, dtype).transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        table = torch.tensor([[1, 3, 5], [0, 2, 4]], dtype=torch.int32, device=device) if paged else None
        shape = (6, 8, 3) if paged else (2, 24, 3)
        at = torch.randperm(48)[: 2 * tokens].view(2, tokens).to(device) if slots else None
        kept = []
        for run in (append_quantized, append):
            caches = [torch.zeros(*shape, dim, dtype=torch.uint8, device=device) for dim in dims]
            scales = [torch.full(shape if granularity == "token" else (3,), 0.25, device=device) for _ in dims]
            lengths = torch.tensor([2, 0], dtype=torch.int32, device=device)
            run(AppendFp8Args(*caches, *scales, lengths, table, at, k, v, 7))
            kept.append([*(t.view(E4M3).float() for t in caches), *scales, lengths.float()])
        for torchs, tritons in zip(*kept, strict=True):
            torch.testing.assert_close(tritons, torchs, rtol=0, atol=0, equal_nan=True)


def rotated_rows(device: str, dtype: torch.dtype, dim: int) -> None:
    for x in (torch.randn(2, 3, 5, dim), torch.randn(7, 2, 2 * dim)[..., :dim], torch.randn(3, 5, dim + 1)[..., 1:]):
        x = x.to(dtype).to(device)
        for seed in (0, -5, 2**62):
            assert torch.equal(rotate_rows(x, seed), rotate(x, seed).to(dtype)), seed


CHECKS: list[Callable[[torch.dtype, str], None]] = [
    a_visible_nan_stays,
    special_scales,
    every_number_and_scale,
    queries_and_scales_of_any_size,
    small_weights_of_many_keys,
    bits_do_not_depend_on_strides,
]
