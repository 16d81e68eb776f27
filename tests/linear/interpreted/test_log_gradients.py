"""The gradient of a decay's logs from what walks leave, in the interpreter, against the same in fp64."""

from __future__ import annotations

import random

import pytest
import torch

from tests.linear.log_terms import added_up
from warploom.linear.hopper.log_gradients import Terms, log_gradients
from warploom.linear.hopper.plan import TERMS, config

CHUNK = 64
# Tokens, heads and batch: ends within a chunk and at one, heads of two programs, more later chunks than are added at a time.
SHAPES = [(1, 1, 1), (150, 3, 2), (8 * CHUNK, 5, 2), (131 * CHUNK + 5, 1, 1)]


@pytest.mark.parametrize(("width", "halves"), [*[(width, False) for width in TERMS], (128, True)])
@pytest.mark.parametrize(("seqlen", "heads", "batch"), SHAPES)
def test_log_gradients(seqlen: int, heads: int, batch: int, width: int, halves: bool) -> None:
    """Of strided logs, some of which forget."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    like = torch.empty(batch, seqlen, heads, width)
    queries = Terms.of(config(width, halves=halves, fading=True, terms=True), like)
    keys = Terms.of(config(width, fading=True, terms=True, reverse=True), like)
    for t in (*queries, *keys):
        t.normal_()
    logs = -torch.rand(batch, heads, seqlen).mT
    logs[torch.rand(logs.shape) < 0.1] = -torch.inf
    found, want = (f(queries, keys, logs, CHUNK, 0.3) for f in (log_gradients, added_up))
    assert found.shape == logs.shape and found.is_contiguous() and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
