"""Windows under trees of drafts: random trees, and each path by itself in plain decode."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.decode.harness import Case, run
from warploom import KVCache, decode

LENGTHS = [67, 11]
# Left sides within a draft, across its first token, around each length and past all; right sides that hide the newest.
WINDOWS = [(0, 0), (1, None), (2, -1), (5, 0), (9, -2), (11, 0), (40, 0), (65, 0), (67, -1), (200, -3), (None, -2), (1, -2)]


def random_trees(page_size: int | None, window: tuple[int | None, int | None], queries: int = 11) -> Case:
    """A tree a sequence; the shortest sequence has no key before its drafts. Most parents are recent: paths are long."""
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    trees = [[draw.choice([t - 1, t - 1, draw.randrange(-1, t)]) for t in range(queries)] for _ in LENGTHS]
    shape = {"queries": queries, "heads_q": 2, "heads_kv": 1, "page_size": page_size}
    return Case(seed, LENGTHS, tree=trees, keywords={"window": window}, **shape)


def check_paths(c: Case, backend: str) -> None:
    """Assert that every token of a tree gets what plain decode gives the last token of its path behind the cache's keys."""
    out, lse = run(c, backend)
    for b, (k, v) in enumerate(c.sequences()):
        base, kin = len(k) - c.queries, c.kin(b)
        assert kin is not None
        for t, path in enumerate(kin):
            want, want_lse = _alone(c, b, t, k, v, torch.cat([torch.arange(base), base + path.nonzero().flatten()]))
            assert torch.allclose(out[b, t], want, rtol=1e-5, atol=1e-6), (backend, c, b, t)
            assert torch.allclose(lse[b, :, t], want_lse, rtol=1e-5, atol=1e-6), (backend, c, b, t)


def _alone(c: Case, b: int, t: int, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    cache = KVCache(k[kept][None], v[kept][None], torch.tensor([len(kept)], dtype=torch.int32))
    out, lse = decode(c.q()[b : b + 1, t : t + 1], cache, return_lse=True, backend="reference", **c.keywords)
    return out[0, 0], lse[0, :, 0]
