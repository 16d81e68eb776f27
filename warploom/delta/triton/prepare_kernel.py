"""What a chunk's walk needs that no state enters, for all chunks at once.

With D_ij = e^(G_i - G_j) the decay from token j to token i, and q and k normalized, S0 the state before the chunk:

    Y = V - e^G k S0 - A Y,    A_ij = D_ij (k_i . k_j) beta_j  for j < i,
    out = scale (e^G q S0 + P Y),    P_ij = D_ij (q_i . k_j) beta_j  for j <= i,
    S = e^G_last S0 + sum_j e^(G_last - G_j) beta_j k_j Y_j.

Y is what a token finds missing in the state; beta stands on the side of the columns, so that nothing is divided by it in the
backward pass, whatever beta. (Yang et al., 2024, arXiv 2412.06464, section 3.3, whose U is beta Y.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.delta.triton.device import (
    Shape,
    Source,
    between,
    cumulative,
    head_base,
    last_of,
    load_chunk,
    load_rows,
    place_of_slot,
    square,
)
from warploom.delta.triton.inverse import unit_inverse
from warploom.kernels.triton.numerics import dot, exp

# Rows of numbers that a chunk's walk multiplies by.
READS, QUERIES, WRITES, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

_PLAIN = [
    "lengths_ptr", "cu_ptr", "beta_ptr", "decay_ptr",
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh",
    "stride_bb", "stride_bs", "stride_bh", "stride_db", "stride_ds", "stride_dh", "sequences", "seqlen", "chunks", "heads_v",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)
def prepare_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    decay_ptr,
    lower_ptr,
    weights_ptr,
    rows_ptr,
    lengths_ptr,
    cu_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_bb,
    stride_bs,
    stride_bh,
    stride_db,
    stride_ds,
    stride_dh,
    sequences,
    seqlen,
    chunks,
    heads_v,
    scale,
    eps,
    E: tl.constexpr,
    DE: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of one chunk of one value head (I + A)^-1 - I, scale P and the rows of numbers.

    Matrices are (slots, value heads, C, C) in q's dtype, rows (slots, value heads, 4, C) fp32: what multiplies k S0, q S0 and
    k^T Y, for keys and queries as they are given, and e^G_last.
    """
    pid = tl.program_id(0)
    head_v = pid % heads_v
    slot = pid // heads_v
    at = place_of_slot(slot, Shape(lengths_ptr, cu_ptr, sequences, seqlen, chunks), C)
    if (at.first < 0) | (at.first >= at.live):
        return
    n = tl.arange(0, C)
    e = tl.arange(0, DE)
    rows = n.to(tl.int64) if WIDE else n
    counts = at.first + n < at.live
    dtype = q_ptr.dtype.element_ty
    index = slot.to(tl.int64) * heads_v + head_v
    k_base = head_base(Source(k_ptr, stride_kb, stride_ks, stride_kh), at, head_v // GROUP, UNIT)
    k = load_chunk(k_base, at.first, rows, e, stride_ks * UNIT, at.live, E, E == DE)
    norm_k = norms(k, counts, eps, NORMALIZE)
    beta = load_rows(Source(beta_ptr, stride_bb, stride_bs, stride_bh), at, head_v, at.first, n, 0.0)
    coarse, fine = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    if decay_ptr is not None:
        decay = load_rows(Source(decay_ptr, stride_db, stride_ds, stride_dh), at, head_v, at.first, n, 0.0)
        coarse, fine = cumulative(decay)

    q_base = head_base(Source(q_ptr, stride_qb, stride_qs, stride_qh), at, head_v // GROUP, UNIT)
    q = load_chunk(q_base, at.first, rows, e, stride_qs * UNIT, at.live, E, E == DE)
    norm_q = norms(q, counts, eps, NORMALIZE) * scale
    pairs = between(coarse, fine) * (beta * norm_k)[None, :]
    weights = dot(q, tl.trans(k), None) * pairs * norm_q[:, None]
    tl.store(weights_ptr + square(index, n, C), tl.where(n[:, None] >= n[None, :], weights, 0.0).to(dtype))
    since = exp(coarse + fine)
    whole_coarse, whole_fine = last_of(coarse, n, C), last_of(fine, n, C)
    until = exp((whole_coarse - coarse) + (whole_fine - fine))
    to = rows_ptr + index * (4 * C) + n
    tl.store(to + READS * C, since * norm_k)
    tl.store(to + QUERIES * C, since * norm_q)
    tl.store(to + WRITES * C, until * norm_k * beta)
    tl.store(to + WHOLE * C, exp(tl.zeros([C], tl.float32) + (whole_coarse + whole_fine)))
    a = dot(k, tl.trans(k), None) * pairs * norm_k[:, None]
    lower = unit_inverse(tl.where(n[:, None] > n[None, :], a, 0.0), C)
    tl.store(lower_ptr + square(index, n, C), lower.to(dtype))


@triton.jit
def norms(x, counts, eps, NORMALIZE: tl.constexpr):
    """What rows of x are multiplied by; 0 where they do not count."""
    if NORMALIZE:
        wide = x.to(tl.float32)
        return tl.where(counts, 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + eps), 0.0)
    else:
        return tl.where(counts, 1.0, 0.0)
