"""Biases of decode's cases, with the numbers that each stands for written out by places in a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.attention.biased import t5_bucket
from warploom.bias import ALiBi, Key, Relative

REACH = 6  # max_distance of tables: less than most lengths
SHARED = torch.tensor([0, 1, 1, 2, 0, 3, 3, 3, 1, 2, 2, 0, 0])  # of 2 · REACH + 1 distances
Shape = tuple[int, int, int]  # batch, heads_q, capacity


@dataclass(frozen=True)
class Kind:
    """A bias made of one tensor."""

    shape: Callable[[Shape], tuple[int, ...]]  # of the tensor
    build: Callable[[Tensor], Any]
    of: Callable[[Tensor, int, Tensor, Tensor], Tensor]  # (heads|1, T, keys) by sequence, places of tokens and of keys
    dtype: torch.dtype = torch.float32
    hides: bool = False  # some numbers are -inf


def _linear(t: Tensor, b: int, tokens: Tensor, keys: Tensor) -> Tensor:
    own = t if t.ndim == 1 else t[b]
    return -own[:, None, None] * (tokens[:, None] - keys).abs()


def _key(t: Tensor, b: int, tokens: Tensor, keys: Tensor) -> Tensor:
    own = t[b] if len(t) > 1 else t[0]
    return own[:, None, keys.clamp(min=0)].expand(-1, len(tokens), -1)


def _two_sided(t: Tensor, b: int, tokens: Tensor, keys: Tensor) -> Tensor:
    return t[:, (tokens[:, None] - keys).clamp(-REACH, REACH) + REACH]


def _one_sided(t: Tensor, b: int, tokens: Tensor, keys: Tensor) -> Tensor:
    return t[:, (tokens[:, None] - keys).clamp(0, REACH)]


def _t5(t: Tensor, b: int, tokens: Tensor, keys: Tensor) -> Tensor:
    at = [[t5_bucket(key - token, False, t.shape[1], 20) for key in keys.tolist()] for token in tokens.tolist()]
    return t[:, torch.tensor(at, dtype=torch.int64, device=t.device).view(len(tokens), len(keys))]


KINDS = {
    "alibi": Kind(lambda s: (s[1],), ALiBi, _linear),
    "alibi of sequences": Kind(lambda s: s[:2], ALiBi, _linear, torch.float16),
    "relative": Kind(lambda s: (s[1], 2 * REACH + 1), Relative, _two_sided, torch.bfloat16),
    "relative, one side, hides": Kind(
        lambda s: (1, REACH + 1), lambda t: Relative(t, bidirectional=False), _one_sided, hides=True
    ),
    "relative, buckets": Kind(
        lambda s: (1, 4),
        lambda t: Relative(t, buckets=SHARED.to(t.device)),
        lambda t, *places: _two_sided(t[:, SHARED.to(t.device)], *places),
    ),
    "t5": Kind(lambda s: (s[1], 8), lambda t: Relative(t, 20, buckets="t5", bidirectional=False), _t5),
    "key": Kind(lambda s: s, Key, _key, torch.float16),
    "key of heads, hides": Kind(lambda s: (1, *s[1:]), Key, _key, hides=True),
    "key of sequences, more": Kind(lambda s: (s[0], 1, s[2] + 5), Key, _key, torch.float64),
    "key, hides": Kind(lambda s: (1, 1, s[2]), Key, _key, hides=True),
}


def drawn(kind: str, shape: Shape, seed: int, device: str = "cpu") -> Tensor:
    """The tensor of a bias, fp64 of numbers that its dtype has."""
    generator = torch.Generator().manual_seed(seed + 7)
    t = torch.randn(KINDS[kind].shape(shape), generator=generator, dtype=torch.float64)
    if kind.startswith("alibi"):
        t *= 0.1  # of either sign, which leave no row to one far key
    if KINDS[kind].hides:
        t = t.masked_fill(torch.rand(t.shape, generator=generator) < 0.4, float("-inf"))
    return t.to(KINDS[kind].dtype).to(device, torch.float64)
