"""Where sequences are cut into segments: the state that each segment's own keys and values leave, in Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.kernels.triton.logs import exp2, held
from warploom.kernels.triton.numerics import LOG2E, opaque_zeros
from warploom.runtime.likeness import like
from warploom.runtime.triton_launch import Launch

States = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_UNIT = 8  # elements that strides count in
UNIT = tl.constexpr(_UNIT)
DIM = 64  # of keys and of values
# Of the kernels of linear/triton/ that sum states, this loop has the same tiling.
_TILE = {"DIM": DIM, "STAGES": 4, "num_warps": 4}


def bind_states(k: Tensor, v: Tensor, segments: int, chunk: int, log_stride: int, a_head: bool) -> States:
    """What launches each segment's own sum of v_j k_j, faded to its end, and the sum of its logs in log2.

    Not of a segment with none behind it.

    Args:
        k, v: (batch, seqlen, heads, DIM) in bfloat16, strides multiples of 16 bytes, as further ones are.
        log_stride: of the heads of logs: sums of `rows.bind_sums`, or of ``a_head`` one log a head, (heads,).

    Returns:
        A function of k, v and logs that returns (batch, heads, segments, DIM, DIM), values down and keys across, and
        (batch, heads, segments), fp32.
    """
    batch, seqlen, heads, _ = k.shape
    likes = [like((batch, heads, segments, *dims), torch.float32, k.device) for dims in ((DIM, DIM), ())]
    steps, each = _steps(k, v), _tokens(seqlen, segments, chunk)
    launch = _launch(states_kernel, chunk, a_head, max(steps) < 2**31, False).kept(
        (batch * heads * segments, 1), (*steps, log_stride, seqlen, heads, segments, each)
    )

    def run(k: Tensor, v: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
        states, fades = (torch.empty_like(t) for t in likes)
        launch(k, v, logs, states, fades)
        return states, fades

    return run


def gradient_states(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, logs: Tensor, segments: int, chunk: int
) -> list[tuple[Tensor | None, Tensor | None]]:
    """What functions of `bind_states` return, for the walks of dq, dk and dv; arguments as there.

    Rounded chunk by chunk, as the walks round what they add to a state.
    """
    batch, seqlen, heads, _ = k.shape
    shape = batch, heads, segments, DIM, DIM
    of_queries, of_keys, of_values = (torch.empty(shape, dtype=torch.float32, device=k.device) for _ in range(3))
    until, since = of_keys.new_empty(2, batch, heads, segments)
    steps, each = _steps(q, k, v, dout), _tokens(seqlen, segments, chunk)
    a_head = logs.ndim == 1
    launch = _launch(gradient_states_kernel, chunk, a_head, max(steps) < 2**31, logs.is_cuda)
    states = of_queries, of_keys, of_values, until, since
    numbers = logs.stride(0 if a_head else 1), seqlen, heads, segments, each
    launch((2 * batch * heads * segments, 1), q, k, v, dout, logs, *states, *steps, *numbers)
    return [(of_queries, until), (of_keys, since), (of_values, since)]


def _steps(*tensors: Tensor) -> list[int]:
    """Strides of batch, tokens and heads in units."""
    return [s // _UNIT for t in tensors for s in t.stride()[:3]]


def _tokens(seqlen: int, segments: int, chunk: int) -> int:
    """Tokens of a segment, whole chunks."""
    return -(-seqlen // (chunk * segments)) * chunk


@cache
def _launch(kernel: Any, chunk: int, a_head: bool, direct: bool, early: bool) -> Launch:
    """``early``: it begins before the kernel before it ends, and so does the next one."""
    constants = {"C": chunk, "A_HEAD": a_head, **_TILE}
    if kernel is gradient_states_kernel:
        constants |= {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
    return Launch(kernel, constants, direct=direct)


@triton.jit(
    do_not_specialize=[
        "logs_ptr", "fades_ptr", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh", "stride_lh",
        "seqlen", "heads", "segments", "segment",
    ]
)  # fmt: skip
def states_kernel(
    k_ptr,
    v_ptr,
    logs_ptr,
    states_ptr,
    fades_ptr,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_lh,
    seqlen,
    heads,
    segments,
    segment,
    C: tl.constexpr,
    DIM: tl.constexpr,
    A_HEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A segment's own state, from its last chunk on: what the walk reads first may then still be in L2."""
    pid = tl.program_id(0)
    row, place = pid // segments, pid % segments
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    first = place * segment
    # Nothing begins from the last one's.
    if first + segment >= seqlen:
        return
    n, e = tl.arange(0, C), tl.arange(0, DIM)
    k_base = k_ptr + (batch * stride_kb + head * stride_kh) * UNIT
    v_base = v_ptr + (batch * stride_vb + head * stride_vh) * UNIT
    logs = logs_ptr + (head if A_HEAD else row.to(tl.int64)) * stride_lh
    if A_HEAD:
        log = held(tl.load(logs)) * LOG2E
    s = opaque_zeros(DIM, DIM)
    passed = tl.zeros([], tl.float32)
    for i in tl.range(0, segment // C, num_stages=STAGES):
        t = (first + segment - (i + 1) * C).to(tl.int64)
        k = tl.load(k_base + t * (stride_ks * UNIT) + (n[:, None] * (stride_ks * UNIT) + e[None, :]))
        v = tl.load(v_base + t * (stride_vs * UNIT) + (n[:, None] * (stride_vs * UNIT) + e[None, :]))
        if A_HEAD:
            left, last = (C - 1 - n).to(tl.float32) * log, C * log
        else:
            last = tl.load(logs + t + (C - 1))
            left = last - tl.load(logs + t + n)
        k = (k.to(tl.float32) * exp2(passed + left)[:, None]).to(k.dtype)
        s = tl.dot(tl.trans(v), k, s)
        passed += last
    to = states_ptr + pid.to(tl.int64) * (DIM * DIM)
    tl.store(to + e[:, None] * DIM + e[None, :], s)
    tl.store(fades_ptr + pid, passed)


@triton.jit(
    do_not_specialize=[
        "logs_ptr", "of_queries_ptr", "of_keys_ptr", "of_values_ptr", "until_ptr", "since_ptr", "stride_qb", "stride_qs",
        "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh", "stride_gb", "stride_gs",
        "stride_gh", "stride_lh", "seqlen", "heads", "segments", "segment",
    ]
)  # fmt: skip
def gradient_states_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    logs_ptr,
    of_queries_ptr,
    of_keys_ptr,
    of_values_ptr,
    until_ptr,
    since_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_gb,
    stride_gs,
    stride_gh,
    stride_lh,
    seqlen,
    heads,
    segments,
    segment,
    C: tl.constexpr,
    DIM: tl.constexpr,
    A_HEAD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A segment's own sum of k v, or from its end of q dO, faded and rounded step by step as the walks do it.

    Sums are stored as walks have them: of dq and dk with keys' or queries' dims down, of dv with them across.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    places = tl.num_programs(0) // 2
    reverse = pid >= places
    pid = pid % places
    row, place = pid // segments, pid % segments
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    first = place * segment
    # Nothing begins from the last one's, in reverse from the first one's.
    if reverse & (place == 0):
        return
    if (first + segment >= seqlen) & (not reverse):
        return
    n, e = tl.arange(0, C), tl.arange(0, DIM)
    if reverse:
        c_base, stride_c = q_ptr + (batch * stride_qb + head * stride_qh) * UNIT, stride_qs
        b_base, stride_b = g_ptr + (batch * stride_gb + head * stride_gh) * UNIT, stride_gs
    else:
        c_base, stride_c = k_ptr + (batch * stride_kb + head * stride_kh) * UNIT, stride_ks
        b_base, stride_b = v_ptr + (batch * stride_vb + head * stride_vh) * UNIT, stride_vs
    logs = logs_ptr + (head if A_HEAD else row.to(tl.int64)) * stride_lh
    if A_HEAD:
        log = held(tl.load(logs)) * LOG2E
    s = opaque_zeros(DIM, DIM)
    passed = tl.zeros([], tl.float32)
    for i in tl.range(0, segment // C, num_stages=STAGES):
        t = first + tl.where(reverse, segment - (i + 1) * C, i * C)
        tokens = (t + n).to(tl.int64)[:, None]
        inside = tokens < seqlen
        c = tl.load(c_base + tokens * (stride_c * UNIT) + e[None, :], mask=inside, other=0.0)
        b = tl.load(b_base + tokens * (stride_b * UNIT) + e[None, :], mask=inside, other=0.0)
        if A_HEAD:
            sums, last = (n + 1).to(tl.float32) * log, C * log
        else:
            sums = tl.load(logs + tl.minimum(t + n, seqlen - 1))
            last = tl.load(logs + tl.minimum(t + (C - 1), seqlen - 1))
        c = (c.to(tl.float32) * exp2(tl.where(reverse, sums, last - sums))[:, None]).to(c.dtype)
        s = tl.dot(tl.trans(b), c, s * exp2(last))
        passed += last
    to = pid.to(tl.int64) * (DIM * DIM)
    down, across = to + e[:, None] * DIM + e[None, :], to + e[None, :] * DIM + e[:, None]
    if reverse:
        tl.store(of_keys_ptr + across, s)
        tl.store(of_values_ptr + down, s)
        tl.store(since_ptr + pid, passed)
    else:
        tl.store(of_queries_ptr + across, s)
        tl.store(until_ptr + pid, passed)
