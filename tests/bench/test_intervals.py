"""Row intervals for cuDNN's FlexAttention: exact where its form can say the mask, refused in words where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.bench.fake_cudnn import create_mask_plan, seen_by
from warploom import masks
from warploom.bench import intervals
from warploom.bench.intervals import MOST, row_intervals
from warploom.bench.masks import pairs
from warploom.bench.peers import NotHere
from warploom.masks import Mask

CPU = torch.device("cpu")
SEQLEN = 512
INEXPRESSIBLE = {"random eviction"}


def check(mask: Mask, seqlen_q: int, seqlen_k: int, batch: int, heads_q: int, heads_kv: int) -> torch.Tensor:
    """The intervals, which show exactly what the dense mask does and which the planner takes."""
    found = row_intervals(mask.resolve(seqlen_q, seqlen_k), seqlen_q, seqlen_k, batch, heads_q, CPU)
    dense = mask.dense(seqlen_q, seqlen_k).transpose(0, 1)  # (heads, batch, queries, keys)
    if dense.shape[0] not in (1, heads_q):
        dense = dense.repeat_interleave(heads_q // dense.shape[0], 0)
    want = dense.expand(found.shape[0], batch, -1, -1)
    assert torch.equal(seen_by(found, batch, seqlen_k), want)
    q = torch.empty(batch, seqlen_q, heads_q, 8)
    k = torch.empty(batch, seqlen_k, heads_kv, 8)
    create_mask_plan(found, q, k, k)
    return found


@pytest.mark.parametrize("name", pairs(SEQLEN, "cpu"))
@pytest.mark.parametrize("seqlen", [256, SEQLEN])
def test_every_mask_of_the_suite(name: str, seqlen: int) -> None:
    mask = pairs(seqlen, "cpu")[name]().mask
    if name in INEXPRESSIBLE:
        with pytest.raises(NotHere, match=f"separate runs of keys, its row intervals are made for at most {MOST}"):
            check(mask, seqlen, seqlen, 2, 4, 2)
    else:
        check(mask, seqlen, seqlen, 2, 4, 2)


def test_as_few_endpoints_as_the_mask_needs() -> None:
    needed = {name: 1 for name in ("causal", "full", "prefix LM", "bidirectional spans", "nothing hidden")}
    needed |= {name: 3 for name in ("causal documents", "documents", "shared question", "tree", "chunked")}
    needed |= {"block diffusion": 5}  # a noisy block, which begins after key 0, and the clean ones before it
    for name, endpoints in needed.items():
        mask = pairs(SEQLEN, "cpu")[name]().mask
        assert check(mask, SEQLEN, SEQLEN, 1, 2, 2).shape == (1, endpoints, SEQLEN), name


def drawn(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> masks.ColumnMask:
    """Few different columns, so that a row sees few runs."""
    cuts = torch.randint(-5, seqlen_q + 5, (4, batch, heads, 4)).sort(0).values
    uts, ute, lts, lte = cuts.repeat_interleave((seqlen_k + 3) // 4, -1)[..., :seqlen_k].int()
    return masks.ColumnMask(lts, lte, uts, ute)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.SlidingWindow(10, 7),
        lambda: masks.SlidingWindow(-3, 9),  # rows that begin after the window of others
        lambda: masks.Document([[30, 20, 0, 7], [1, 64, 4, 4]], causal=False),  # with padding, which sees nothing
        lambda: masks.PrefixDocument([40, 30], [10, 30]),
        lambda: masks.PrefixLM([0, 70]),
        lambda: masks.SharedQuestion([10, 0], [[20, 10, 5], [30, 30, 13]]),
        lambda: masks.GlobalWindow(5, 9, 4),
        lambda: masks.CausalBlockwise([20, 20, 33]),
        lambda: masks.QKSparse([[3, 4, 5, 40], [0, 1, 2, 72]]),
        lambda: masks.Padding([50, 73]),
        lambda: masks.Tree([-1, 0, 1, 2, 1, 4, 0, 6, -1, 8]),
        lambda: masks.BidirectionalSpans([3, 40], [20, 30]),
        lambda: drawn(2, 1, 73, 73),
        lambda: drawn(1, 2, 73, 73),  # of key heads
        lambda: drawn(2, 4, 73, 73) & masks.Causal(),
    ],
)
def test_every_builder_with_batches_and_heads(make: Callable[[], Mask]) -> None:
    check(make(), 73, 73, 2, 4, 2)


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(40, 73), (73, 40), (1, 5), (5, 1)])
def test_queries_and_keys_of_different_lengths(seqlen_q: int, seqlen_k: int) -> None:
    for mask in (masks.Causal(), masks.SlidingWindow(6, 2), drawn(2, 2, seqlen_q, seqlen_k)):
        check(mask, seqlen_q, seqlen_k, 2, 4, 2)


def test_parts_of_rows_that_need_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are converted a part at a time; a mask needs as many endpoints as the part that needs most."""
    mask = pairs(256, "cpu")["block diffusion"]().mask
    whole = check(mask, 256, 256, 2, 2, 2)
    monkeypatch.setattr(intervals, "_CELLS", 256 * 7)
    assert torch.equal(check(mask, 256, 256, 2, 2, 2), whole)
