"""The door: decode()."""

from __future__ import annotations

from torch import Tensor

from warploom.decode import op, registry  # noqa: F401  (registry fills the dispatch list)
from warploom.decode.arguments import Window, decode_args
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.problem import DecodeProblem
from warploom.runtime import dispatch


def decode(
    q: Tensor,
    cache: KVCache | PagedKVCache,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: Window | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries over a long cache (split-KV, Flash-Decoding); causal, inference only.

    Query t of T sits at position p = length - T + t, so the cache holds the T new tokens already (append first), and
    sees keys j <= p. A query before the first key (T > length) or with an empty cache has out 0 and lse -inf.

    Nothing is planned on the host and nothing synchronises: lengths and page tables are read on the device, and a
    captured CUDA graph follows them. A sequence's bits depend on its own keys and length alone, never on the other
    sequences, the batch size or the page layout.

    Args:
        q: (batch, T, heads_q, head_dim), T from 1 to 16, in the cache's dtype; heads_q is a multiple of heads_kv.
        cache: a KVCache or PagedKVCache.
        scale: factor on q kᵀ; default 1/√head_dim.
        softcap: c > 0 replaces a scaled score s by c · tanh(s / c); 0 is off.
        window: (left, right) keys kept around the position, -right <= p - j <= left; None is unlimited.
        sink: (heads_q,) a logit a head that joins the softmax's denominator, neither scaled nor softcapped.
        return_lse: also return lse, natural log, float32 (batch, heads_q, T), sink included.
        backend: run this implementation or raise its refusal; default: the first that does not refuse.

    Returns:
        out (batch, T, heads_q, head_dim_v) in q's dtype, or (out, lse).

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes; also where an input
            requires grad while gradients are recorded.
    """
    args = decode_args(q, cache, scale, softcap, window, sink)
    args = args._replace(backend=dispatch.choose(DecodeProblem.from_args(args), backend, "decode"))
    out, lse = (op.decode_op(*args) if op.needs_op(q) else op.run(args))
    return (out, lse) if return_lse else out
