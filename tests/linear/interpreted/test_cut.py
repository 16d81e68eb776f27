"""What segments of a walk begin from, in the interpreter, against the same in fp64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from warploom.linear.hopper import cut, rows
from warploom.linear.hopper.plan import config

BATCH, HEADS, CHUNK = 2, 3, 64
SHAPES = [(9 * CHUNK - 5, 3), (8 * CHUNK, 4), (10 * CHUNK + 1, 4)]


def test_the_state_is_that_of_the_walk() -> None:
    narrow = config(64, fading=True, cut=True)
    assert (narrow.head_dim, narrow.head_dim_v, narrow.chunk) == (cut.DIM, cut.DIM, CHUNK)


def drawn(kind: str, seqlen: int, count: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """So many strided tensors, a decay of every token, and the logs that kernels are given for it."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(BATCH, HEADS, seqlen, 64, generator=generator).transpose(1, 2) for _ in range(count)]
    decay = -torch.rand(BATCH, seqlen, HEADS, generator=generator) * 0.05
    if "forgets" in kind:
        decay[torch.rand(decay.shape, generator=generator) > 0.97] = -torch.inf
    if kind == "head":
        one = decay[0, 0]
        return found, one.expand(decay.shape), one.repeat_interleave(2)[::2]
    return found, decay, rows.bind_sums(decay, CHUNK)(decay)


@pytest.mark.parametrize("kind", ["head", "token", "token that forgets"])
@pytest.mark.parametrize(("seqlen", "segments"), SHAPES)
def test_own_states(seqlen: int, segments: int, kind: str) -> None:
    """Of strided keys and logs; what nobody begins from is not looked at.

    Behind a token that forgets sums are in the thousands, of which fp32 has three digits behind the point.
    """
    (k, v), decay, logs = drawn(kind, seqlen, 2)
    states, fades = cut.bind_states(k, v, segments, CHUNK, logs.stride()[-2:][0], logs.ndim == 1)(k, v, logs)
    assert states.shape == (BATCH, HEADS, segments, 64, 64) and fades.shape == (BATCH, HEADS, segments)
    near = 1e-3 if "forgets" in kind else 1e-4
    each = -(-seqlen // (CHUNK * segments)) * CHUNK
    for s in range(-(-seqlen // each) - 1):
        of = slice(s * each, (s + 1) * each)
        sums = decay[:, of].double().clamp_min(-128.0).cumsum(1)
        want = torch.einsum("bjhm,bjhe->bhme", v[:, of].double(), k[:, of].double() * (sums[:, -1:] - sums).exp()[..., None])
        torch.testing.assert_close(states[:, :, s].double(), want, rtol=near, atol=near)
        torch.testing.assert_close(fades[:, :, s].double(), sums[:, -1] / math.log(2), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["head", "token", "token that forgets"])
@pytest.mark.parametrize(("seqlen", "segments"), [*SHAPES, (5 * CHUNK, 4)])
def test_gradient_states(seqlen: int, segments: int, kind: str) -> None:
    """Behind a segment those of a short last one, and of one that has no token, too."""
    (q, k, v, dout), decay, logs = drawn(kind, seqlen, 4)
    (of_queries, until), (of_keys, since), (of_values, again) = cut.gradient_states(q, k, v, dout, logs, segments, CHUNK)
    assert again.data_ptr() == since.data_ptr()
    near = 1e-3 if "forgets" in kind else 1e-4
    each = -(-seqlen // (CHUNK * segments)) * CHUNK
    for s in range(segments):
        of = slice(s * each, (s + 1) * each)
        sums = decay[:, of].double().clamp_min(-128.0).cumsum(1)
        if (s + 1) * each < seqlen:
            left = (sums[:, -1:] - sums).exp()[..., None]
            want = torch.einsum("bjhc,bjhd->bhcd", k[:, of].double() * left, v[:, of].double())
            torch.testing.assert_close(of_queries[:, :, s].double(), want, rtol=near, atol=near)
            torch.testing.assert_close(until[:, :, s].double(), sums[:, -1] / math.log(2), rtol=1e-5, atol=1e-4)
        if s > 0:
            want = torch.einsum("bjhc,bjhd->bhcd", q[:, of].double() * sums.exp()[..., None], dout[:, of].double())
            torch.testing.assert_close(of_keys[:, :, s].double(), want, rtol=near, atol=near)
            assert torch.equal(of_values[:, :, s], of_keys[:, :, s].mT)
        if s > 0 and (s + 1) * each < seqlen:
            torch.testing.assert_close(since[:, :, s].double(), sums[:, -1] / math.log(2), rtol=1e-5, atol=1e-4)
