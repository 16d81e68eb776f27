"""Masks on a GPU: no synchronisation, capture and replay, the same results."""

import random

import pytest
import torch
from torch.utils import _pytree

from warploom import masks
from warploom.attention.bounds import BLOCK, COARSE_BLOCK, prepared_bounds

from .samples import SAMPLERS
from .test_compile import BUILD, dense

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", BUILD)
def test_building_from_device_tensors_never_synchronises(name, seed):
    build, draw = BUILD[name]
    t = draw(torch.Generator().manual_seed(seed), 4, 24)
    expected = build(t).resolve(20, 24)
    on_device = t.cuda()
    build(on_device).resolve(20, 24)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = build(on_device)
        resolved = mask.resolve(20, 24, "cuda")
        mask.tiles(8, 8, 20, 24)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_host = masks.ResolvedMask(*[v.cpu() if isinstance(v, torch.Tensor) else v for v in resolved])
    assert torch.equal(dense(on_host, 20, 24), dense(expected, 20, 24))


@pytest.mark.parametrize("name", SAMPLERS)
def test_same_on_device(name, seed):
    for round_ in range(10):
        rng = random.Random(f"{name} {seed} {round_}")
        sample = SAMPLERS[name](rng)
        q, k = sample.seqlen_q, sample.seqlen_k
        mask = sample.mask.to("cuda")
        assert torch.equal(mask.dense(q, k).cpu(), sample.mask.dense(q, k))
        if q and k:
            ours, theirs = mask.tiles(4, 4, q, k), sample.mask.tiles(4, 4, q, k)
            assert torch.equal(ours.matrix().cpu(), theirs.matrix())


@pytest.mark.parametrize("name", SAMPLERS)
def test_deterministic_algorithms_are_enough(name):
    sample = SAMPLERS[name](random.Random(name))
    torch.use_deterministic_algorithms(True)
    try:
        mask = sample.mask.to("cuda")
        mask.resolve(sample.seqlen_q, sample.seqlen_k)
        mask.tiles(4, 4, sample.seqlen_q, sample.seqlen_k)
    finally:
        torch.use_deterministic_algorithms(False)


def test_capture_recomputes_from_device_tensors():
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
    mask = masks.Document.from_cu_seqlens(cu)
    mask.resolve(8, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lts = mask.resolve(8, 8).lts
    cu[1] = 5
    graph.replay()
    assert lts.flatten().tolist() == [5] * 5 + [8] * 3


def ids_of(lengths, segments):
    if segments:
        return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.cat([torch.arange(n) for n in lengths])


def parents_of(lengths):
    """Chains, each of which hangs on the middle of the path that ends before it."""
    path, found = [], []
    for n in lengths:
        del path[len(path) // 2 :]
        for _ in range(n):
            found.append(path[-1] if path else -1)
            path.append(len(found) - 1)
    return torch.tensor(found)


def parts_of(length):
    """Lengths that sum to it, long and short ones and none."""
    rng = random.Random(length)
    found = []
    while sum(found) < length:
        found.append(min(rng.choice((0, 1, 7, 300, 2000, 6000)), length - sum(found)))
    return found


LAUNCHED = {  # a mask from lengths, made of a tensor on the device; and of how many vectors
    "documents": (lambda t: masks.Document(t, causal=False), 2),
    "causal documents": (masks.Document, 1),
    "cu_seqlens": (lambda t: masks.Document.from_cu_seqlens(torch.nn.functional.pad(t.cumsum(0), (1, 0))), 1),
    "segment ids": (lambda t: masks.Document.from_segment_ids(ids_of(t.tolist(), True).to(t.device), causal=False), 2),
    "causal segment ids": (lambda t: masks.Document.from_segment_ids(ids_of(t.tolist(), True).int().to(t.device)), 1),
    "position ids": (lambda t: masks.Document.from_position_ids(ids_of(t.tolist(), False).to(t.device), causal=False), 2),
    "causal position ids": (lambda t: masks.Document.from_position_ids(ids_of(t.tolist(), False).to(t.device)), 1),
    "prefix documents": (lambda t: masks.PrefixDocument(t, t // 3), 2),
    "shared question": (lambda t: masks.SharedQuestion(t[:1], t[1:]), 1),
    "blocks": (masks.CausalBlockwise, 3),
    "a tree": (lambda t: masks.Tree(parents_of(t.tolist()).to(t.device)), 1),
    "prefix": (lambda t: masks.PrefixLM(t[:1]), 1),
    "chunks": (lambda t: masks.Chunked(1 + max(t.tolist()) // 3), 1),
    "window": (lambda t: masks.GlobalWindow(t[:1], 30, 7), 3),
    "spans": (lambda t: masks.BidirectionalSpans(t.cumsum(0) - t, t // 2), 1),
}


@pytest.mark.parametrize("length", [1, 31, 1025, 32768, 100_003])
@pytest.mark.parametrize("name", LAUNCHED)
def test_vectors_by_one_launch_are_those_of_the_host(name, length):
    build, _ = LAUNCHED[name]
    for parts in (parts_of(length), [length], [length // 2, length - length // 2, 0]):
        lengths = torch.tensor(parts)
        for more in (0,) if "ids" in name else (0, 77):
            size = length + more
            found = build(lengths.cuda()).resolve(length // 2 + 1, size, "cuda")
            want = build(lengths.cuda()).to("cpu")._resolve(length // 2 + 1, size, torch.device("cpu"))
            if found.ute is not None and want.ute is None:  # blocks, whose padding only a host can see to be none
                want = want._replace(lts=torch.full_like(want.lts, length // 2 + 1), lte=None, uts=want.lts, ute=want.lte)
            for a, b in zip(found.vectors, want.vectors, strict=True):
                assert (a is None) == (b is None) and (a is None or torch.equal(a.cpu(), b)), parts[:5]


def test_ids_that_change_between_replays():
    ids = torch.zeros(1, 5000, dtype=torch.int64, device="cuda")
    mask = masks.Document.from_segment_ids(ids)
    mask.resolve(5000, 5000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lts = mask.resolve(5000, 5000).lts
    for cut in (1, 1024, 4999):
        ids.copy_(torch.arange(5000) >= cut)
        graph.replay()
        assert lts.flatten().tolist() == [cut] * cut + [5000] * (5000 - cut)


@pytest.mark.parametrize("name", LAUNCHED)
def test_preparing_takes_no_memory_but_vectors_and_bounds(name):
    """4 (n S + 8 blocks) bytes at the peak, and what the allocator rounds up."""
    build, count = LAUNCHED[name]
    lengths, length = torch.tensor(parts_of(32768), device="cuda"), 32768
    for _ in range(2):  # the first compiles
        mask = build(lengths)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        resolved = mask.resolve(length, length, "cuda")
        bounds = prepared_bounds(resolved, length, length)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak >= bounds.numel() * 4
    blocks = length // BLOCK + length // COARSE_BLOCK
    assert peak <= 4 * (count * length + 8 * blocks) + 512 * (count + 1), name


def test_capture_takes_host_masks_from_the_cache_or_refuses():
    mask = masks.Document([3, 5])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="no CUDA graph capture can copy"), torch.cuda.graph(graph):
        mask.resolve(8, 8, "cuda")
    kept = mask.resolve(8, 8, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert mask.resolve(8, 8, "cuda").lts is kept.lts
        total = kept.lts.sum()
    graph.replay()
    assert total.item() == 3 * 3 + 5 * 8


def test_each_stream_resolves_for_itself():
    mask = masks.Document(torch.tensor([3, 5], device="cuda"))
    first, side = mask.resolve(8, 8).lts, torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = mask.resolve(8, 8).lts
        assert mask.resolve(8, 8).lts is other
    torch.cuda.synchronize()
    assert other is not first and torch.equal(other, first) and mask.resolve(8, 8).lts is first


def test_pytree_moves_masks():
    mask = masks.Document([3, 5]) & masks.Padding([7])
    moved = _pytree.tree_map(lambda t: t.cuda(), mask)
    assert moved.device.type == "cuda" and torch.equal(moved.dense(8, 8).cpu(), mask.dense(8, 8))


def test_a_function_is_read_on_the_accelerator():
    """By default, as create_block_mask does it, with captured tensors there; deterministic algorithms are enough."""
    document = (torch.arange(300) // 70).cuda()

    def packed(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    torch.use_deterministic_algorithms(True)
    try:
        mask = masks.ColumnMask.from_mask_mod(packed, 300, 300)
        united = masks.Document([40, 260]).to("cuda") | mask
    finally:
        torch.use_deterministic_algorithms(False)
    truth = masks.Document([70, 70, 70, 70, 20]).dense(300, 300)
    assert mask.device.type == "cuda" and torch.equal(mask.dense(300, 300).cpu(), truth)
    assert torch.equal(united.dense(300, 300).cpu(), truth | masks.Document([40, 260]).dense(300, 300))
