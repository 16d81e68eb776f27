"""What surrounds the walks where there are maps or denominators: sums over the rows up to each row.

Legend: E columns in a tile of BE; C rows at a time; a sequence is cut into segments of SEGMENT rows, a program each, whose own
sums are taken first. Strided tensors are (batch, seqlen, heads, E), strides in units of UNIT elements; others are contiguous,
(batch, seqlen, heads, E) or (batch, heads, seqlen), and sums are (batch, heads, segments, E).
"""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.kernels.triton.feature_maps import IDENTITY, only, phi, through_map
from warploom.kernels.triton.logs import sums_in_log2

UNIT = tl.constexpr(8)  # 16 bytes: walks ask that of strides too
MOST = tl.constexpr(16)  # segments whose sums are read at a time


@triton.jit
def _strided(pointer, row, heads, stride_b, stride_s, stride_h, rows, e):
    """Addresses of rows of a batch entry and head, numbered together as `row`."""
    base = pointer + ((row // heads).to(tl.int64) * stride_b + (row % heads).to(tl.int64) * stride_h) * UNIT
    return base + rows.to(tl.int64)[:, None] * (stride_s * UNIT) + e[None, :]


@triton.jit
def _packed(pointer, row, heads, seqlen, rows, e, E: tl.constexpr):
    """The same of a contiguous tensor."""
    offsets = ((row // heads).to(tl.int64) * seqlen + rows) * heads + row % heads
    return pointer + offsets[:, None] * E + e[None, :]


@triton.jit
def _between(sums_ptr, row, first, end, segments, e, E: tl.constexpr, BE: tl.constexpr):
    """The segments' own sums, added up from `first` to before `end`."""
    total = tl.zeros([MOST, BE], tl.float32)
    for s0 in range(first, end, MOST):
        s = s0 + tl.arange(0, MOST)
        offsets = (row * segments + s).to(tl.int64)[:, None] * E + e[None, :]
        total += tl.load(sums_ptr + offsets, mask=(s < end)[:, None] & (e < E)[None, :], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _mapped(x, inside, MAP: tl.constexpr):
    """phi(x), rounded as x is; 0 outside."""
    if MAP == IDENTITY:
        return x
    return only(phi(x, MAP), inside, MAP).to(x.dtype)


@triton.jit(do_not_specialize=["sums_ptr", "stride_b", "stride_s", "stride_h", "seqlen", "heads", "segments"])
def sums_kernel(
    x_ptr,
    mapped_ptr,
    sums_ptr,
    stride_b,
    stride_s,
    stride_h,
    seqlen,
    heads,
    segments,
    E: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAP: tl.constexpr,
):
    """phi(x) of a segment's rows, and its sum over them, each where there is room for it."""
    pid = tl.program_id(0)
    row, first = pid // segments, pid % segments * SEGMENT
    e, n = tl.arange(0, BE), tl.arange(0, C)
    total = tl.zeros([C, BE], tl.float32)
    for t in range(first, tl.minimum(first + SEGMENT, seqlen), C):
        inside = (t + n < seqlen)[:, None] & (e < E)[None, :]
        x = tl.load(_strided(x_ptr, row, heads, stride_b, stride_s, stride_h, t + n, e), mask=inside, other=0.0)
        x = _mapped(x, inside, MAP)
        if mapped_ptr is not None:
            tl.store(_packed(mapped_ptr, row, heads, seqlen, t + n, e, E), x, mask=inside)
        total += x.to(tl.float32)
    if sums_ptr is not None:
        tl.store(sums_ptr + pid.to(tl.int64) * E + e, tl.sum(total, 0), mask=e < E)


_NUMBERS = ["seqlen", "heads", "segments"]
_STRIDES = [f"stride_{t}{dim}" for t in "qk" for dim in "bsh"]


@triton.jit(do_not_specialize=["sums_ptr", "norm_ptr", "weights_ptr", *_NUMBERS, *_STRIDES])
def norm_kernel(
    q_ptr,
    k_ptr,
    sums_ptr,
    norm_ptr,
    weights_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    seqlen,
    heads,
    segments,
    scale,
    eps,
    E: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """norm_i = scale * q_i.z_i + eps, z_i the sum of k_j over j <= i, both mapped; weights are its reciprocals."""
    pid = tl.program_id(0)
    row, segment = pid // segments, pid % segments
    e, n = tl.arange(0, BE), tl.arange(0, C)
    z = _between(sums_ptr, row, 0, segment, segments, e, E, BE)
    lower = (n[:, None] >= n[None, :]).to(k_ptr.dtype.element_ty)
    for t in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, seqlen), C):
        live = t + n < seqlen
        inside = live[:, None] & (e < E)[None, :]
        k = tl.load(_strided(k_ptr, row, heads, stride_kb, stride_ks, stride_kh, t + n, e), mask=inside, other=0.0)
        q = tl.load(_strided(q_ptr, row, heads, stride_qb, stride_qs, stride_qh, t + n, e), mask=inside, other=0.0)
        sums = tl.dot(lower, k) + z[None, :]
        norm = scale * tl.sum(sums * q.to(tl.float32), 1) + eps
        vectors = row.to(tl.int64) * seqlen + t + n
        tl.store(norm_ptr + vectors, norm, mask=live)
        tl.store(weights_ptr + vectors, 1.0 / norm, mask=live)
        z += tl.sum(k.to(tl.float32), 0)


@triton.jit(do_not_specialize=["sums_ptr", "weights_ptr", "bias_ptr", *_NUMBERS, *_STRIDES])
def dq_kernel(
    q_ptr,
    k_ptr,
    sums_ptr,
    x_ptr,
    weights_ptr,
    bias_ptr,
    dq_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    seqlen,
    heads,
    segments,
    scale,
    E: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAP: tl.constexpr,
):
    """dphi(q_i) = w_i (x_i - bias_i scale z_i), from x_i = scale * sum of (dO_i.v_j) phi(k_j) over j <= i, in fp32.

    q and k are mapped, w_i is 1 / norm_i, and bias_i = w_i phi(q_i).x_i = dO_i.out_i. Writes bias and dq, behind the map.
    """
    pid = tl.program_id(0)
    row, segment = pid // segments, pid % segments
    e, n = tl.arange(0, BE), tl.arange(0, C)
    z = _between(sums_ptr, row, 0, segment, segments, e, E, BE)
    lower = (n[:, None] >= n[None, :]).to(k_ptr.dtype.element_ty)
    for t in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, seqlen), C):
        live = t + n < seqlen
        inside = live[:, None] & (e < E)[None, :]
        k = tl.load(_strided(k_ptr, row, heads, stride_kb, stride_ks, stride_kh, t + n, e), mask=inside, other=0.0)
        q = tl.load(_strided(q_ptr, row, heads, stride_qb, stride_qs, stride_qh, t + n, e), mask=inside, other=0.0)
        x = tl.load(_packed(x_ptr, row, heads, seqlen, t + n, e, E), mask=inside, other=0.0)
        vectors = row.to(tl.int64) * seqlen + t + n
        weight = tl.load(weights_ptr + vectors, mask=live, other=0.0)
        sums = tl.dot(lower, k) + z[None, :]
        bias = weight * tl.sum(x * q.to(tl.float32), 1)
        tl.store(bias_ptr + vectors, bias, mask=live)
        dq = weight[:, None] * (x - (bias * scale)[:, None] * sums)
        dq = through_map(dq, q.to(tl.float32), MAP).to(dq_ptr.dtype.element_ty)
        tl.store(_packed(dq_ptr, row, heads, seqlen, t + n, e, E), dq, mask=inside)
        z += tl.sum(k.to(tl.float32), 0)


@triton.jit(do_not_specialize=["stride_b", "stride_s", "stride_h", *_NUMBERS])
def through_kernel(
    mapped_ptr,
    gradient_ptr,
    stride_b,
    stride_s,
    stride_h,
    seqlen,
    heads,
    segments,
    E: tl.constexpr,
    BE: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAP: tl.constexpr,
):
    """The gradient of phi(x) becomes that of x, in place."""
    pid = tl.program_id(0)
    row, first = pid // segments, pid % segments * SEGMENT
    e, n = tl.arange(0, BE), tl.arange(0, C)
    for t in range(first, tl.minimum(first + SEGMENT, seqlen), C):
        inside = (t + n < seqlen)[:, None] & (e < E)[None, :]
        source = _strided(mapped_ptr, row, heads, stride_b, stride_s, stride_h, t + n, e)
        mapped = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        target = _packed(gradient_ptr, row, heads, seqlen, t + n, e, E)
        gradient = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, through_map(gradient, mapped, MAP).to(gradient_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["logs_ptr", "sums_ptr", "stride_b", "stride_s", "stride_h", "seqlen", "heads", "chunks"])
def logs_kernel(
    logs_ptr, sums_ptr, stride_b, stride_s, stride_h, seqlen, heads, chunks, C: tl.constexpr, HEADS: tl.constexpr
):
    """Sums of logs (batch, seqlen, heads), their strides in elements, up to each row within its chunk, in log2."""
    blocks = tl.cdiv(heads, HEADS)
    row = tl.program_id(0) // blocks
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    batch, rows = (row // chunks).to(tl.int64), row % chunks * C + tl.arange(0, C)
    inside = (rows < seqlen)[:, None] & (head < heads)[None, :]
    base = logs_ptr + batch * stride_b + rows.to(tl.int64)[:, None] * stride_s + head.to(tl.int64)[None, :] * stride_h
    sums = sums_in_log2(tl.load(base, mask=inside, other=0.0))
    tl.store(sums_ptr + (batch * heads + head)[None, :] * seqlen + rows[:, None], sums, mask=inside)
