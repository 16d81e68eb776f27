"""A bias in the split kernel: what a tile of scores gets, and which of its keys that hides."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import LOG2E, clamp, in_log2, narrowed


@triton.jit
def bias_of_rows(bias_ptr, stride_b, stride_h, batch, head_q, row_live, KIND: tl.constexpr):
    """What `biased` takes of rows: slopes in log2 units, or pointers to the first entry or value. ``batch`` is int64."""
    if KIND == "alibi":
        return tl.load(bias_ptr + batch * stride_b + head_q, mask=row_live, other=0.0) * LOG2E
    else:
        return bias_ptr + batch * stride_b + head_q.to(tl.int64) * stride_h


@triton.jit
def places_of_keys(cols, tree_ptr, length, T: tl.constexpr, TREE: tl.constexpr):
    """Where keys stand: at their index, but those of a tree's tokens by the depths that ``tree_ptr`` holds."""
    if TREE:
        nth = cols - (length - T)
        depth = tl.load(tree_ptr + nth, mask=(nth >= 0) & (nth < T), other=0).to(tl.int32)
        return tl.where(nth < 0, cols, length - T + depth)
    else:
        return cols


@triton.jit
def biased(s, seen, rows, position, place, stride_k, entries, origin, KIND: tl.constexpr):
    """Scores in log2 units with the bias of those that are seen, and which of these -inf leaves; others are not read."""
    if KIND == "alibi":
        far = tl.abs(position[:, None] - place[None, :]).to(tl.float32)
        return tl.fma(far, tl.broadcast_to(-rows[:, None], far.shape), s), seen
    else:
        if KIND == "key":
            at = rows[:, None] + (tl.maximum(place, 0).to(tl.int64) * stride_k)[None, :]
        else:
            # Clamped first: near the last of 2^31 positions the sum would pass 32 bits.
            at = rows[:, None] + (clamp(position[:, None] - place[None, :], -origin, entries - 1 - origin) + origin)
        b = narrowed(tl.load(at, mask=seen, other=0.0))
        return s + in_log2(b), seen & (b != float("-inf"))
