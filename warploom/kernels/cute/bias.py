"""Additive biases on the device. Imports the CuTe DSL.

ALiBi adds -slope · |d| with d = p - j + origin. Kernels count columns from a tile's first, so that along a side of the diagonal
a thread's elements differ by constants.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from warploom.kernels.cute.basics import LOG2_E
from warploom.kernels.cute.fields import Fields


class Slopes(Fields):
    """ALiBi's slopes in global memory."""

    values: Any  # fp32 (batch|1, heads_q), contiguous
    origin: Any  # of distances


def slopes_of(bias: Any) -> Slopes | None:
    """Of the tuple that the host passes, values, origin and what of a reach there is; None of None."""
    if bias is None:
        return None
    values, origin, *_ = bias
    return Slopes(values=values, origin=origin)


@cute.jit
def slope_of(slopes, batch, head):
    """A head's slope in log2 units; of a batch entry or head past the last one any."""
    batches, heads = slopes.values.shape
    own = slopes.values[cutlass.min(batch, batches - 1), cutlass.min(head, heads - 1)]
    return own * LOG2_E
