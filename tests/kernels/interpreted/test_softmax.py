"""The end of a running softmax: its logarithm, its divisor, and a sink."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tests.kernels.maps import agree
from warploom.kernels.triton.numerics import LN2
from warploom.kernels.triton.softmax import add_sink, divisor, log_sum


@triton.jit
def _kernel(total_ptr, top_ptr, sink_ptr, out_ptr, lse_ptr, LN2: tl.constexpr):
    """Rows whose values are their weights: normalised, what a sink leaves of 1."""
    at = tl.arange(0, 8)
    total = tl.load(total_ptr + at)
    acc = total[:, None] + tl.zeros([8, 4], tl.float32)
    acc, total, top = add_sink(acc, total, tl.load(top_ptr + at), tl.load(sink_ptr + at))
    out = acc / divisor(total)[:, None]
    tl.store(out_ptr + at[:, None] * 4 + tl.arange(0, 4)[None, :], out)
    tl.store(lse_ptr + at, log_sum(total, top, LN2))


def test_a_sink_joins_rows_with_and_without_keys() -> None:
    far = float("-inf")
    total = torch.tensor([1.0, 3.0, 0.0, 0.0, 2.0, 1.0, 5.0, float("nan")])
    top = torch.tensor([0.0, 100.0, far, far, -3.0, 7.0, -200.0, 1.0])
    sink = torch.tensor([0.0, -100.0, 2.0, far, far, 90.0, 150.0, 1.0])
    out, lse = torch.empty(8, 4), torch.empty(8)
    _kernel[(1,)](total, top, sink, out, lse, LN2=LN2.value)
    keys = top.double() * math.log(2) + total.double().log()
    want = torch.logaddexp(keys, sink.double() * math.log(2))
    share = (keys - want).exp()
    share[3] = 0.0  # neither keys nor a sink
    agree(lse, want)
    agree(out, share[:, None].expand(8, 4))
