"""mask_bounds against transformers' own dense mask, closure by closure."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import masking_utils as hf
from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay

from warploom.integrations.transformers.masks import mask_bounds
from warploom.integrations.transformers.recognise import recognise
from warploom.masks import ColumnMask

SEEDS = range(20)


def dense(bounds, q_length):
    assert bounds.dtype == torch.int32 and bounds.dim() == 4 and bounds.shape[1] == 1 and bounds.shape[3] == 4
    mask = ColumnMask.from_startend_row_indices(bounds, causal=False)
    return mask.dense(q_length, bounds.shape[2])


def expected(**call):
    call.pop("config", None)
    call.pop("allow_is_bidirectional_skip", None)
    return hf.sdpa_mask(**call, allow_is_causal_skip=False)


def check(known=True, **call):
    columns = (torch.arange(call["kv_length"]) + call.get("kv_offset", 0))[None]
    assert (recognise(call["mask_function"], columns) is not None) is known
    bounds = mask_bounds(**call)
    assert bounds.shape[0] == call["batch_size"]
    torch.testing.assert_close(dense(bounds, call["q_length"]), expected(**call))


def ids_of_runs(rng, batch, length, ids):
    rows = []
    for _ in range(batch):
        row = []
        while len(row) < length:
            row += [next(ids) if rng.random() < 0.6 else -1] * rng.randint(1, 5)
        rows.append(row[:length])
    return torch.tensor(rows)


def counter():
    n = 0
    while True:
        yield n
        n += 1


def closures(rng, batch, length):
    """Every closure transformers has, with arguments for positions up to `length`."""
    blocks = ids_of_runs(rng, batch, length, counter())
    window, chunk = rng.randint(1, 7), rng.randint(1, 7)
    left_padding = torch.tensor([rng.randint(0, 4) for _ in range(batch)])
    sliding = hf.sliding_window_causal_mask_function(window)
    return {
        "causal": hf.causal_mask_function,
        "bidirectional": hf.bidirectional_mask_function,
        "sliding": sliding,
        "sliding bidirectional": hf.sliding_window_bidirectional_mask_function(window),
        "chunked": hf.chunked_causal_mask_function(chunk, left_padding),
        "image blocks": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(blocks)),
        "image blocks, sliding": hf.and_masks(
            hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(blocks)),
            hf.sliding_window_overlay(window),
        ),
        "image blocks over sliding": hf.or_masks(sliding, hf.blockwise_overlay(blocks)),
        "gemma bidirectional": hf.or_masks(sliding, _bidirectional_window_overlay(window)),
        "padding": hf.and_masks(hf.causal_mask_function, hf.bidirectional_mask_function),
    }


NAMES = list(closures(random.Random(0), 1, 8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_closure_with_offsets_and_padding(name, seed):
    rng = random.Random(seed)
    batch, q_length, kv_length = rng.randint(1, 3), rng.randint(1, 12), rng.randint(1, 16)
    q_offset, kv_offset = rng.randint(0, 9), rng.randint(0, 5)
    reach = max(q_length + q_offset, kv_length + kv_offset) + rng.randint(0, 4)
    padding = None
    if rng.random() < 0.6:
        width = rng.randint(1, reach)
        padding = torch.tensor([[rng.random() < 0.7 for _ in range(width)] for _ in range(batch)])
    as_tensor = rng.random() < 0.5  # static caches give a 0-d tensor
    check(
        batch_size=batch,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=torch.tensor(q_offset) if as_tensor else q_offset,
        kv_offset=kv_offset,
        mask_function=closures(rng, batch, reach)[name],
        attention_mask=padding,
    )


def packed(inner, positions, documents, blocks=None):
    """As transformers composes them since 5.24, and before it where there are no blocks."""
    remapped, within = hf.remap_positions_for_packed_sequence(inner, positions), hf.packed_sequence_mask_function(documents)
    if blocks is not None:
        return [hf.and_masks(hf.or_masks(remapped, hf.blockwise_overlay(blocks)), within)]
    return [hf.and_masks(remapped, within), hf.and_masks(within, remapped)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", ["causal", "sliding", "chunked", "sliding bidirectional"])
def test_packed_documents_with_positions_of_their_own(inner, seed):
    rng = random.Random(seed)
    batch, length = rng.randint(1, 3), rng.randint(1, 24)
    positions = torch.zeros(batch, length, dtype=torch.long)
    for row in positions:
        at = 0
        while at < length:
            size = min(rng.randint(1, 9), length - at)
            row[at : at + size] = torch.arange(size) + (rng.randint(0, 3) if rng.random() < 0.3 else 0)
            at += size
    documents = hf.find_packed_sequence_indices(positions)
    if documents is None:
        documents = torch.zeros_like(positions)
    function, blocks = closures(rng, batch, length)[inner], torch.full((batch, length), -1)
    for row in blocks:
        edges = sorted(rng.sample(range(length + 1), min(4, length)))
        for i, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=False)):
            row[start:end] = i
    for mask_function in packed(function, positions, documents) + packed(function, positions, documents, blocks):
        check(batch_size=batch, q_length=length, kv_length=length, mask_function=mask_function)


def test_packed_documents_keep_image_blocks_of_indices_apart():
    # Blocks inside remapped positions index by position: not a range of indices, so the function is
    # evaluated.
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    blocks = torch.tensor([[0, 0, -1, -1, 1, 1, 1, -1]])
    inner = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(blocks))
    documents = hf.find_packed_sequence_indices(positions)
    for function in packed(inner, positions, documents):
        check(known=False, batch_size=1, q_length=8, kv_length=8, mask_function=function)


def test_unknown_functions_are_evaluated_exactly():
    def dilated_start(b, h, q, k):
        return (k <= q) & ((k != 3) | (q < 7))

    check(known=False, batch_size=2, q_length=11, kv_length=11, mask_function=dilated_start)
    check(known=False, batch_size=2, q_length=3, kv_length=11, q_offset=8, mask_function=dilated_start)


def test_unknown_functions_that_need_vmap():
    table = torch.tensor([0, 0, 1, 1, 1, 2])

    def same(b, h, q, k):
        return table[q] == table[k]

    function = hf.or_masks(hf.causal_mask_function, same)
    call = dict(batch_size=2, q_length=6, kv_length=6, mask_function=function, use_vmap=True)
    torch.testing.assert_close(dense(mask_bounds(**call), 6), expected(**call))


def test_evaluation_in_several_chunks_of_rows(monkeypatch):
    from warploom.integrations.transformers import evaluate

    monkeypatch.setattr(evaluate, "CHUNK_ELEMENTS", 2 * 13 * 2)  # two rows at a time

    def two_gaps(b, h, q, k):
        return ~(((q >= k - 4) & (q < k - 1)) | ((q >= k + 2) & (q < k + 5)))

    check(known=False, batch_size=2, q_length=13, kv_length=13, mask_function=two_gaps)


def test_three_hidden_runs_are_refused_in_words():
    def stripes(b, h, q, k):
        return (q + k) % 2 == 0

    with pytest.raises(ValueError, match=r"key 0 of batch row 0 is hidden from 4 separate runs.*sdpa"):
        mask_bounds(1, 8, 8, mask_function=stripes)


def test_repeated_ids_are_not_taken_for_one_run():
    ids = torch.tensor([[0, 0, 1, 0]])
    function = hf.and_masks(hf.bidirectional_mask_function, hf.packed_sequence_mask_function(ids))
    check(known=False, batch_size=1, q_length=4, kv_length=4, mask_function=function)
    blocks = torch.tensor([[0, -1, -1, 0]])
    function = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(blocks))
    check(known=False, batch_size=1, q_length=4, kv_length=4, mask_function=function)


def test_a_closure_that_changed_its_meaning_is_evaluated(monkeypatch):
    from warploom.integrations.transformers import recognise as module

    def sliding_window_overlay(sliding_window):
        def inner_mask(b, h, q, k):
            return k >= q - sliding_window  # one key wider than today's

        inner_mask.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
        inner_mask.__module__ = "transformers.masking_utils"
        return inner_mask

    monkeypatch.setattr(hf, "sliding_window_overlay", sliding_window_overlay)
    module._maker_holds.cache_clear()
    try:
        check(known=False, batch_size=1, q_length=9, kv_length=9, mask_function=sliding_window_overlay(3))
    finally:
        module._maker_holds.cache_clear()


def test_foreign_functions_with_known_names_are_evaluated():
    def causal_mask_function(b, h, q, k):
        return k < q + 2

    causal_mask_function.__qualname__ = "causal_mask_function"
    check(known=False, batch_size=1, q_length=6, kv_length=6, mask_function=causal_mask_function)


def test_none_only_for_unpadded_full_attention():
    class Bidirectional:
        is_causal = False

    full = dict(batch_size=2, q_length=5, kv_length=5, mask_function=hf.bidirectional_mask_function)
    assert mask_bounds(**full, allow_is_bidirectional_skip=True) is None
    assert mask_bounds(**full, allow_is_bidirectional_skip=True, config=object()) is None
    assert mask_bounds(**full) is not None
    assert mask_bounds(**full, allow_is_bidirectional_skip=True, config=Bidirectional()) is not None
    ones = torch.ones(2, 5, dtype=torch.bool)
    assert mask_bounds(**full, allow_is_bidirectional_skip=True, attention_mask=ones) is not None
    assert mask_bounds(2, 5, 5, mask_function=hf.causal_mask_function, allow_is_bidirectional_skip=True) is not None


def test_padding_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask.*\(batch, tokens\)"):
        mask_bounds(2, 5, 5, attention_mask=torch.ones(2, 1, 5))


class NoHostReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses every op that would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert "_local_scalar_dense" not in name and "nonzero" not in name and "is_nonzero" not in name, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n in NAMES if "image" not in n])
def test_recognised_masks_never_wait_for_the_device(name):
    rng = random.Random(1)
    function = closures(rng, 2, 20)[name]
    padding = torch.ones(2, 12, dtype=torch.bool)
    columns = torch.arange(12)[None]
    recognise(function, columns)  # the one-time trial reads its own small tensors
    with NoHostReads():
        mask_bounds(2, 6, 12, q_offset=torch.tensor(4), mask_function=function, attention_mask=padding)


@pytest.mark.parametrize("name", [n for n in NAMES if "image" in n])
def test_image_blocks_never_wait_for_a_device_other_than_the_cpu(name, monkeypatch):
    from warploom.integrations.transformers import recognise as module

    function = closures(random.Random(1), 2, 20)[name]
    recognise(function, torch.arange(12)[None])
    monkeypatch.setattr(module, "_readable", lambda ids: False)
    with NoHostReads():
        mask_bounds(2, 6, 12, q_offset=torch.tensor(4), mask_function=function)
