"""The union of masks against the OR of dense ones: exact or refused, and the laws of `|` and `&`."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom import masks
from warploom.masks import Causal, ColumnMask, Document, Full, Padding, PrefixLM, SlidingWindow

from .samples import SAMPLERS
from .test_columns import expressible
from .test_tiles import adversarial

SEEDS = st.integers(0, 2**30)


def exactly(mask, truth, q, k):
    """Whether the mask shows the truth, or refuses a truth that no column mask shows."""
    try:
        got = mask().dense(q, k)
    except ValueError as error:
        assert "and a column has two intervals; docs/masks.md" in str(error)
        return not expressible(truth)
    return torch.equal(got.expand(truth.shape), truth)


def drawn(rng, q, k):
    """A mask of these lengths: bands, hidden intervals and batch entries or heads of its own."""
    if rng.random() < 0.3:
        left, right = (rng.choice([None, rng.randint(-3, 9)]) for _ in range(2))
        return Full() if left == right == -1 else SlidingWindow(left, right)
    if rng.random() < 0.3:
        sample = SAMPLERS[rng.choice(["document", "prefix_lm", "chunked", "padding"])]
        mask = next(s.mask for s in iter(lambda: sample(rng), None) if (s.batch, s.seqlen_k) in ((1, k), (2, k)))
        return mask
    return adversarial(rng, q, k, beyond=0)


def fitting(rng, count):
    """Masks whose batch entries and heads broadcast, with their lengths."""
    q, k = rng.randint(1, 9), rng.randint(1, 9)
    while True:
        found = [drawn(rng, q, k) for _ in range(count)]
        shapes = [m.dense(q, k).shape for m in found]
        if all(len({s[d] for s in shapes} - {1}) < 2 for d in (0, 1)):
            return q, k, found


@settings(max_examples=200)
@given(SEEDS)
def test_union_is_or_and_commutes(seed):
    q, k, (a, b) = fitting(random.Random(seed), 2)
    truth = a.dense(q, k) | b.dense(q, k)
    assert exactly(lambda: a | b, truth, q, k)
    assert exactly(lambda: b | a, truth, q, k)


@settings(max_examples=60)
@given(SEEDS)
def test_laws(seed):
    q, k, (a, b) = fitting(random.Random(seed), 2)
    truth = a.dense(q, k)
    assert torch.equal((a | a).dense(q, k), truth)  # idempotent
    assert (a | Full()).dense(q, k).all() and (Full() | a).dense(q, k).all()
    nothing = Padding([0])
    assert torch.equal((a | nothing).dense(q, k), truth)
    joint = torch.broadcast_to(truth, torch.broadcast_shapes(truth.shape, b.dense(q, k).shape))
    assert exactly(lambda: a & (a | b), joint, q, k) or not expressible(joint | b.dense(q, k))  # absorption
    assert exactly(lambda: a | (a & b), joint, q, k) or not expressible(joint & b.dense(q, k))


@settings(max_examples=60)
@given(SEEDS)
def test_distribution_and_de_morgan(seed):
    q, k, (a, b, c) = fitting(random.Random(seed), 3)
    dense = [m.dense(q, k) for m in (a, b, c)]
    truth = (dense[0] | dense[1]) & dense[2]
    assert torch.equal(truth, ~((~dense[0] & ~dense[1]) | ~dense[2]))  # what a union hides, both hide
    results = []
    for made in (lambda: (a | b) & c, lambda: (a & c) | (b & c)):
        try:
            results.append(made().dense(q, k).expand(truth.shape))
        except ValueError:
            continue
    assert all(torch.equal(result, truth) for result in results)


@pytest.mark.parametrize("first", SAMPLERS)
def test_any_two_builders(first, seed):
    for round_ in range(25):
        rng = random.Random(f"{first} {seed} {round_}")
        a, b = SAMPLERS[first](rng), SAMPLERS[rng.choice(list(SAMPLERS))](rng)
        q, k = a.seqlen_q, a.seqlen_k
        try:
            truth = a.mask.dense(q, k) | b.mask.dense(q, k)
        except (ValueError, RuntimeError):
            continue  # b is for another length or batch
        assert exactly(lambda a=a, b=b: a.mask | b.mask, truth, q, k), (
            f"seed {seed} round {round_}: {a.mask} | {b.mask} {q} {k}"
        )


def test_bands_that_meet_give_a_band():
    assert repr(SlidingWindow(3, 0) | SlidingWindow(-1, 2)) == "SlidingWindow(left=3, right=2)"
    assert repr(SlidingWindow(3, 0) | SlidingWindow(None, -4)) == "Causal()"
    assert repr(Causal() | Full()) == "Full()"
    assert repr(SlidingWindow(-5, 2) | Causal()) == "Causal()"  # the first shows nothing
    apart = SlidingWindow(2, 0) | SlidingWindow(8, -5)
    assert torch.equal(apart.dense(12, 12), SlidingWindow(2, 0).dense(12, 12) | SlidingWindow(8, -5).dense(12, 12))
    assert repr(apart) == "SlidingWindow(left=2, right=0) | SlidingWindow(left=8, right=-5)"


def test_structure_alone_decides_without_reading_values():
    """So masks on a device unite without synchronising, in a compiled region too."""
    united = [
        Document(torch.tensor([3, 4])) | masks.Chunked(2),
        Padding(torch.tensor([[1, 1, 0, 1, 0, 1, 1]])) | Padding(torch.tensor([[0, 1, 1, 1, 0, 0, 1]])),
        PrefixLM(torch.tensor([2])) | PrefixLM(torch.tensor([4])),
        masks.Tree(torch.tensor([-1, 0, 1, 0])) | Causal(),
    ]
    for mask in united:
        torch.utils._pytree.tree_map(lambda t: t.to("meta"), mask).resolve(7, 7, "meta")  # meta tensors have no values
        a, b = (m.dense(7, 7) for m in (mask.a, mask.b))
        assert torch.equal(mask.dense(7, 7), a | b)


def test_key_heads_and_query_heads():
    generator = torch.Generator().manual_seed(1)
    keys, queries = (
        ColumnMask(torch.randint(0, 12, (2, heads, 9), generator=generator, dtype=torch.int32)) for heads in (2, 6)
    )
    for one, other in ((keys, queries), (queries, keys & Causal())):
        truth = [m.dense(12, 9) for m in (one, other)]
        truth = [t.repeat_interleave(6 // t.shape[1], dim=1) for t in truth]
        assert torch.equal((one | other).dense(12, 9), truth[0] | truth[1])
    with pytest.raises(ValueError, match="cannot unite masks of 2 and 3 heads"):
        (keys | ColumnMask(torch.ones(1, 3, 9, dtype=torch.int32))).resolve(12, 9)


def test_refusals_in_words():
    strided = SlidingWindow(0) | SlidingWindow(2, -2) | SlidingWindow(4, -4) | SlidingWindow(6, -6)
    with pytest.raises(ValueError, match=r"column 0 \(batch 0, head 0\) hides 3 separate runs .* what to do then"):
        strided.resolve(12, 12)
    with pytest.raises(TypeError, match=r"\| takes another mask, got .* ColumnMask.from_dense"):
        Causal() | torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(TypeError):
        Causal() | 3
    ones = torch.ones(4, dtype=torch.int32)
    mask = ColumnMask(ones, 2 * ones) | Causal()
    compiled = torch.compile(lambda x: mask.resolve(x.shape[0], x.shape[0]).lts, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="needs its values"):
        compiled(torch.empty(4))


def test_printing_keeps_the_order_of_operators():
    a, b, c = Document([3]), Document([4], causal=False), Padding([5])
    for mask in ((a | b) & c, a | (b & c), c & (a | b)):
        again = eval(repr(mask), dict(vars(masks)))
        assert repr(again) == repr(mask)
        assert torch.equal(again.dense(6, 6), mask.dense(6, 6))


def test_a_union_moves_and_flattens():
    mask = Document(torch.tensor([3, 2])) | PrefixLM(torch.tensor([4]))
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert len(leaves) == 2 and torch.equal(again.to("cpu").dense(6, 6), mask.dense(6, 6))
