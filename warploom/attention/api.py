"""The door: attention() and attention_varlen()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from warploom.attention import launcher
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.calls import are, of_fp8, results, sequences_of
from warploom.attention.stats import AttentionStats, checked_names
from warploom.bias import Bias
from warploom.kernels.pages import PagedCache
from warploom.masks import Mask
from warploom.runtime import arguments
from warploom.runtime.arguments import Window

if TYPE_CHECKING:
    from warploom.fp8 import Fp8Tensor

Descale = tuple[Tensor, Tensor, Tensor]
_Some = tuple[str] | tuple[str, str]  # names of stats


class _Options(TypedDict, total=False):
    """Keywords of every call, which say nothing of the result's type."""

    mask: Mask | None
    causal: bool
    window: Window | None
    scale: float | None
    softcap: float
    sink: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | int | None
    deterministic: bool | None
    backend: str | None
    bias: Tensor | Bias | None
    batch_invariant: bool | None


class _Fp8Options(_Options, total=False):
    descale: Descale | None
    out_dtype: torch.dtype | None


class _Keys(TypedDict, total=False):
    """What packed keys have besides."""

    seqused_k: Tensor | None
    block_table: Tensor | None


class _PackedOptions(_Options, _Keys, total=False):
    pass


class _PackedFp8Options(_Fp8Options, _Keys, total=False):
    pass


@overload
def attention(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, *,
    return_lse: Literal[False] = ..., return_stats: tuple[()] = ..., **options: Unpack[_Fp8Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, *,
    return_lse: Literal[True], return_stats: tuple[()] = ..., **options: Unpack[_Fp8Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, *,
    return_lse: bool, return_stats: tuple[()] = ..., **options: Unpack[_Fp8Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: Literal[False] = ..., return_stats: _Some, **options: Unpack[_Options],
) -> tuple[Tensor, AttentionStats]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: Literal[True], return_stats: _Some, **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, AttentionStats]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    return_lse: bool = ..., return_stats: Sequence[str], **options: Unpack[_Options],
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

    No seqlen_q × seqlen_k matrix is made but by the reference (Dao, FlashAttention-2, arXiv 2307.08691; masks as columns:
    Wang et al., FlashMask, arXiv 2410.01359). `warploom.explain` takes the same arguments and says what runs, and why::

        q, k, v = (torch.randn(2, 1024, 8, 64) for _ in range(3))
        out = warploom.attention(q, k, v, causal=True)
        packed = warploom.masks.Document([600, 424])  # two texts in a row
        out, lse = warploom.attention(q, k, v, mask=packed, return_lse=True)
        print(warploom.explain(q, k, v, mask=packed))

    Causal masks and windows are bottom-right aligned: with p = i + seqlen_k - seqlen_q, query i sees key j when
    -right <= p - j <= left. A query that sees no key has out 0 and lse -inf, or the sink, and zero gradients.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); float16, bfloat16, float32 or float64. Any strides; where the last
            dimension is not contiguous a copy is made. Sums are fp32 whatever the dtype, fp64 for float64.
        k: (batch, seqlen_k, heads_kv, head_dim), of q's dtype and device. heads_q is a multiple of heads_kv, and query head
            h reads key head h // (heads_q / heads_kv), without a copy.
        v: (batch, seqlen_k, heads_kv, head_dim_v), of q's dtype and device.
        mask: a builder or ColumnMask of `warploom.masks`; intersects with causal and window. No dense tensor:
            `ColumnMask.from_dense` turns one into columns.
        causal: hide keys after the query's position, p < j.
        window: (left, right) keys kept before and after the position; None is unlimited, negatives are legal. (w - 1, 0) is
            a causal window of w keys with the query's own.
        scale: factor on q kᵀ; default 1/√head_dim.
        softcap: c > 0 replaces a scaled score s by c · tanh(s / c); 0 is off.
        sink: (heads_q,) floats, a logit a head that joins the softmax's denominator, neither scaled nor softcapped.
        dropout_p: probability of dropping a softmax weight, in [0, 1), rounded to a multiple of 2^-15 but not to 0.
        dropout_seed: int64 tensor of one element, or an int; default: drawn on q's device by torch's generator.
        deterministic: bitwise equal run to run; None follows torch.are_deterministic_algorithms_enabled(). True where
            batch_invariant is.
        return_lse: also return lse, the natural log of the softmax's denominator (sink included, dropout ignored),
            float32 (batch, heads_q, seqlen_q), differentiable.
        backend: run this implementation or raise its refusal: "cpu", "hopper", "ampere", "triton" or "reference"; default: the
            first that does not refuse.
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
        RuntimeError: under `warploom.strict`, where a call on a GPU would fall to a slower implementation.
    """
    names = () if return_stats == () else checked_names(return_stats)
    key, launch, others, kept, records = launcher.NOTHING
    if not names and descale is None and out_dtype is None:
        key, launch, others, kept, records = launcher.find(
            q, k, v, sink, mask, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend, return_lse,
            bias=bias,
            batch_invariant=batch_invariant,
        )
        if launch is not None:
            out, lse = launch(q, k, v, sink, *others)
            return (out, lse) if return_lse else out
    q, k, v, fp8 = of_fp8(q, k, v, descale, out_dtype, backend, {"sink": sink, "bias": bias})
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
        kept=kept,
    )
    return_lse = arguments.flag("return_lse", return_lse)
    if not are((q, k, v, sink), (args.q, args.k, args.v, args.sink)):
        key = None
    return results(args, backend, key, records, return_lse, names, fp8)


@overload
def attention_varlen(
    q: Tensor, k: PagedCache, v: None = ..., cu_seqlens_q: Tensor = ..., cu_seqlens_k: None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor, k: PagedCache, v: None = ..., cu_seqlens_q: Tensor = ..., cu_seqlens_k: None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor, k: PagedCache, v: None = ..., cu_seqlens_q: Tensor = ..., cu_seqlens_k: None = ...,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: bool, **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: Literal[False] = ..., return_stats: tuple[()] = ..., **options: Unpack[_PackedFp8Options],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: Literal[True], return_stats: tuple[()] = ..., **options: Unpack[_PackedFp8Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor | Fp8Tensor, k: Tensor | Fp8Tensor, v: Tensor | Fp8Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: bool, return_stats: tuple[()] = ..., **options: Unpack[_PackedFp8Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: Literal[False] = ..., return_stats: _Some, **options: Unpack[_PackedOptions],
) -> tuple[Tensor, AttentionStats]: ...


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: Literal[True], return_stats: _Some, **options: Unpack[_PackedOptions],
) -> tuple[Tensor, Tensor, AttentionStats]: ...


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *,
    return_lse: bool = ..., return_stats: Sequence[str], **options: Unpack[_PackedOptions],
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

    Two sequences, of 100 and of 28 tokens::

        q, k, v = (torch.randn(128, 8, 64) for _ in range(3))
        starts = torch.tensor([0, 100, 128], dtype=torch.int32)
        out = warploom.attention_varlen(q, k, v, starts, causal=True)

    Args:
        q: (total_q, heads_q, head_dim), of attention()'s dtypes.
        k, v: (total_k, heads_kv, ·), of q's dtype and device; with block_table the page pools (pages, page_size, heads_kv, ·).
            Or k is a `PagedKVCache`, which holds the values, the table and the lengths: v, seqused_k and block_table are left
            out. It may be one of float8_e4m3fn, whose scales and rotation are read as decode() reads them; q then has any float
            type, which out has too, and nothing may require grad.
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

    Raises:
        TypeError, ValueError, RuntimeError: as attention() does. What index tensors hold is checked on the CPU, and on a GPU
            under WARPLOOM_CHECK=1; else it is clamped, and nothing is read or written out of bounds.
    """
    key, launch, others, kept, records = launcher.NOTHING
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
        if not are((q, *pages, sink, *sequences), (args.q, args.k, args.v, args.sink, *sequences_of(args))):
            key = None
        return results(args, backend, key, records, arguments.flag("return_lse", return_lse), (), None)
    names = () if return_stats == () else checked_names(return_stats, block_table)
    sequences = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    if block_table is not None:
        sequences = (*sequences, block_table)
    if cu_seqlens_q is not None and not names and descale is None and out_dtype is None:
        key, launch, others, kept, records = launcher.find(
            q, k, v, sink, mask, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend, return_lse,
            sequences, longest, bias, batch_invariant,
        )
    if launch is not None:
        out, lse = launch(q, k, v, sink, *others)
        return (out, lse) if return_lse else out
    beside, starts = {"sink": sink, "bias": bias}, (cu_seqlens_q, cu_seqlens_k)
    q, k, v, fp8 = of_fp8(q, k, v, descale, out_dtype, backend, beside, starts, block_table is not None)
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
        kept=kept,
    )
    return_lse = arguments.flag("return_lse", return_lse)
    if not are((q, k, v, sink, *sequences), (args.q, args.k, args.v, args.sink, *sequences_of(args))):
        key = None
    return results(args, backend, key, records, return_lse, names, fp8)
