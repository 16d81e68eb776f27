"""A packed call whose keys and values are a cache: opened into the arguments of pages, FP8 ones with their scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.attention.arguments import varlen_args
from warploom.attention.problem import AttentionArgs
from warploom.fp8 import Fp8Tensor, refuse_gradients
from warploom.kernels.e4m3 import E4M3
from warploom.kernels.pages import PagedCache
from warploom.kernels.rotation import rotated_like
from warploom.runtime import arguments

# What a call of pages has besides k, and a cache has of its own.
_OWN = ("v", "cu_seqlens_k", "seqused_k", "block_table")
_FP8 = ("descale", "out_dtype")


def cache_args(q: Any, cache: PagedCache, *packed: Any, **keywords: Any) -> AttentionArgs:
    """The validated arguments of ``attention_varlen(q, cache, *packed, **keywords)``; packed begins with v.

    Keys and values of e4m3 stay as they are, beside ``k_scale`` and ``v_scale``; q is rotated as the keys are.
    """
    names = ("v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = dict(zip(names, packed, strict=False)) | keywords
    for name in _OWN:
        if given.pop(name, None) is not None:
            how = "; give cu_seqlens_q by its name" if name == "v" else ""
            raise TypeError(f"{name} comes with the cache that k is: leave it out{how}")
    for name in _FP8:
        if given.pop(name, None) is not None:
            raise TypeError(f"{name} goes with FP8 tensors, and k is a cache, which has its scales; out has q's dtype")
    pages: dict[str, Any] = {"seqused_k": cache.lengths, "block_table": cache.block_table}
    starts = given.pop("cu_seqlens_q", None)
    if cache.k_pages.dtype != E4M3:
        if isinstance(q, Fp8Tensor):
            raise TypeError(f"q is an Fp8Tensor, and the cache has dtype {cache.k_pages.dtype}: give q the cache's dtype")
        return varlen_args(q, cache.k_pages, cache.v_pages, starts, **pages, **given)
    if isinstance(q, Fp8Tensor) or arguments.strided("q", q).dtype not in arguments.FLOATS:
        kind = "an Fp8Tensor" if isinstance(q, Fp8Tensor) else f"of dtype {q.dtype}"
        raise TypeError(f"q is {kind}; over a cache of {E4M3} it takes float16, bfloat16, float32 or float64")
    # Who checks a call looks at shapes, devices and dtypes, and would ask for one dtype of all three.
    k, v = [_like(t, q.dtype) for t in (cache.k_pages, cache.v_pages)]
    args = varlen_args(q, k, v, starts, **pages, **given)
    refuse_gradients(q=args.q, sink=args.sink, bias=args.bias, k=cache.k_pages, v=cache.v_pages)
    if cache.hadamard_seed is not None:
        args = args._replace(q=rotated_like(args.q, cache.hadamard_seed))
    return args._replace(k=cache.k_pages, v=cache.v_pages, k_scale=cache.k_scale, v_scale=cache.v_scale)


def _like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of t's shape that holds one row."""
    return torch.empty(t.shape[-1:], dtype=dtype, device=t.device).expand(t.shape)
