"""flash-attn 2.x's functions, names and signatures, on Warploom: migrating is one import line.

    from warploom.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Semantics are flash-attn's (>= 2.1): (batch, seqlen, heads, head_dim), causal aligned bottom right, windows inclusive with
-1 for unlimited, a softmax_scale of None meaning 1/√head_dim. Differences, all in words or documented: cache_leftpad
raises, float32 inputs work, page sizes are any power of two, and the lse of a query that sees no key is -inf (flash-attn
gives +inf).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from warploom.attention.api import attention, attention_varlen
from warploom.bias import ALiBi
from warploom.decode.api import decode
from warploom.decode.arguments import MAX_QUERIES
from warploom.decode.cache import KVCache, PagedKVCache, append
from warploom.decode.problem import AppendArgs
from warploom.runtime import arguments

Pair = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim) -> out as q.

    ``alibi_slopes``: (heads_q,) or (batch, heads_q), -slope · |i + seqlen_k - seqlen_q - j| added to scores; differentiable.
    With ``return_attn_probs``: (out, softmax_lse float32 (batch, heads_q, seqlen_q), None); the third is flash-attn's
    probabilities, which it too returns only for testing under dropout.
    """
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    result = attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        return_lse=return_attn_probs,
        bias=_alibi(alibi_slopes),
        **_common(softmax_scale, causal, window_size, softcap),
        deterministic=_deterministic(deterministic),
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    k, v = _unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Packed q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim), or pages with ``block_table``.

    With ``return_attn_probs``: (out, softmax_lse float32 (heads_q, total_q), None).
    """
    return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    keys: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        cu_seqlens_k = arguments.int32("cu_seqlens_k", cu_seqlens_k, 1, arguments.strided("q", q))
        if cu_seqlens_k is None or not cu_seqlens_k.numel():
            raise TypeError("cu_seqlens_k must be an int32 tensor of batch + 1 entries")
        keys = {"seqused_k": cu_seqlens_k[1:] - cu_seqlens_k[:-1], "block_table": block_table}
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        return_lse=return_attn_probs,
        bias=_alibi(alibi_slopes),
        **keys,
        **_common(softmax_scale, causal, window_size, softcap),
        deterministic=_deterministic(deterministic),
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with kv (total_k, 2, heads_kv, head_dim)."""
    k, v = _unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with qkv (total, 3, heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 4, 3)
    max_seqlen = arguments.integer("max_seqlen", max_seqlen, 0, optional=True)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend to a cache, after writing k and v behind its cache_seqlens in place where given. No backward.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim), or pages (pages, page_size, heads_kv, head_dim).
        k, v: (batch, seqlen_new, heads_kv, head_dim), tokens to append; cache_seqlens itself stays as it is.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), applied to k at its positions, and to q: at the same
            positions if causal or windowed, else all at cache_seqlens.
        cache_seqlens: int or int32 (batch,), keys held before k; default: the whole cache.
        cache_batch_idx: int32 (batch,), the row of the cache each sequence uses.
        alibi_slopes: (heads_q,) or (batch, heads_q), as in flash_attn_func with seqlen_k the keys of the sequence.
        num_splits: ignored: splits are fixed, so that results never depend on the batch.

    Returns:
        out as q, or (out, softmax_lse float32 (batch, heads_q, seqlen_q)) with ``return_softmax_lse``.
    """
    if cache_leftpad is not None:
        raise ValueError("cache_leftpad is not supported: start each sequence at the first key of its row or page")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx and block_table cannot both be given: the table already picks the pages")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v: it says where they are written")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin apply only where k and v are given")

    causal = arguments.flag("causal", causal)
    return_softmax_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    rotary_interleaved = arguments.flag("rotary_interleaved", rotary_interleaved)
    arguments.integer("num_splits", num_splits)
    common = _common(softmax_scale, causal, window_size, softcap) | {"bias": _alibi(alibi_slopes)}
    lengths, block_table = _cache_arguments(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, block_table)
    _check_alibi(alibi_slopes, q)
    queries = q.shape[1]
    local = causal or common["window"] is not None
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            q = _rotate(q, rotary_cos, rotary_sin, lengths, rotary_interleaved, advance=local)
            k = _rotate(k, rotary_cos, rotary_sin, lengths, rotary_interleaved, advance=True)
        append(AppendArgs(k_cache, v_cache, lengths, block_table, None, k, v, advance=False))
        lengths = lengths + k.shape[1]
    # decode is causal: a call that is not may use it only where the one query sees the whole cache anyway.
    ahead = None if common["window"] is None else common["window"][1]
    if queries <= MAX_QUERIES and (causal or queries == 1 or (ahead is not None and ahead <= 0)):
        cache: KVCache | PagedKVCache
        if block_table is None:
            cache = KVCache(k_cache, v_cache, lengths)
        else:
            cache = PagedKVCache(k_cache, v_cache, block_table, lengths)
        del common["causal"]
        return decode(q, cache, return_lse=return_softmax_lse, **common)
    return _prefill(q, k_cache, v_cache, lengths, block_table, return_softmax_lse, common)


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    return_lse: bool,
    common: dict[str, Any],
) -> Any:
    """Many queries, or queries that look ahead: packed attention over the cache, whose rows are pages of their own."""
    batch, queries = q.shape[:2]
    if block_table is None:
        block_table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=q.device)
    result = attention_varlen(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        starts,
        max_seqlen_q=queries,
        seqused_k=lengths,
        block_table=block_table,
        return_lse=return_lse,
        **common,
    )
    out, lse = result if return_lse else (result, None)
    assert isinstance(out, Tensor)
    out = out.unflatten(0, (batch, queries))
    return out if lse is None else (out, lse.unflatten(1, (batch, queries)).transpose(0, 1))


def _cache_arguments(
    q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, cache_batch_idx: Any, block_table: Any
) -> tuple[Tensor, Tensor | None]:
    """Lengths, int32 (batch,), and the table of the cache's rows or pages, if it takes one."""
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if arguments.strided(name, t).ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions (·, ·, heads, head_dim), got shape {tuple(t.shape)}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} but q is on {q.device}")
    if q.dtype != k_cache.dtype or q.shape[3] != k_cache.shape[3]:
        raise TypeError(
            f"q must have the dtype and head_dim of k_cache, got {arguments.describe(q)} and {arguments.describe(k_cache)}"
        )
    if v_cache.dtype != k_cache.dtype or v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            "v_cache must agree with k_cache in dtype and all but the last dimension, "
            f"got {arguments.describe(v_cache)} and {arguments.describe(k_cache)}"
        )
    batch = q.shape[0]
    block_table = arguments.int32("block_table", block_table, 2, q)
    cache_batch_idx = arguments.int32("cache_batch_idx", cache_batch_idx, 1, q)
    if block_table is None and (cache_batch_idx is not None or k_cache.shape[0] != batch):
        if cache_batch_idx is None:
            raise ValueError(
                f"q has batch {batch} but k_cache has batch {k_cache.shape[0]}; give cache_batch_idx, the row of each sequence"
            )
        block_table = cache_batch_idx[:, None]
    capacity = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.ndim:
        return arguments.int32("cache_seqlens", cache_seqlens, 1, q), block_table
    if cache_seqlens is not None:
        capacity = arguments.integer("cache_seqlens", cache_seqlens, 0, capacity)
    return torch.full((batch,), capacity, dtype=torch.int32, device=q.device), block_table


def _common(softmax_scale: float | None, causal: bool, window_size: Pair, softcap: float) -> dict[str, Any]:
    """flash-attn's keywords in Warploom's terms: a negative window side and a softcap of 0 or less are off."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right) of ints, got {window_size!r:.80}")
    left, right = (arguments.integer("window_size's " + name, side) for name, side in zip(_SIDES, window_size, strict=True))
    left, right = (None if side < 0 else side for side in (left, right))
    cap = arguments.number("softcap", softcap)
    if softmax_scale is not None:
        softmax_scale = arguments.number("softmax_scale", softmax_scale)
        if not -math.inf < softmax_scale < math.inf:
            raise ValueError(f"softmax_scale must be a finite number, got {softmax_scale}")
    return {
        "scale": softmax_scale,
        "causal": arguments.flag("causal", causal),
        "window": None if left is None and right is None else (left, right),
        "softcap": 0.0 if cap < 0 else cap,
    }


_SIDES = ("left", "right")


def _deterministic(deterministic: bool) -> bool | None:
    """flash-attn's False leaves it to torch's own switch."""
    return arguments.flag("deterministic", deterministic, optional=True) or None


def _unpack(name: str, packed: Tensor, ndim: int, count: int) -> tuple[Tensor, ...]:
    if arguments.with_values(name, arguments.strided(name, packed)).ndim != ndim or packed.shape[-3] != count:
        raise ValueError(
            f"{name} must have {ndim} dimensions with {count} in the third from last, got shape {tuple(packed.shape)}"
        )
    return packed.unbind(-3)


def _alibi(slopes: Tensor | None) -> ALiBi | None:
    """(heads_q,) or (batch, heads_q) as a bias."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor) or slopes.ndim not in (1, 2) or slopes.dtype not in arguments.FLOATS:
        raise TypeError(
            f"alibi_slopes must be a floating point tensor (heads,) or (batch, heads), got {arguments.describe(slopes)}"
        )
    return ALiBi(slopes)


def _check_alibi(slopes: Tensor | None, q: Tensor) -> None:
    """The shape and device of slopes beside a cache, to which nothing is to be written where they are wrong."""
    batch, _, heads, _ = q.shape
    if slopes is not None and (tuple(slopes.shape) not in ((heads,), (batch, heads)) or slopes.device != q.device):
        raise ValueError(
            f"alibi_slopes must have shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}) on {q.device}, "
            f"got {arguments.describe(slopes)} on {slopes.device}"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, interleaved: bool, advance: bool) -> Tensor:
    """Rotary embedding of x (batch, T, heads, head_dim) at lengths + t, or at lengths for every t without ``advance``."""
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if arguments.strided(name, table).dtype not in arguments.FLOATS or table.device != x.device or table.ndim != 2:
            raise ValueError(
                f"{name} must be floating point (seqlen_rotary, rotary_dim / 2) on {x.device}, got {arguments.describe(table)}"
            )
    half = cos.shape[-1]
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            "rotary_cos and rotary_sin must have one shape (seqlen_rotary, rotary_dim / 2) with rotary_dim up to the "
            f"head_dim {x.shape[-1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    position = lengths.long()[:, None] + (torch.arange(x.shape[1], device=x.device) if advance else 0)
    position = position.clamp(0, cos.shape[0] - 1)
    c, s = (table[position].float().unsqueeze(2) for table in (cos, sin))
    rotated = x[..., : 2 * half].float()
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)
