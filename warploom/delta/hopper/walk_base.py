"""What the roles of a walk share. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warploom.delta.hopper.config import CHUNK, BackConfig, KeepConfig, WalkConfig
from warploom.kernels.cute.basics import DTYPES, WARPGROUP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import store_shared
from warploom.kernels.cute.packed import RAGGED, bounds, first_tile


class WalkShared(Fields):
    """A block's shared memory. Barriers are addresses of the first of the ring's."""

    full: Any
    empty: Any
    q: Any  # (chunk, width, stage)
    k: Any
    boxes_q: Any  # the same as TMA fills it, (chunk, COLUMNS, box)
    boxes_k: Any
    v: Any  # (chunk, COLUMNS, stage and warpgroup)
    v_start: Any  # pointers
    matrices: Any  # (chunk, chunk, stage and which): (I + A)⁻¹ - I, then P
    matrices_start: Any
    numbers: Any  # of each stage
    out: Any  # (chunk, COLUMNS, warpgroup)
    out_start: Any


class WalkPart(Fields):
    """What a block works on."""

    shared: WalkShared
    block: Any  # which columns of v and out, in tiles of COLUMNS: its first
    head: Any  # of values
    head_qk: Any
    batch: Any
    sequence: Any
    start: Any  # row of the sequence's first token in its batch
    rows: Any  # the sequence's tokens
    live: Any  # those that count
    chunks: Any  # that hold any of these
    slot: Any  # of the first chunk


class WalkBase:
    """Sizes of one configuration."""

    def __init__(self, config: WalkConfig | KeepConfig | BackConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.boxes = config.width // 64  # of a chunk of q or k

    @cute.jit
    def clear(self, address, size):
        """Zeros, which stay where no copy ever goes."""
        threads = (1 + self.config.warpgroups) * WARPGROUP
        own = cute.arch.thread_idx()[0] * 16
        whole = size // (16 * threads)
        for i in cutlass.range_constexpr(whole):
            store_shared(address + own, i * 16 * threads, [Float32(0.0)] * 4)
        if own < size - whole * 16 * threads:
            store_shared(address + own, whole * 16 * threads, [Float32(0.0)] * 4)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def tokens(self, sequence, lengths, cu, seqlen):
        """Batch, first row, rows, those that count and the first slot of a sequence; past the packed ones none counts."""
        batch, start, rows, live = sequence, Int32(0), Int32(seqlen), Int32(seqlen)
        slot = sequence * cute.ceil_div(seqlen, CHUNK)
        if cu.shape[0] > 0:
            batch = Int32(0)
            packed = Int32(cu.shape[0] - 1)
            start, live = bounds(cu, cutlass.min(sequence, packed - 1), seqlen)
            rows = live
            if sequence == packed:
                start = cutlass.min(cutlass.max(cu[packed], 0), seqlen)
                live, rows = Int32(0), seqlen - start
            slot = first_tile(cu, cutlass.min(sequence, packed), CHUNK, seqlen)
        else:
            if lengths.shape[0] > 0:
                live = cutlass.min(cutlass.max(lengths[sequence], 0), seqlen)
        return batch, start, rows, live, slot


@cute.jit
def missed(seqlen, slots, size, per_sequence):
    """How many chunks, or slots, the first range of a backward pass has less than the others."""
    chunks = choose(per_sequence != 0, cute.ceil_div(seqlen, CHUNK), slots)
    return cute.ceil_div(chunks, size) * size - chunks


def place_of_y(head: Any, heads: Any, missing: Any) -> tuple[Any, Any]:
    """Which of two tensors like ``missing`` has the Y of one of so many value heads, and as which of its heads."""
    tensors = heads // missing.shape[2]
    return head % tensors, head // tensors


def ragged(t: Any) -> Any:
    """(tokens, dim, heads, batch) as (RAGGED, dim, heads, end, batch), of which ``rows_of`` takes a sequence."""
    layout = cute.make_layout(
        (RAGGED, *t.shape[1:3], t.shape[0] + 1, t.shape[3]), stride=(*t.stride[:3], t.stride[0], t.stride[3])
    )
    return cute.make_tensor(cute.domain_offset((-RAGGED, 0, 0, 0), t).iterator, layout)


def rows_of(t: Any, head: Any, batch: Any, start: Any, length: Any) -> Any:
    """(rows, dim) of a head of ``length`` tokens; TMA reads zeros past them and writes nothing there."""
    return cute.domain_offset((RAGGED - length, 0), t[None, None, head, start + length, batch])
