"""explain() and prepare(): what a call would run, without running it, and making that ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor

from warploom.attention.api import attention, attention_varlen
from warploom.attention.arguments import dense_args, varlen_args
from warploom.attention.calls import of_fp8, problem_of
from warploom.attention.plan import plan_of, torch_plan
from warploom.attention.problem import AttentionArgs
from warploom.attention.sdpa import check_promised, check_sdpa, sdpa_call, why_torch
from warploom.attention.stats import checked_names, warm_stats
from warploom.kernels.pages import PagedCache
from warploom.masks import Mask
from warploom.runtime import arguments, dispatch, invariance
from warploom.runtime.plan import Describer, Plan
from warploom.runtime.plan import describer as describer_of

if TYPE_CHECKING:
    from warploom.attention.fp8 import Fp8Call


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
    tensors to count tiles. Of tensors that require grad the backward pass is described too.

    Returns:
        A `Plan`: ``str(plan)`` is the text for people, ``plan.to_dict()`` the same for programs, ``plan.implementation`` who
        runs the call, ``plan.reason`` why, ``plan.refused`` who does not and why not.

    Raises:
        TypeError, ValueError: what the call itself would raise, also the refusal of a ``backend``.
        RuntimeError: under `warploom.strict`, where a call on a GPU would fall to a slower implementation.
    """
    is_causal, enable_gqa = arguments.flag("is_causal", is_causal), arguments.flag("enable_gqa", enable_gqa)
    arguments.flag("return_lse", return_lse)
    describer = _describer(k, packed, keywords)
    if describer is not None:
        others = _given(v, return_stats, attn_mask=attn_mask, is_causal=is_causal or None, enable_gqa=enable_gqa or None)
        return describer.explain(q, k, backend=backend, **others, **keywords)
    names = checked_names(return_stats, k.block_table if isinstance(k, PagedCache) else keywords.get("block_table"))
    if attn_mask is not None or is_causal or enable_gqa:
        check_sdpa(q, k, v, attn_mask, is_causal, enable_gqa)
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        reason = why_torch(q, k, v, attn_mask, keywords.get("dropout_p", 0.0))
        if reason is not None:
            check_promised(reason)
            return torch_plan(reason)
        q, k, v, options = sdpa_call(q, k, v, attn_mask, is_causal)
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
        if plan.stats_implementation is not None:
            warm_stats(args, plan.implementation, plan.stats_implementation, names)
    else:
        fp8.warm(args)
    return plan


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
    is_packed = bool(packed) or "cu_seqlens_q" in keywords or isinstance(k, PagedCache)
    _check_keywords(is_packed, keywords)
    arguments.flag("return_lse", keywords.pop("return_lse", False))
    if isinstance(k, PagedCache):
        from warploom.attention.caches import cache_args

        args = cache_args(q, k, v, *packed, **keywords)
        return args, plan_of(args, problem_of(args), backend, names=names), None
    rest = {name: value for name, value in keywords.items() if name not in ("descale", "out_dtype")}
    starts = None
    if is_packed:
        given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), packed, strict=False)) | rest
        starts = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    others = {name: rest.get(name) for name in ("sink", "bias")}
    descale, out_dtype = [keywords.get(name) for name in ("descale", "out_dtype")]
    paged = rest.get("block_table") is not None
    q, k, v, fp8 = of_fp8(q, k, v, descale, out_dtype, backend, others, starts, paged)
    make: Any = dense_args if starts is None else varlen_args
    args = make(q, k, v, *packed, **rest)
    refused = None
    if fp8 is not None:
        refused = fp8.refusal(args, backend, bool(names))
        args = fp8.as_numbers(args) if refused is not None else fp8.as_e4m3(args)
    plan = plan_of(args, problem_of(args), backend, names=names)
    if fp8 is None:
        return args, plan, None
    return args, replace(plan, reason=f"{plan.reason}; {fp8.words(refused, args)}"), fp8 if refused is None else None


def _check_keywords(packed: bool, keywords: Iterable[str]) -> None:
    """TypeError for what the call that is asked about would not take, in that call's name."""
    function = attention_varlen if packed else attention
    taken = signature(function).parameters
    for name in keywords:
        if name not in taken:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")


invariance.offer(attention_varlen, explain)
