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


@triton.jit(do_not_specialize=["parents_ptr", "step_batch", "step", "bits_ptr", "count", "left", "right"])
def ancestors_kernel(
    parents_ptr, step_batch: tl.int64, step: tl.int64, bits_ptr, count, left, right, NODES: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Bit a of word t: whether token a is t or an ancestor of it. One program a tree; all its tokens walk up at once.

    A parent that is no earlier token makes a root: every step goes down in number, so walks end and stay inside.
    With WINDOW a bit is set only where a window counted in steps shows the ancestor, -right <= steps <= left, and after a
    tree's words follow the depths of its tokens.
    """
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    parents = parents_ptr + tree * step_batch
    bits = tl.zeros((NODES,), tl.int64)
    at = tl.where(node < count, node, -1)
    if WINDOW:
        bits_ptr += tree * count
        steps = 0
        depth = tl.full((NODES,), -1, tl.int64)
    while tl.max(at, 0) >= 0:
        one = tl.full((NODES,), 1, tl.int64) << tl.maximum(at, 0).to(tl.int64)
        if WINDOW:
            shown = (at >= 0) & (steps + right >= 0) & (steps <= left)
            depth += tl.where(at >= 0, 1, 0)
            steps += 1
        else:
            shown = at >= 0
        bits = tl.where(shown, bits | one, bits)
        above = tl.load(parents + at * step, mask=at >= 0, other=-1)
        at = tl.where((above >= 0) & (above < at), above, -1)
    tl.store(bits_ptr + tree * count + node, bits, mask=node < count)
    if WINDOW:
        tl.store(bits_ptr + tree * count + count + node, depth, mask=node < count)


def ancestors(parents: Tensor, window: tuple[int, int] | None) -> Tensor:
    """int64 (batch, T) of parents int32 (batch, T), on the current device and stream.

    With a window (left, right) the bits of what it shows, and beside them the depths: (batch, 2 T).
    """
    batch, count = parents.shape
    bits = parents.new_empty((batch, count if window is None else 2 * count), dtype=torch.int64)
    left, right = (None, None) if window is None else window
    _launch(window is not None)((batch, 1), parents, *parents.stride(), bits, count, left, right)
    return bits


@cache
def _launch(window: bool) -> Launch:
    return Launch(ancestors_kernel, {"NODES": _NODES, "WINDOW": window, "num_warps": 2}, direct=True)
