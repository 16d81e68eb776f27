"""Memory that kernels of one call alone see: one allocation, of which they are given addresses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from warploom.runtime.likeness import like

_STEP = 128  # bytes that every piece starts at a multiple of: whole cache lines, as those of an allocation do


class Room:
    """What several tensors need together.

    Args:
        device: where.
        pieces: shape and dtype of each; None for one that there is not.
    """

    def __init__(self, device: torch.device, *pieces: tuple[Sequence[int], torch.dtype] | None) -> None:
        self._pieces, self._starts, end = pieces, list[int](), 0
        for piece in pieces:
            self._starts.append(end)
            if piece is not None:
                end += -(-prod(piece[0]) * piece[1].itemsize // _STEP) * _STEP
        self._like = like((end,), torch.uint8, device)

    def new(self) -> Tensor:
        """The memory; it must live until what uses it is launched."""
        return torch.empty_like(self._like)

    def addresses(self, memory: Tensor) -> list[Any]:
        """Of each piece, or None."""
        base = memory.data_ptr()
        return [None if piece is None else base + at for piece, at in zip(self._pieces, self._starts, strict=True)]

    def tensors(self, memory: Tensor) -> list[Any]:
        """Each piece as a tensor, or None."""
        found: list[Tensor | None] = []
        for piece, at in zip(self._pieces, self._starts, strict=True):
            if piece is None:
                found.append(None)
                continue
            shape, dtype = piece
            found.append(memory[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        return found
