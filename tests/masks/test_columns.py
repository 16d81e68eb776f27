"""ColumnMask: conversions, the cache, moving, printing, and errors in words."""

import copy
import pickle
import random
import weakref

import pytest
import torch
from torch.utils import _pytree

from warploom import masks
from warploom.masks import ColumnMask

from .samples import SAMPLERS
from .test_tiles import adversarial


def vector(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("n,causal", [(1, True), (2, True), (2, False), (4, False)])
def test_startend_row_indices_round_trip(n, causal, seed):
    torch.manual_seed(seed)
    for heads in (1, 2):
        bounds = torch.randint(0, 13, (3, heads, 12, n), dtype=torch.int32)
        mask = ColumnMask.from_startend_row_indices(bounds, causal)
        again, flag = mask.to_startend_row_indices()
        assert flag == causal and again.dtype == torch.int32 and torch.equal(again, bounds)
        row, hidden = torch.arange(12).view(-1, 1), torch.zeros(3, heads, 12, 12, dtype=torch.bool)
        starts, ends = {
            1: ([0], [None]),
            2: ([0], [1]) if causal else ([0, None], [None, 1]),
            4: ([0, 2], [1, 3]),
        }[n]
        for start, end in zip(starts, ends, strict=True):
            after = row >= (0 if start is None else bounds[:, :, None, :, start])
            hidden |= after & (row < (12 if end is None else bounds[:, :, None, :, end]))
        if causal:
            hidden |= row < torch.arange(12)
        assert torch.equal(mask.dense(12, 12), ~hidden)


def test_startend_row_indices_of_every_builder(seed):
    """The bounds show what the mask shows, whatever band was folded into them."""
    for name, sampler in SAMPLERS.items():
        for round_ in range(30):
            rng = random.Random(f"{name} {seed} {round_}")
            sample = sampler(rng)
            q, k = sample.seqlen_q, sample.seqlen_k
            try:
                bounds, causal = sample.mask.to_startend_row_indices(q, k)
            except ValueError:  # padding behind blocks makes three runs
                assert name == "causal_blockwise" and runs_of_hidden(sample.dense()).max() > 2
                continue
            again = ColumnMask.from_startend_row_indices(bounds, causal).dense(q, k)
            assert torch.equal(again, sample.mask.dense(q, k).expand_as(again)), f"{name} seed {seed} round {round_}"


def test_startend_row_indices_folds_bands_or_refuses(seed):
    refused, rounds = 0, 2000  # about one in a hundred is refused: so many that none cannot be luck
    for round_ in range(rounds):
        rng = random.Random(f"{seed} {round_}")
        q, k = rng.randint(1, 20), rng.randint(1, 20)
        mask = adversarial(rng, q, k)
        truth = mask.dense(q, k)
        try:
            bounds, causal = mask.to_startend_row_indices(q, k)
        except ValueError as error:
            assert "and a column has two" in str(error)
            assert runs_of_hidden(truth).max() > 2 and mask._tensors()
            refused += 1
            continue
        assert torch.equal(ColumnMask.from_startend_row_indices(bounds, causal).dense(q, k), truth)
    assert 0 < refused < rounds / 2


def runs_of_hidden(dense):
    hidden = ~dense
    return (hidden & ~torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :, :-1]).sum(2)


def expressible(truth):
    """Whether some band leaves at most two runs of hidden rows to each column: every band is tried."""
    q, k = truth.shape[-2:]
    distance = torch.arange(q).view(-1, 1) + (k - q) - torch.arange(k)
    limits = torch.arange(-q - k, q + k + 1)
    bands = (distance <= limits.view(-1, 1, 1, 1)) & (distance >= -limits.view(-1, 1, 1))
    bands = bands.flatten(0, 1)
    holds = bands[[not (truth & ~band).any() for band in bands]]
    return any(runs_of_hidden(truth | ~band).max() <= 2 for band in holds)


def test_from_dense_round_trip(seed):
    for name, sampler in SAMPLERS.items():
        for round_ in range(30):
            rng = random.Random(f"{name} {seed} {round_}")
            sample = sampler(rng)
            truth = sample.dense()
            again = ColumnMask.from_dense(truth)
            assert torch.equal(again.dense(sample.seqlen_q, sample.seqlen_k), truth), f"{name} seed {seed} {round_}"


def test_from_dense_takes_what_is_expressible_and_nothing_else(seed):
    generator = torch.Generator().manual_seed(seed)
    taken = 0
    for _ in range(300):
        q, k = torch.randint(1, 8, (2,), generator=generator).tolist()
        truth = torch.rand(1, 2, q, k, generator=generator) > 0.5
        if expressible(truth):
            assert torch.equal(ColumnMask.from_dense(truth).dense(q, k), truth)
            taken += 1
        else:
            with pytest.raises(ValueError, match="and a column has two intervals"):
                ColumnMask.from_dense(truth)
    assert 30 < taken < 270


def test_from_dense_needs_few_vectors():
    tri = torch.ones(6, 6, dtype=torch.bool).tril()
    assert ColumnMask.from_dense(tri).causal and ColumnMask.from_dense(tri).lte is None
    assert ColumnMask.from_dense(torch.ones(3, 5, dtype=torch.bool)).ute is None
    prefix = ColumnMask.from_dense(masks.PrefixLM(2).dense(6, 6))
    assert prefix.lte is None and prefix.uts is None and prefix.ute is not None
    assert not ColumnMask.from_dense(tri.logical_not()).causal


def test_from_dense_names_the_first_inexpressible_column():
    visible = torch.ones(2, 2, 7, 5, dtype=torch.bool)
    visible[1, 0, ::2, 3] = False
    visible[1, 1, ::2, 1] = False
    with pytest.raises(ValueError, match=r"column 3 \(batch 1, head 0\) hides 4 separate runs"):
        ColumnMask.from_dense(visible)
    tri = torch.ones(9, 9, dtype=torch.bool).tril()
    tri[[2, 4], 0] = False
    assert torch.equal(ColumnMask.from_dense(tri).dense(9, 9)[0, 0], tri)  # with causal, two intervals do
    tri[7, 0] = False
    with pytest.raises(ValueError, match=r"column 0 \(batch 0, head 0\) hides 3 separate runs"):
        ColumnMask.from_dense(tri)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_from_dense_of_nothing(shape):
    assert ColumnMask.from_dense(torch.ones(shape, dtype=torch.bool)).dense(*shape).shape == (1, 1, *shape)


def test_vectors_broadcast_to_one_shape():
    mask = ColumnMask(torch.full((2, 1, 5), 4, dtype=torch.int32), ute=torch.full((1, 3, 5), 1, dtype=torch.int32))
    resolved = mask.resolve(6, 5)
    assert resolved.lts.shape == resolved.ute.shape == (2, 3, 5)
    strided = ColumnMask(torch.arange(10, dtype=torch.int32)[::2])
    assert strided.resolve(9, 5).lts.is_contiguous() and strided.resolve(9, 5).lts.flatten().tolist() == [
        0,
        2,
        4,
        6,
        8,
    ]


def test_values_outside_the_rows_act_as_clamped():
    mask = ColumnMask(vector(-5, 9, 2**31 - 1), vector(2, 99, 3), vector(-9, 3, 2), vector(-1, 2, 2**31 - 1))
    assert mask.dense(4, 3)[0, 0].T.tolist() == [
        [False, False, True, True],
        [True] * 4,
        [True, True, False, False],
    ]
    assert mask.density(4, 3) == 8 / 12


@pytest.mark.parametrize("name", SAMPLERS)
def test_pytree(name):
    sample = SAMPLERS[name](random.Random(name))
    q, k = sample.seqlen_q, sample.seqlen_k
    mask = sample.mask & masks.SlidingWindow(5, 4)
    leaves, spec = _pytree.tree_flatten(mask)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec
    again = _pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
    assert type(again) is type(mask) and repr(again) == repr(mask)
    for copied in (again, copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        assert torch.equal(copied.dense(q, k), mask.dense(q, k))
    on_meta = _pytree.tree_map(lambda t: t.to("meta"), sample.mask).resolve(q, k, "meta")
    assert all(v.device.type == "meta" for v in on_meta[2:] if v is not None)


def test_resolved_vectors_are_kept_until_a_tensor_changes():
    lengths = torch.tensor([3, 5])
    mask = masks.Document(lengths)
    first = mask.resolve(8, 8)
    assert mask.resolve(8, 8).lts is first.lts
    assert mask.resolve(4, 8).lts is not first.lts and mask.resolve(8, 8).lts is first.lts
    lengths[0], lengths[1] = 4, 4
    assert mask.resolve(8, 8).lts.flatten().tolist() == [4] * 4 + [8] * 4
    both = mask & masks.Padding([[7], [6]][0])
    before = both.resolve(8, 8)
    assert both.resolve(8, 8).lts is before.lts
    lengths[0] = 2
    assert not torch.equal(both.resolve(8, 8).lts, before.lts)
    for length in range(20, 40):
        mask.resolve(length, length)
    assert len(mask._cache) <= 8
    assert "_cache" not in pickle.loads(pickle.dumps(mask)).__dict__


def test_a_stream_and_a_graph_keep_vectors_of_their_own(monkeypatch):
    """A stream waits for none that made the same vectors; a graph reads what it was captured with as long as the mask lives."""
    on, device = {"stream": 0, "capturing": False}, torch.device("cuda", 0)
    mask, resolve = masks.Document([3, 5]), masks.Document._resolve
    monkeypatch.setattr(masks.Document, "_resolve", lambda self, q, k, device: resolve(self, q, k, torch.device("cpu")))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: on["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on["capturing"])

    def vectors(length=8):
        return mask.resolve(length, length, device).lts

    first = vectors()
    on["stream"] = 7
    other = vectors()
    assert other is not first and vectors() is other
    on["stream"] = 0
    assert vectors() is first
    on.update(stream=9, capturing=True)
    captured = weakref.ref(vectors())
    with pytest.raises(ValueError, match="no CUDA graph capture can copy"):
        vectors(9)
    on.update(stream=0, capturing=False)
    del first, other
    for length in range(20, 40):
        vectors(length)
    assert captured() is not None and len(mask._cache) <= 8
    assert "_captured" not in pickle.loads(pickle.dumps(mask)).__dict__


def test_vectors_resolved_in_inference_mode_serve_autograd_later():
    mask = masks.Document(torch.tensor([3, 5]))
    with torch.inference_mode():
        resolved = mask.resolve(8, 8)
        made_here = masks.Document(torch.tensor([3, 5]))
        assert torch.equal(made_here.resolve(8, 8).lts, resolved.lts)
    assert not resolved.lts.is_inference() and mask.resolve(8, 8).lts is resolved.lts
    assert torch.equal(made_here.resolve(8, 8).lts, resolved.lts)


def test_fake_tensors_are_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mask = masks.Chunked(3)
    with FakeTensorMode():
        mask.resolve(8, 8)
    assert type(mask.resolve(8, 8).lts) is torch.Tensor


def test_known_lengths_need_no_sizes():
    assert masks.Document([3, 2]).dense().shape == (1, 1, 5, 5)
    assert masks.Tree([-1, 0]).density() == 0.75
    assert masks.BlockDiffusion(4, 2).dense(3).shape == (1, 1, 3, 8)
    assert ColumnMask(vector(2, 2)).tiles(1, 1).shape == (2, 2)


def test_repr():
    assert repr(masks.Document([3, 5])) == "Document([3, 5])"
    assert repr(masks.Document([[3], [1, 1]], causal=False)) == "Document([[3, 0], [1, 1]], causal=False)"
    assert repr(masks.Document.from_cu_seqlens(torch.arange(100))) == "Document.from_cu_seqlens(<int64 1x100>)"
    assert repr(masks.Padding([4, 2])) == "Padding([4, 2])"
    assert repr(masks.Padding([4, 2]) & masks.Causal()) == "Padding([4, 2]) & Causal()"
    assert repr(masks.PrefixLM([3, 4])) == "PrefixLM(prefix=[3, 4])"
    assert repr(ColumnMask(vector(1, 2), causal=True)) == "ColumnMask(lts=[1, 2], causal=True)"
    assert repr(ColumnMask(None, ute=vector(1, 2))) == "ColumnMask(ute=[1, 2])"
    assert repr(masks.SlidingWindow(3)) == "SlidingWindow(left=3, right=0)"


V = vector(1, 2, 3)
ERRORS = [
    (
        lambda: ColumnMask(V.float()),
        TypeError,
        r"lts takes an int32 .*float32 tensor of shape \(3,\); use .to\(torch.int32\)",
    ),
    (lambda: ColumnMask(V > 1), TypeError, "for a dense mask use ColumnMask.from_dense"),
    (lambda: ColumnMask([1, 2]), TypeError, "lts takes an int32 tensor .*got list"),
    (
        lambda: ColumnMask(V.view(1, 3)),
        ValueError,
        r"lts takes shape \(batch\|1, heads\|1, seqlen_k\) or \(seqlen_k,\)",
    ),
    (lambda: ColumnMask(V, V[:2]), ValueError, r"lte has shape \(1, 1, 2\) but lts has \(1, 1, 3\)"),
    (lambda: ColumnMask(V, uts=V), ValueError, "give ute too"),
    (lambda: ColumnMask(None, V, ute=V), ValueError, "give lts too"),
    (lambda: ColumnMask(None), ValueError, r"use Full\(\) or Causal\(\)"),
    (lambda: ColumnMask(V, causal=1), TypeError, "causal takes a bool, got int 1"),
    (lambda: ColumnMask(V).resolve(3, 4), ValueError, "the mask has length 3, but the keys have seqlen_k 4"),
    (lambda: ColumnMask(V).resolve(-1, 3), ValueError, "seqlen_q must be at least 0, got -1"),
    (lambda: ColumnMask.from_startend_row_indices(V, True), ValueError, r"\(batch, heads, seqlen_k, n\)"),
    (lambda: ColumnMask.from_startend_row_indices(V.view(1, 1, 1, 3), True), ValueError, "n=3, causal=True"),
    (
        lambda: ColumnMask.from_startend_row_indices(V.view(1, 1, 3, 1), False),
        ValueError,
        "n=1, causal=False",
    ),
    (lambda: ColumnMask.from_dense(V), TypeError, "from_dense takes a bool tensor"),
    (lambda: ColumnMask.from_dense(V > 1), ValueError, r"from_dense takes shape .* got \(3,\)"),
    (lambda: masks.Causal() & (V > 1), TypeError, "ColumnMask.from_dense"),
    (lambda: masks.SlidingWindow(1.5), TypeError, r"left takes an int or None \(unlimited\), got float 1.5"),
    (lambda: masks.SlidingWindow(True), TypeError, "left takes an int"),
    (lambda: masks.Chunked(0), ValueError, "size must be at least 1, got 0"),
    (
        lambda: masks.Document([3, -1]),
        ValueError,
        r"lengths must hold document lengths of at least 0, got -1 at \[0, 1\]",
    ),
    (lambda: masks.Document([3.0]), TypeError, "lengths takes document lengths.*it holds float 3.0"),
    (lambda: masks.Document(torch.ones(3)), TypeError, "float32 tensor"),
    (lambda: masks.Document("35"), TypeError, "got str '35'"),
    (lambda: masks.Document([3, [2]]), TypeError, "mixes ints and lists"),
    (
        lambda: masks.Document([3, 4]).resolve(5, 5),
        ValueError,
        "lengths sum to 7 in batch entry 0, but there are only 5 keys",
    ),
    (
        lambda: masks.Document.from_cu_seqlens([0, 4, 2]),
        ValueError,
        r"must not decrease, got \[4, 2\] at index 2",
    ),
    (
        lambda: masks.Document.from_cu_seqlens([0, 9]).resolve(5, 5),
        ValueError,
        "cu_seqlens ends at 9, but there are only 5 keys",
    ),
    (lambda: masks.Document.from_cu_seqlens([]), ValueError, "holds at least its leading 0"),
    (
        lambda: masks.Document.from_segment_ids([0, 1, 0]),
        ValueError,
        "id 0 comes back at key 2 of batch entry 0",
    ),
    (
        lambda: masks.Document.from_position_ids([0, 1]).resolve(3, 3),
        ValueError,
        "position_ids has length 2, .* seqlen_k 3",
    ),
    (lambda: masks.Padding(torch.ones(3)), TypeError, "or lengths"),
    (lambda: masks.Padding([[1, 1], [1]]), ValueError, "differ in length"),
    (lambda: masks.Padding([2, -2]), ValueError, "at least 0, got -2"),
    (lambda: masks.Padding([[1, 0]]).resolve(3, 3), ValueError, "has length 2, but the keys have seqlen_k 3"),
    (lambda: masks.PrefixLM(-1), ValueError, "prefix must be at least 0, got -1"),
    (lambda: masks.PrefixLM(torch.ones(2, 2, dtype=torch.int32)), ValueError, "one int per batch entry"),
    (lambda: masks.PrefixDocument([3, 2], [1]), ValueError, "prefixes holds 1 values a row, but lengths 2"),
    (lambda: masks.SharedQuestion(3, [4]).resolve(5, 5), ValueError, "question and answers sum to 7"),
    (lambda: masks.Tree([-1, 1]), ValueError, "node 1 of batch entry 0 has parent 1"),
    (lambda: masks.Tree([-1, 0, 0, 1]), ValueError, "node 3 .* has parent 1.*preorder"),
    (lambda: masks.Tree([-1, -2, 0]), ValueError, "node 2 of batch entry 0 comes after padding"),
    (lambda: masks.Tree([-1, 0]).resolve(1, 1), ValueError, "holds 2 nodes, but there are only 1 keys"),
    (
        lambda: masks.BidirectionalSpans([0, 2], [3, 2]),
        ValueError,
        r"must not overlap, got \[0, 3\) and \[2, 4\)",
    ),
    (lambda: masks.BidirectionalSpans([0, 2], [3]), ValueError, "lengths holds 1 values a row, but starts 2"),
    (lambda: masks.QKSparse([7]).resolve(4, 4), ValueError, "names position 7, but there are only 4 keys"),
    (lambda: masks.RandomEviction([1, 2]).resolve(3, 3), ValueError, "rows has length 2"),
    (lambda: masks.RandomEviction(torch.ones(1, 1, 2)), TypeError, "takes integers"),
    (
        lambda: masks.BlockDiffusion(4, 2).resolve(8, 9),
        ValueError,
        "together has length 8, but the keys have seqlen_k 9",
    ),
    (lambda: masks.CausalBlockwise([[2, 2], [9, 9]]).resolve(4, 4), ValueError, "sum to 18 in batch entry 1"),
]


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors_in_words(case):
    call, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        call()
