"""Masks built from tensors inside a compiled region: one graph, no recompiling from batch to batch, and torch.export."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from warploom import masks
from warploom.masks import ColumnMask, ResolvedMask
from warploom.masks.visible import visible


def lengths_of(generator, count, total):
    cuts = torch.randint(0, total + 1, (count - 1, count), generator=generator).sort(-1).values
    return torch.diff(cuts, prepend=torch.zeros(count - 1, 1, dtype=torch.long)).to(torch.int32)


def cu_of(generator, count, total):
    return torch.nn.functional.pad(lengths_of(generator, count, total).cumsum(1), (1, 0)).to(torch.int32)


def integers(low, high):
    return lambda generator, count, total: torch.randint(
        low, max(high(total), low + 1), (count - 1, total), generator=generator
    )


BUILD = {  # how a mask is made from one tensor, and the tensor drawn from (generator, count, seqlen_k)
    "document": (masks.Document, lengths_of),
    "bidirectional_document": (lambda t: masks.Document(t, causal=False), lengths_of),
    "cu_seqlens": (masks.Document.from_cu_seqlens, cu_of),
    "cu_seqlens_1d": (masks.Document.from_cu_seqlens, lambda g, n, k: cu_of(g, n, k)[0]),
    "segment_ids": (
        masks.Document.from_segment_ids,
        lambda g, n, k: integers(0, lambda _: 3)(g, n, k).sort().values,
    ),
    "position_ids": (masks.Document.from_position_ids, integers(0, lambda _: 3)),
    "padding_mask": (masks.Padding, lambda g, n, k: torch.rand(n - 1, k, generator=g) > 0.5),
    "padding_lengths": (masks.Padding, lambda g, n, k: torch.randint(0, k, (n - 1,), generator=g)),
    "prefix": (masks.PrefixLM, lambda g, n, k: torch.randint(0, k, (n - 1,), generator=g)),
    "prefix_document": (lambda t: masks.PrefixDocument(t, t // 2), lengths_of),
    "shared_question": (lambda t: masks.SharedQuestion(t[:, 0], t[:, 1:]), lengths_of),
    "global_window": (lambda t: masks.GlobalWindow(t[:, 0], 3, 2), lengths_of),
    "causal_blockwise": (masks.CausalBlockwise, lengths_of),
    "spans": (lambda t: masks.BidirectionalSpans(t.cumsum(1) - t, t // 3), lengths_of),
    "dropped": (masks.QKSparse, lambda g, n, k: torch.rand(n - 1, k, generator=g) > 0.5),
    "dropped_positions": (masks.QKSparse, integers(-1, lambda k: k)),
    "eviction": (masks.RandomEviction, integers(0, lambda k: k)),
    "columns": (lambda t: ColumnMask(t.to(torch.int32)[:, None], causal=True), integers(0, lambda k: k)),
    "chunked": (lambda t: masks.Chunked(5), lengths_of),
    "document_and_padding": (
        lambda t: masks.Document(t) & masks.Padding(t[:, 0]) & masks.SlidingWindow(4),
        lengths_of,
    ),
}


def dense(resolved, seqlen_q, seqlen_k):
    return visible(resolved, torch.arange(seqlen_q), torch.arange(seqlen_k), seqlen_k - seqlen_q)


@pytest.mark.parametrize("name", BUILD)
def test_one_graph_for_every_batch_and_length(name, seed):
    build, draw = BUILD[name]

    def resolve(t, q, k):
        return tuple(build(t).resolve(q.shape[0], k.shape[0]))

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(resolve, fullgraph=True, dynamic=True, backend=counter)
    generator = torch.Generator().manual_seed(seed)
    for count, seqlen_q, seqlen_k in ((4, 12, 20), (4, 12, 20), (4, 31, 24), (7, 16, 40), (5, 70, 33)):
        t = draw(generator, count, seqlen_k)
        q, k = torch.empty(seqlen_q), torch.empty(seqlen_k)
        expected, got = build(t).resolve(seqlen_q, seqlen_k), ResolvedMask(*compiled(t, q, k))
        assert torch.equal(dense(got, seqlen_q, seqlen_k), dense(expected, seqlen_q, seqlen_k)), f"{name} seed {seed}"
    assert counter.frame_count == 1, f"{counter.frame_count - 1} recompilations"


def test_tree_recompiles_only_when_its_length_doubles():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda t: masks.Tree(t).resolve(t.shape[1], t.shape[1]).lts,
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for count in (20, 20, 25, 31, 30):
        parents = torch.arange(-1, count - 1).unsqueeze(0)
        assert (compiled(parents) == count).all()
    assert counter.frame_count == 1


def test_a_mask_as_argument_of_a_compiled_function():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda mask, x: x + mask.resolve(x.shape[0], x.shape[0]).lts.flatten(),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for lengths in ([3, 5], [4, 4], [1, 7]):
        mask = masks.Document(torch.tensor(lengths))
        for _ in range(2):
            assert torch.equal(compiled(mask, torch.zeros(8)), mask.resolve(8, 8).lts.flatten().float())
    assert counter.frame_count == 1


class Attends(torch.nn.Module):
    def forward(self, mask, x):
        return x * mask.resolve(x.shape[0], x.shape[0]).lts.flatten()


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_mask_as_input(strict, tmp_path):
    mask = masks.Document.from_cu_seqlens(torch.tensor([0, 3, 8], dtype=torch.int32))
    program = torch.export.export(Attends(), (mask, torch.ones(8)), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2").module()
    other = masks.Document.from_cu_seqlens(torch.tensor([0, 5, 8], dtype=torch.int32))
    assert again(other, torch.ones(8)).tolist() == [5] * 5 + [8] * 3


def test_what_needs_values_refuses_while_compiling():
    a = ColumnMask(torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32))
    b = ColumnMask(torch.full((4,), 2, dtype=torch.int32), torch.full((4,), 3, dtype=torch.int32))
    c = ColumnMask(torch.full((4,), 1, dtype=torch.int32), torch.full((4,), 2, dtype=torch.int32))
    mask = a & b & c
    assert torch.equal(mask.dense(4, 4)[0, 0, :, 0], torch.tensor([False, False, False, True]))
    compiled = torch.compile(lambda x: mask.resolve(x.shape[0], x.shape[0]).lts, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="needs its values"):
        compiled(torch.empty(4))
