"""Sequences of a packed call, whose lengths only the device knows: `cu` has one boundary more than there are sequences.

Boundaries are clamped to the call's tokens, so that none reads or writes past them, whatever it holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import clamp


@triton.jit
def find_tile(slot, cu_ptr, sequences, total, size):
    """Sequence and first local row of a slot of `size` packed tokens: (sequence, row, first token, length).

    Slots of sequence i begin at cu[i] // size + i, enough for its tiles whatever its alignment, and need no scan. The
    tokens past the last sequence are number `sequences`. A slot without rows has a row outside [0, length).
    """
    started = 0
    for first in range(0, sequences + 1, 256):
        i = first + tl.arange(0, 256)
        cu = clamp(tl.load(cu_ptr + i, mask=i <= sequences, other=0), 0, total)
        started += tl.sum(((i <= sequences) & (cu // size + i <= slot)).to(tl.int32), 0)
    sequence = tl.maximum(started - 1, 0)
    start = clamp(tl.load(cu_ptr + sequence), 0, total)
    stop = clamp(tl.load(cu_ptr + tl.minimum(sequence + 1, sequences)), 0, total)
    stop = tl.where(sequence < sequences, stop, total)
    return sequence, (slot - start // size - sequence) * size, start, tl.maximum(stop - start, 0)


@triton.jit
def span(sequence, cu_ptr, sequences, total):
    """First token and length of a sequence; past the last one, length 0."""
    inside = sequence < sequences
    start = clamp(tl.load(cu_ptr + tl.minimum(sequence, sequences)), 0, total)
    stop = clamp(tl.load(cu_ptr + tl.minimum(sequence + 1, sequences)), 0, total)
    return start, tl.where(inside, tl.maximum(stop - start, 0), 0)
