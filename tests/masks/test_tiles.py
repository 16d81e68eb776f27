"""Tile classes against the dense truth: never unsound, how tight, in memory that grows with seqlen alone."""

import random

import pytest
import torch

from warploom import masks
from warploom.masks import ColumnMask, SlidingWindow
from warploom.masks.tiles import (
    FULL,
    HIDDEN,
    PARTIAL,
    block_edges,
    classify_row_block,
    column_bounds,
    row_segments,
)

from .samples import SAMPLERS


def true_classes(dense, m_edges, n_edges):
    """Classes read off the dense matrix, (batch, heads, row blocks, column blocks)."""
    sums = torch.nn.functional.pad(dense.long(), (1, 0, 1, 0)).cumsum(2).cumsum(3)
    corners = sums[:, :, m_edges][..., n_edges]
    visible = corners.diff(dim=2).diff(dim=3)
    size = torch.tensor(m_edges).diff()[:, None] * torch.tensor(n_edges).diff()
    return torch.where(visible == size, FULL, torch.where(visible > 0, PARTIAL, HIDDEN))


def adversarial(rng, q, k, beyond=2):
    """Random vectors in every combination, in runs or not, sorted or not, `beyond` the rows, inverted too."""
    batch, heads = rng.choice([1, 2]), rng.choice([1, 2])
    torch.manual_seed(rng.randrange(1 << 30))
    vectors = torch.randint(-beyond, q + beyond + 1, (4, batch, heads, k), dtype=torch.int32)
    run = rng.choice([1, 1, 4, 16])
    vectors = vectors[..., torch.arange(k) // run * run]
    if rng.random() < 0.3:
        vectors = vectors.sort(-1).values
    if rng.random() < 0.3:  # touching intervals, where the two together hide
        vectors[0] = vectors[3] - rng.randint(-1, 1)
    if rng.random() < 0.2:
        vectors[2] = vectors[1] - rng.randint(-1, 1)
    lts, lte, uts, ute = vectors.clamp(-beyond, q + beyond)
    lower, upper = rng.choice([(1, 1), (1, 1), (1, 1), (1, 0), (0, 1)])
    mask = ColumnMask(
        lts if lower else None,
        rng.choice([None, lte]) if lower else None,
        rng.choice([None, uts]) if upper else None,
        ute if upper else None,
        causal=rng.random() < 0.3,
    )
    if rng.random() < 0.4:
        left, right = rng.choice([None, rng.randint(-4, k)]), rng.choice([None, rng.randint(-4, k)])
        mask = mask & SlidingWindow(left, right if (left, right) != (-1, -1) else -2)  # which is refused
    return mask


def check_sound(mask, q, k, block_m, block_n, where):
    """Classes, counts, segments and edges against the truth; returns (tiles, partial tiles, needlessly partial tiles)."""
    tiles = mask.tiles(block_m, block_n, q, k)
    truth = true_classes(mask.dense(q, k), range_edges(q, block_m), range_edges(k, block_n))
    got = torch.stack([classes for _, _, classes in tiles.rows()], 2).expand_as(truth)
    assert not ((got == HIDDEN) & (truth != HIDDEN)).any(), where
    assert not ((got == FULL) & (truth != FULL)).any(), where
    for kind, count in ((HIDDEN, tiles.hidden), (PARTIAL, tiles.partial), (FULL, tiles.full)):
        assert torch.equal((got == kind).sum((2, 3)), count.expand(got.shape[:2])), where
    assert torch.equal(tiles.matrix(), got[0, 0]), where
    segments = tiles.segments()
    row = torch.arange(truth.shape[2]).view(-1, 1, 1)
    visited = ((row >= segments[:, :, None, ..., 0]) & (row < segments[:, :, None, ..., 1])).sum(-1)
    assert torch.equal(visited.expand_as(got), (got != HIDDEN).long()), where
    edges = segments.flatten(-2)
    assert (edges[..., 1:] >= edges[..., :-1]).all(), where
    partial = got == PARTIAL
    return got.numel(), int(partial.sum()), int((partial & (truth != PARTIAL)).sum())


def range_edges(length, block):
    return [*range(0, length, block), length]


def adversarial_tiles(seed):
    """Sum of check_sound over 300 masks."""
    total = [0, 0, 0]
    for round_ in range(300):
        rng = random.Random(f"{seed} {round_}")
        q, k = rng.randint(1, 70), rng.randint(1, 70)
        mask = adversarial(rng, q, k)
        found = check_sound(mask, q, k, rng.randint(1, 24), rng.randint(1, 24), f"seed {seed} round {round_} {mask}")
        total = [a + b for a, b in zip(total, found, strict=True)]
    return total


def builder_tiles(name, seed):
    """Sum of check_sound over 60 masks of a builder."""
    total = [0, 0, 0]
    for round_ in range(60):
        rng = random.Random(f"{name} {seed} {round_}")
        sample = SAMPLERS[name](rng)
        if not sample.seqlen_q or not sample.seqlen_k:
            continue
        found = check_sound(sample.mask, sample.seqlen_q, sample.seqlen_k, 4, 4, f"seed {seed} round {round_} {sample}")
        total = [a + b for a, b in zip(total, found, strict=True)]
    return total


def test_adversarial_vectors(seed):
    adversarial_tiles(seed)


@pytest.mark.parametrize("name", SAMPLERS)
def test_builders(name, seed):
    builder_tiles(name, seed)


# Partial tiles that are in truth hidden or full, as a fraction of all tiles (4 x 4 here). Only masks whose
# neighbouring columns are hidden for different reasons, by the band here and by an interval there, have any
# to speak of.
LOOSE = {"qk_sparse": 0.04, "random_eviction": 0.04}


# Soundness holds for every mask; how tight the classes are is a share of a fixed sample.
@pytest.mark.parametrize("name", SAMPLERS)
def test_tightness(name):
    tiles, partial, needless = builder_tiles(name, "tightness")
    print(f"{name}: {tiles} tiles, {partial} partial, {needless} of them needlessly")
    assert needless / tiles <= LOOSE.get(name, 0.005)


def test_tightness_of_adversarial_vectors():
    tiles, partial, needless = adversarial_tiles("tightness")
    print(f"{tiles} tiles, {partial} partial, {needless / partial:.1%} of them needlessly")
    assert needless / tiles < 0.02


def test_arbitrary_edges(seed):
    for round_ in range(200):
        rng = random.Random(f"{seed} {round_}")
        q, k = rng.randint(1, 60), rng.randint(1, 60)
        mask = adversarial(rng, q, k)
        where = f"seed {seed} round {round_} {mask}"
        n_edges = torch.tensor([0, *sorted(rng.sample(range(1, k), rng.randint(0, min(5, k - 1)))), k])
        m_edges = torch.tensor([0, *sorted(rng.sample(range(1, q), rng.randint(0, min(5, q - 1)))), q])
        resolved = mask.resolve(q, k)
        bounds = column_bounds(resolved, q, k, n_edges)
        assert bounds.dtype == torch.int32 and bounds.shape[2:] == (len(n_edges) - 1, 8)
        got = classify_row_block(bounds, n_edges, m_edges[:-1, None], m_edges[1:, None], resolved.left, resolved.right, q, k)
        truth = true_classes(mask.dense(q, k), m_edges.tolist(), n_edges.tolist())
        assert not ((got == HIDDEN) & (truth != HIDDEN)).any(), where
        assert not ((got == FULL) & (truth != FULL)).any(), where
        for r in range(len(m_edges) - 1):
            m0, m1 = m_edges[r : r + 2].tolist()
            one = classify_row_block(bounds, n_edges, m0, m1, resolved.left, resolved.right, q, k)
            assert torch.equal(one, got[:, :, r]), where
        rows = row_segments(bounds, n_edges, resolved.left, resolved.right, q, k)
        row = torch.arange(q).view(-1, 1, 1)
        walked = ((row >= rows[:, :, None, ..., 0]) & (row < rows[:, :, None, ..., 1])).any(-1)
        for n in range(len(n_edges) - 1):
            seen = mask.dense(q, k)[..., n_edges[n] : n_edges[n + 1]].any(-1)
            assert (walked[..., n] | ~seen).all(), where


@pytest.mark.parametrize("block", [1, 3, 8, 100])
def test_bounds_by_block_and_by_edges_agree(block, seed):
    rng = random.Random(seed)
    for _ in range(20):
        q, k = rng.randint(1, 60), rng.randint(1, 60)
        resolved = adversarial(rng, q, k).resolve(q, k)
        by_edges = column_bounds(resolved, q, k, block_edges(k, block))
        assert torch.equal(column_bounds(resolved, q, k, block), by_edges)


def test_common_masks_are_tight_at_kernel_size():
    """At 128 x 128 the masks of notes' measurements leave no partial tile without need."""
    length = 1024
    cases = [
        masks.Causal(),
        masks.Document([256] * 4),
        masks.Document([300, 500, 224]),
        masks.SlidingWindow(255),
        masks.Document([300, 500, 224], causal=False),
        masks.Padding([700]),
        masks.PrefixLM(300),
        masks.Chunked(384),
        masks.SharedQuestion(200, [400, 424]),
        masks.BlockDiffusion(512, 128),
        masks.GlobalWindow(64, 128, 128),
    ]
    for mask in cases:
        total, partial, needless = check_sound(mask, length, length, 128, 128, repr(mask))
        assert needless == 0, f"{mask}: {needless} of {partial} partial tiles ({total} in all)"


def test_padding_beside_documents_is_skipped():
    """A block with padded columns beside a document's is hidden wherever the document's columns are."""
    mask = masks.Document([100], causal=False)
    tiles = mask.tiles(64, 64, 256, 256)
    assert tiles.matrix().tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_memory_grows_with_length_only():
    """32k x 32k in tiles of 32: a million tiles, whose matrix is never made; the bounds are 32 KiB."""
    tiles = masks.Document([2048] * 16).tiles(32, 32, 1 << 15, 1 << 15)
    assert tiles.bounds.numel() * 4 == 1024 * 8 * 4
    assert int(tiles.hidden + tiles.partial + tiles.full) == 1024 * 1024
    assert int(tiles.partial) == 1024 and int(tiles.full) == 16 * 64 * 63 // 2
    assert tiles.skipped == pytest.approx(1 - (1024 + int(tiles.full)) / 1024**2)


@pytest.mark.parametrize("q,k", [(0, 0), (0, 5), (5, 0)])
def test_empty(q, k):
    for mask in (masks.Full(), masks.Document([0], causal=False), masks.Chunked(3)):
        tiles = mask.tiles(4, 4, q, k)
        assert tiles.skipped == 0.0 and mask.density(q, k) == 0.0
        assert tiles.matrix().shape == tiles.shape == (-(-q // 4), -(-k // 4))
        assert tiles.segments().shape[-2:] == (3, 2)


def test_bad_arguments():
    with pytest.raises(ValueError, match="block_m must be at least 1, got 0"):
        masks.Causal().tiles(0, 4, 8, 8)
    with pytest.raises(TypeError, match="block_n takes an int"):
        masks.Causal().tiles(4, 4.0, 8, 8)
    with pytest.raises(ValueError, match="fits any length: give seqlen_q and seqlen_k"):
        masks.Causal().tiles(4, 4)
    with pytest.raises(ValueError, match="the mask has 2 batch entries and 1 heads"):
        masks.Document([[3], [2]]).tiles(4, 4, 8, 8).matrix(batch=2)


@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 70, 100, 128, 129, 200])
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_narrower_tiles_take_the_class_of_their_block(seqlen_k: int, block_n: int) -> None:
    lengths = [[seqlen_k // 3, seqlen_k - seqlen_k // 3], [seqlen_k, 0]]
    tiles = masks.Document(lengths, causal=False).tiles(32, 64, 150, seqlen_k)
    wanted = [0, 0, 0]
    for batch in range(2):
        for row in tiles.matrix(batch).tolist():
            for first in range(0, seqlen_k, block_n):
                wanted[row[first // 64]] += 1
    assert list(tiles.in_tiles(block_n).values()) == wanted
    assert tiles.in_tiles(64) == {kind: int(getattr(tiles, kind).sum()) for kind in ("hidden", "partial", "full")}
