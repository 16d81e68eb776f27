"""Random masks of every builder, each with its predicate, for drawn lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from warploom import masks
from warploom.masks import Mask

from . import predicates
from .predicates import Predicate


@dataclass(frozen=True)
class Sample:
    mask: Mask
    predicate: Predicate
    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads: int = 1

    def dense(self) -> torch.Tensor:
        return predicates.dense(self.predicate, self.batch, self.heads, self.seqlen_q, self.seqlen_k)


def split(rng: random.Random, total: int, fill: bool | None = None) -> list[int]:
    """Random lengths with a sum of at most `total`, zeros among them."""
    if fill is None:
        fill = rng.random() < 0.5
    lengths: list[int] = []
    left = total if fill else rng.randint(0, total)
    while left:
        n = rng.choice([0, 1, rng.randint(1, left), rng.randint(1, left)])
        lengths.append(n)
        left -= n
    return lengths


def given(rng: random.Random, rows: list[list[int]], pad: int = 0):
    """Rows as a caller may give them: lists, or a tensor of either integer type."""
    if len(rows) == 1 and rng.random() < 0.3:
        return rows[0] if rng.random() < 0.5 else torch.tensor(rows[0], dtype=torch.int64)
    if rng.random() < 0.5:
        return rows
    width = max(len(row) for row in rows)
    padded = [row + [pad] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=rng.choice([torch.int32, torch.int64])).reshape(len(rows), width)


def given_scalar(rng: random.Random, values: list[int]):
    if len(set(values)) == 1 and rng.random() < 0.5:
        return values[0]
    return values if rng.random() < 0.5 else torch.tensor(values, dtype=rng.choice([torch.int32, torch.int64]))


def _lengths(rng: random.Random):
    q, k = rng.choice([(0, 0), (1, 1)]) if rng.random() < 0.05 else (rng.randint(1, 24), rng.randint(1, 24))
    if rng.random() < 0.3:
        q = k
    return q, k, rng.choice([1, 1, 2, 3])


def _limit(rng: random.Random, low: int = -3):
    return rng.choice([None, 0, rng.randint(low, 26), rng.randint(low, 6), 10**12])


def full(rng: random.Random) -> Sample:
    q, k, _ = _lengths(rng)
    return Sample(masks.Full(), predicates.full(), q, k)


def causal(rng: random.Random) -> Sample:
    q, k, _ = _lengths(rng)
    return Sample(masks.Causal(), predicates.causal(), q, k)


def sliding_window(rng: random.Random) -> Sample:
    q, k, _ = _lengths(rng)
    left, right = _limit(rng), _limit(rng)
    if left == right == -1:  # refused: it means no window elsewhere
        left = -2
    return Sample(masks.SlidingWindow(left, right), predicates.sliding_window(left, right), q, k)


def chunked(rng: random.Random) -> Sample:
    q, k, _ = _lengths(rng)
    size = rng.randint(1, 30)
    return Sample(masks.Chunked(size), predicates.chunked(size), q, k)


def padding(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    if rng.random() < 0.5:
        lengths = [rng.randint(0, k) for _ in range(batch)]
        real = [[j < n for j in range(k)] for n in lengths]
        return Sample(masks.Padding(given_scalar(rng, lengths)), predicates.padding(real), q, k, batch)
    real = [[rng.random() < 0.7 for _ in range(k)] for _ in range(batch)]
    kind = rng.choice([torch.bool, torch.int64, torch.float32])
    value = real if rng.random() < 0.3 and k else torch.tensor(real, dtype=kind).reshape(batch, k)
    return Sample(masks.Padding(value), predicates.padding(real), q, k, batch)


def document(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    rows = [split(rng, k) for _ in range(batch)]
    is_causal = rng.random() < 0.5
    return Sample(masks.Document(given(rng, rows), is_causal), predicates.document(rows, k, is_causal), q, k, batch)


def document_cu_seqlens(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    rows = [split(rng, k) for _ in range(batch)]
    width = max(len(row) for row in rows)
    cu = [[sum(row[:n]) for n in range(width + 1)] for row in rows]
    is_causal = rng.random() < 0.5
    mask = masks.Document.from_cu_seqlens(given(rng, cu), causal=is_causal)
    return Sample(mask, predicates.document(rows, k, is_causal), q, k, batch)


def document_segment_ids(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    owned = [predicates.owners(split(rng, k), k) for _ in range(batch)]
    names = {d: rng.randint(0, 5) + 7 * d for d in range(k + 30)} | {-1: -1}
    ids = [[names[d] for d in row] for row in owned]
    is_causal = rng.random() < 0.5
    mask = masks.Document.from_segment_ids(given(rng, ids), causal=is_causal)
    return Sample(mask, predicates.segments(ids, is_causal), q, k, batch)


def document_position_ids(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    rows = [[n for n in split(rng, k, fill=True) if n] for _ in range(batch)]
    ids = [[t for n in row for t in range(n)] for row in rows]
    is_causal = rng.random() < 0.5
    mask = masks.Document.from_position_ids(given(rng, ids), causal=is_causal)
    return Sample(mask, predicates.document(rows, k, is_causal), q, k, batch)


def prefix_lm(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    prefix = [rng.randint(0, k + 1) for _ in range(batch)]
    return Sample(masks.PrefixLM(given_scalar(rng, prefix)), predicates.prefix_lm(prefix), q, k, batch)


def prefix_document(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    rows = [split(rng, k) for _ in range(batch)]
    prefixes = [[rng.randint(0, n) for n in row] for row in rows]
    mask = masks.PrefixDocument(given(rng, rows), given(rng, prefixes))
    return Sample(mask, predicates.prefix_document(rows, prefixes, k), q, k, batch)


def shared_question(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    question = [rng.randint(0, k) for _ in range(batch)]
    answers = [split(rng, k - n) for n in question]
    mask = masks.SharedQuestion(given_scalar(rng, question), given(rng, answers))
    return Sample(mask, predicates.shared_question(question, answers, k), q, k, batch)


def global_window(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    tokens = [rng.randint(0, k + 1) for _ in range(batch)]
    left, right = _limit(rng), _limit(rng)
    mask = masks.GlobalWindow(given_scalar(rng, tokens), left, right)
    return Sample(mask, predicates.global_window(tokens, left, right), q, k, batch)


def causal_blockwise(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    fill = rng.random() < 0.5
    rows = [split(rng, k, fill) for _ in range(batch)]
    return Sample(masks.CausalBlockwise(given(rng, rows)), predicates.causal_blockwise(rows, k), q, k, batch)


def random_parents(rng: random.Random, count: int) -> list[int]:
    """A random forest in preorder."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(count):
        keep = rng.choice([len(path), len(path), rng.randint(0, len(path))])
        del path[keep:]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def tree(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    rows = [random_parents(rng, rng.choice([k, rng.randint(0, k)])) for _ in range(batch)]
    return Sample(masks.Tree(given(rng, rows, pad=-2)), predicates.tree(rows), q, k, batch)


def bidirectional_spans(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    starts, lengths = [], []
    for _ in range(batch):
        parts = split(rng, k)
        spans = [(sum(parts[:n]), parts[n]) for n in range(len(parts)) if rng.random() < 0.5]
        rng.shuffle(spans)
        starts.append([s for s, _ in spans])
        lengths.append([n for _, n in spans])
    mask = masks.BidirectionalSpans(given(rng, starts), given(rng, lengths))
    return Sample(mask, predicates.bidirectional_spans(starts, lengths), q, k, batch)


def qk_sparse(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    dropped = [[rng.random() < 0.5 for _ in range(k)] for _ in range(batch)]
    if rng.random() < 0.5:
        value = torch.tensor(dropped, dtype=torch.bool).reshape(batch, k)
    else:
        value = given(rng, [[j for j in range(k) if row[j]] for row in dropped], pad=-1)
    return Sample(masks.QKSparse(value), predicates.qk_sparse(dropped), q, k, batch)


def random_eviction(rng: random.Random) -> Sample:
    q, k, batch = _lengths(rng)
    heads = rng.choice([1, 2])
    rows = [[[rng.randint(0, q + 2) for _ in range(k)] for _ in range(heads)] for _ in range(batch)]
    value = (
        torch.tensor(rows, dtype=torch.int64).reshape(batch, heads, k) if heads > 1 else given(rng, [row[0] for row in rows])
    )
    return Sample(masks.RandomEviction(value), predicates.random_eviction(rows), q, k, batch, heads)


def block_diffusion(rng: random.Random) -> Sample:
    length, block = rng.randint(1, 14), rng.randint(1, 16)
    q = rng.choice([2 * length, rng.randint(1, 30)])
    return Sample(masks.BlockDiffusion(length, block), predicates.block_diffusion(length, block), q, 2 * length)


SAMPLERS: dict[str, Callable[[random.Random], Sample]] = {
    f.__name__: f
    for f in (
        full,
        causal,
        sliding_window,
        chunked,
        padding,
        document,
        document_cu_seqlens,
        document_segment_ids,
        document_position_ids,
        prefix_lm,
        prefix_document,
        shared_question,
        global_window,
        causal_blockwise,
        tree,
        bidirectional_spans,
        qk_sparse,
        random_eviction,
        block_diffusion,
    )
}
