"""Sequences that share a part: one question with several answers, demonstrations before a test, trees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import check_values, per_batch_rows, per_batch_value, readable, saturated
from warploom.masks.intersect import Mask
from warploom.masks.intervals import ResolvedMask
from warploom.masks.zoo.launched import may_launch
from warploom.masks.zoo.positions import batch_of, check_total, cumulative, largest, locate, rows_of, scalar_or_column


class SharedQuestion(Mask):
    """One question followed by several answers; an answer sees the question and itself, causally.

    It serves DPO, GRPO and reward models. Positions after the last answer are padding, which sees and is seen by nothing.

    Args:
        question: tokens of the question, one int, or one per batch entry.
        answers: tokens of each answer, (n,) or (batch, n) or ragged lists.
    """

    _fields = ("question", "answers")

    def __init__(self, question: Any, answers: Any) -> None:
        self.question = per_batch_value("question", question)
        self.answers = per_batch_rows("answers", answers, "answer lengths (n,), or one row per batch entry")
        check_values("answers", self.answers, minimum=0)

    def _parts(self, device: torch.device) -> Tensor:
        answers = saturated(self.answers.to(device))
        question = scalar_or_column(self.question, device)
        if not isinstance(question, Tensor):
            question = torch.full((1, 1), question, dtype=torch.int32, device=device)
        batch = batch_of(question, answers)
        return torch.cat([question.expand(batch, 1), answers.expand(batch, -1)], dim=1)

    def _extent(self) -> int | None:
        if not readable(self.answers) or (isinstance(self.question, Tensor) and not readable(self.question)):
            return None
        return largest(self._parts(self.answers.device).sum(1))

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        if self._extent() is not None:
            check_total("question and answers", self._parts(self.answers.device), seqlen_k)
        given = isinstance(self.question, Tensor)
        if may_launch(device, self.answers, *([self.question] if given else [])):
            from warploom.masks.zoo.document_kernel import part_vectors

            rows, wanted = self.answers.to(device), (True, False, False)
            others, question = (self.question.to(device), 0) if given else (None, self.question)
            vectors = part_vectors("answers", rows, wanted, seqlen_q, seqlen_k, others, question)
            if vectors is not None:
                return ResolvedMask(None, 0, vectors[0], None, None, None)
        bounds = cumulative(self._parts(device))
        index, inside, _, end = locate(bounds, seqlen_k)
        end = torch.where(index == 0, bounds[:, -1:], end)
        lts = rows_of(end, seqlen_q, seqlen_k).masked_fill(~inside.unsqueeze(1), 0)
        return ResolvedMask(None, 0, lts, None, None, None)


class CausalBlockwise(Mask):
    """Demonstration blocks that see only themselves, and a last block that sees all before it; all are causal.

    Positions after the last block are padding, which sees and is seen by nothing.

    Args:
        block_lengths: tokens of each block, (n,) or (batch, n) or ragged lists; the last one with tokens is
            the test block.
    """

    _fields = ("block_lengths",)

    def __init__(self, block_lengths: Any) -> None:
        self.block_lengths = per_batch_rows("block_lengths", block_lengths, "block lengths (n,), or one row per batch entry")
        check_values("block_lengths", self.block_lengths, minimum=0)

    def _extent(self) -> int | None:
        return largest(self.block_lengths.sum(1)) if readable(self.block_lengths) else None

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        check_total("block_lengths", self.block_lengths, seqlen_k)
        padded = not (readable(self.block_lengths) and bool((self.block_lengths.sum(1) == seqlen_k).all()))
        if may_launch(device, self.block_lengths):
            from warploom.masks.zoo.document_kernel import part_vectors

            vectors = part_vectors("blocks", self.block_lengths.to(device), (padded, True, True), seqlen_q, seqlen_k)
            if vectors is not None:
                lts, begin, stop = vectors
                if padded:
                    return ResolvedMask(None, 0, lts, None, begin, stop)
                return ResolvedMask(None, 0, begin, stop, None, None)
        lengths = saturated(self.block_lengths.to(device))
        bounds = cumulative(lengths)
        test = torch.where(lengths > 0, bounds[:, :-1], 0)
        test = test.amax(1, keepdim=True) if lengths.shape[1] else bounds[:, :1]
        _, inside, start, end = locate(bounds, seqlen_k)
        hides = inside & (start < test)  # a demonstration's columns, from its end to the test block
        begin = rows_of(torch.where(hides, end, seqlen_k), seqlen_q, seqlen_k)
        stop = rows_of(torch.where(hides, test, seqlen_k), seqlen_q, seqlen_k)
        if not padded:
            return ResolvedMask(None, 0, begin, stop, None, None)
        padding = rows_of(torch.where(inside, bounds[:, -1:], 0), seqlen_q, seqlen_k).masked_fill(~inside.unsqueeze(1), 0)
        return ResolvedMask(None, 0, padding, None, begin, stop)


class Tree(Mask):
    """A tree of tokens in preorder: a node sees its ancestors and itself.

    It serves speculative decoding and prefix trees of rollouts.

    Args:
        parents: parent of each node, (n,) or (batch, n) or ragged lists; -1 is a root, below -1 padding at
            the end, which sees and is seen by nothing, as are positions after the last node. In preorder a
            node's parent is the node before it or one of that node's ancestors.
    """

    _fields = ("parents",)

    def __init__(self, parents: Any) -> None:
        self.parents = per_batch_rows("parents", parents, "parents (n,), or one row per batch entry", pad=-2)
        if readable(self.parents):
            _check_preorder(self.parents)

    def _extent(self) -> int | None:
        return self.parents.shape[1]

    def _resolve(self, seqlen_q: int, seqlen_k: int, device: torch.device) -> ResolvedMask:
        batch, count = self.parents.shape
        if count > seqlen_k:
            raise ValueError(f"parents holds {count} nodes, but there are only {seqlen_k} keys")
        if may_launch(device, self.parents):
            from warploom.masks.zoo.tree_kernel import tree_vector

            lts = tree_vector(self.parents.to(device), seqlen_q, seqlen_k)
            if lts is not None:
                return ResolvedMask(None, 0, lts, None, None, None)
        parents = self.parents.to(device=device, dtype=torch.int64)
        node = torch.arange(count, device=device).unsqueeze(0)
        # Pointer doubling: after t rounds `last` covers descendants less than 2^t generations below, `up`
        # leads 2^t up. Index `count` stands above the roots.
        none = parents.new_full((batch, 1), count)
        up = torch.cat([torch.where((parents < 0) | (parents >= node), count, parents), none], dim=1)
        last = torch.cat([node.expand(batch, -1), none], dim=1)
        reach = 1
        while reach < count:
            last = last.scatter_reduce(1, up, last, "amax")
            up = up.gather(1, up)
            reach *= 2
        end = (last[:, :count] + 1).masked_fill(parents < -1, -seqlen_q - seqlen_k)
        end = torch.cat([end, end.new_full((batch, seqlen_k - count), -seqlen_q - seqlen_k)], dim=1)
        return ResolvedMask(None, 0, rows_of(end, seqlen_q, seqlen_k), None, None, None)


def _check_preorder(parents: Tensor) -> None:
    for b, row in enumerate(parents.tolist()):
        path: list[int] = []
        ended = False
        for node, parent in enumerate(row):
            if parent < -1:
                ended = True
                continue
            if ended:
                raise ValueError(f"parents: node {node} of batch entry {b} comes after padding (a value below -1)")
            while path and path[-1] != parent:
                path.pop()
            if parent >= 0 and not path:
                raise ValueError(
                    f"parents: node {node} of batch entry {b} has parent {parent}, not the node before it "
                    "nor an ancestor of it; nodes come in preorder"
                )
            path.append(node)
