"""Which of a tree's tokens see which: what implementations that walk sequences on the host share."""

from __future__ import annotations

import torch
from torch import Tensor


def kinship(parents: Tensor) -> Tensor:
    """Bool (batch, T, T) of parents (batch, T): whether the column's token is the row's own or one of its ancestors.

    A parent that is no earlier token makes a root, so that every walk up ends.
    """
    batch, count = parents.shape
    token = torch.arange(count, device=parents.device)
    above = torch.where((parents >= 0) & (parents < token), parents.long(), count)
    # Node `count` stands above the roots, and above itself.
    above = torch.cat([above, above.new_full((batch, 1), count)], 1)
    kin = torch.zeros(batch, count, count + 1, dtype=torch.bool, device=parents.device)
    at = token.expand(batch, count)
    for _ in range(count):
        kin.scatter_(2, at[:, :, None], True)
        at = above.gather(1, at)
    return kin[:, :, :count]


def places(
    kin: Tensor | None, queries: int, begin: int, end: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Integers (T,) and (end - begin,): where in a text the T tokens and a sequence's keys begin to end stand.

    A token and its key stand at length - T + depth, the number of the token's ancestors by kin (T, T), its sequence's tree;
    without a tree (None) each has all tokens before it as ancestors. A key before the T stands at its index.
    """
    depth = torch.arange(queries, device=device) if kin is None else kin.sum(1) - 1
    place = torch.arange(begin, end, device=device)
    nth = place - (length - queries)
    if kin is not None:
        place = torch.where(nth < 0, place, length - queries + depth[nth.clamp(0, queries - 1)])
    return length - queries + depth, place


def sees_keys(kin: Tensor, begin: int, end: int, length: int) -> Tensor:
    """Bool (T, end - begin): which of a sequence's keys begin to end the tree of one sequence, kin (T, T), shows its tokens.

    The last T of ``length`` keys are the tokens' own; all before them are seen.
    """
    nth = torch.arange(begin, end, device=kin.device) - (length - kin.shape[0])
    return (nth < 0) | kin[:, nth.clamp(0, kin.shape[0] - 1)]
