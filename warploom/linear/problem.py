"""One validated, frozen description of a linear attention call: what dispatch decides on and every implementation computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearCall:
    """Tensors and numbers of one call, validated; q, k and v before their feature maps.

    Causal: query i sees keys j <= i, both counted from the start, so keys past the last query are seen by none and queries
    past the last key see all. The state after the call holds all keys (up to ``lengths``) whether seen or not.

    With normalize, out_i = scale · phi(q_i) s_i / (scale · phi(q_i) · z_i + eps), else the numerator; s_i and z_i are sums
    over the keys that query i sees, the initial state among them.

    A decay makes the sums s_t = exp(decay_t) s_{t-1} + phi(k_t) v_t and z_t = exp(decay_t) z_{t-1} + phi(k_t), one for each
    token of the keys: those past the last key, or past ``lengths``, change no sum, decays included.
    """

    q: Tensor  # (batch, seqlen_q, heads_q, E); packed calls have batch 1 and cu_seqlens
    k: Tensor  # (batch, seqlen_k, heads_kv, E), heads_q a multiple of heads_kv
    v: Tensor  # (batch, seqlen_k, heads_kv, M)
    map_q: str  # "elu+1", "relu" or "identity", applied by the implementation; the api has applied callables ("identity")
    map_k: str
    causal: bool
    normalize: bool
    eps: float
    scale: float  # multiplies phi(q), in numerator and denominator
    s: Tensor | None  # initial state, fp32 (fp64 for fp64 inputs): (sequences, heads_kv, E, M), None for zeros
    z: Tensor | None  # (sequences, heads_kv, E), None together with s
    lengths: Tensor | None  # int32 (batch,): keys from there on count for nothing, in numerator and denominator
    cu_seqlens: Tensor | None  # int32 (sequences + 1,), on the device: where packed sequences start
    # Natural logs of what the sums are multiplied by before a key joins them, at most 0, in the accumulator's dtype:
    # (heads_kv,) or (batch, seqlen_k, heads_kv), batch 1 where packed.
    decay: Tensor | None = None
    decay_grad: bool = False  # the decay asks for a gradient

    @property
    def device(self) -> str:
        return self.q.device.type

    @property
    def sequences(self) -> int:
        """The batch, or the number of packed sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of sums and states."""
        return torch.promote_types(self.v.dtype, torch.float32)

    def decays(self) -> Tensor:
        """The decay of every token and head, (batch, seqlen_k, heads_kv): a view."""
        assert self.decay is not None
        return self.decay.expand(self.k.shape[:3])


class StepArgs(NamedTuple):
    """The arguments of one step of decoding, in schema order: one token a sequence, and the state before it."""

    q: Tensor  # (batch, heads_q, E)
    k: Tensor  # (batch, heads_kv, E)
    v: Tensor  # (batch, heads_kv, M)
    s: Tensor  # (batch, heads_kv, E, M), fp32 (fp64 for fp64 inputs)
    z: Tensor  # (batch, heads_kv, E)
    map_q: str
    map_k: str
    normalize: bool
    eps: float
    scale: float
    backend: str
    decay: Tensor | None = None  # (heads_kv,) or (batch, heads_kv)

    def call(self) -> LinearCall:
        """The same as a call of sequences of one token."""
        q, k, v, s, z, map_q, map_k, normalize, eps, scale, _, decay = self
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        if decay is not None and decay.ndim == 2:
            decay = decay.unsqueeze(1)
        return LinearCall(q, k, v, map_q, map_k, True, normalize, eps, scale, s, z, None, None, decay)
