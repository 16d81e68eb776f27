"""A forward pass: one function launches both its kernels, which spares the host a call. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from warploom.delta.hopper.config import ForwardConfig
from warploom.delta.hopper.numbers import words_of
from warploom.delta.hopper.prepare import Prepare
from warploom.delta.hopper.walk import Walk


class Forward:
    """Both kernels of one configuration; ``__call__`` is what gets compiled."""

    def __init__(self, config: ForwardConfig):
        self.prepare, self.walk = Prepare(config.prepare), Walk(config.walk)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen, heads, E)
        k: cute.Tensor,
        v: cute.Tensor,  # (batch, seqlen, heads_v, M)
        out: cute.Tensor,
        prepared: cute.Tensor,  # (slots * heads_v, ITEM) fp32
        state: cute.Tensor,  # (sequences, heads_v, E, M) fp32 before the first token, or empty
        last: cute.Tensor,  # the same after the last token, or empty
        lengths: cute.Tensor,  # (batch,) int32, or empty
        cu: cute.Tensor,  # (sequences + 1,) int32, or empty
        beta: Int64,  # address of (batch, seqlen, heads_v), fp32 or bfloat16
        beta_batch: Int64,  # strides, in words of 16 bits
        beta_row: Int64,
        beta_head: Int64,
        beta_words: Int32,  # of an element
        decay: Int64,  # as beta; not read without `decays`
        decay_batch: Int64,
        decay_row: Int64,
        decay_head: Int64,
        decay_words: Int32,
        scale: Float32,
        eps: Float32,
        normalize: Int32,
        decays: Int32,
        stream: Any,
    ):
        """Launch both."""
        shape = v.shape[:3]
        betas = words_of(beta, shape, (beta_batch, beta_row, beta_head), beta_words)
        logs = words_of(decay, shape, (decay_batch, decay_row, decay_head), decay_words)
        self.prepare(q, k, betas, logs, lengths, cu, prepared, scale, eps, normalize, decays, stream)
        self.walk(q, k, v, out, prepared, state, last, lengths, cu, stream)
