"""One validated, frozen description of a gated delta rule call: what dispatch decides on and every implementation computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeltaCall:
    """Tensors and numbers of one call, validated.

    A value head h has a state S (E, M) and reads the query and key head h // (heads_v / heads_qk). At each token, in this order

        S <- exp(decay) · S,    S <- S + beta · k ⊗ (v - S^T k),    out = scale · S^T q.

    With normalize_qk, q and k are q / √(|q|² + eps) and k / √(|k|² + eps). Tokens from ``lengths`` on, and those past
    cu_seqlens[-1], may hold anything, NaN too: they change no state, their out is 0 and so are the gradients of what they hold.
    A decay may be -inf: it forgets all that came before, and its own gradient is 0.

    The last dimension of q, k, v and the state is contiguous; beta and decay have any strides.
    """

    q: Tensor  # (batch, seqlen, heads_qk, E); packed calls have batch 1 and cu_seqlens
    k: Tensor  # (batch, seqlen, heads_qk, E)
    v: Tensor  # (batch, seqlen, heads_v, M), heads_v a multiple of heads_qk
    beta: Tensor  # (batch, seqlen, heads_v), fp32 (fp64 for fp64 inputs); any number, mostly within [0, 2]
    decay: Tensor | None  # (batch, seqlen, heads_v), of beta's dtype, natural log, <= 0; None: nothing is forgotten (DeltaNet)
    scale: float  # multiplies q, after its normalization
    normalize_qk: bool
    eps: float  # added to the squared norms
    state: Tensor | None  # initial state of beta's dtype: (sequences, heads_v, E, M), None for zeros
    lengths: Tensor | None  # int32 (batch,): tokens of each row that count
    cu_seqlens: Tensor | None  # int32 (sequences + 1,), on the device: where packed sequences start

    @property
    def device(self) -> str:
        return self.q.device.type

    @property
    def sequences(self) -> int:
        """The batch, or the number of packed sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def group(self) -> int:
        """Value heads that share a query and key head."""
        return self.v.shape[2] // max(self.q.shape[2], 1)

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of beta, decay and states."""
        return torch.promote_types(self.v.dtype, torch.float32)


class StepArgs(NamedTuple):
    """The arguments of one step of decoding, in schema order: one token a sequence, and the state before it."""

    q: Tensor  # (batch, heads_qk, E)
    k: Tensor  # (batch, heads_qk, E)
    v: Tensor  # (batch, heads_v, M)
    beta: Tensor  # (batch, heads_v), fp32 (fp64 for fp64 inputs)
    state: Tensor  # (batch, heads_v, E, M), of beta's dtype
    decay: Tensor | None  # (batch, heads_v), of beta's dtype
    scale: float
    normalize_qk: bool
    eps: float
    backend: str

    def call(self) -> DeltaCall:
        """The same as a call of sequences of one token."""
        q, k, v, beta, state, decay, scale, normalize_qk, eps, _ = self
        q, k, v, beta = (t.unsqueeze(1) for t in (q, k, v, beta))
        decay = None if decay is None else decay.unsqueeze(1)
        return DeltaCall(q, k, v, beta, decay, scale, normalize_qk, eps, state, None, None)
