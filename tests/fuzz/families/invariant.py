"""One sequence of a batch-invariant call in another form, whose bits have to be those that it has in the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.attention.biased import KINDS
from tests.fuzz.families import biases
from warploom.masks import ColumnMask, Mask, SlidingWindow

TAKE_INVARIANT = ("cpu", "triton", "reference")
# Of that many Triton variants one, and of so many freely drawn problems, is batch-invariant.
EVERY = 8


def differs(a: Tensor, b: Tensor) -> Tensor:
    """1 where bits differ; NaN equals itself."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (~same).any().double().view(1)


def either(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """1 where some pair differs."""
    return torch.stack([differs(a, b) for a, b in pairs]).amax(0)


def mask_of(mask: Mask, entry: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Mask:
    """The mask of one batch entry."""
    left, right, *vectors = mask.resolve(seqlen_q, seqlen_k, device)
    if all(t is None for t in vectors):
        return mask
    own = ColumnMask(*[t if t is None or t.shape[0] == 1 else t[entry : entry + 1] for t in vectors])
    return own if left is None and right is None else own & SlidingWindow(left, right)


def columns_of(mask: Any, keys: slice) -> Mask:
    """The mask of one packed sequence's keys: rows are its own already."""
    vectors = [None if t is None else t[..., keys] for t in (mask.lts, mask.lte, mask.uts, mask.ute)]
    return ColumnMask(*vectors, causal=mask.causal)


def of_dense(p: Any, given: dict[str, Any], named: dict[str, Any], found: dict[str, Any], backend: str) -> Tensor:
    """Of attention(): alone, or packed behind nobody. ``named``: the call's keywords, the mask among them."""
    named = {name: value for name, value in named.items() if name != "return_stats"}
    b = 0 if p.dropout_p else p.seed % p.batch  # elements are dropped by a sequence's number
    q, k, v = (given[n][b : b + 1].clone() for n in "qkv")
    if "mask" in named:
        named = {**named, "mask": mask_of(named["mask"], b, p.seqlen_q, p.seqlen_k, q.device)}
    if p.bias:
        named = {**named, "bias": _bias(p, given["bias"], b, p.seqlen_q, p.seqlen_k)}
    packs = p.invariant == "packed" and ("mask" not in named or isinstance(named["mask"], (ColumnMask, SlidingWindow)))
    if packs:
        starts = (torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (p.seqlen_q, p.seqlen_k))
        longest = {"max_seqlen_q": p.seqlen_q, "max_seqlen_k": p.seqlen_k} if p.bias else {}
        out, lse = warploom.attention_varlen(q[0], k[0], v[0], *starts, **longest, backend=backend, **named)
    else:
        out, lse = (t[0] for t in warploom.attention(q, k, v, backend=backend, **named))
    return either([(out, found["out"][b]), (lse, found["lse"][b])])


def _bias(p: Any, leaf: Tensor, at: int, rows: int, keys: int) -> Any:
    return KINDS[p.bias].build(biases.entry(p.bias, leaf, at, rows, keys))


def of_packed(p: Any, given: dict[str, Any], named: dict[str, Any], found: dict[str, Any], backend: str) -> Tensor:
    """Of attention_varlen(): alone, or dense. ``named``: the call's keywords but those of sequences and pages."""
    named = {name: value for name, value in named.items() if name != "return_stats"}
    b = 0 if p.dropout_p else p.seed % len(p.lengths_q)
    begin, length = sum(p.lengths_q[:b]), p.lengths_q[b]
    rows, q, device = slice(begin, begin + length), given["q"][begin : begin + length].clone(), given["q"].device

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    used = p.keys[b] if p.used is None else p.used[b]
    if p.bias:
        alone = p.invariant == "alone" or bool(p.fp8)
        longest = p.longest_of_call if alone else (length, used)
        named = {**named, "bias": _bias(p, given["bias"], b, *longest)}
        if alone:
            named |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    first = sum(p.keys[:b])
    if p.page_size:
        table = torch.tensor(p.table[b : b + 1], dtype=torch.int32, device=device).reshape(1, p.width)
        pages = given["k"], given["v"]
        scales = (given["scales"]["k"], given["scales"]["v"], p.rotation) if p.fp8 else ()
        if p.fp8 or p.invariant == "alone":
            cache = warploom.PagedKVCache(*pages, table, numbers(used), *scales) if p.fp8 else None
            where = {"block_table": table, "seqused_k": numbers(used)}
            keys = (cache, None) if cache is not None else pages
            more = {} if cache is not None else where
            out, lse = warploom.attention_varlen(
                q, *keys, cu_seqlens_q=numbers(0, length), **more, backend=backend, **named
            )
            return either([(out, found["out"][rows]), (lse, found["lse"][:, rows])])
        needed = table[0, : -(-used // p.page_size)].long()
        k, v = (t[needed].flatten(0, 1)[:used] for t in pages)
    else:
        last = first + (p.keys[b] if p.invariant == "alone" else used)
        k, v = (given[n][first:last].clone() for n in "kv")
        if isinstance(named.get("mask"), ColumnMask):
            named = {**named, "mask": columns_of(named["mask"], slice(first, last))}
        if p.invariant == "alone":
            seqused = {} if p.used is None else {"seqused_k": numbers(used)}
            starts = numbers(0, length), numbers(0, last - first)
            out, lse = warploom.attention_varlen(q, k, v, *starts, **seqused, backend=backend, **named)
            return either([(out, found["out"][rows]), (lse, found["lse"][:, rows])])
    out, lse = warploom.attention(q[None], k[None], v[None], backend=backend, **named)
    return either([(out[0], found["out"][rows]), (lse[0], found["lse"][:, rows])])
