"""One token of decoding: the state is read once and written once, and the output read off on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.numerics import exp


@triton.jit(
    do_not_specialize=[
        "beta_ptr", "decay_ptr", "stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh", "stride_bb",
        "stride_bh", "stride_db", "stride_dh", "stride_sb", "stride_sh", "stride_se", "stride_tb", "stride_th", "stride_te",
        "heads_v",
    ]
)  # fmt: skip
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    decay_ptr,
    s_ptr,
    out_ptr,
    s_out_ptr,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_bb,
    stride_bh,
    stride_db,
    stride_dh,
    stride_sb,
    stride_sh,
    stride_se,
    stride_tb,
    stride_th,
    stride_te,
    heads_v,
    scale,
    eps,
    E: tl.constexpr,
    M: tl.constexpr,
    DE: tl.constexpr,
    BM: tl.constexpr,
    GROUP: tl.constexpr,
    DENSE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """S <- e^decay S, S <- S + beta k outer (v - S^T k), out = scale S^T q, of BM value columns of one value head.

    out is contiguous, (batch, heads_v, M). The new state may lie where the old one does: a program reads its columns before it
    writes them, and no other's. Where states are DENSE their rows lie M apart, and other strides are in units of four elements.
    All loads begin before one is waited for; one warp holds whole columns, whose sums need no barrier.
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = (M + BM - 1) // BM
    block = pid % blocks
    index = (pid // blocks).to(tl.int64)
    batch = index // heads_v
    head = index % heads_v
    e = tl.arange(0, DE)
    m = block * BM + tl.arange(0, BM)
    live_e, live_m = e < E, m < M
    live = live_e[:, None] & live_m[None, :]
    read = s_ptr + (batch * stride_sb + head * stride_sh) * (4 if DENSE else 1)
    into = s_out_ptr + (batch * stride_tb + head * stride_th) * (4 if DENSE else 1)
    if DENSE:
        read += e[:, None] * M + m[None, :]
        into += e[:, None] * M + m[None, :]
    else:
        read += (e.to(tl.int64) * stride_se)[:, None] + m[None, :]
        into += (e.to(tl.int64) * stride_te)[:, None] + m[None, :]
    s = tl.load(read, mask=live, other=0.0)
    v = tl.load(v_ptr + batch * stride_vb + head * stride_vh + m, mask=live_m, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + batch * stride_bb + head * stride_bh)
    kept = 1.0
    if decay_ptr is not None:
        kept = exp(tl.load(decay_ptr + batch * stride_db + head * stride_dh))
    k = tl.load(k_ptr + batch * stride_kb + head // GROUP * stride_kh + e, mask=live_e, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + batch * stride_qb + head // GROUP * stride_qh + e, mask=live_e, other=0.0).to(tl.float32)
    if NORMALIZE:
        q *= 1.0 / tl.sqrt(tl.sum(q * q, 0) + eps)
        k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + eps)
    if decay_ptr is not None:
        s *= kept
    written = beta * (v - tl.sum(k[:, None] * s, 0))
    s += k[:, None] * written[None, :]
    out = tl.sum((q * scale)[:, None] * s, 0)
    tl.store(out_ptr + index * M + m, out.to(out_ptr.dtype.element_ty), mask=live_m)
    tl.store(into, s, mask=live)
