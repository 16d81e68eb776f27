"""The masks of the benchmark: each as ours and as FlexAttention's mask_mod, of the same truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom import masks
from warploom.masks import Mask

NOTHING = "nothing hidden"  # full attention through the kernels of column masks
MaskMod = Callable[[Any, Any, Any, Any], Any]
DOCUMENT_LENGTHS = (200, 6000)
WINDOW, CHUNK, DIFFUSION_BLOCK = 1024, 2048, 32
IMAGE, IMAGE_EVERY = 576, 2048  # tokens of an image in a text, and from one image to the next


@dataclass(frozen=True)
class MaskPair:
    mask: Mask
    mask_mod: MaskMod | None  # None: FlexAttention goes without a block mask


def pairs(seqlen: int, device: torch.device | str) -> dict[str, Callable[[], MaskPair]]:
    """By name, what makes each mask for seqlen queries and keys (a multiple of 128) on the device."""

    def column(values: Tensor) -> Tensor:
        return values.to(device=device, dtype=torch.int32)

    def documents(causal: bool) -> MaskPair:
        lengths = document_lengths(seqlen)
        number = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)

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
        mask = masks.GlobalWindow(64, WINDOW - 1, 0)
        return MaskPair(mask, lambda b, h, i, j: (i >= j) & ((i - j < WINDOW) | (j < 64) | (i < 64)))

    def tree() -> MaskPair:
        parents = tree_parents(seqlen)
        end = subtree_ends(parents)
        ends = column(end)
        return MaskPair(masks.Tree(parents.to(device)), lambda b, h, i, j: (i >= j) & (i < ends[j]))

    def diffusion() -> MaskPair:
        half = seqlen // 2

        def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            row, key = i % half // DIFFUSION_BLOCK, j % half // DIFFUSION_BLOCK
            noisy = (i < half) & (((j < half) & (row == key)) | ((j >= half) & (key < row)))
            return noisy | ((i >= half) & (j >= half) & (key <= row))

        return MaskPair(masks.BlockDiffusion(half, DIFFUSION_BLOCK), mod)

    def eviction() -> MaskPair:
        rows = eviction_rows(seqlen)
        ends = column(rows)
        return MaskPair(masks.RandomEviction(rows.to(device)), lambda b, h, i, j: (i >= j) & (i < ends[j]))

    def chunked() -> MaskPair:
        size = min(CHUNK, seqlen // 4)
        return MaskPair(masks.Chunked(size), lambda b, h, i, j: (i >= j) & (i // size == j // size))

    def spans() -> MaskPair:
        starts, length = image_starts(seqlen)
        span = torch.full((seqlen,), -1, dtype=torch.int32)
        for number, start in enumerate(starts.tolist()):
            span[start : start + length] = number
        span = column(span)
        mask = masks.BidirectionalSpans(starts.to(device), torch.full_like(starts, length).to(device))
        return MaskPair(mask, lambda b, h, i, j: (i >= j) | ((span[i] == span[j]) & (span[i] >= 0)))

    def window() -> MaskPair:
        return MaskPair(masks.SlidingWindow(WINDOW - 1), lambda b, h, i, j: (i >= j) & (i - j < WINDOW))

    return {
        "causal": lambda: MaskPair(masks.Causal(), lambda b, h, i, j: i >= j),
        "full": lambda: MaskPair(masks.Full(), None),
        "window 1024": window,
        "causal documents": lambda: documents(True),
        "documents": lambda: documents(False),
        "shared question": shared_question,
        "prefix LM": prefix,
        "tree": tree,
        "block diffusion": diffusion,
        "random eviction": eviction,
        "chunked": chunked,
        "bidirectional spans": spans,
        "global + window": global_window,
        NOTHING: lambda: MaskPair(masks.ColumnMask(column(torch.full((seqlen,), seqlen))), None),
    }


def document_lengths(seqlen: int) -> Tensor:
    """Documents of drawn lengths up to the sequence's end, where the last one is cut; fewer tokens in short sequences."""
    high = min(DOCUMENT_LENGTHS[1], 3 * seqlen // 4)
    low = min(DOCUMENT_LENGTHS[0], high // 8)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(low, high + 1, (seqlen // low + 1,), generator=generator)
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), drawn.cumsum(0)]).clamp(max=seqlen).unique()
    return edges.diff()


def image_starts(seqlen: int) -> tuple[Tensor, int]:
    """First tokens of the images, and the tokens of each."""
    every = min(IMAGE_EVERY, seqlen // 4)
    return torch.arange(every // 8, seqlen - every // 2, every), IMAGE * every // IMAGE_EVERY


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
