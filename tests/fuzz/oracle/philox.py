"""Philox-4x32-10 by 16-bit halves, and the elements that dropout keeps.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The contract: the counter is (key // 4, query,
head, batch), the 64-bit seed is the key, and element (.., key) takes word key % 4; words below p · 2³² drop.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def _product(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32-bit product."""
    upper, lower = a * (constant >> 16), a * (constant & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def words(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, in int64, of broadcastable counters."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def kept(
    seed: int, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k), True where dropout keeps."""

    def numbers(n: int, dim: int) -> Tensor:
        return torch.arange(n, device=device).view([-1 if d == dim else 1 for d in range(4)])

    quads = numbers(-(-seqlen_k // 4), 3)
    drawn = words(seed, quads, numbers(seqlen_q, 2), numbers(heads, 1), numbers(batch, 0))
    shape = (batch, heads, seqlen_q, quads.shape[3])
    each = torch.stack([w.expand(shape) for w in drawn], -1).flatten(3)[..., :seqlen_k]
    return each >= min(int(dropout_p * 2**32), _LOW)
