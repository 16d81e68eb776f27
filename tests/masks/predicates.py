"""What each mask shows, element by element, straight from its definition: (batch entry, head, row i, key j) -> bool.

Written without looking at column vectors. p = i + seqlen_k - seqlen_q is the position of row i among the keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Predicate = Callable[[int, int, int, int, int], bool]  # b, h, i, p, j


def dense(predicate: Predicate, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The matrix of a predicate, bool (batch, heads, seqlen_q, seqlen_k)."""
    offset = seqlen_k - seqlen_q
    rows = [
        [[[predicate(b, h, i, i + offset, j) for j in range(seqlen_k)] for i in range(seqlen_q)] for h in range(heads)]
        for b in range(batch)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(batch, heads, seqlen_q, seqlen_k)


def in_window(p: int, j: int, left: int | None, right: int | None) -> bool:
    return (left is None or p - j <= left) and (right is None or j - p <= right)


def owners(lengths: list[int], total: int) -> list[int]:
    """Which document each position belongs to; -1 for none."""
    owned = [d for d, n in enumerate(lengths) for _ in range(n)]
    return owned + [-1] * (total - len(owned))


def full() -> Predicate:
    return lambda b, h, i, p, j: True


def causal() -> Predicate:
    return lambda b, h, i, p, j: j <= p


def sliding_window(left: int | None, right: int | None) -> Predicate:
    return lambda b, h, i, p, j: in_window(p, j, left, right)


def chunked(size: int) -> Predicate:
    return lambda b, h, i, p, j: p >= 0 and j <= p and p // size == j // size


def padding(real: list[list[bool]]) -> Predicate:
    return lambda b, h, i, p, j: real[b][j]


def document(lengths: list[list[int]], total: int, causal: bool) -> Predicate:
    owner = [owners(row, total) for row in lengths]

    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        return p >= 0 and owner[b][j] >= 0 and owner[b][p] == owner[b][j] and (j <= p or not causal)

    return visible


def segments(ids: list[list[int]], causal: bool) -> Predicate:
    return lambda b, h, i, p, j: p >= 0 and ids[b][j] >= 0 and ids[b][p] == ids[b][j] and (j <= p or not causal)


def prefix_lm(prefix: list[int]) -> Predicate:
    return lambda b, h, i, p, j: j <= p or j < prefix[b]


def prefix_document(lengths: list[list[int]], prefixes: list[list[int]], total: int) -> Predicate:
    owner = [owners(row, total) for row in lengths]

    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        d = owner[b][j]
        if p < 0 or d < 0 or owner[b][p] != d:
            return False
        return j <= p or j - sum(lengths[b][:d]) < prefixes[b][d]

    return visible


def shared_question(question: list[int], answers: list[list[int]], total: int) -> Predicate:
    owner = [owners([question[b], *answers[b]], total) for b in range(len(answers))]

    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        if p < 0 or owner[b][p] < 0 or j > p:
            return False
        return owner[b][j] in (0, owner[b][p])

    return visible


def global_window(tokens: list[int], left: int | None, right: int | None) -> Predicate:
    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        if right == 0 and j > p:
            return False
        return j < tokens[b] or i < tokens[b] or in_window(p, j, left, right)

    return visible


def causal_blockwise(lengths: list[list[int]], total: int) -> Predicate:
    owner = [owners(row, total) for row in lengths]
    test = [max((d for d, n in enumerate(row) if n), default=-1) for row in lengths]

    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        if p < 0 or owner[b][p] < 0 or j > p:
            return False
        return owner[b][p] == test[b] or owner[b][p] == owner[b][j]

    return visible


def tree(parents: list[list[int]]) -> Predicate:
    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        node = p if 0 <= p < len(parents[b]) else -1
        while node > j:
            node = parents[b][node]
        return node == j

    return visible


def bidirectional_spans(starts: list[list[int]], lengths: list[list[int]]) -> Predicate:
    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        return j <= p or any(s <= p < s + n and s <= j < s + n for s, n in zip(starts[b], lengths[b], strict=True))

    return visible


def qk_sparse(dropped: list[list[bool]]) -> Predicate:
    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        return 0 <= j <= p and not all(dropped[b][j : p + 1])

    return visible


def random_eviction(rows: list[list[list[int]]]) -> Predicate:
    return lambda b, h, i, p, j: j <= p and i < rows[b][h][j]


def block_diffusion(length: int, block: int) -> Predicate:
    def visible(b: int, h: int, i: int, p: int, j: int) -> bool:
        if p < 0:
            return False
        query_block, key_block = p % length // block, j % length // block
        noisy_query, noisy_key = p < length, j < length
        if noisy_query:
            return query_block == key_block if noisy_key else key_block < query_block
        return not noisy_key and key_block <= query_block

    return visible
