"""The door: attention(), attention_varlen(), scaled_dot_product_attention() and explain()."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from warploom.attention import (
    launcher,
    registry,  # noqa: F401  (it fills the dispatch list)
)
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.ops import attention_op, stats_op
from warploom.attention.plan import plan_of, torch_plan
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import FAMILY, AttentionStats, StatsBackend, checked_names, stats_args, stats_backend
from warploom.bias import Bias
from warploom.kernels.pages import PagedCache
from warploom.masks import Mask, Padding
from warploom.runtime import arguments, dispatch, invariance
from warploom.runtime.arguments import Window
from warploom.runtime.backend import Backend
from warploom.runtime.plan import Describer, Plan
from warploom.runtime.plan import describer as describer_of
from warploom.runtime.qkv import scalars

if TYPE_CHECKING:
    from warploom.attention.fp8 import Fp8Call
    from warploom.fp8 import Fp8Tensor

Descale = tuple[Tensor, Tensor, Tensor]
_Some = tuple[str] | tuple[str, str]  # names of stats


@overload
def attention(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, *, mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ..., return_lse: Literal[False] = ...,
    backend: str | None = ..., bias: Tensor | Bias | None = ...,
    descale: Descale | None = ..., out_dtype: torch.dtype | None = ..., return_stats: tuple[()] = ...,
    batch_invariant: bool | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, *, mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ..., return_lse: Literal[True],
    backend: str | None = ..., bias: Tensor | Bias | None = ...,
    descale: Descale | None = ..., out_dtype: torch.dtype | None = ..., return_stats: tuple[()] = ...,
    batch_invariant: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, *, mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ..., return_lse: bool, backend: str | None = ...,
    bias: Tensor | Bias | None = ...,
    descale: Descale | None = ..., out_dtype: torch.dtype | None = ..., return_stats: tuple[()] = ...,
    batch_invariant: bool | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., causal: bool = ..., window: Window | None = ...,
    scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ..., return_lse: Literal[False] = ...,
    backend: str | None = ..., bias: Tensor | Bias | None = ..., return_stats: _Some,
    batch_invariant: bool | None = ...,
) -> tuple[Tensor, AttentionStats]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., causal: bool = ..., window: Window | None = ...,
    scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ..., return_lse: Literal[True],
    backend: str | None = ..., bias: Tensor | Bias | None = ..., return_stats: _Some,
    batch_invariant: bool | None = ...,
) -> tuple[Tensor, Tensor, AttentionStats]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = ..., causal: bool = ..., window: Window | None = ...,
    scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ...,
    dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ..., return_lse: bool = ...,
    backend: str | None = ..., bias: Tensor | Bias | None = ..., return_stats: Sequence[str],
    batch_invariant: bool | None = ...,
) -> Any: ...


def attention(
    q: Tensor | Fp8Tensor,
    k: Tensor | Fp8Tensor,
    v: Tensor | Fp8Tensor,
    *,
    mask: Mask | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    bias: Tensor | Bias | None = None,
    descale: Descale | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool | None = None,
    return_stats: Sequence[str] = (),
) -> Any:
    """Exact softmax attention, softmax(scale · q kᵀ + bias, masked) v, differentiable in q, k, v, sink and bias.

    Causal masks and windows are bottom-right aligned: with p = i + seqlen_k - seqlen_q, query i sees key j when
    -right <= p - j <= left. A query that sees no key has out 0 and lse -inf, and zero gradients.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); float16, bfloat16, float32 or float64. Any strides; where the last
            dimension is not contiguous a copy is made.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        mask: a builder or ColumnMask of `warploom.masks`; intersects with causal and window.
        causal: hide keys after the query's position, p < j.
        window: (left, right) keys kept before and after the position; None is unlimited, negatives are legal.
        scale: factor on q kᵀ; default 1/√head_dim.
        softcap: c > 0 replaces a scaled score s by c · tanh(s / c); 0 is off.
        sink: (heads_q,) a logit a head that joins the softmax's denominator, neither scaled nor softcapped.
        dropout_p: probability of dropping a softmax weight, in [0, 1).
        dropout_seed: int64 tensor of one element, or an int; default: drawn on q's device by torch's generator.
        deterministic: bitwise equal run to run; None follows torch.are_deterministic_algorithms_enabled(). True where
            batch_invariant is.
        return_lse: also return lse, the natural log of the softmax's denominator (sink included, dropout ignored),
            float32 (batch, heads_q, seqlen_q), differentiable.
        backend: run this implementation or raise its refusal; default: the first that does not refuse.
        bias: added to the scaled and softcapped scores, in fp32: a tensor that broadcasts to (batch, heads_q, seqlen_q,
            seqlen_k), of any float dtype and strides, or ALiBi, Relative or Key of `warploom.bias`. -inf hides an element as a
            mask does; what it holds where a mask hides changes nothing. Differentiable, if it asks for a gradient: in its
            dtype, summed over dimensions that broadcast.
        descale: float32 scales of q, k and v, which then are float8_e4m3fn tensors: (1,), (heads,) or those of blocks, as
            `warploom.fp8.Fp8Tensor` has them. What `warploom.fp8.quantize()` returns has its own. FP8 is for inference: nothing
            may require grad.
        out_dtype: of out, with FP8 inputs: float16, bfloat16, float32 or float64; default: what q had before quantize(),
            bfloat16 with descale.
        batch_invariant: a sequence has the same bits, of out and lse, alone and in any batch: whatever other sequences there
            are and how long, in whatever place and order, and dense, packed or in pages where one implementation takes all of
            them. Tiles and the order of sums are fixed, and nothing is split, which costs time. With dropout a sequence keeps
            its bits where it keeps its number in the batch, by which elements are dropped. None takes the value of
            `warploom.batch_invariant`.
        return_stats: names of `warploom.AttentionStats` to compute and return last: "max_logits", the largest logits of each
            head, and "column_sums", the probabilities of each key summed over queries. Both are exact, float32, without a
            gradient, and ignore sink and dropout. Each costs one more pass over the scores, both together one; column sums of
            a call with a sink another forward pass.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in q's dtype, or a tuple of it, of lse and of an `AttentionStats`, as asked.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes.
    """
    names = () if return_stats == () else checked_names(return_stats)
    key, launch, others, resolved, records = launcher.NOTHING
    if not names and descale is None and out_dtype is None:
        key, launch, others, resolved, records = launcher.find(
            q, k, v, sink, mask, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend, return_lse,
            bias=bias,
            batch_invariant=batch_invariant,
        )
        if launch is not None:
            out, lse = launch(q, k, v, sink, *others)
            return (out, lse) if return_lse else out
    q, k, v, fp8 = _of_fp8(q, k, v, descale, out_dtype, backend, {"sink": sink, "bias": bias})
    args = dense_args(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        bias=bias,
        batch_invariant=batch_invariant,
        resolved=resolved,
    )
    return_lse = arguments.flag("return_lse", return_lse)
    if not _are((q, k, v, sink), (args.q, args.k, args.v, args.sink)):
        key = None
    return _results(args, backend, key, records, return_lse, names, fp8)


@overload
def attention_varlen(
    q: Tensor, k: PagedCache, v: None = ..., cu_seqlens_q: Tensor = ..., cu_seqlens_k: None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ...,
    dropout_p: float = ..., dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ...,
    return_lse: Literal[False] = ..., backend: str | None = ..., bias: Tensor | Bias | None = ...,
    batch_invariant: bool | None = ...,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor, k: PagedCache, v: None = ..., cu_seqlens_q: Tensor = ..., cu_seqlens_k: None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ...,
    dropout_p: float = ..., dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ...,
    return_lse: Literal[True], backend: str | None = ..., bias: Tensor | Bias | None = ...,
    batch_invariant: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor, k: PagedCache, v: None = ..., cu_seqlens_q: Tensor = ..., cu_seqlens_k: None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ..., softcap: float = ..., sink: Tensor | None = ...,
    dropout_p: float = ..., dropout_seed: Tensor | int | None = ..., deterministic: bool | None = ...,
    return_lse: bool, backend: str | None = ..., bias: Tensor | Bias | None = ...,
    batch_invariant: bool | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    seqused_k: Tensor | None = ..., block_table: Tensor | None = ..., mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ..., dropout_seed: Tensor | int | None = ...,
    deterministic: bool | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
    bias: Tensor | Bias | None = ...,
    descale: Descale | None = ..., out_dtype: torch.dtype | None = ..., return_stats: tuple[()] = ...,
    batch_invariant: bool | None = ...,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    seqused_k: Tensor | None = ..., block_table: Tensor | None = ..., mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ..., dropout_seed: Tensor | int | None = ...,
    deterministic: bool | None = ..., return_lse: Literal[True], backend: str | None = ...,
    bias: Tensor | Bias | None = ...,
    descale: Descale | None = ..., out_dtype: torch.dtype | None = ..., return_stats: tuple[()] = ...,
    batch_invariant: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    seqused_k: Tensor | None = ..., block_table: Tensor | None = ..., mask: Mask | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ..., dropout_seed: Tensor | int | None = ...,
    deterministic: bool | None = ..., return_lse: bool, backend: str | None = ...,
    bias: Tensor | Bias | None = ...,
    descale: Descale | None = ..., out_dtype: torch.dtype | None = ..., return_stats: tuple[()] = ...,
    batch_invariant: bool | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *, seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    mask: Mask | None = ..., causal: bool = ..., window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ..., dropout_seed: Tensor | int | None = ...,
    deterministic: bool | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
    bias: Tensor | Bias | None = ..., return_stats: _Some,
    batch_invariant: bool | None = ...,
) -> tuple[Tensor, AttentionStats]: ...


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *, seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    mask: Mask | None = ..., causal: bool = ..., window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ..., dropout_seed: Tensor | int | None = ...,
    deterministic: bool | None = ..., return_lse: Literal[True], backend: str | None = ...,
    bias: Tensor | Bias | None = ..., return_stats: _Some,
    batch_invariant: bool | None = ...,
) -> tuple[Tensor, Tensor, AttentionStats]: ...


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *, seqused_k: Tensor | None = ..., block_table: Tensor | None = ...,
    mask: Mask | None = ..., causal: bool = ..., window: Window | None = ..., scale: float | None = ...,
    softcap: float = ..., sink: Tensor | None = ..., dropout_p: float = ..., dropout_seed: Tensor | int | None = ...,
    deterministic: bool | None = ..., return_lse: bool = ..., backend: str | None = ...,
    bias: Tensor | Bias | None = ..., return_stats: Sequence[str],
    batch_invariant: bool | None = ...,
) -> Any: ...


def attention_varlen(
    q: Tensor | Fp8Tensor,
    k: Tensor | Fp8Tensor | PagedCache,
    v: Tensor | Fp8Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    bias: Tensor | Bias | None = None,
    descale: Descale | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool | None = None,
    return_stats: Sequence[str] = (),
) -> Any:
    """attention() over sequences packed without padding; masks apply within each sequence.

    Args:
        q: (total_q, heads_q, head_dim).
        k, v: (total_k, heads_kv, ·); with block_table the page pools (pages, page_size, heads_kv, ·). Or k is a `PagedKVCache`,
            which holds the values, the table and the lengths: v, seqused_k and block_table are left out. It may be one of
            float8_e4m3fn, whose scales and rotation are read as decode() reads them; q then has any float type, which out has
            too, and nothing may require grad.
        cu_seqlens_q: int32 (batch + 1,), starts of the sequences in q, from 0. Tokens past the last entry get out 0,
            lse -inf and zero gradients.
        cu_seqlens_k: the same for k; default: cu_seqlens_q. Not with block_table.
        max_seqlen_q, max_seqlen_k: the longest sequences; default: bounds that need no synchronisation.
        seqused_k: int32 (batch,), keys of each sequence that count; default: all. Required with block_table.
        block_table: int32 (batch, pages_per_sequence), the pages of each sequence in order.
        mask: a band (Full, Causal, SlidingWindow) or a ColumnMask whose columns are packed as k is, with rows local to
            each sequence.
        bias: as attention()'s, by rows and keys of each sequence: a tensor has (sequences|1, heads_q|1, max_seqlen_q|1,
            max_seqlen_k|1), the last two or more; slopes of `warploom.bias.ALiBi` (heads_q,) or (sequences, heads_q).

    The other keywords are attention()'s. Stats are (sequences, heads_q) and (heads_q, total_k); return_stats does not go with
    block_table.

    Returns:
        out (total_q, heads_q, head_dim_v), or a tuple of it, of lse (heads_q, total_q) and of an `AttentionStats`, as asked.
    """
    key, launch, others, resolved, records = launcher.NOTHING
    longest = (max_seqlen_q, max_seqlen_k)
    sequences: tuple[Tensor | None, ...]
    if isinstance(k, PagedCache):
        checked_names(return_stats, k.block_table)
        pages = k.k_pages, k.v_pages
        sequences = (cu_seqlens_q, None, k.lengths, k.block_table)
        given_twice = v is not None or cu_seqlens_k is not None or seqused_k is not None or block_table is not None
        if not given_twice and cu_seqlens_q is not None and k.k_scale is None and descale is None and out_dtype is None:
            key, launch, others, _, records = launcher.find(
                q, *pages, sink, mask, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend,
                return_lse, sequences, longest, bias, batch_invariant,
            )
        if launch is not None:
            out, lse = launch(q, *pages, sink, *others)
            return (out, lse) if return_lse else out
        from warploom.attention.caches import cache_args

        args = cache_args(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_k=seqused_k,
            block_table=block_table,
            mask=mask,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            deterministic=deterministic,
            bias=bias,
            descale=descale,
            out_dtype=out_dtype,
            batch_invariant=batch_invariant,
        )
        if not _are((q, *pages, sink, *sequences), (args.q, args.k, args.v, args.sink, *_sequences(args))):
            key = None
        return _results(args, backend, key, records, arguments.flag("return_lse", return_lse), (), None)
    names = () if return_stats == () else checked_names(return_stats, block_table)
    sequences = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    if block_table is not None:
        sequences = (*sequences, block_table)
    if cu_seqlens_q is not None and not names and descale is None and out_dtype is None:
        key, launch, others, resolved, records = launcher.find(
            q, k, v, sink, mask, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend, return_lse,
            sequences, longest, bias, batch_invariant,
        )
    if launch is not None:
        out, lse = launch(q, k, v, sink, *others)
        return (out, lse) if return_lse else out
    beside, starts = {"sink": sink, "bias": bias}, (cu_seqlens_q, cu_seqlens_k)
    q, k, v, fp8 = _of_fp8(q, k, v, descale, out_dtype, backend, beside, starts, block_table is not None)
    args = varlen_args(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k=seqused_k,
        block_table=block_table,
        mask=mask,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        bias=bias,
        batch_invariant=batch_invariant,
        resolved=resolved,
    )
    return_lse = arguments.flag("return_lse", return_lse)
    if not _are((q, k, v, sink, *sequences), (args.q, args.k, args.v, args.sink, *_sequences(args))):
        key = None
    return _results(args, backend, key, records, return_lse, names, fp8)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for torch.nn.functional.scaled_dot_product_attention, same arguments and (…, heads, seqlen, head_dim).

    ``is_causal`` is top-left aligned, as torch's. ``attn_mask`` also takes a mask of `warploom.masks`. A boolean mask over keys
    alone (query dimension 1) runs here, and a floating point one, as attention()'s bias, where a kernel takes it. Any other
    tensor mask goes to torch's own function: turning a dense boolean mask into columns on the hot path would cost more than it
    saves. explain(..., attn_mask=...) says which, and why. Under `warploom.batch_invariant` such a call raises a ValueError.
    """
    is_causal, enable_gqa = arguments.flag("is_causal", is_causal), arguments.flag("enable_gqa", enable_gqa)
    _check_sdpa(query, key, value, attn_mask, is_causal, enable_gqa)
    reason = _why_torch(query, key, value, attn_mask, dropout_p)
    if reason is not None:
        _check_promised(reason)
        assert attn_mask is None or isinstance(attn_mask, Tensor)
        checked_scale, _, dropout_p = scalars(scale, 0.0, dropout_p, query.shape[-1])
        scale = None if scale is None else checked_scale
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v, options = _sdpa_call(query, key, value, attn_mask, is_causal)
    out = attention(q, k, v, scale=scale, dropout_p=dropout_p, **options)
    out = out.transpose(1, 2)
    return out if query.ndim == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def explain(
    q: Tensor,
    k: Tensor | PagedCache,
    v: Tensor | None = None,
    *packed: Any,
    attn_mask: Tensor | Mask | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    return_lse: bool = False,
    return_stats: Sequence[str] = (),
    backend: str | None = None,
    **keywords: Any,
) -> Plan:
    """What a call would run and why, without running it; print the result.

    Takes attention()'s arguments; attention_varlen()'s when ``cu_seqlens_q`` is among them; decode()'s when k is a cache and it
    is not; those of scaled_dot_product_attention() when ``attn_mask``, ``is_causal`` or ``enable_gqa`` is. May read device
    tensors to count tiles.
    """
    is_causal, enable_gqa = arguments.flag("is_causal", is_causal), arguments.flag("enable_gqa", enable_gqa)
    arguments.flag("return_lse", return_lse)
    describer = _describer(k, packed, keywords)
    if describer is not None:
        others = _given(v, return_stats, attn_mask=attn_mask, is_causal=is_causal or None, enable_gqa=enable_gqa or None)
        return describer.explain(q, k, backend=backend, **others, **keywords)
    names = checked_names(return_stats, k.block_table if isinstance(k, PagedCache) else keywords.get("block_table"))
    if attn_mask is not None or is_causal or enable_gqa:
        _check_sdpa(q, k, v, attn_mask, is_causal, enable_gqa)
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        reason = _why_torch(q, k, v, attn_mask, keywords.get("dropout_p", 0.0))
        if reason is not None:
            _check_promised(reason)
            return torch_plan(reason)
        q, k, v, options = _sdpa_call(q, k, v, attn_mask, is_causal)
        keywords = {**keywords, **options}
    return _planned(q, k, v, packed, keywords, backend, names)[1]


def prepare(
    q: Tensor,
    k: Tensor | PagedCache,
    v: Tensor | None = None,
    *packed: Any,
    return_stats: Sequence[str] = (),
    backend: str | None = None,
    **keywords: Any,
) -> Plan:
    """Make ready what a call of these shapes and features would run, and return its plan: compiled code is built or loaded.

    A process that prepares its calls can capture a CUDA graph at once, and pays no compilation at its first request. Takes
    attention()'s arguments; attention_varlen()'s when ``cu_seqlens_q`` is among them; decode()'s when k is a cache and it is
    not. Contents do not matter: q, k and v may be empty tensors of the right shape, dtype and device.

    Raises:
        RuntimeError: the code can be neither loaded nor built here; the message says why.
    """
    describer = _describer(k, packed, keywords)
    if describer is not None:
        return describer.prepare(q, k, backend=backend, **_given(v, return_stats), **keywords)
    names = checked_names(return_stats, k.block_table if isinstance(k, PagedCache) else keywords.get("block_table"))
    args, plan, fp8 = _planned(q, k, v, packed, keywords, backend, names)
    if fp8 is None:
        dispatch.find(plan.implementation).warm(args)
    else:
        fp8.warm(args)
    return plan


invariance.offer(attention_varlen, explain)


def _describer(k: Any, packed: tuple[Any, ...], keywords: dict[str, Any]) -> Describer | None:
    """Who describes a call over a cache that is none of attention_varlen()."""
    return None if packed or keywords.get("cu_seqlens_q") is not None else describer_of(k)


def _given(v: Any, return_stats: Any, **others: Any) -> dict[str, Any]:
    """What the caller gave that a call of a cache does not take, and says so."""
    named = {"v": v, "return_stats": return_stats or None, **others}
    return {name: value for name, value in named.items() if value is not None}


def _planned(
    q: Any, k: Any, v: Any, packed: tuple[Any, ...], keywords: dict[str, Any], backend: str | None, names: tuple[str, ...]
) -> tuple[AttentionArgs, Plan, Fp8Call | None]:
    """A call of attention() or attention_varlen(), as it would run; of FP8 numbers where a kernel multiplies them."""
    if isinstance(k, PagedCache):
        from warploom.attention.caches import cache_args

        args = cache_args(q, k, v, *packed, **keywords)
        return args, plan_of(args, _problem(args), backend, names=names), None
    rest = {name: value for name, value in keywords.items() if name not in ("descale", "out_dtype")}
    starts = None
    if packed or "cu_seqlens_q" in rest:
        given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packed, strict=False)) | rest
        starts = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    others = {name: rest.get(name) for name in ("sink", "bias")}
    descale, out_dtype = [keywords.get(name) for name in ("descale", "out_dtype")]
    paged = rest.get("block_table") is not None
    q, k, v, fp8 = _of_fp8(q, k, v, descale, out_dtype, backend, others, starts, paged)
    make: Any = dense_args if starts is None else varlen_args
    args = make(q, k, v, *packed, **rest)
    refused = None
    if fp8 is not None:
        refused = fp8.refusal(args, backend, bool(names))
        args = fp8.as_numbers(args) if refused is not None else fp8.as_e4m3(args)
    plan = plan_of(args, _problem(args), backend, names=names)
    if fp8 is None:
        return args, plan, None
    return args, replace(plan, reason=f"{plan.reason}; {fp8.words(refused)}"), fp8 if refused is None else None


def _of_fp8(
    q: Any,
    k: Any,
    v: Any,
    descale: Any,
    out_dtype: Any,
    backend: str | None,
    others: dict[str, Any],
    cu_seqlens: tuple[Any, Any] | None = None,
    paged: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Fp8Call | None]:
    """q, k and v, or what stands for them while a call of FP8 is checked, whose modules nobody else needs."""
    plain = all([isinstance(t, Tensor) and t.dtype != torch.float8_e4m3fn for t in (q, k, v)])
    if plain and descale is None and out_dtype is None:
        return q, k, v, None
    from warploom.attention.fp8 import checked

    found = checked(q, k, v, descale, out_dtype, backend, others, cu_seqlens, paged)
    return *found.stand_ins(), found


def _results(
    args: AttentionArgs,
    backend: str | None,
    key: Hashable,
    records: bool,
    return_lse: bool,
    names: tuple[str, ...],
    fp8: Fp8Call | None,
) -> Tensor | tuple[Any, ...]:
    """What a validated call returns; ``names``: of the stats that it asks for."""
    if fp8 is not None:
        if fp8.refusal(args, backend, bool(names)) is None:
            out, lse = fp8.run(args)
            return (out, lse) if return_lse else out
        args = fp8.as_numbers(args)
    chosen, settled = _choose(args, backend)
    measuring = stats_backend(_problem(args), chosen) if names else None
    out, lse = _run(args, chosen, key if settled else None, records)
    out = out if fp8 is None else out.to(fp8.out_dtype)
    if measuring is None:
        return (out, lse) if return_lse else out
    stats = _stats(args, lse, measuring, names)
    return (out, lse, stats) if return_lse else (out, stats)


def _choose(args: AttentionArgs, backend: str | None) -> tuple[str, bool]:
    """The implementation that runs a call, and whether it will run all calls of this kind."""
    if backend is not None and not isinstance(backend, str):
        dispatch.find(backend)  # says what there is
    key = _key(args, backend) if args.q.is_cuda and not torch.compiler.is_compiling() else None
    chosen = None if key is None else dispatch.settled(key)
    if chosen is not None:
        return chosen, True
    chosen = dispatch.choose(_problem(args), backend)
    if key is not None:
        dispatch.settle(key, chosen, by_name=backend is not None)
    return chosen, key is not None and dispatch.settled(key) is not None


def _run(args: AttentionArgs, chosen: str, call_key: Hashable, records: bool) -> tuple[Tensor, Tensor]:
    implementation = dispatch.find(chosen)
    if implementation.eager:
        out, lse = implementation.forward(args)
        return out, lse.float()
    args = implementation.prepare(args)._replace(backend=chosen)
    result: tuple[Tensor, Tensor] = attention_op(*args)
    if call_key is not None and type(implementation).bind is not Backend.bind:
        dispatch.bind(call_key, partial(launcher.bind, implementation, args, records))
    return result


def _stats(args: AttentionArgs, lse: Tensor, measuring: str, names: tuple[str, ...]) -> AttentionStats:
    """The stats of a call that has run, by the implementation called ``measuring``."""
    implementation = dispatch.find(measuring, FAMILY)
    assert isinstance(implementation, StatsBackend)
    max_logits, column_sums = "max_logits" in names, "column_sums" in names
    if implementation.eager:
        found = implementation.stats(stats_args(args), None, max_logits, column_sums)
        return AttentionStats(*[None if t is None else t.float() for t in found])
    given = lse.detach() if column_sums and args.sink is None else None
    args = implementation.prepare(stats_args(args))._replace(backend=measuring)
    largest, sums = stats_op(*args, given, max_logits, column_sums)
    return AttentionStats(largest if max_logits else None, sums if column_sums else None)


def _sequences(args: AttentionArgs) -> tuple[Tensor | None, ...]:
    """What says where the sequences of a packed call are."""
    found = args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k
    return found if args.block_table is None else (*found, args.block_table)


def _are(given: tuple[object, ...], read: tuple[Tensor | None, ...]) -> bool:
    """Whether a call runs on the caller's own tensors. A launcher takes them as they are: of copies, none is kept."""
    return all([t is found for t, found in zip(given, read, strict=True)])


def _key(args: AttentionArgs, backend: str | None) -> tuple[Any, ...]:
    """All that the problem of a call depends on, at a tenth of its cost."""
    q, k, v, sink, cu_q = args.q, args.k, args.v, args.sink, args.cu_seqlens_q
    backward = args.bias_grad or (
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad))
    )
    return (
        *(backend, backward, q.dtype, q.shape, k.shape, v.shape[-1], args.left, args.right, args.deterministic),
        *(args.softcap != 0.0, args.dropout_p > 0.0, sink is None, args.lts is None, args.lte is None),
        *(args.uts is None, args.ute is None, None if cu_q is None else cu_q.shape, args.block_table is None),
        *(args.seqused_k is None, args.max_seqlen_q, args.max_seqlen_k, args.q_offset is None),
        *(args.bias_kind, args.bias_grad, args.batch_invariant, args.k_scale is None),
    )


def _problem(args: AttentionArgs) -> AttentionProblem:
    tensors = (args.q, args.k, args.v, args.sink, args.bias)
    backward = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    return AttentionProblem.from_args(args, backward)


def _why_torch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | Mask | None, dropout_p: float
) -> str | None:
    """Why the SDPA drop-in hands a checked call to torch, or None."""
    if not isinstance(attn_mask, Tensor):
        return None
    if attn_mask.dtype != torch.bool:
        return _why_torch_adds(query, key, value, attn_mask, dropout_p)
    if query.ndim == 4 and _is_key_padding(attn_mask):
        return None
    return f"attn_mask is a dense mask of shape {tuple(attn_mask.shape)}; ColumnMask.from_dense converts it once, ahead"


def _check_promised(reason: str) -> None:
    """Refuse under warploom.batch_invariant() what torch's function runs for this reason."""
    if invariance.enabled:
        raise ValueError(f"batch_invariant: torch's function, which makes no such promise, would run this call: {reason}")


def _why_torch_adds(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float) -> str | None:
    """The same of a floating point attn_mask, an additive bias."""
    what = f"attn_mask is a {str(attn_mask.dtype).removeprefix('torch.')} tensor, an additive bias"
    if query.ndim > 4 and attn_mask.ndim > 3:
        return f"{what} with dimensions before the heads beyond a batch"
    q, k, v, options = _sdpa_call(query, key, value, attn_mask, False)
    problem = _problem(dense_args(q, k, v, dropout_p=dropout_p, dropout_seed=0, **options))
    refused = []
    for implementation in dispatch.implementations():
        reason = implementation.refusal(problem)
        if reason is None and not implementation.eager:
            return None
        if reason is not None and implementation.device in (None, problem.device):
            refused.append(f"{implementation.name}: {reason}")
    return f"{what}, which no kernel takes here ({'; '.join(refused)})"


def _check_sdpa(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, enable_gqa: bool) -> None:
    """The tensors of a drop-in call, whoever takes it: names and shapes as the caller has them."""
    arguments.with_values("query", arguments.strided("query", query))
    for name, t in (("query", query), ("key", key), ("value", value)):
        if arguments.strided(name, t).ndim < 3 or t.ndim != query.ndim:
            raise ValueError(
                f"{name} must have 3 or more dimensions (…, heads, seqlen, head_dim) and as many as query, "
                f"got shape {tuple(t.shape)}"
            )
        if t.dtype not in arguments.FLOATS:
            raise TypeError(f"{name} has dtype {t.dtype}; attention takes float16, bfloat16, float32 or float64")
        if t.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(f"{name} has dtype {t.dtype} but query has {query.dtype}; give all three one dtype")
        if t.device != query.device:
            raise ValueError(f"{name} is on {t.device} but query is on {query.device}; move them to one device")
        if t.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} and query must agree before the heads, got {tuple(t.shape)} and {tuple(query.shape)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key and value must agree in all but the last dimension, got {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head_dim, got {query.shape[-1]} and {key.shape[-1]}")
    heads, heads_kv = query.shape[-3], key.shape[-3]
    if heads != heads_kv and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {heads_kv}; pass enable_gqa=True for grouped heads")
    if heads % heads_kv if heads_kv else heads:
        raise ValueError(f"query has {heads} heads, which is not a multiple of the {heads_kv} heads of key and value")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True together are not allowed, as in torch; use attention(mask=, causal=)")
    if attn_mask is None or isinstance(attn_mask, Mask):
        return
    if not isinstance(attn_mask, Tensor) or not (attn_mask.dtype == torch.bool or attn_mask.dtype in arguments.FLOATS):
        raise TypeError(
            "attn_mask must be a bool or floating point tensor, or a mask of warploom.masks, "
            f"got {arguments.describe(attn_mask)}"
        )
    if arguments.strided("attn_mask", attn_mask).device != query.device:
        raise ValueError(f"attn_mask is on {attn_mask.device} but query is on {query.device}")
    full = (*query.shape[:-1], key.shape[-2])
    if attn_mask.ndim > len(full) or any(
        [have not in (1, want) for have, want in zip(reversed(attn_mask.shape), reversed(full), strict=False)]
    ):
        raise ValueError(f"attn_mask must broadcast to (…, heads, seqlen_q, seqlen_k) = {full}, got {tuple(attn_mask.shape)}")


def _is_key_padding(attn_mask: Tensor) -> bool:
    """(batch|1, 1, 1, seqlen_k), or with leading ones left out: a row over keys for each batch entry."""
    shape = (1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape)
    return attn_mask.ndim <= 4 and shape[1] == 1 and shape[2] == 1


def _sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v as attention() takes them and its keywords, of a checked call."""
    if query.ndim == 3:
        query, key, value = (t[None] for t in (query, key, value))
    elif query.ndim > 4:
        query, key, value = (t.flatten(0, -4) for t in (query, key, value))
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    options: dict[str, Any] = {}
    if is_causal:
        # torch aligns top-left, j <= i: in our coordinates p - j >= seqlen_k - seqlen_q.
        options["window"] = (None, seqlen_q - seqlen_k)
    elif isinstance(attn_mask, Tensor) and attn_mask.dtype != torch.bool:
        options["bias"] = attn_mask
    elif isinstance(attn_mask, Tensor):
        batch = attn_mask.shape[0] if attn_mask.ndim == 4 else 1
        options["mask"] = Padding(attn_mask.reshape(batch, attn_mask.shape[-1]).expand(batch, seqlen_k))
    elif attn_mask is not None:
        options["mask"] = attn_mask
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return q, k, v, options
