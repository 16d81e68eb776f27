"""What each mask shows, by its definition in docs/masks.md and without column vectors: dense booleans.

Row i of a call of seqlen_q queries and seqlen_k keys sits at p = i + seqlen_k - seqlen_q among the keys; j is a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.fuzz import maskspec
from tests.fuzz.maskspec import MaskSpec


@dataclass(frozen=True)
class Grid:
    """Rows and keys of a call. Of padded packed sequences each batch entry has lengths of its own.

    i: (seqlen_q, 1), p: (batch|1, 1, seqlen_q, 1), j: (seqlen_k,).
    """

    i: Tensor
    p: Tensor
    j: Tensor
    seqlen_q: int
    seqlen_k: int


def grid(oracle: SimpleNamespace, seqlen_q: int, seqlen_k: int, device: torch.device | str) -> Grid:
    """Of a dense call."""
    i, j = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    return Grid(i, oracle.position(i, seqlen_q, seqlen_k)[None, None], j, seqlen_q, seqlen_k)


def position(i: Tensor, seqlen_q: int | Tensor, seqlen_k: int | Tensor) -> Tensor:
    """Bottom-right alignment."""
    return i + (seqlen_k - seqlen_q)


def band(p: Tensor, j: Tensor, left: int | None, right: int | None) -> Tensor:
    """-right <= p - j <= left."""
    seen = torch.ones(torch.broadcast_shapes(p.shape, j.shape), dtype=torch.bool, device=j.device)
    if left is not None:
        seen = seen & (p - j <= left)
    if right is not None:
        seen = seen & (j - p <= right)
    return seen


def interval(i: Tensor, start: Tensor | int, stop: Tensor | int) -> Tensor:
    """Rows [start, stop)."""
    return (i >= start) & (i < stop)


def of_chunks(whole: Tensor, sequences: list[int], offsets: tuple[int, ...], rows: int) -> Tensor:
    """Rows offsets[b] to offsets[b] + rows of sequence sequences[b], for each b, of (batch|1, heads, seqlen_q, …)."""
    last = whole.shape[0] - 1
    return torch.cat([whole[min(s, last)][None, :, at : at + rows] for s, at in zip(sequences, offsets, strict=True)])


def over_heads(seen: Tensor, heads_q: int) -> Tensor:
    """(batch, heads, …) of one head, the key heads or the query heads to those of the queries; a key head's are in a row."""
    heads = seen.shape[1]
    return seen if heads in (1, heads_q) else seen.repeat_interleave(heads_q // heads, dim=1)


def visible(oracle: SimpleNamespace, mask: MaskSpec | None, g: Grid) -> Tensor:
    """bool (batch|1, heads|1, seqlen_q, seqlen_k), True = visible."""
    if mask is None:
        return oracle.band(g.p, g.j, None, None)
    if mask.kind == "and":
        one, other = (visible(oracle, part, g) for part in mask.parts)
        heads = max(one.shape[1], other.shape[1])
        return oracle.over_heads(one, heads) & oracle.over_heads(other, heads)
    return _OF[mask.kind](oracle, mask, g)


def _column(values: list[int] | tuple[int, ...], g: Grid) -> Tensor:
    """One number a batch entry, as (batch, 1, 1, 1)."""
    return torch.tensor(values, device=g.j.device).view(-1, 1, 1, 1)


def _per_key(rows: list[list[int]], g: Grid) -> Tensor:
    """One number a key and batch entry, (batch, 1, 1, seqlen_k)."""
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 1, 1, g.seqlen_k).to(g.j.device)


def _owners(lengths: tuple[int, ...], total: int) -> list[int]:
    """Which part each position belongs to; -1: none."""
    owned = [d for d, n in enumerate(lengths) for _ in range(n)]
    return owned + [-1] * (total - len(owned))


def _at(per_key: Tensor, g: Grid, none: int = -1) -> Tensor:
    """What `per_key` has at each row's position, (batch, 1, seqlen_q, 1); `none` before the first key."""
    if g.seqlen_k == 0:
        return torch.full((per_key.shape[0], 1, g.seqlen_q, 1), none, device=g.j.device)
    rows = g.p.expand(per_key.shape[0], 1, g.seqlen_q, 1)
    found = per_key.transpose(2, 3).gather(2, rows.clamp(min=0))
    return torch.where(rows >= 0, found, none)


def _same(owner: Tensor, g: Grid) -> Tensor:
    at = _at(owner, g)
    return (owner >= 0) & (at >= 0) & (owner == at)


def _causal(oracle: SimpleNamespace, g: Grid) -> Tensor:
    return oracle.band(g.p, g.j, None, 0)


def _bands(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    left, right = {"full": (None, None), "causal": (None, 0)}.get(mask.kind, (mask.left, mask.right))
    return oracle.band(g.p, g.j, left, right)


def _chunked(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    size = mask.a[0][0]
    chunk = torch.div(g.p, size, rounding_mode="floor")
    return (g.p >= 0) & _causal(oracle, g) & (chunk == g.j // size)


def _padding(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    if mask.kind == "padding_bits":
        real = maskspec.bits(mask, g.seqlen_k).to(g.j.device)[:, None, None]
    else:
        real = g.j < _column([row[0] for row in mask.a], g)
    return real.expand(-1, 1, g.seqlen_q, g.seqlen_k)


def _document(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    if mask.kind == "document_segments":
        owners = [list(row) for row in mask.a]
    elif mask.kind == "document_positions":
        owners = []
        for row in mask.a:
            count, owner = -1, []
            for n, value in enumerate(row):
                count += n == 0 or value != row[n - 1] + 1
                owner.append(count)
            owners.append(owner)
    else:
        owners = [_owners(row, g.seqlen_k) for row in mask.a]
    seen = _same(_per_key(owners, g), g)
    return seen & _causal(oracle, g) if mask.causal else seen


def _prefix_lm(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    return _causal(oracle, g) | (g.j < _column([row[0] for row in mask.a], g))


def _prefix_document(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    prefix = []
    for lengths, prefixes in zip(mask.a, mask.b, strict=True):
        row = [t < m for n, m in zip(lengths, prefixes, strict=True) for t in range(n)]
        prefix.append(row + [False] * (g.seqlen_k - len(row)))
    owner = _per_key([_owners(row, g.seqlen_k) for row in mask.a], g)
    return _same(owner, g) & (_causal(oracle, g) | _per_key(prefix, g).bool())


def _shared_question(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    parts = [_owners((q[0], *answers), g.seqlen_k) for q, answers in zip(mask.a, mask.b, strict=True)]
    owner = _per_key(parts, g)
    at = _at(owner, g)
    return (at >= 0) & _causal(oracle, g) & ((owner == 0) | (owner == at))


def _global_window(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    tokens = _column([row[0] for row in mask.a], g)
    seen = (g.j < tokens) | (g.i < tokens) | oracle.band(g.p, g.j, mask.left, mask.right)
    return seen & _causal(oracle, g) if mask.right == 0 else seen


def _blockwise(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    owner = _per_key([_owners(row, g.seqlen_k) for row in mask.a], g)
    test = _column([max((d for d, n in enumerate(row) if n), default=-2) for row in mask.a], g)
    at = _at(owner, g)
    return (at >= 0) & _causal(oracle, g) & ((at == test) | (at == owner))


def _tree(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    n = g.seqlen_k
    seen = torch.zeros(len(mask.a), n + 1, n, dtype=torch.bool)  # the last row: of no node
    for tree, parents in zip(seen, mask.a, strict=True):
        for node, parent in enumerate(parents):
            if parent >= 0:
                tree[node] = tree[parent]
            tree[node, node] = True
    rows = torch.where(g.p[0, 0, :, 0] >= 0, g.p[0, 0, :, 0], n).cpu()
    return seen[:, rows][:, None].to(g.j.device)


def _spans(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    owners = []
    for starts, lengths in zip(mask.a, mask.b, strict=True):
        owner = [-1] * g.seqlen_k
        for n, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            owner[start : start + length] = [n] * length
        owners.append(owner)
    return _causal(oracle, g) | _same(_per_key(owners, g), g)


def _qk_sparse(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    n = g.seqlen_k
    if mask.kind == "qk_sparse_bits":
        dropped = maskspec.bits(mask, n).tolist()
    else:
        dropped = [[j in positions for j in range(n)] for positions in map(set, mask.a)]
    ends = []
    for row in dropped:
        end, run = [0] * n, n
        for j in range(n - 1, -1, -1):
            run = run if row[j] else j
            end[j] = run
        ends.append(end)
    hidden = _per_key([list(map(int, row)) for row in dropped], g).bool() & (g.p < _per_key(ends, g))
    return _causal(oracle, g) & ~hidden


def _eviction(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    rows = maskspec.eviction_rows(mask, g.seqlen_q, g.seqlen_k).to(g.j.device)
    return _causal(oracle, g) & (g.i < rows[:, :, None])


def _block_diffusion(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    length, block = mask.a[0]
    size = max(length, 1)
    query, key = g.p % size // block, g.j % size // block
    noisy_query, noisy_key = g.p < length, g.j < length
    of_noisy = torch.where(noisy_key, query == key, key < query)
    return (g.p >= 0) & torch.where(noisy_query, of_noisy, ~noisy_key & (key <= query))


def _columns(oracle: SimpleNamespace, mask: MaskSpec, g: Grid) -> Tensor:
    found = maskspec.vectors(mask, g.seqlen_q, g.seqlen_k)
    return by_vectors(oracle, {name: t.to(g.j.device) for name, t in found.items()}, mask.causal, g)


def by_vectors(oracle: SimpleNamespace, vectors: dict[str, Tensor], causal: bool, g: Grid) -> Tensor:
    """Rows [lts, lte) and [uts, ute) of each key are hidden; lte defaults to the last row's end, uts to row 0."""
    keys = {name: t.to(torch.int64)[:, :, None] for name, t in vectors.items()}
    seen = oracle.band(g.p, g.j, None, 0 if causal else None)
    if "lts" in keys:
        seen = seen & ~oracle.interval(g.i, keys["lts"], keys.get("lte", 2**40))
    if "ute" in keys:
        seen = seen & ~oracle.interval(g.i, keys.get("uts", -(2**40)), keys["ute"])
    return seen


_OF = {
    "full": _bands,
    "causal": _bands,
    "window": _bands,
    "chunked": _chunked,
    "padding_lengths": _padding,
    "padding_bits": _padding,
    "document": _document,
    "document_both": _document,
    "document_cu": _document,
    "document_segments": _document,
    "document_positions": _document,
    "prefix_lm": _prefix_lm,
    "prefix_document": _prefix_document,
    "shared_question": _shared_question,
    "global_window": _global_window,
    "global_window_causal": _global_window,
    "blockwise": _blockwise,
    "tree": _tree,
    "spans": _spans,
    "qk_sparse_bits": _qk_sparse,
    "qk_sparse_positions": _qk_sparse,
    "eviction": _eviction,
    "block_diffusion": _block_diffusion,
    "columns": _columns,
}
