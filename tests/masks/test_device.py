"""Masks on a GPU: no synchronisation, capture and replay, the same results."""

import random

import pytest
import torch
from torch.utils import _pytree

from warploom import masks

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


def test_pytree_moves_masks():
    mask = masks.Document([3, 5]) & masks.Padding([7])
    moved = _pytree.tree_map(lambda t: t.cuda(), mask)
    assert moved.device.type == "cuda" and torch.equal(moved.dense(8, 8).cpu(), mask.dense(8, 8))
