"""Which vectors and which band serve given runs of hidden rows: the fewest, and a band of its own only where one is needed."""

import pytest
import torch

from warploom.masks import Causal, ColumnMask, SlidingWindow
from warploom.masks.fit import check, fit, tight_band

Q, K = 20, 4
NONE = (Q, Q)


def hidden(*columns):
    """Runs and counts of four columns, each a list of (first, past the last) hidden rows."""
    padded = [[*column, *[NONE] * (4 - len(column))] for column in columns]
    runs = [tuple(torch.tensor([[[c[n][end] for c in padded]]], dtype=torch.int32) for end in (0, 1)) for n in range(4)]
    return runs, torch.tensor([[[len(column) for column in columns]]])


def shown(*columns):
    visible = torch.ones(Q, K, dtype=torch.bool)
    for j, column in enumerate(columns):
        for start, end in column:
            visible[start:end, j] = False
    return visible


CASES = {
    "lts": ([(4, 20)], [(0, 20)], [], [(19, 20)]),
    "ute": ([(0, 4)], [(0, 20)], [], [(0, 1)]),
    "lts ute": ([(0, 4), (9, 20)], [(3, 20)], [(0, 5)], []),
    "lts lte": ([(3, 4)], [(5, 20)], [], [(0, 2)]),
    "lts lte ute": ([(0, 4), (9, 12)], [(3, 5)], [(0, 5)], [(6, 20)]),
    "lts uts ute": ([(2, 4), (9, 20)], [(3, 5)], [(0, 5)], [(6, 20)]),
    "lts lte uts ute": ([(2, 4), (9, 12)], [(0, 5), (8, 20)], [(0, 5)], []),
}


@pytest.mark.parametrize("names", CASES)
def test_the_fewest_vectors(names):
    columns = CASES[names]
    found = fit("it", *hidden(*columns), Q, K)
    assert [name for name in ("lts", "lte", "uts", "ute") if getattr(found, name) is not None] == names.split()
    assert found.left is None and found.right is None
    for given in (shown(*columns), shown(*columns)[None, None].expand(2, 3, Q, K)):
        again = ColumnMask.from_dense(given)
        assert (again.dense(Q, K) == given).all()


@pytest.mark.parametrize("band", [Causal(), SlidingWindow(None, -2), SlidingWindow(9, None), SlidingWindow(11, 1)], ids=str)
@pytest.mark.parametrize("names", CASES)
def test_within_a_band(names, band):
    """No band but the causal one where two intervals serve without, and never a wrong element."""
    for q, k in ((Q, K), (Q, 30)):
        visible = band.dense(q, k)[0, 0].clone()
        visible[:, :K] &= shown(*CASES[names])
        mask = ColumnMask.from_dense(visible)
        assert torch.equal(mask.dense(q, k)[0, 0], visible)
        if mask.left is not None or mask.right not in (None, 0):
            with pytest.raises(ValueError, match=r"hides [34] separate runs of rows"):
                mask.to_startend_row_indices(q, k)  # which has bounds only


def test_what_no_band_helps_is_refused_and_named():
    runs, count = hidden([], [(0, 1), (3, 4), (6, 7), (9, 20)], [(2, 3), (5, 6), (8, 9)], [])
    assert tight_band(runs, count, Q, K) == (Q - 1 + K - Q, 3 - K + Q)
    with pytest.raises(ValueError, match=r"^it is not a column mask: column 1 \(batch 0, head 0\) hides 4 separate runs"):
        check("it", runs, count, Q, K)
    with pytest.raises(ValueError, match=r"column 1 .* docs/masks.md, 'Masks that are not column masks', says what to do then"):
        fit("it", runs, count, Q, K)


def test_nothing_visible_needs_no_band():
    runs, count = hidden(*[[(0, Q)]] * K)
    assert tight_band(runs, count, Q, K) == (None, None)
    found = fit("it", runs, count, Q, K)
    assert found[:2] == (None, None) and found.lts.tolist() == [[[0] * K]]
