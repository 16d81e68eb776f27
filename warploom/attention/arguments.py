"""From the user's arguments to validated AttentionArgs: every error is raised here, in words, before any work."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from warploom.attention.biases import with_bias
from warploom.attention.problem import AttentionArgs, check_columns, check_contents
from warploom.bias import Bias
from warploom.masks import Causal, ColumnMask, Full, Mask, ResolvedMask, SlidingWindow
from warploom.masks.kept import Kept
from warploom.runtime import arguments, invariance
from warploom.runtime.arguments import Window
from warploom.runtime.op import plain
from warploom.runtime.qkv import autocast_inputs, check_sink, check_tensors, last_contiguous, scalars

PACKED_MASKS = Full, Causal, SlidingWindow, ColumnMask  # that packed sequences may have

_warned_layout = False


def dense_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    bias: Tensor | Bias | None = None,
    batch_invariant: bool | None = None,
    kept: Kept | None = None,
) -> AttentionArgs:
    """The arguments of attention(); ``kept``: the mask for these lengths, if it was asked already."""
    q, k, v = autocast_inputs(q, k, v)
    check_tensors(q, k, v, 4, "(batch, seqlen, heads, head_dim)")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} but k has batch {k.shape[0]}")
    _warn_layout(q)
    _check_mask(mask)
    if kept is None and mask is not None:
        kept = _kept(mask, q, k)
    resolved = resolve(mask, causal, window, q.shape[1], k.shape[1], q, kept)
    check_columns(resolved, q.shape[0], q.shape[2], k.shape[2], k.shape[1], q)
    args = _assemble(q, k, v, resolved, scale, softcap, sink, dropout_p, dropout_seed, deterministic, batch_invariant)
    if kept is not None and kept.documents is not None and q.shape[0] == 1:
        args = args._replace(documents=kept.documents)
    return with_bias(args, bias, q.shape[1], k.shape[1])


def _kept(mask: Mask, q: Tensor, k: Tensor) -> Kept | None:
    """The mask for the call's lengths as it is kept, which says more than its vectors; None where tracers are about."""
    if torch.compiler.is_compiling() or isinstance(mask, ColumnMask) or not q.is_cuda or not plain(q, k):
        return None
    return mask.kept(q.shape[1], k.shape[1], q.device)


def varlen_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
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
    bias: Tensor | Bias | None = None,
    batch_invariant: bool | None = None,
    kept: Kept | None = None,
) -> AttentionArgs:
    """The arguments of attention_varlen(); ``kept``: the mask for all packed tokens, if it was asked already."""
    q, k, v = autocast_inputs(q, k, v)
    paged = block_table is not None
    check_tensors(q, k, v, 3, "(total_tokens, heads, head_dim)", kv_rank=4 if paged else 3)
    cu_seqlens_q, cu_seqlens_k, seqused_k, block_table = _lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    max_seqlen_q, max_seqlen_k = _longest("max_seqlen_q", max_seqlen_q), _longest("max_seqlen_k", max_seqlen_k)

    _check_mask(mask)
    if mask is not None and not isinstance(mask, PACKED_MASKS):
        raise ValueError(
            "attention_varlen takes a band (Full, Causal, SlidingWindow) or a ColumnMask with packed columns as mask, "
            f"got {type(mask).__name__}; call attention(), or build the columns of each sequence"
        )
    total_k = k.shape[0] * k.shape[1] if paged else k.shape[0]
    resolved = resolve(mask, causal, window, q.shape[0], total_k, q, kept)
    if paged and any(vector is not None for vector in resolved.vectors):
        raise ValueError("mask: column vectors together with block_table are not supported; use a band")
    check_columns(resolved, 1, q.shape[1], k.shape[-2], total_k, q)
    if max_seqlen_q is None:
        max_seqlen_q = q.shape[0]
    if max_seqlen_k is None:
        max_seqlen_k = total_k if block_table is None else block_table.shape[1] * k.shape[1]
    args = _assemble(q, k, v, resolved, scale, softcap, sink, dropout_p, dropout_seed, deterministic, batch_invariant)
    args = args._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        block_table=block_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    check_contents(args)
    return with_bias(args, bias, max_seqlen_q, max_seqlen_k)


def _longest(name: str, length: Any) -> Any:
    """A bound of the sequences' lengths, None if there is none; beyond int32 it is as good as int32's largest."""
    length = arguments.integer(name, length, optional=True)
    if length is not None and length < 0:
        raise ValueError(f"{name} must not be negative, got {length}")
    return min(length, arguments.INT32[1]) if type(length) is int else length


def _lengths(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The tensors that describe packed sequences, as int32 and of the right shapes."""
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q must be an int32 tensor of batch + 1 entries, got None")
    cu_seqlens_q = arguments.int32("cu_seqlens_q", cu_seqlens_q, 1, q)
    cu_seqlens_k = arguments.int32("cu_seqlens_k", cu_seqlens_k, 1, q)
    seqused_k = arguments.int32("seqused_k", seqused_k, 1, q)
    block_table = arguments.int32("block_table", block_table, 2, q)
    if block_table is not None and block_table.stride(1) != 1 and block_table.shape[1] > 1:
        block_table = block_table.contiguous()  # kernels read a sequence's pages side by side
    if cu_seqlens_q.shape[0] < 1:
        raise ValueError("cu_seqlens_q must have batch + 1 entries, got none")
    batch = cu_seqlens_q.shape[0] - 1
    if block_table is not None and (seqused_k is None or cu_seqlens_k is not None):
        raise ValueError("block_table takes the keys' lengths from seqused_k: give seqused_k and leave cu_seqlens_k out")
    if cu_seqlens_k is not None and cu_seqlens_k.shape[0] != batch + 1:
        raise ValueError(f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries but cu_seqlens_q has {batch + 1}")
    if cu_seqlens_k is None and block_table is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has {k.shape[0]} packed tokens but q has {q.shape[0]}: give cu_seqlens_k")
    for name, t in (("seqused_k", seqused_k), ("block_table", block_table)):
        if t is not None and t.shape[0] != batch:
            raise ValueError(f"{name} has {t.shape[0]} entries but cu_seqlens_q describes {batch} sequences")
    return cu_seqlens_q, cu_seqlens_k, seqused_k, block_table


def _assemble(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    resolved: ResolvedMask,
    scale: float | None,
    softcap: float,
    sink: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | int | None,
    deterministic: bool | None,
    batch_invariant: bool | None,
) -> AttentionArgs:
    scale, softcap, dropout_p = scalars(scale, softcap, dropout_p, q.shape[-1])
    check_sink(sink, q)
    if sink is not None and sink.stride(0) != 1:
        sink = sink.contiguous()  # kernels read a head's logit next to the one before
    q, k, v = (last_contiguous(t) for t in (q, k, v))
    deterministic = arguments.flag("deterministic", deterministic, optional=True)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    batch_invariant = invariance.asked(batch_invariant)
    return AttentionArgs(
        q=q,
        k=k,
        v=v,
        lts=resolved.lts,
        lte=resolved.lte,
        uts=resolved.uts,
        ute=resolved.ute,
        bounds=None,
        sink=sink,
        dropout_seed=seed_of(dropout_p, dropout_seed, q),
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_k=None,
        block_table=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        left=resolved.left,
        right=resolved.right,
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic or batch_invariant,
        backend="",
        batch_invariant=batch_invariant,
    )


def seed_of(dropout_p: float, seed: Tensor | int | None, q: Tensor) -> Tensor | None:
    """The Philox key: the caller's, or drawn on the device, so that a captured graph draws anew at every replay."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device) if dropout_p else None
    if not isinstance(seed, Tensor):
        number = arguments.whole(seed)
        if number is None:
            raise TypeError(f"dropout_seed must be an int or an int64 tensor of one element, got {arguments.describe(seed)}")
        if type(number) is int and not arguments.INT64[0] <= number <= arguments.INT64[1]:
            raise ValueError(f"dropout_seed must fit int64, from -2**63 to 2**63 - 1, got {number}")
        return torch.tensor([number], dtype=torch.int64, device=q.device) if dropout_p else None
    if seed.dtype not in arguments.INTEGERS or seed.numel() != 1:
        raise TypeError(f"dropout_seed must be an int or an int64 tensor of one element, got {arguments.describe(seed)}")
    if arguments.strided("dropout_seed", seed).device != q.device:
        raise ValueError(f"dropout_seed is on {seed.device} but q is on {q.device}")
    if seed.dtype == torch.uint64 and arguments.readable(seed) and int(seed.item()) > arguments.INT64[1]:
        raise ValueError(f"dropout_seed must fit int64, from -2**63 to 2**63 - 1, got {int(seed.item())}")
    return seed.to(torch.int64) if dropout_p else None


def _check_mask(mask: object) -> None:
    if mask is None or isinstance(mask, Mask):
        return
    if isinstance(mask, Tensor):
        raise TypeError(
            f"mask must be a builder or ColumnMask of warploom.masks, got a {mask.dtype} tensor of shape "
            f"{tuple(mask.shape)}; "
            "turn a dense boolean mask into columns once with warploom.masks.ColumnMask.from_dense(mask); docs/masks.md, "
            "'Masks that are not column masks', says what to do where that is refused"
        )
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise TypeError(f"mask is the class {mask.__name__} itself; give a mask, as {mask.__name__}(...) makes one")
    if hasattr(mask, "mask_mod") or callable(mask):
        raise TypeError(
            f"mask must be a builder or ColumnMask of warploom.masks, got {type(mask).__name__}; turn a FlexAttention mask_mod "
            "into columns once with warploom.masks.ColumnMask.from_mask_mod (docs/from-flexattention.md)"
        )
    raise TypeError(f"mask must be a builder or ColumnMask of warploom.masks, got {type(mask).__name__}")


def resolve(
    mask: Mask | None,
    causal: bool,
    window: Window | None,
    seqlen_q: int,
    seqlen_k: int,
    q: Tensor,
    kept: Kept | None = None,
) -> ResolvedMask:
    """The mask of the call: columns and the intersection of all bands. ``kept``: of the mask alone, if it was asked."""
    _check_mask(mask)
    left, right = arguments.window("window", window)
    causal = arguments.flag("causal", causal)
    if mask is None:
        resolved = ResolvedMask(None, None, None, None, None, None)
    elif kept is not None:
        resolved = kept.resolved
    else:
        resolved = mask.resolve(seqlen_q, seqlen_k, None if isinstance(mask, ColumnMask) else q.device)
    left, right = _narrower(resolved.left, left), _narrower(resolved.right, right)
    if causal:
        right = _narrower(right, 0)
    return resolved._replace(left=arguments.near(left), right=arguments.near(right))


def _narrower(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _warn_layout(q: Tensor) -> None:
    global _warned_layout
    if _warned_layout or torch.compiler.is_compiling() or q.shape[2] <= 256 or q.shape[1] > 256:
        return
    _warned_layout = True
    warnings.warn(
        f"q has {q.shape[2]} heads and seqlen {q.shape[1]}: warploom.attention takes (batch, seqlen, heads, head_dim); "
        "scaled_dot_product_attention takes (batch, heads, seqlen, head_dim)",
        stacklevel=4,
    )
