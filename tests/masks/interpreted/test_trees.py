"""The vector of a tree by one launch is that of torch's operations."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from warploom import masks
from warploom.masks.zoo import tree_kernel
from warploom.masks.zoo.tree_kernel import tree_vector

COLUMNS, CHUNK = 64, 128  # of the kernel here, so that small trees have many


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tree_kernel._launch.cache_clear()
    monkeypatch.setattr(tree_kernel, "COLUMNS", COLUMNS)
    monkeypatch.setattr(tree_kernel, "CHUNK", CHUNK)
    yield
    tree_kernel._launch.cache_clear()


def check(parents: Tensor, seqlen_q: int, seqlen_k: int) -> None:
    want = masks.Tree(parents)._resolve(seqlen_q, seqlen_k, torch.device("cpu"))
    found = tree_vector(parents, seqlen_q, seqlen_k)
    assert found is not None and want.lts is not None and found.dtype == torch.int32 and torch.equal(found, want.lts)


def tree(draw: random.Random, count: int, climb: float) -> list[int]:
    """Parents in preorder; from each node on the way back is left with probability 1 - climb at each ancestor."""
    path: list[int] = []
    found = []
    for node in range(count):
        while path and draw.random() < climb:
            path.pop()
        found.append(path[-1] if path else -1)
        path.append(node)
    return found


@pytest.mark.parametrize("climb", [0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("count", [0, 1, 5, COLUMNS, 3 * COLUMNS + 1, 500])
def test_drawn_trees(count: int, climb: float) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    batch = draw.choice((1, 2))
    parents = torch.tensor([tree(draw, count, climb) for _ in range(batch)], dtype=draw.choice((torch.int32, torch.int64)))
    parents = parents.view(batch, count)
    if count > 1:
        parents[-1, count - draw.randrange(count) :] = -2
    for more in (0, COLUMNS + 3):
        seqlen_k = max(1, count + more)
        check(parents, max(0, seqlen_k + draw.choice((0, 7, -30))), seqlen_k)


@pytest.mark.parametrize("length", [COLUMNS, CHUNK + 1, 3 * CHUNK])
def test_long_subtrees(length: int) -> None:
    chain = torch.arange(-1, length - 1)
    check(chain[None], length, length)
    check(torch.cat([chain, torch.tensor([-1, length])])[None], length, length + 2)
    check(torch.cat([chain, chain.flip(0)[:-1]])[None], 2 * length, 2 * length)  # a leaf behind each of the chain's nodes
    check(torch.cat([chain, torch.full((2 * CHUNK,), 0)])[None], 9, length + 2 * CHUNK)


def test_blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert tree_kernel.COLUMNS > COLUMNS and tree_kernel.CHUNK > CHUNK
    length = tree_kernel.COLUMNS + tree_kernel.CHUNK + 9
    check(torch.arange(-1, length - 1)[None], 30, length)


def test_strided_parents() -> None:
    check(torch.tensor([[-1, 7, 0, 7, 0], [-1, 7, 0, 7, 1]])[:, ::2], 3, 3)


def test_senseless_parents_lead_to_no_row_outside() -> None:
    for parents in ([[5, 2**62, -(2**62), 1]], [[3, 3, 3, 3]]):
        found = tree_vector(torch.tensor(parents), 3, 6)
        assert found is not None and int(found.min()) >= 0 and int(found.max()) <= 3
