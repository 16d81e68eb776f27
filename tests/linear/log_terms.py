"""The gradient of a decay's logs from what walks leave, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.linear.hopper.log_gradients import Terms


def added_up(queries: Terms, keys: Terms, logs: Tensor, chunk: int, scale: float) -> Tensor:
    """As `warploom.linear.hopper.log_gradients.log_gradients`, in fp64."""
    seqlen, groups = logs.shape[1], keys.dots.shape[0]

    def of_chunks(t: Tensor) -> Tensor:
        """The sum over warpgroups, (batch, heads, chunks, chunk)."""
        return torch.nn.functional.pad(t.double().sum(0), (0, -seqlen % chunk)).unflatten(-1, (-1, chunk))

    asked, pairs, written = (of_chunks(t) for t in (queries.dots[:groups], queries.dots[groups:], keys.dots))
    totals = [terms.totals.double().sum(0) for terms in (queries, keys)]
    change = totals[0] - totals[1]
    passes = change.flip(-1).cumsum(-1).flip(-1) - change - totals[1]
    found = (asked + pairs).flip(-1).cumsum(-1).flip(-1) + written.cumsum(-1) - written + passes[..., None]
    fades = (logs.exp() != 0) & (torch.arange(seqlen) > 0)[:, None]
    return scale * found.flatten(-2)[..., :seqlen].mT.where(fades, 0.0)
