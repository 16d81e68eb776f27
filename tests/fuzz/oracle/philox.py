"""Philox-4x32-10 by 16-bit halves, and the elements that dropout keeps.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The contract: the counter is (key // 16, query,
head, batch), the 64-bit seed is the key, and its words are sixteen bytes, the lowest first. Keys n and n + 8 of sixteen share
bytes 2n and 2n + 1: of the former the second one comes first, of the latter the first one, less its highest bit, which makes a
number of 15 bits. p is rounded to so many steps, at least one from either end; the rarer outcome has the lowest numbers.
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


def dropped(dropout_p: float) -> int:
    """Of 32768 elements how many are dropped."""
    return min(max(round(dropout_p * 32768), 1), 32767)


def factor(dropout_p: float) -> float:
    """What is kept counts so much."""
    return 32768 / (32768 - dropped(dropout_p))


def kept(
    seed: int, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
) -> Tensor:
    """bool (batch, heads, seqlen_q, seqlen_k), True where dropout keeps."""

    def numbers(n: int, dim: int) -> Tensor:
        return torch.arange(n, device=device).view([-1 if d == dim else 1 for d in range(4)])

    counters = numbers(-(-seqlen_k // 16), 3)
    drawn = words(seed, counters, numbers(seqlen_q, 2), numbers(heads, 1), numbers(batch, 0))
    shape = (batch, heads, seqlen_q, counters.shape[3])
    each = torch.stack([(w >> 8 * n & 255).expand(shape) for w in drawn for n in range(4)], -1)
    lower, upper = each[..., 0::2], each[..., 1::2]
    first, second = torch.cat((upper, lower), -1), torch.cat((lower, upper), -1)
    found = (first % 128 * 256 + second).flatten(3)[..., :seqlen_k]
    if dropout_p > 0.5:
        return found < 32768 - dropped(dropout_p)
    return found >= dropped(dropout_p)
