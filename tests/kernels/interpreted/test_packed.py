"""Slots of packed tokens: every token is in one, whatever the boundaries hold."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from warploom.kernels.triton.packed import find_tile, span


@triton.jit
def _tiles_kernel(cu_ptr, out_ptr, sequences, total, SIZE: tl.constexpr):
    slot = tl.program_id(0)
    sequence, row, start, length = find_tile(slot, cu_ptr, sequences, total, SIZE)
    out = out_ptr + slot * 4
    tl.store(out, sequence)
    tl.store(out + 1, row)
    tl.store(out + 2, start)
    tl.store(out + 3, length)


@triton.jit
def _span_kernel(cu_ptr, out_ptr, sequences, total):
    sequence = tl.program_id(0)
    start, length = span(sequence, cu_ptr, sequences, total)
    tl.store(out_ptr + sequence * 2, start)
    tl.store(out_ptr + sequence * 2 + 1, length)


def tiles(cu: list[int], total: int, size: int) -> list[list[int]]:
    sequences, slots = len(cu) - 1, total // size + len(cu)
    out = torch.empty(slots, 4, dtype=torch.int32)
    _tiles_kernel[(slots,)](torch.tensor(cu, dtype=torch.int32), out, sequences, total, SIZE=size)
    return out.tolist()


@pytest.mark.parametrize("size", [16, 64])
def test_every_token_is_in_one_slot_of_its_sequence(size: int) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    lengths = [draw.choice((0, 1, size - 1, size, size + 1, draw.randrange(3 * size))) for _ in range(draw.randrange(12))]
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    total = cu[-1] + draw.randrange(2 * size)
    rows: list[tuple[int, int]] = []
    for sequence, row, start, length in tiles(cu, total, size):
        if 0 <= row < length:
            assert start == cu[sequence], f"seed {seed}"
            rows += [(sequence, start + row + n) for n in range(min(size, length - row))]
    # Tokens past the last sequence are one more.
    want = [(n, t) for n, (a, b) in enumerate(zip(cu, [*cu[1:], total], strict=True)) for t in range(a, b)]
    assert sorted(rows) == want, f"seed {seed}"


def test_bad_boundaries_stay_within_the_tokens() -> None:
    for cu in ([-5, 90, 20, 300], [0, 2**31 - 1, -(2**31), 7], [50, 40, 30, 20]):
        for _, row, start, length in tiles(cu, 100, 16):
            assert 0 <= start <= 100 and (not 0 <= row < length or start + length <= 100)


def test_a_span_past_the_last_sequence_is_empty() -> None:
    out = torch.empty(5, 2, dtype=torch.int32)
    _span_kernel[(5,)](torch.tensor([0, 7, 7, 130], dtype=torch.int32), out, 3, 100)
    assert out.tolist()[:3] == [[0, 7], [7, 0], [7, 93]]
    assert out[3:, 1].tolist() == [0, 0]
