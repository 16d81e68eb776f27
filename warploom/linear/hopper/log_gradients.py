"""The gradient of a decay's logs, in Triton, from what walks of queries' and of keys' gradients leave: see ``walk_terms``."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from warploom.kernels.triton.numerics import exp
from warploom.linear.hopper.config import WalkConfig
from warploom.runtime.triton_launch import Launch

# Heads of a program, each a chunk, and later chunks that are added at a time. 4 × 32 × 8192 tokens on an H200 16.4 us, of 8
# heads and four warps 17.5, of 16 heads 22.
_TILE = {"HEADS": 4, "LATER": 128, "num_warps": 2}


class Terms(NamedTuple):
    """Room for what a walk leaves, in fp32."""

    dots: Tensor  # (warpgroups, and of pairs where not in reverse one of each block, batch, heads, seqlen)
    totals: Tensor  # (warpgroups, batch, heads, chunks)

    @classmethod
    def of(cls, config: WalkConfig, like: Tensor) -> Terms:
        """Of ``like`` (batch, seqlen, heads, ·)."""
        batch, seqlen, heads, _ = like.shape
        parts = config.parts + config.meets * config.blocks
        dots = torch.empty(parts, batch, heads, seqlen, dtype=torch.float32, device=like.device)
        return cls(dots, dots.new_empty(config.parts, batch, heads, -(-seqlen // config.chunk)))


def log_gradients(queries: Terms, keys: Terms, decay: Tensor, chunk: int, scale: float) -> Tensor:
    """The gradient of the logs ``decay`` (batch, seqlen, heads), any strides; 0 of the first, and where all is forgotten."""
    batch, seqlen, heads = decay.shape
    found = torch.empty(batch, seqlen, heads, dtype=torch.float32, device=decay.device)
    programs = batch * -(-seqlen // chunk) * -(-heads // _TILE["HEADS"])
    groups = keys.dots.shape[0]
    launch = _launch(chunk, groups, queries.dots.shape[0] - groups, max(decay.stride()) < 2**31, decay.is_cuda)
    launch((programs, 1), *queries, *keys, decay, found, *decay.stride(), seqlen, heads, batch, scale)
    return found


@cache
def _launch(chunk: int, groups: int, pairs: int, direct: bool, early: bool) -> Launch:
    """``early``: it may begin before the walk before it ends, and waits for it."""
    constants = {"C": chunk, "GROUPS": groups, "PAIRS": pairs, "PDL": early, **_TILE, **({"launch_pdl": True} if early else {})}
    return Launch(log_gradients_kernel, constants, direct=direct)


@triton.jit
def _sum_of_groups(pointer, at, inside, line, GROUPS: tl.constexpr):
    """What all warpgroups left at the same places of their tensors, which are ``line`` elements long."""
    total = tl.load(pointer + at, mask=inside, other=0.0)
    for i in tl.static_range(1, GROUPS):
        total += tl.load(pointer + i * line + at, mask=inside, other=0.0)
    return total


@triton.jit(
    do_not_specialize=[
        "dots_q_ptr", "totals_q_ptr", "dots_k_ptr", "totals_k_ptr", "decay_ptr", "found_ptr", "stride_b", "stride_s",
        "stride_h", "seqlen", "heads", "batches",
    ]
)  # fmt: skip
def log_gradients_kernel(
    dots_q_ptr,
    totals_q_ptr,
    dots_k_ptr,
    totals_k_ptr,
    decay_ptr,
    found_ptr,
    stride_b,
    stride_s,
    stride_h,
    seqlen,
    heads,
    batches,
    scale,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    LATER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gradients of the logs of a chunk of C tokens and HEADS heads.

    A log is the factor of every pair of a query at or after its token and a key before it: of all that pass the chunk, of
    queries from there on with keys before the chunk, of keys up to there with queries behind it, and of pairs in the chunk.
    """
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    chunks, blocks = tl.cdiv(seqlen, C), tl.cdiv(heads, HEADS)
    head = pid % blocks * HEADS + tl.arange(0, HEADS)
    chunk = pid // blocks % chunks
    batch = (pid // blocks // chunks).to(tl.int64)
    row, there = (batch * heads + head)[:, None], (head < heads)[:, None]
    lines = tl.cast(batches, tl.int64) * heads
    # Pairs that pass the end of the chunk.
    after = tl.zeros([HEADS, LATER], tl.float32)
    later = tl.arange(0, LATER)[None, :]
    for first in range(chunk + 1, chunks, LATER):
        at, inside = row * chunks + first + later, there & (first + later < chunks)
        after += _sum_of_groups(totals_q_ptr, at, inside, lines * chunks, GROUPS)
        after -= _sum_of_groups(totals_k_ptr, at, inside, lines * chunks, GROUPS)
    passes = tl.sum(after, 1)[:, None] - _sum_of_groups(totals_k_ptr, row * chunks + chunk, there, lines * chunks, GROUPS)
    tokens = (chunk * C + tl.arange(0, C))[None, :]
    at, inside = row * seqlen + tokens, there & (tokens < seqlen)
    asked = _sum_of_groups(dots_q_ptr, at, inside, lines * seqlen, GROUPS)
    asked += _sum_of_groups(dots_q_ptr + GROUPS * lines * seqlen, at, inside, lines * seqlen, PAIRS)
    written = _sum_of_groups(dots_k_ptr, at, inside, lines * seqlen, GROUPS)
    found = tl.cumsum(asked, 1, reverse=True) + (tl.cumsum(written, 1) - written) + passes
    logs = decay_ptr + batch * stride_b + tokens.to(tl.int64) * stride_s + head.to(tl.int64)[:, None] * stride_h
    # Nothing comes before the first token; and whatever rounding left of the terms of what is forgotten.
    fades = (tokens > 0) & (exp(tl.load(logs, mask=inside, other=0.0)) != 0.0)
    found = tl.where(fades, found * scale, 0.0)
    to = found_ptr + (batch * seqlen + tokens) * heads + head[:, None]
    tl.store(to, found, mask=inside)
