"""The gradient of a decay's logs from what walks leave, in the interpreter, against the same in fp64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from warploom.linear.hopper.log_gradients import Terms, log_gradients
from warploom.linear.hopper.plan import TERMS, config

CHUNK = 64
# Tokens, heads and batch: ends within a chunk and at one, within the chunks of a program and past those of two.
SHAPES = [(1, 1, 1), (150, 3, 2), (8 * CHUNK, 2, 2), (17 * CHUNK + 5, 2, 1)]


def walked(width: int, seqlen: int, heads: int, batch: int, reverse: bool) -> tuple[Terms, Tensor, Tensor]:
    """Drawn terms, and sums over warpgroups of those of tokens and of pairs, (batch, heads, chunks, CHUNK) in fp64."""
    variant = config(width, fading=True, terms=True, reverse=reverse)
    terms = Terms.of(variant, torch.empty(batch, seqlen, heads, width))
    terms.dots.normal_()
    padded = torch.nn.functional.pad(terms.dots.double(), (0, -seqlen % CHUNK)).unflatten(-1, (-1, CHUNK))
    terms.totals.copy_(padded[: variant.groups].sum(-1))
    return terms, padded[: variant.groups].sum(0), padded[variant.groups :].sum(0)


@pytest.mark.parametrize("width", TERMS)
@pytest.mark.parametrize(("seqlen", "heads", "batch"), SHAPES)
def test_log_gradients(seqlen: int, heads: int, batch: int, width: int) -> None:
    """Of strided logs, some of which forget."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    queries, asked, pairs = walked(width, seqlen, heads, batch, False)
    keys, written, _ = walked(width, seqlen, heads, batch, True)
    logs = -torch.rand(batch, heads, seqlen).mT
    logs[torch.rand(logs.shape) < 0.1] = -torch.inf
    found = log_gradients(queries, keys, logs, CHUNK, 0.3)
    assert found.shape == logs.shape and found.is_contiguous()
    change = asked.sum(-1) - written.sum(-1)
    passes = change.flip(-1).cumsum(-1).flip(-1) - change - written.sum(-1)
    want = (asked + pairs).flip(-1).cumsum(-1).flip(-1) + written.cumsum(-1) - written + passes[..., None]
    want = 0.3 * want.flatten(-2)[..., :seqlen].mT.where(logs.exp() != 0, 0.0)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
