"""One call of attention() on one rank, as the methods receive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom.distributed import local
from warploom.distributed.layout import Layout
from warploom.distributed.pieces import Piece, Sharded


@dataclass(frozen=True)
class Call:
    """What does not depend on the tensors' values.

    Attributes:
        run: how pieces run here.
        sharded: the mask, as this rank needs it.
        group: ours; None for one rank.
        rank: this one's number in the group.
        places: of keys and of queries, `Layout.places` on the tensors' device.
        tail: rows at the end of this rank's that are in no packed sequence.
        last: the whole's position that the tail begins at.
        unit: of a batch-invariant call, as `pieces.fixed_pieces` has it for gather's forward pass; None of others.
    """

    run: local.Run
    sharded: Sharded
    group: Any
    rank: int
    key_places: Tensor
    query_places: Tensor
    tail: int
    last: int
    unit: int | None = None

    @property
    def queries(self) -> Layout:
        return self.sharded.queries

    @property
    def keys(self) -> Layout:
        return self.sharded.keys

    @property
    def ranks(self) -> int:
        return len(self.queries.counts)

    @property
    def dropout(self) -> bool:
        return self.run.args.dropout_p > 0.0

    def blank(self, q: Tensor, head_dim_v: int, sink: Tensor | None, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Room for out and lse: those of queries that see nothing where ``pieces`` will not write."""
        batch, rows, heads, _ = q.shape
        out = q.new_empty((batch, rows, heads, head_dim_v))
        lse = torch.empty((batch, heads, rows), dtype=local.wide(q), device=q.device)
        if sum([piece.rows[1] - piece.rows[0] for piece in pieces]) < rows:
            out.zero_()
            lse.fill_(float("-inf"))
            if sink is not None:
                lse.copy_(sink[:, None].expand(lse.shape))
        return out, lse
