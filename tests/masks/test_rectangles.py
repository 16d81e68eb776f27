"""The rectangle cover is exact: disjoint, complete, and what it calls full or causal is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom import masks
from warploom.masks.intervals import ResolvedMask
from warploom.masks.rectangles import BLOCK_ROWS, cover, covers
from warploom.masks.visible import visible


def check(mask: ResolvedMask, seqlen_q: int, seqlen_k: int) -> None:
    seen = visible(mask, torch.arange(seqlen_q), torch.arange(seqlen_k), seqlen_k - seqlen_q)[0, 0]
    times = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    for r0, r1, c0, c1, kind in cover(mask, 0, 0, seqlen_q, seqlen_k):
        assert 0 <= r0 < r1 <= seqlen_q and 0 <= c0 < c1 <= seqlen_k
        tile = seen[r0:r1, c0:c1]
        shown = torch.ones_like(tile)
        if kind == "causal":
            assert r1 - r0 == c1 - c0
            shown = shown.tril()
        if kind == "masked":
            assert r1 - r0 <= BLOCK_ROWS
            shown = tile
        assert torch.equal(tile, shown), (kind, r0, r1, c0, c1)
        times[r0:r1, c0:c1] += shown
    assert torch.equal(times, seen.int())


@st.composite
def resolved(draw: st.DrawFn) -> tuple[ResolvedMask, int, int]:
    seqlen_q, seqlen_k = draw(st.integers(1, 500)), draw(st.integers(1, 500))
    bound = st.none() | st.integers(-30, 400)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    run = draw(st.sampled_from([1, 3, 50, 500]))

    def vector(present: bool) -> torch.Tensor | None:
        if not present:
            return None
        values = torch.randint(-5, seqlen_q + 6, (1, 1, -(-seqlen_k // run)), generator=generator, dtype=torch.int32)
        return values.repeat_interleave(run, dim=2)[..., :seqlen_k].contiguous()

    lower, upper = draw(st.booleans()), draw(st.booleans())
    vectors = (
        vector(lower),
        vector(lower and draw(st.booleans())),
        vector(upper and draw(st.booleans())),
        vector(upper),
    )
    return ResolvedMask(draw(bound), draw(bound), *vectors), seqlen_q, seqlen_k


@settings(max_examples=300)
@given(resolved())
def test_random_vectors_and_bands(case: tuple[ResolvedMask, int, int]) -> None:
    check(*case)


@pytest.mark.parametrize("seqlens", [(700, 700), (300, 700), (700, 300)])
@pytest.mark.parametrize(
    "mask",
    [
        masks.Full(),
        masks.Causal(),
        masks.SlidingWindow(64),
        masks.SlidingWindow(400, 300),
        masks.Document([100, 37, 163]),
        masks.Document([9] * 33),
        masks.PrefixLM(120),
        masks.GlobalWindow(10, 30, 5),
        masks.Chunked(64),
    ],
    ids=repr,
)
def test_builders(mask: masks.Mask, seqlens: tuple[int, int]) -> None:
    check(mask.resolve(*seqlens), *seqlens)


def test_plain_cases_are_one_call_of_a_dense_kernel() -> None:
    assert cover(masks.Full().resolve(512, 512), 0, 0, 512, 512) == [(0, 512, 0, 512, "full")]
    assert cover(masks.Causal().resolve(512, 512), 0, 0, 512, 512) == [(0, 512, 0, 512, "causal")]
    documents = cover(masks.Document([256, 256]).resolve(512, 512), 0, 0, 512, 512)
    assert documents == [(0, 256, 0, 256, "causal"), (256, 512, 256, 512, "causal")]


def test_work_is_linear_in_documents() -> None:
    for documents in (16, 64, 256):
        length = 256 * documents
        pieces = cover(masks.Document([256] * documents).resolve(length, length), 0, 0, length, length)
        assert len(pieces) == documents


def test_plans_are_kept_by_content_not_by_identity() -> None:
    mask = masks.Document([[100, 50], [30, 120]]).resolve(150, 150)
    first = covers(mask, 2, 1, 150, 150)
    assert covers(mask._replace(lts=mask.lts.clone()), 2, 1, 150, 150) is first
    reused = mask.lts.clone()
    covers(mask._replace(lts=reused), 2, 1, 150, 150)
    reused.data[1] = reused.data[0]  # writes the version counter does not see
    assert covers(mask._replace(lts=reused), 2, 1, 150, 150) == [first[0], first[0]]
    assert covers(mask._replace(right=3), 2, 1, 150, 150) != first
