"""Packed and paged sequences: where they start and end, and how TMA reads them. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.kernels.cute.basics import choose

# A packed sequence is read by TMA as the end of a dimension of so many rows, past which TMA fills in zeros.
RAGGED = 1 << 24


def ragged(t: Any) -> Any:
    """A packed tensor (tokens, head_dim, heads) as (RAGGED, head_dim, heads, end).

    Tile row RAGGED - n + i of end e is token e - n + i, and rows of a sequence of n tokens that ends at e stop where it does.
    """
    layout = cute.make_layout((RAGGED, t.shape[1], t.shape[2], t.shape[0] + 1), stride=(*t.stride, t.stride[0]))
    return cute.make_tensor(cute.domain_offset((-RAGGED, 0, 0), t).iterator, layout)


def sequence_rows(t: Any, head: Any, end: Any, length: Any) -> Any:
    """(rows, head_dim) of a head of the sequence of ``length`` tokens that ends at ``end``, of a ``ragged`` tensor."""
    return cute.domain_offset((RAGGED - length, 0), t[None, None, head, end])


def page_rows(t: Any) -> Any:
    """Pages (page_size, head_dim, heads, pages) as (RAGGED, head_dim, heads, end, pages), as ``ragged`` has a packed tensor.

    Row RAGGED - n + i of end e is key e - n + i of the page, and rows that do not count stand past the last one.
    """
    layout = cute.make_layout(
        (RAGGED, t.shape[1], t.shape[2], t.shape[0] + 1, t.shape[3]), stride=(*t.stride[:3], t.stride[0], t.stride[3])
    )
    return cute.make_tensor(cute.domain_offset((-RAGGED, 0, 0, 0), t).iterator, layout)


@cute.jit
def bounds(cu, sequence, total):
    """Start and length of a sequence, inside of the packed tokens whatever the contents say."""
    start = cutlass.min(cutlass.max(cu[sequence], 0), total)
    return start, cutlass.max(cutlass.min(cu[sequence + 1], total) - start, 0)


@cute.jit
def seen_end(config, seqlen_k, right):
    """How many keys there are up to the last one that some query sees."""
    if const_expr(config.right):
        seqlen_k = cutlass.max(cutlass.min(seqlen_k, seqlen_k + right), 0)
    return seqlen_k


@cute.jit
def seen_keys(config, k_start, seqlen_k, shift, left, right):
    """Start, length and shift without the keys that no query of the sequence sees, and how many of those came first.

    So they stay outside of what TMA reads.
    """
    hidden = Int32(0)
    seqlen_k = seen_end(config, seqlen_k, right)
    if const_expr(config.left):
        hidden = cutlass.min(cutlass.max(shift - left, 0), seqlen_k)
        k_start += hidden
        seqlen_k -= hidden
        shift -= hidden
    return k_start, seqlen_k, shift, hidden


@cute.jit
def first_tile(cu, sequence, size, total):
    """Number of a sequence's first tile of ``size`` rows, which leaves none of two sequences."""
    return cutlass.min(cutlass.max(cu[sequence], 0), total) // size + sequence


@cute.jit
def locate(cu, tile, size, total):
    """Number, start and length of the packed sequence that a tile belongs to, and the tile's number in it.

    The lanes of a warp look at 32 sequences at a time, evenly spread: of up to 1024 a tile's is found by two loads.
    """
    last = Int32(cu.shape[0] - 2)
    lower, count = Int32(0), last + 1
    while count > 1:
        apart = (count + 31) // 32
        probe = lower + cute.arch.lane_idx() * apart
        begins = first_tile(cu, cutlass.min(probe, last), size, total) <= tile
        before = cute.arch.popc(cute.arch.vote_ballot_sync(begins and probe < lower + count))
        found = lower + cutlass.max(before - 1, 0) * apart
        count = cutlass.min(apart, lower + count - found)
        lower = found
    start, length = bounds(cu, lower, total)
    block = tile - first_tile(cu, lower, size, total)
    return lower, start, length, choose(block < 0, length // size + 1, block)
