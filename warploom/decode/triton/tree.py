"""The ancestors of a tree's tokens as the bits of one word each, in one small launch from their parents."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.runtime.triton_launch import Launch

# Tokens of a tree at most: the bits of a word.
_NODES = 64


@triton.jit(do_not_specialize=["parents_ptr", "step_batch", "step", "bits_ptr", "count"])
def ancestors_kernel(parents_ptr, step_batch: tl.int64, step: tl.int64, bits_ptr, count, NODES: tl.constexpr):
    """Bit a of word t: whether token a is t or an ancestor of it. One program a tree; all its tokens walk up at once.

    A parent that is no earlier token makes a root: every step goes down in number, so walks end and stay inside.
    """
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    parents = parents_ptr + tree * step_batch
    bits = tl.zeros((NODES,), tl.int64)
    at = tl.where(node < count, node, -1)
    while tl.max(at, 0) >= 0:
        one = tl.full((NODES,), 1, tl.int64) << tl.maximum(at, 0).to(tl.int64)
        bits = tl.where(at >= 0, bits | one, bits)
        above = tl.load(parents + at * step, mask=at >= 0, other=-1)
        at = tl.where((above >= 0) & (above < at), above, -1)
    tl.store(bits_ptr + tree * count + node, bits, mask=node < count)


def ancestors(parents: Tensor) -> Tensor:
    """int64 (batch, T) of parents int32 (batch, T), on the current device and stream."""
    batch, count = parents.shape
    bits = parents.new_empty((batch, count), dtype=torch.int64)
    _launch()((batch, 1), parents, *parents.stride(), bits, count)
    return bits


@cache
def _launch() -> Launch:
    return Launch(ancestors_kernel, {"NODES": _NODES, "num_warps": 2}, direct=True)
