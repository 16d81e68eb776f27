"""Where a block works. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.packed import locate


class Place(Fields):
    """A chunk of a sequence."""

    batch: Any
    start: Any  # row of the sequence's first token in its batch
    first: Any  # first token of the chunk, counted from there
    live: Any  # tokens of the sequence that count


@cute.jit
def place_of_slot(slot, lengths, cu, seqlen, chunk):
    """The chunk of a slot; one whose first token does not count is to be left alone. Called by whole warps."""
    batch, start, first, live = Int32(0), Int32(0), Int32(0), Int32(0)
    if cu.shape[0] > 0:
        _, start, live, number = locate(cu, slot, chunk, seqlen)
        first = number * chunk
    else:
        chunks = (seqlen + chunk - 1) // chunk
        batch = slot // chunks
        first = (slot - batch * chunks) * chunk
        live = Int32(seqlen)
        if lengths.shape[0] > 0:
            live = cutlass.min(cutlass.max(lengths[batch], 0), seqlen)
    return batch, start, first, live
