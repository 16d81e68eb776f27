"""The stats of a call, judged against the same formulas in fp64, one sequence at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.attention.biased import KINDS, leaf_of, matrix_of
from tests.attention.harness import Call
from warploom import AttentionStats
from warploom.attention.arguments import dense_args
from warploom.attention.judge import judge
from warploom.masks.visible import visible

BOTH = ("max_logits", "column_sums")
SIZES = ("seqlen_q", "seqlen_k", "head_dim")


def formulas(q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Max logits and column sums of a dense call, in q's dtype, of nothing but what is seen."""
    group = q.shape[2] // k.shape[2]
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~seen, float("-inf"))
    lse = logits.logsumexp(-1, keepdim=True)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0))
    return logits.amax((-2, -1)), weights.sum(-2)


def seen_by(q: Tensor, k: Tensor, **keywords: Any) -> tuple[Tensor, float, float]:
    """(batch|1, heads_q|1, seqlen_q, seqlen_k) of a dense call, its scale and its softcap."""
    args = dense_args(q, k, k, **{name: value for name, value in keywords.items() if name not in ("sink", "bias")})
    rows, cols = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[1]))
    seen = visible(args.mask, rows, cols, k.shape[1] - q.shape[1])
    if seen.shape[1] not in (1, q.shape[2]):
        seen = seen.repeat_interleave(q.shape[2] // seen.shape[1], 1)
    return seen, args.scale, args.softcap


def compare(got: AttentionStats, want: tuple[Tensor, Tensor], model: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    assert got.max_logits is not None and got.column_sums is not None
    for name, value, exact, low in zip(BOTH, got, want, model, strict=True):
        assert isinstance(value, Tensor) and value.dtype == torch.float32 and not value.requires_grad
        verdict = judge(name, value, exact, low, dtype)
        assert verdict.passed, verdict


def check_stats(call: Call, backend: str, kind: str | None = None) -> None:
    """Both stats of a dense call; ``kind``: of its bias, in fp32."""
    q, k, v, sink = call.tensors()
    keywords, matrix = dict(call.keywords), None
    if kind is not None:
        leaf = leaf_of(kind, (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k), call.seed, torch.float32)
        keywords["bias"] = KINDS[kind].build(leaf.to(q.device))
        matrix = matrix_of(kind, leaf, call.seqlen_q, call.seqlen_k).to(q.device)
    seen, scale, softcap = seen_by(q, k, **keywords)
    want, model = (
        formulas(q.to(t), k.to(t), seen, scale, softcap, None if matrix is None else matrix.to(t))
        for t in (torch.float64, torch.float32)
    )
    _, stats = warploom.attention(q, k, v, sink=sink, return_stats=BOTH, backend=backend, **keywords)
    compare(stats, want, model, call.dtype)


def check_largest(seed: int, backend: str, **options: Any) -> None:
    """Max logits alone, which a forward pass may find beside out and lse."""
    sizes = {"seqlen_q": 500, "seqlen_k": 333, **{n: x for n, x in options.items() if n in SIZES}}
    keywords = {n: x for n, x in options.items() if n not in SIZES}
    call = Call(seed, batch=2, heads_q=4, heads_kv=2, dtype=torch.bfloat16, device="cuda", **sizes)
    q, k, v, _ = call.tensors()
    q[0], k[0] = q[0].abs(), -k[0].abs()
    seen, scale, softcap = seen_by(q, k, **keywords)
    want, model = (formulas(q.to(t), k.to(t), seen, scale, softcap, None)[0] for t in (torch.float64, torch.float32))
    plan = warploom.explain(q, k, v, return_stats=["max_logits"], backend=backend, **keywords)
    assert plan.stats_implementation == backend
    out, lse = warploom.attention(q, k, v, return_lse=True, backend=backend, **keywords)
    *same, stats = warploom.attention(
        q, k, v, return_lse=True, return_stats=["max_logits"], backend=backend, **keywords
    )
    assert torch.equal(same[0], out) and torch.equal(same[1], lse) and stats.column_sums is None
    verdict = judge("max_logits", stats.max_logits, want, model, call.dtype)
    assert verdict.passed, verdict


def check_packed(
    call: Call, starts_q: list[int], starts_k: list[int], backend: str, kind: str | None = None, used: list[int] | None = None
) -> None:
    """Both stats of sequences that begin at these tokens of the call's only batch entry; NaN where nobody looks."""
    q, k, v = [t[0] for t in call.tensors()[:3] if t is not None]
    cu_q, cu_k = (torch.tensor(starts, dtype=torch.int32, device=q.device) for starts in (starts_q, starts_k))
    ends = starts_k[1:] if used is None else [start + n for start, n in zip(starts_k, used, strict=False)]
    hidden = torch.ones(k.shape[0], dtype=torch.bool, device=q.device)
    for start, stop in zip(starts_k, ends, strict=False):
        hidden[start:stop] = False
    k, v = (t.masked_fill(hidden[:, None, None], float("nan")) for t in (k, v))
    longest = [max(b - a for a, b in pairwise(t)) for t in (starts_q, starts_k)]
    keywords, leaf = dict(call.keywords), None
    if kind is not None:
        leaf = leaf_of(kind, (len(ends), call.heads_q, *longest), call.seed, torch.float32)
        keywords["bias"] = KINDS[kind].build(leaf.to(q.device))
    lengths = None if used is None else torch.tensor(used, dtype=torch.int32, device=q.device)
    _, stats = warploom.attention_varlen(
        q, k, v, cu_q, cu_k, *longest, seqused_k=lengths, return_stats=BOTH, backend=backend, **keywords
    )
    found = []
    for dtype in (torch.float64, torch.float32):
        sums = torch.zeros((call.heads_q, k.shape[0]), dtype=dtype, device=q.device)
        largest = torch.full((len(ends), call.heads_q), float("-inf"), dtype=dtype, device=q.device)
        for n, (first, stop) in enumerate(zip(starts_k, ends, strict=False)):
            own_q, own_k = q[None, starts_q[n] : starts_q[n + 1]].to(dtype), k[None, first:stop].to(dtype)
            if not (own_q.shape[1] and own_k.shape[1]):
                continue
            seen, scale, softcap = seen_by(own_q, own_k, **_own(call.keywords, first, stop))
            matrix = None
            if kind is not None and leaf is not None:
                matrix = _of_sequence(kind, leaf, n, own_q.shape[1], own_k.shape[1]).to(q.device, dtype)
            part = formulas(own_q, own_k, seen, scale, softcap, matrix)
            largest[n], sums[:, first:stop] = part[0][0], part[1][0]
        found.append((largest, sums))
    compare(stats, found[0], found[1], call.dtype)


def _own(keywords: dict[str, Any], first: int, stop: int) -> dict[str, Any]:
    """A sequence's keywords: of a column mask its own columns."""
    mask = keywords.get("mask")
    if not isinstance(mask, warploom.masks.ColumnMask):
        return keywords
    vectors = [None if t is None else t[..., first:stop] for t in (mask.lts, mask.lte, mask.uts, mask.ute)]
    return {**keywords, "mask": warploom.masks.ColumnMask(*vectors)}


def _of_sequence(kind: str, leaf: Tensor, n: int, rows: int, keys: int) -> Tensor:
    """What the bias of all sequences adds to one."""
    matrix = matrix_of(kind, leaf, rows, keys)
    matrix = matrix[n : n + 1] if matrix.shape[0] > 1 else matrix
    return matrix[..., :rows, :keys]
