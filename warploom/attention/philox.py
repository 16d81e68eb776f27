"""Philox-4x32-10 dropout bits, a pure function of (seed, batch, head, query, key).

Every implementation draws the same bits for the same element whatever its tiling: the counter is
(key // 4, query, head, batch), the key is the 64-bit seed, and element (.., key) uses output word key % 4.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def threshold(dropout_p: float) -> int:
    """Words below this 32-bit value drop their element."""
    return min(int(dropout_p * 2**32), _WORD)


def signed_threshold(dropout_p: float) -> int:
    """The int32 of the same bits, as kernels take it."""
    word = threshold(dropout_p)
    return word - 2**32 if word >= 2**31 else word


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
    seed = seed.reshape(())
    b, h, i = batch[:, None, None, None], heads[None, :, None, None], rows[..., None]
    words = philox(seed, (cols // 4, i, h, b))
    word = cols % 4
    chosen = torch.where(word < 2, torch.where(word == 0, words[0], words[1]), torch.where(word == 2, words[2], words[3]))
    return chosen >= threshold(dropout_p)
