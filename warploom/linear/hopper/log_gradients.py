"""The gradient of a decay's logs, in Triton, from what walks of queries' and of keys' gradients leave: see ``walk_terms``."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from warploom.kernels.triton.numerics import exp
from warploom.linear.hopper.config import WalkConfig
from warploom.runtime.triton_launch import Launch

_TILE = {"CHUNKS": 8, "LATER": 128, "num_warps": 4}  # chunks of a program, and of later ones at a time


class Terms(NamedTuple):
    """Room for what a walk leaves, in fp32."""

    dots: Tensor  # (warpgroups, and one of pairs where not in reverse, batch, heads, seqlen)
    totals: Tensor  # (warpgroups, batch, heads, chunks)

    @classmethod
    def of(cls, config: WalkConfig, like: Tensor) -> Terms:
        """Of ``like`` (batch, seqlen, heads, ·)."""
        batch, seqlen, heads, _ = like.shape
        parts = config.groups + config.meets
        dots = torch.empty(parts, batch, heads, seqlen, dtype=torch.float32, device=like.device)
        return cls(dots, dots.new_empty(config.groups, batch, heads, -(-seqlen // config.chunk)))


def log_gradients(queries: Terms, keys: Terms, decay: Tensor, chunk: int, scale: float) -> Tensor:
    """The gradient of the logs ``decay`` (batch, seqlen, heads), any strides; 0 of the first, and where all is forgotten."""
    batch, seqlen, heads = decay.shape
    found = torch.empty(batch, seqlen, heads, dtype=torch.float32, device=decay.device)
    blocks = -(-seqlen // (chunk * _TILE["CHUNKS"]))
    launch = _launch(chunk, keys.dots.shape[0])
    launch((batch * heads * blocks, 1), *queries, *keys, decay, found, *decay.stride(), seqlen, heads, batch, blocks, scale)
    return found


@cache
def _launch(chunk: int, groups: int) -> Launch:
    return Launch(log_gradients_kernel, {"C": chunk, "GROUPS": groups, **_TILE}, direct=True)


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
        "stride_h", "seqlen", "heads", "batches", "blocks",
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
    blocks,
    scale,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LATER: tl.constexpr,
):
    """Gradients of the logs of CHUNKS chunks of C tokens of a head.

    A log is the factor of every pair of a query at or after its token and a key before it: of all that pass the chunk, of
    queries from there on with keys before the chunk, of keys up to there with queries behind it, and of pairs in the chunk.
    """
    pid = tl.program_id(0)
    head, block = pid % heads, pid // heads % blocks
    batch = pid // heads // blocks
    row = (batch * heads + head).to(tl.int64)
    line = tl.cast(batches, tl.int64) * heads * seqlen
    chunks = tl.cdiv(seqlen, C)
    line_t = tl.cast(batches, tl.int64) * heads * chunks
    chunk, n = tl.arange(0, CHUNKS), tl.arange(0, C)
    # Pairs that pass the end of these chunks.
    after = tl.zeros([LATER], tl.float32)
    later = tl.arange(0, LATER)
    for first in range((block + 1) * CHUNKS, chunks, LATER):
        at, inside = row * chunks + first + later, first + later < chunks
        after += _sum_of_groups(totals_q_ptr, at, inside, line_t, GROUPS)
        after -= _sum_of_groups(totals_k_ptr, at, inside, line_t, GROUPS)
    at, inside = row * chunks + block * CHUNKS + chunk, block * CHUNKS + chunk < chunks
    change = _sum_of_groups(totals_q_ptr, at, inside, line_t, GROUPS)
    of_keys = _sum_of_groups(totals_k_ptr, at, inside, line_t, GROUPS)
    change -= of_keys
    both = tl.sum(after, 0) + tl.cumsum(change, 0, reverse=True) - change - of_keys
    tokens = (block * CHUNKS + chunk[:, None]) * C + n[None, :]
    live = tokens < seqlen
    at = row * seqlen + tokens
    asked = _sum_of_groups(dots_q_ptr, at, live, line, GROUPS)
    asked += tl.load(dots_q_ptr + GROUPS * line + at, mask=live, other=0.0)
    written = _sum_of_groups(dots_k_ptr, at, live, line, GROUPS)
    found = tl.cumsum(asked, 1, reverse=True) + (tl.cumsum(written, 1) - written) + both[:, None]
    logs = decay_ptr + batch.to(tl.int64) * stride_b + tokens.to(tl.int64) * stride_s + head.to(tl.int64) * stride_h
    # Nothing comes before the first token; and whatever rounding left of the terms of what is forgotten.
    fades = (tokens > 0) & (exp(tl.load(logs, mask=live, other=0.0)) != 0.0)
    found = tl.where(fades, found * scale, 0.0)
    to = found_ptr + (tl.cast(batch, tl.int64) * seqlen + tokens) * heads + head
    tl.store(to, found, mask=live)
