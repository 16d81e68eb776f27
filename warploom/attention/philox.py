"""Philox-4x32-10 dropout bits, a pure function of (seed, batch, head, query, key).

Every implementation draws the same bits for the same element whatever its tiling: the counter is (key // 16, query, head,
batch), the key is the 64-bit seed. The words of a counter are eight halves, the lower one of each word first. Half n serves
keys n and n + 8 of the sixteen, the latter with its two bytes exchanged, and of it the lower 15 bits count: an element's own
byte decides, but where seven bits of it tie with the bound's.

With p up to 1/2 elements below ``bound`` are dropped, past that elements below it are kept: p is a multiple of 2^-15.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEYS = 16  # that share a counter
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_STEPS = 2**15


def bound(dropout_p: float) -> int:
    """Of 2^15 numbers how many are below it: the rarer outcome's, at least one where anything is dropped."""
    return max(round(min(dropout_p, 1.0 - dropout_p) * _STEPS), 1) if dropout_p else 0


def keep_scale(dropout_p: float) -> float:
    """What is kept counts so much: 1 / (1 - p), of the p that ``bound`` makes of it."""
    below = bound(dropout_p)
    return _STEPS / (below if dropout_p > 0.5 else _STEPS - below)


def kernel_bound(dropout_p: float) -> int:
    """``bound`` as kernels take it: an int32 of two equal halves, negative where elements below it are kept."""
    both = bound(dropout_p) * 0x10001
    return both - 2**31 + 0x8000 if dropout_p > 0.5 else both


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words (held in int64) for broadcastable int64 counters and an int64 scalar seed."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2**64, which keeps all 64 bits; the mask undoes the arithmetic shift.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def split_seed(seed: Tensor) -> tuple[Tensor, Tensor | int]:
    """The seed, and the whole's number of a call's first head, which stands behind it where that is not 0."""
    words = seed.reshape(-1)
    return words[0], words[1] if words.shape[0] == 2 else 0


def numbers(seed: Tensor, batch: Tensor, heads: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """The 15 bits of every element, int64; arguments and shape as of ``keep_mask``."""
    b, h, i = batch[:, None, None, None], heads[None, :, None, None], rows[..., None]
    words = philox(seed.reshape(()), (cols // KEYS, i, h, b))
    word = cols % 8 // 2
    chosen = torch.where(word < 2, torch.where(word == 0, words[0], words[1]), torch.where(word == 2, words[2], words[3]))
    half = (chosen >> cols % 2 * 16) & 0xFFFF
    return torch.where(cols % KEYS < 8, half, (half >> 8) | (half << 8)) & (_STEPS - 1)


def keep_mask(seed: Tensor, dropout_p: float, batch: Tensor, heads: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Which elements survive dropout.

    Args:
        seed: int64, one element.
        dropout_p: probability of dropping.
        batch, heads, rows, cols: int64 index vectors (absolute positions in the call); rows may be (len(batch), 1, n), of
            each batch entry its own.

    Returns:
        bool (len(batch), len(heads), n, len(cols)) of n rows, True = kept.
    """
    below = numbers(seed, batch, heads, rows, cols) < bound(dropout_p)
    return below if dropout_p > 0.5 else ~below
