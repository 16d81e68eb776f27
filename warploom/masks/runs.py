"""Runs of hidden rows in each column of a mask that is read in blocks of rows."""

from __future__ import annotations

import torch
from torch import Tensor


class Runs:
    """The first runs of hidden rows of each column, and how many runs there are.

    Blocks of rows are added from the first row to the last. Memory is that of one block and O(columns). While
    torch compiles, nothing is read back and no shape depends on values.

    Args:
        shape: (..., columns).
        rows: rows in all.
        keep: runs of a column that are kept; the others are only counted.
        device: where the blocks are.
    """

    def __init__(self, shape: tuple[int, ...], rows: int, keep: int, device: torch.device | str) -> None:
        self.rows = rows
        # A column begins visible; an odd change begins a hidden run, an even one ends it.
        self._changes = torch.zeros(shape, dtype=torch.int32, device=device)
        self._at = [torch.full(shape, rows, dtype=torch.int32, device=device) for _ in range(2 * keep)]
        self._above = torch.ones((*shape[:-1], 1, shape[-1]), dtype=torch.bool, device=device)

    @property
    def count(self) -> Tensor:
        """Hidden runs of each column, int32."""
        return (self._changes + 1) // 2

    @property
    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """First and past-the-last row of each kept run, int32, in order; both are `rows` where there is none."""
        return list(zip(self._at[::2], self._at[1::2], strict=True))

    def add(self, low: int, visible: Tensor) -> None:
        """Adds rows from `low` on: bool (..., rows, columns), True = visible."""
        changed = visible ^ torch.cat([self._above, visible[..., :-1, :]], -2)
        self._above = visible[..., -1:, :].clone()
        if torch.compiler.is_compiling():
            self._changes, self._at = self._counted(low, changed, self._changes, self._at, range(len(self._at)))
            return
        touched = changed.view(torch.uint8).amax(-2)  # by far the quickest "any" of a column on a CPU
        columns = touched.reshape(-1, touched.shape[-1]).amax(0).nonzero()[:, 0]
        if not columns.numel():
            return
        before = self._changes[..., columns]
        changed = changed.index_select(-1, columns)
        after = before + changed.sum(-2, dtype=torch.int32)
        numbers = range(int(before.min()), min(int(after.max()), len(self._at)))
        before, at = self._counted(low, changed, before, [each[..., columns] for each in self._at], numbers)
        self._changes[..., columns] = before
        for each, found in zip(self._at, at, strict=True):
            each[..., columns] = found

    def _counted(
        self, low: int, changed: Tensor, before: Tensor, at: list[Tensor], numbers: range
    ) -> tuple[Tensor, list[Tensor]]:
        """Changes counted and those of `numbers` found, for some columns."""
        ordinal = before.unsqueeze(-2) + changed.cumsum(-2, dtype=torch.int32)
        index = torch.arange(low, low + changed.shape[-2], dtype=torch.int32, device=changed.device).unsqueeze(-1)
        at = list(at)
        for number in numbers:
            found = torch.where(changed & (ordinal == number + 1), index, self.rows).amin(-2)
            at[number] = torch.minimum(at[number], found)
        return ordinal[..., -1, :], at
