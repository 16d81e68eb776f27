"""After a draft: the tokens that were accepted stay in the cache, side by side, and the others leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warploom.runtime import arguments


def accept(
    tensors: Sequence[Tensor], lengths: Tensor, block_table: Tensor | None, path: Any, drafted: Any
) -> None:
    """`KVCache.accept` on bare tensors that hold something of each token; in torch ops, none of which waits for a device."""
    drafted = arguments.integer("drafted", drafted, 0)
    path = _checked(path, drafted, lengths)
    pages, page_size = tensors[0].shape[:2]
    capacity = page_size if block_table is None else block_table.shape[1] * page_size
    if not path.shape[0] or not capacity or not pages:
        return
    order = torch.arange(path.shape[1], device=path.device)
    # What comes behind a negative entry is not of the path either: each such slot is written with what it holds.
    kept = ((path >= 0) & (path < drafted)).to(torch.int32).cumprod(1)
    first = (lengths.clamp(0, capacity) - drafted).clamp(min=0)
    source, target = (
        (first[:, None] + nth).clamp(max=capacity - 1) for nth in (torch.where(kept > 0, path, order), order.expand_as(path))
    )
    if block_table is None:
        row = torch.arange(path.shape[0], device=path.device)[:, None]
        old, new = (row, source), (row, target)
    else:
        old, new = (
            (block_table.gather(1, at // page_size).clamp(0, pages - 1).long(), at % page_size) for at in (source, target)
        )
    for t in tensors:
        t[new] = t[old]  # the right side is a copy: no token is overwritten before it is read
    lengths.copy_(first + kept.sum(1))


def _checked(path: Any, drafted: int, lengths: Tensor) -> Tensor:
    """path as int64 (batch, n)."""
    if path is None:
        raise TypeError("path must be an integer tensor, got None")
    path = arguments.int32("path", path, 2, lengths, "the cache").long()
    if path.shape[0] != lengths.shape[0] or path.shape[1] > drafted:
        raise ValueError(
            f"path must have shape (batch, n) = ({lengths.shape[0]}, at most drafted = {drafted}), got {tuple(path.shape)}"
        )
    if arguments.readable(path):
        if lengths.numel() and int(lengths.min()) < drafted:
            raise ValueError(f"drafted is {drafted}, but a sequence of the cache holds {int(lengths.min())} keys")
        ended = (path < 0).int().cumsum(1) > 0
        bad = (path < -1) | (path >= drafted) | (ended & (path >= 0))
        if bool(bad.any()):
            row, n = bad.nonzero()[0].tolist()
            raise ValueError(
                f"path[{row}, {n}] is {int(path[row, n])}; it takes tokens from 0 to drafted - 1 = {drafted - 1}, and -1 "
                "behind the last"
            )
    return path
