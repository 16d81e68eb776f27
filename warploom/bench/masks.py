"""The masks of the benchmark: each as ours and as FlexAttention's mask_mod, of the same truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom import masks
from warploom.masks import Mask

MaskMod = Callable[[Any, Any, Any, Any], Any]
DOCUMENTS = 8


@dataclass(frozen=True)
class MaskPair:
    mask: Mask
    mask_mod: MaskMod


def pairs(seqlen: int, device: torch.device | str) -> dict[str, Callable[[], MaskPair]]:
    """By name, what makes each mask for seqlen queries and keys (a multiple of 128) on the device."""

    def column(values: Tensor) -> Tensor:
        return values.to(device=device, dtype=torch.int32)

    def documents(causal: bool) -> MaskPair:
        lengths = document_lengths(seqlen)
        number = torch.repeat_interleave(torch.arange(DOCUMENTS), lengths).to(device)

        def same(b: Any, h: Any, i: Any, j: Any) -> Any:
            return number[i] == number[j]

        def same_and_before(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (number[i] == number[j]) & (i >= j)

        return MaskPair(masks.Document(lengths.to(device), causal), same_and_before if causal else same)

    def prefix() -> MaskPair:
        length = seqlen // 4
        return MaskPair(masks.PrefixLM(length), lambda b, h, i, j: (i >= j) | (j < length))

    def shared_question() -> MaskPair:
        question, answer = seqlen // 4, seqlen // 8
        mask = masks.SharedQuestion(question, [answer] * 6)

        def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & ((j < question) | ((i - question) // answer == (j - question) // answer))

        return MaskPair(mask, mod)

    def global_window() -> MaskPair:
        mask = masks.GlobalWindow(64, 1023, 0)
        return MaskPair(mask, lambda b, h, i, j: (i >= j) & ((i - j < 1024) | (j < 64) | (i < 64)))

    def tree() -> MaskPair:
        parents = tree_parents(seqlen)
        end = subtree_ends(parents)
        ends = column(end)
        return MaskPair(masks.Tree(parents.to(device)), lambda b, h, i, j: (i >= j) & (i < ends[j]))

    def eviction() -> MaskPair:
        rows = eviction_rows(seqlen)
        ends = column(rows)
        return MaskPair(masks.RandomEviction(rows.to(device)), lambda b, h, i, j: (i >= j) & (i < ends[j]))

    return {
        "causal": lambda: MaskPair(masks.Causal(), lambda b, h, i, j: i >= j),
        "causal document": lambda: documents(True),
        "document": lambda: documents(False),
        "window 1024": lambda: MaskPair(masks.SlidingWindow(1023), lambda b, h, i, j: (i >= j) & (i - j < 1024)),
        "prefix LM": prefix,
        "shared question": shared_question,
        "global + window": global_window,
        "tree": tree,
        "random eviction": eviction,
    }


def document_lengths(seqlen: int) -> Tensor:
    """Eight documents of drawn lengths, multiples of 16."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randperm(seqlen // 16 - 1, generator=generator)[: DOCUMENTS - 1].sort().values + 1
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), cuts * 16, torch.tensor([seqlen])])
    return edges.diff()


def tree_parents(seqlen: int) -> Tensor:
    """Rollouts: a trunk of a quarter, then branches of a sixteenth that leave it at drawn nodes."""
    trunk, branch = seqlen // 4, seqlen // 16
    generator = torch.Generator().manual_seed(2)
    parents = torch.arange(-1, seqlen - 1)
    # In preorder a later branch leaves the trunk no further down than an earlier one.
    leaves = torch.randint(0, trunk, ((seqlen - trunk) // branch,), generator=generator).sort(descending=True).values
    parents[trunk::branch] = leaves
    return parents


def subtree_ends(parents: Tensor) -> Tensor:
    """Past-the-last descendant of each node, in preorder."""
    ends = torch.arange(1, len(parents) + 1)
    for node in range(len(parents) - 1, 0, -1):
        parent = int(parents[node])
        if parent >= 0:
            ends[parent] = torch.maximum(ends[parent], ends[node])
    return ends


def eviction_rows(seqlen: int) -> Tensor:
    """The query from which each key is gone, any later one."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.arange(seqlen) + torch.randint(1, seqlen, (seqlen,), generator=generator)
    return rows.clamp(max=seqlen).int()
