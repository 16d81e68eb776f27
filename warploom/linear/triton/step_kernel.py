"""One token of decoding: the state is read once and written once, and the output read off on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.feature_maps import phi
from warploom.kernels.triton.numerics import exp


@triton.jit(
    do_not_specialize=[
        "z_ptr", "z_out_ptr", "decay_ptr", "stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh",
        "stride_gb", "stride_gh", "heads_kv",
    ]
)  # fmt: skip
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    s_ptr,
    z_ptr,
    out_ptr,
    s_out_ptr,
    z_out_ptr,
    decay_ptr,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_gb,
    stride_gh,
    heads_kv,
    scale,
    eps,
    E: tl.constexpr,
    M: tl.constexpr,
    DE: tl.constexpr,
    BM: tl.constexpr,
    GROUP: tl.constexpr,
    MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """S + phi(k) outer v, z + phi(k), and out = phi(q) S / (phi(q).z + eps / scale) of a block of value columns.

    With decay_ptr, (batch, heads_kv) by its strides, S and z are multiplied by its exponential first.
    States and out are contiguous: (batch, heads_kv, E, M), (batch, heads_kv, E), (batch, heads, M).
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = (M + BM - 1) // BM
    block = pid % blocks
    index = (pid // blocks).to(tl.int64)
    batch = index // heads_kv
    head_kv = index % heads_kv
    e = tl.arange(0, DE)
    m = block * BM + tl.arange(0, BM)
    live_e, live_m = e < E, m < M
    offsets = index * (E * M) + (e[:, None] * M + m[None, :])
    live = live_e[:, None] & live_m[None, :]
    s = tl.load(s_ptr + offsets, mask=live, other=0.0)
    z = tl.load(z_ptr + index * E + e, mask=live_e, other=0.0)
    k = tl.load(k_ptr + batch * stride_kb + head_kv * stride_kh + e, mask=live_e, other=0.0)
    v = tl.load(v_ptr + batch * stride_vb + head_kv * stride_vh + m, mask=live_m, other=0.0)
    fk = tl.where(live_e, phi(k, MAP_K), 0.0)
    if decay_ptr is not None:
        kept = exp(tl.load(decay_ptr + batch * stride_gb + head_kv * stride_gh))
        s *= kept
        z *= kept
    s += fk[:, None] * v.to(tl.float32)[None, :]
    z += fk
    tl.store(s_out_ptr + offsets, s, mask=live)
    tl.store(z_out_ptr + index * E + e, z, mask=live_e & (block == 0))
    for g in range(GROUP):
        head = head_kv * GROUP + g
        q = tl.load(q_ptr + batch * stride_qb + head * stride_qh + e, mask=live_e, other=0.0)
        fq = phi(q, MAP_Q) * scale
        out = tl.sum(fq[:, None] * s, 0)
        if NORMALIZE:
            out = out / (tl.sum(fq * z, 0) + eps)
        tl.store(out_ptr + (index * GROUP + g) * M + m, out.to(out_ptr.dtype.element_ty), mask=live_m)
