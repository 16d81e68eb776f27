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
        self._at = torch.full((2 * keep, *shape), rows, dtype=torch.int32, device=device)  # rows of the first changes
        self._above = torch.ones((*shape[:-1], 1, shape[-1]), dtype=torch.bool, device=device)

    @property
    def count(self) -> Tensor:
        """Hidden runs of each column, int32."""
        return (self._changes + 1) // 2

    @property
    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """First and past-the-last row of each kept run, int32, in order; both are `rows` where there is none."""
        at = self._at.unbind()
        return list(zip(at[::2], at[1::2], strict=True))

    def add(self, low: int, visible: Tensor) -> None:
        """Adds rows from `low` on: bool (..., rows, columns), True = visible."""
        changed = visible ^ torch.cat([self._above, visible[..., :-1, :]], -2)
        self._above = visible[..., -1:, :].clone()
        if torch.compiler.is_compiling():
            self._at = self._noted(low, changed, self._changes, self._at, self._at.shape[0])
            self._changes = self._changes + changed.sum(-2, dtype=torch.int32)
            return
        touched = changed.view(torch.uint8).amax(-2)  # by far the quickest "any" of a column on a CPU
        columns = touched.reshape(-1, touched.shape[-1]).amax(0).nonzero()[:, 0]
        if not columns.numel():
            return
        changed = changed.index_select(-1, columns)
        before, more = self._changes[..., columns], changed.sum(-2, dtype=torch.int32)
        most = min(int(more.max()), self._at.shape[0])
        self._at[..., columns] = self._noted(low, changed, before, self._at[..., columns], most)
        self._changes[..., columns] = before + more

    def _noted(self, low: int, changed: Tensor, before: Tensor, at: Tensor, most: int) -> Tensor:
        """Rows of the changes, of some columns, with up to `most` more, found one after the other."""
        index = torch.arange(low, low + changed.shape[-2], dtype=torch.int32, device=changed.device).unsqueeze(-1)
        slots = torch.arange(at.shape[0], dtype=torch.int32, device=changed.device).view(-1, *[1] * before.ndim)
        for number in range(most):
            found = torch.where(changed, index, self.rows).amin(-2)  # where there is none, as it is already
            at = torch.where(slots == before + number, found, at)
            changed = changed & (index > found.unsqueeze(-2))
        return at
