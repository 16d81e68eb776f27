"""ColumnMask.from_mask_mod against torch's create_mask: equal, or refused where no column mask is."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

from warploom.masks import ColumnMask, Document, from_mask_mod, scan

from .test_columns import expressible


def made(mask_mod, q, k, batch=None, heads=None):
    return ColumnMask.from_mask_mod(mask_mod, q, k, batch=batch, heads=heads, device="cpu")


def equal(mask_mod, q, k, batch=None, heads=None):
    mask = made(mask_mod, q, k, batch, heads)
    assert mask._tensors()[0].shape == (batch or 1, heads or 1, k)
    return torch.equal(mask.dense(q, k), flex.create_mask(mask_mod, batch, heads, q, k, "cpu"))


IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, 2, 3, 3, 4, 4]])
BITS = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1], [0, 0, 1]], dtype=torch.bool)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class Window:
    """A mask_mod that is an object."""

    def __init__(self, size):
        self.size = size

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= self.size


@pytest.mark.parametrize("q,k", [(12, 12), (7, 12), (12, 7), (1, 12), (12, 1)])
@pytest.mark.parametrize(
    "mask_mod",
    [
        causal,
        flex.noop_mask,
        Window(3),
        lambda b, h, q, k: IDS[0][q] == IDS[0][k],
        lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q >= k),
        flex.and_masks(causal, Window(2)),
        flex.or_masks(causal, lambda b, h, q, k: k < 4 + h),
        functools.partial(lambda b, h, q, k, size: (q - k < size * (h + 1)) & (q >= k), size=3),
        lambda b, h, q, k, size=2: (q // size == k // size) & (b >= 0),
        lambda b, h, q, k: q < 0,
    ],
    ids=range(10),
)
def test_common_functions(mask_mod, q, k):
    assert equal(mask_mod, q, k, 2, 3)


def test_captured_vectors_are_reduced_for_one_pair_at_a_time():
    """Broadcast indices would reduce over all pairs at once: `any()` sees one query and one key."""

    def share(b, h, q_idx, kv_idx):
        return (BITS[q_idx] & BITS[kv_idx]).any()

    expected = (BITS[:, None] & BITS[None]).any(-1)
    assert torch.equal(made(share, 6, 6).dense(6, 6)[0, 0], expected)


def test_rows_are_those_of_the_call():
    """q_idx >= kv_idx is aligned top-left, unlike causal=True."""
    mask = made(causal, 3, 8)
    assert torch.equal(mask.dense(3, 8)[0, 0], torch.ones(3, 8, dtype=torch.bool).tril())


def test_few_vectors():
    def vectors(mask_mod, q=12, k=12):
        mask = made(mask_mod, q, k)
        return mask.causal, [t is not None for t in (mask.lts, mask.lte, mask.uts, mask.ute)]

    assert vectors(causal) == (True, [True, False, False, False])
    assert vectors(flex.and_masks(causal, Window(3))) == (True, [True, False, False, False])
    assert vectors(Window(3)) == (False, [True, False, False, True])
    assert vectors(lambda b, h, q, k: IDS[0][q] == IDS[0][k]) == (False, [True, False, False, True])
    assert vectors(lambda b, h, q, k: (IDS[0][q] == IDS[0][k]) & (q >= k)) == (True, [True, False, False, False])
    assert vectors(flex.or_masks(causal, lambda b, h, q, k: k < 4)) == (False, [False, False, False, True])
    holes = flex.and_masks(causal, lambda b, h, q, k: (q < 9) | (k % 3 != 0) | (q > 10))
    assert vectors(holes) == (True, [True, True, False, False])


def test_a_band_beside_two_intervals():
    """Three or four runs of hidden rows in a column, of which a band is one or two; causal=True is one such band."""
    for limits in ((None, 0), (None, 3), (None, -2), (20, None), (25, 2)):
        left, right = limits

        def two_holes(b, h, q, k, left=left, right=right):
            p = q + 4
            seen = ~((q >= k + 3) & (q < k + 6)) & ~((q >= k + 9) & (q < k + 12))
            seen = seen & (p - k <= left) if left is not None else seen
            return seen & (k - p <= right) if right is not None else seen

        mask = made(two_holes, 40, 44)
        assert torch.equal(mask.dense(40, 44), flex.create_mask(two_holes, 1, 1, 40, 44, "cpu"))
        assert mask.causal is (limits == (None, 0))
        assert mask.lte is not None and mask.uts is not None


ATOMS = st.one_of(
    st.just(causal),
    st.integers(0, 6).map(Window),
    st.integers(0, 8).map(lambda n: lambda b, h, q, k: k < n),
    st.integers(0, 8).map(lambda n: lambda b, h, q, k: q < n + b),
    st.integers(-4, 4).map(lambda n: lambda b, h, q, k: q + n >= k),
    st.integers(1, 5).map(lambda n: lambda b, h, q, k: q // n == k // n),
    st.integers(2, 4).map(lambda n: lambda b, h, q, k: (q - k) % n == 0),
    st.lists(st.integers(0, 2), min_size=10, max_size=10).map(
        lambda ids: lambda b, h, q, k: torch.tensor(ids)[q] == torch.tensor(ids)[k]
    ),
    st.lists(st.booleans(), min_size=10, max_size=10).map(lambda real: lambda b, h, q, k: torch.tensor(real)[k] | (h > 0)),
)
MASK_MODS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: flex.and_masks(*parts)),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: flex.or_masks(*parts)),
        inner.map(lambda part: lambda b, h, q, k: ~part(b, h, q, k)),
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(MASK_MODS, st.integers(1, 10), st.integers(1, 10), st.sampled_from([(None, None), (2, 1), (1, 2)]))
def test_any_function_is_met_exactly_or_refused(mask_mod, q, k, sizes):
    truth = flex.create_mask(mask_mod, *sizes, q, k, "cpu")
    try:
        mask = made(mask_mod, q, k, *sizes)
    except ValueError as error:
        assert "and a column has two intervals" in str(error)
        assert not expressible(truth)
        return
    assert torch.equal(mask.dense(q, k), truth)


@pytest.mark.parametrize("sizes", [(0, 4, 1, 1), (4, 0, 1, 1), (4, 4, 0, 1), (4, 4, 1, 0)])
def test_of_nothing(sizes):
    q, k, batch, heads = sizes
    assert made(causal, q, k, batch, heads).dense(q, k).shape == (batch, heads, q, k)


def test_a_mask_serves_attention_and_other_masks():
    mask = made(lambda b, h, q, k: IDS[0][q] == IDS[0][k], 12, 12)
    both = Document([3, 2, 4, 3])
    assert torch.equal((mask & both).dense(12, 12), both.dense(12, 12))
    with torch.inference_mode():
        kept = made(causal, 12, 12)
    assert not kept.lts.is_inference()


ERRORS = [
    (
        lambda: made(lambda b, h, q, k: (q - k) % 3 == 0, 12, 12),
        ValueError,
        r"mask_mod <lambda> is not a column mask: column 0 ",
    ),
    (
        lambda: made(lambda b, h, q, k: (h < 2) | (k < 5) | (q % 2 == 0), 12, 12, 2, 3),
        ValueError,
        r"column 5 \(batch 0, head 2\) hides 6 separate runs of rows, and a column has two intervals; docs/masks.md, 'Masks",
    ),
    (lambda: made(3, 4, 4), TypeError, r"takes a function mask_mod\(b, h, q_idx, kv_idx\), got"),
    (lambda: made(lambda s, b, h, q, k: s, 4, 4), TypeError, "of 5 arguments; with five it is a score_mod"),
    (lambda: made(lambda q, k: q >= k, 4, 4), TypeError, "got one of 2 arguments"),
    (lambda: made(flex.create_block_mask(causal, 1, 1, 128, 128, "cpu"), 4, 4), TypeError, "pass block_mask.mask_mod"),
    (lambda: made(lambda b, h, q, k: q - k, 4, 4), TypeError, "must return a bool, True = visible, got torch.int64"),
    (lambda: made(lambda b, h, q, k: BITS[q], 4, 4), ValueError, r"one bool for each pair .* got shape \(3,\)"),
    (lambda: made(lambda b, h, q, k: q if q > k else k, 4, 4), ValueError, "failed when called as FlexAttention calls it"),
    (lambda: made(causal, -1, 4), ValueError, "seqlen_q must be at least 0"),
    (lambda: made(causal, 4, 2**30), ValueError, "seqlen_k must be at most"),
    (lambda: made(causal, 4, 4.5), TypeError, "seqlen_k takes an int"),
    (lambda: made(causal, 4, 4, batch="two"), TypeError, "batch takes an int or None"),
    (lambda: ColumnMask.from_mask_mod(causal, 4, 4, device="nowhere"), ValueError, "device takes a device"),
]


@pytest.mark.parametrize("call,kind,words", ERRORS, ids=range(len(ERRORS)))
def test_errors_in_words(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_a_compiled_region_is_told_to_call_it_outside():
    compiled = torch.compile(lambda x: x + ColumnMask.from_mask_mod(causal, 4, 4).lts, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="outside of the compiled region"):
        compiled(torch.zeros(4))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(terminal, capsys, monkeypatch):
    monkeypatch.setattr(from_mask_mod, "_SILENT", 0.0)
    monkeypatch.setattr(scan, "_ON_CPU", 16)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    made(causal, 40, 40)
    drawn = capsys.readouterr().err
    assert ("reading causal over 40 x 40 positions" in drawn and drawn.endswith("\r\x1b[K")) is terminal
    assert terminal or not drawn
