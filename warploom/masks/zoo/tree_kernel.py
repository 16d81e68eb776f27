"""The column vector of a tree of tokens in one launch, from the parents of its nodes on a GPU."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.masks.zoo.launched import empty_vector, loads
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import Launch

# Columns of a program, nodes that it compares all of them with at once, and nodes that it passes at once behind its own.
COLUMNS, NODES, CHUNK = 256, 32, 4096
_NOWHERE = tl.constexpr(2**31 - 1)
_FAR = tl.constexpr(2**30)

_PLAIN = ["parents_ptr", "step", "step_batch", "lts_ptr", "count", "blocks", "seqlen_q", "seqlen_k"]


@triton.jit(do_not_specialize=_PLAIN)
def tree_kernel(
    parents_ptr, step_batch: tl.int64, step: tl.int64, lts_ptr, count, blocks, seqlen_q, seqlen_k,
    COLUMNS: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The first row after the subtree of each column of a block of one batch entry.

    In preorder that is the row of the first node behind the column whose parent lies before it. Columns whose subtrees go on
    behind the block lie on one path. The program walks on until the last of these has ended, CHUNK nodes at once, and stops
    once at each node where some end: n nodes take at most n / CHUNK such steps, and one more for each branch of that path.
    """
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    top = pid % blocks * COLUMNS
    cols = top + tl.arange(0, COLUMNS)
    parents = parents_ptr + batch * step_batch
    end = tl.full([COLUMNS], _NOWHERE, tl.int32)
    for first in range(top, top + COLUMNS, NODES):
        near = first + tl.arange(0, NODES)
        above = _parents(parents, step, near, count)
        ends = (near[None, :] > cols[:, None]) & (above[None, :] < cols[:, None])
        end = tl.minimum(end, tl.min(tl.where(ends, near[None, :], _NOWHERE), 1))
    unended = tl.where((end == _NOWHERE) & (cols < count), cols, -1)
    deepest = tl.max(unended, 0)
    below = top + COLUMNS
    while deepest >= 0:
        nodes = below + tl.arange(0, CHUNK)
        over = _parents(parents, step, nodes, count)
        at = tl.min(tl.where(over < deepest, nodes, _NOWHERE), 0)
        while at != _NOWHERE:
            parent = tl.maximum(tl.max(tl.where(nodes == at, over, -_FAR), 0), -1)
            end = tl.where(unended > parent, at, end)
            unended = tl.where(unended > parent, -1, unended)
            deepest = tl.max(unended, 0)
            at = tl.min(tl.where((over < deepest) & (deepest >= 0), nodes, _NOWHERE), 0)
        below += CHUNK
    row = tl.minimum(tl.maximum(end - (seqlen_k - seqlen_q), 0), seqlen_q)
    hidden = _parents(parents, step, cols, count) < -1
    tl.store(lts_ptr + batch * seqlen_k + cols, tl.where(hidden, 0, row), mask=cols < seqlen_k)


@triton.jit
def _parents(parents, step, nodes, count):
    """Below -1 behind the last node, as of padding."""
    found = tl.load(parents + nodes * step, mask=nodes < count, other=-2).to(tl.int64)
    return tl.minimum(tl.maximum(found, -_FAR), _FAR).to(tl.int32)


def tree_vector(parents: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """lts, int32 (batch, 1, seqlen_k); None where it cannot be launched now.

    Args:
        parents: integers (batch, n) of any strides, as `Tree` takes them.
    """
    launch, (batch, count) = _launch(parents.dtype), parents.shape
    if not loads(parents, launch):
        return None
    lts = empty_vector(batch, seqlen_k, parents.device)
    blocks = -(-seqlen_k // COLUMNS)
    if lts.numel():
        with on_device(parents):
            launch((batch * blocks, 1), parents, *parents.stride(), lts, count, blocks, seqlen_q, seqlen_k)
    return lts


@cache
def _launch(dtype: torch.dtype) -> Launch:
    constants = {"COLUMNS": COLUMNS, "NODES": NODES, "CHUNK": CHUNK, "num_warps": 8}
    return Launch(tree_kernel, constants, direct=True)
