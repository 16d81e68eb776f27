"""Leading keys that the sequences of a batch have in common: what a user says of them, or a block table shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom.runtime import arguments


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Which neighbours of a batch begin in the same pages; what `PagedKVCache.shared_prefix` found.

    Attributes:
        keys: int32 (batch + 1,) on the cache's device. Entry b: leading keys for which sequence b has the pages of b - 1, in
            whole pages and whatever their lengths, 0 for the first. The last entry is the largest one.
    """

    keys: Tensor

    def __post_init__(self) -> None:
        keys = arguments.strided("keys", self.keys)
        if keys.dtype != torch.int32 or keys.ndim != 1 or not keys.numel():
            raise TypeError(f"keys must be an int32 tensor of shape (batch + 1,), got {arguments.describe(keys)}")


torch.serialization.add_safe_globals([SharedPrefix])


def shared_prefix(block_table: Tensor, page_size: int) -> SharedPrefix:
    """What the equal leading columns of neighbouring rows of a table say; in torch ops, none of which waits for a device."""
    batch, width = block_table.shape
    keys = torch.zeros(batch + 1, dtype=torch.int32, device=block_table.device)
    if batch > 1 and width:
        column = torch.arange(width, device=block_table.device)
        differs = block_table[1:] != block_table[:-1]
        same = torch.where(differs, column, width).amin(1) * page_size
        keys[1:batch] = same.clamp(max=arguments.INT32[1])
        keys[batch] = keys[1:batch].amax()
    return SharedPrefix(keys)


def prefix_of(
    prefix: Any, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None, scales: list[Tensor]
) -> tuple[Tensor | None, int]:
    """A call's ``prefix`` as implementations read it: on the device, or keys of all sequences; looked at where it may be."""
    if prefix is None:
        return None, 0
    batch, keys = lengths.shape[0], None
    if isinstance(prefix, SharedPrefix):
        keys = prefix.keys
        if block_table is None:
            raise TypeError("prefix is a SharedPrefix, which is of pages; of a KVCache give the number of keys")
        if keys.shape != (batch + 1,):
            raise ValueError(f"prefix was found in a batch of {keys.shape[0] - 1}, but the cache holds {batch} sequences")
        if keys.device != k.device:
            raise ValueError(f"prefix is on {keys.device} but the cache is on {k.device}; move them to one device")
        keys = keys.contiguous()
        number = 0
    elif isinstance(prefix, Tensor):
        raise TypeError("prefix takes what cache.shared_prefix() returns, or a number of keys, not a tensor")
    else:
        number = arguments.integer("prefix", prefix, 0, arguments.INT32[1])
    if arguments.readable(k) and batch > 1:
        if keys is not None and int(keys[batch]) != int(keys[1:batch].max()):
            raise ValueError(
                f"the last entry of prefix.keys is {int(keys[batch])}, but must be the largest of the others, "
                f"{int(keys[1:batch].max())}"
            )
        claimed = torch.full_like(lengths[1:], number) if keys is None else keys[1:batch]
        claimed = torch.minimum(claimed, torch.minimum(lengths[1:], lengths[:-1])).clamp(min=0)
        wrong = _differing(claimed, [k, v, *scales]) if block_table is None else _elsewhere(claimed, block_table, k.shape[1])
        if wrong is not None:
            what = "keys" if block_table is None else "pages"
            again = "" if keys is None else "; when the table has changed, ask cache.shared_prefix() again"
            raise ValueError(
                f"prefix says that sequences {wrong} and {wrong + 1} share {int(claimed[wrong])} keys, but they begin with "
                f"other {what}{again}"
            )
    return keys, number


def _elsewhere(claimed: Tensor, block_table: Tensor, page_size: int) -> int | None:
    """The first pair of neighbours of which some page of the claimed keys differs."""
    used = torch.arange(block_table.shape[1], device=claimed.device) * page_size < claimed[:, None]
    bad = (used & (block_table[1:] != block_table[:-1])).any(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def _differing(claimed: Tensor, tensors: list[Tensor]) -> int | None:
    """The first pair of neighbours whose claimed keys are not the same bits."""
    for b, count in enumerate(claimed.tolist()):
        for t in tensors:
            one, other = (t[n, :count].contiguous().view(torch.uint8) for n in (b, b + 1))
            if not torch.equal(one, other):
                return b
    return None
