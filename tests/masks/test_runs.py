"""Runs of hidden rows, gathered block by block, against columns read one element at a time."""

import random

import pytest
import torch

from warploom.masks.runs import Runs


def by_hand(column):
    """(first, past the last) of each run of False."""
    found, start = [], None
    for row, seen in enumerate([*column, True]):
        if seen and start is not None:
            found.append((start, row))
            start = None
        elif not seen and start is None:
            start = row
    return found


def gathered(visible, cuts, keep):
    rows = visible.shape[-2]
    runs = Runs((*visible.shape[:-2], visible.shape[-1]), rows, keep, "cpu")
    for low, high in zip([0, *cuts], [*cuts, rows], strict=True):
        runs.add(low, visible[..., low:high, :])
    return runs.count, runs.kept


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_any_blocks_give_the_runs(keep, seed):
    rng = random.Random(seed)
    for _ in range(40):
        shape = (rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 20), rng.randint(1, 6))
        torch.manual_seed(rng.randrange(1 << 30))
        visible = torch.rand(shape) < rng.choice([0.1, 0.5, 0.9, 0.97])
        cuts = sorted(rng.sample(range(1, shape[2]), rng.randint(0, shape[2] - 1)))
        count, kept = gathered(visible, cuts, keep)
        for b, h, j in torch.cartesian_prod(*[torch.arange(shape[d]) for d in (0, 1, 3)]).tolist():
            expected = by_hand(visible[b, h, :, j].tolist())
            assert count[b, h, j] == len(expected)
            found = [(int(start[b, h, j]), int(end[b, h, j])) for start, end in kept]
            assert found == (expected + [(shape[2], shape[2])] * keep)[:keep]


def test_a_compiled_region_gathers_the_same_runs(seed):
    torch.manual_seed(seed)
    visible = torch.rand(2, 14, 5) < 0.6
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: gathered(t, [5], 2), fullgraph=True, backend="aot_eager")
    (count, kept), (expected, runs) = compiled(visible), gathered(visible, [5], 2)
    assert torch.equal(count, expected)
    assert all(torch.equal(a, b) for pair, other in zip(kept, runs, strict=True) for a, b in zip(pair, other, strict=True))
