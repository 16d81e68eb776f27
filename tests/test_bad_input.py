"""Every public entry refuses every bad value of every argument: a TypeError or ValueError that names the argument.

One table says what kind of thing each argument is, another which values are bad for that kind; and one which values mean the
same as a good one, and are taken.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import warploom
from warploom import KVCache, LinearState, PagedKVCache, masks
from warploom.integrations import collators, flash_attn
from warploom.linear.feature_maps import RandomFeatures
from warploom.nn import CausalLinearAttention, GatedDeltaNet, LinearAttention

warnings.filterwarnings("ignore", message=".*(nested|sparse|quanti).*")

NAN, INF = float("nan"), float("inf")


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)])


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.quint8)


def not_strided(good: Any) -> list[Any]:
    """Tensors that are no memory of numbers: sparse, nested, quantised, on the meta device, complex."""
    like = [good.to_sparse(), good.to("meta")] if isinstance(good, Tensor) and good.numel() else []
    return [nested(), quantised(), torch.zeros(2, 8, 4, 16, dtype=torch.complex64), *like]


NOT_TENSORS: list[Any] = ["1", 1.5, [1.0], (), np.zeros(3), object()]
NOT_INTS: list[Any] = ["3", 3.5, 6.0, True, np.bool_(True), [3], 1j, ints(1, 2), torch.tensor(1.0), torch.tensor(True)]

# Of each kind of argument, what it refuses; a function of the good value where that matters.
BAD: dict[str, Callable[[Any], list[Any]]] = {
    "tensor": lambda good: [None, *NOT_TENSORS, *not_strided(good), torch.zeros(2, 3, dtype=torch.int64)],
    "tensor or none": lambda good: [*NOT_TENSORS, *not_strided(good), torch.zeros(2, 3, dtype=torch.int64)],
    "index": lambda good: [
        *NOT_TENSORS,
        *not_strided(good),
        torch.zeros(3),
        torch.ones(3, dtype=torch.bool),
        good.long() + 2**33,
    ],
    "flag": lambda good: ["no", 1, 0, 1.0, [], torch.tensor([True, False]), torch.tensor(1), None],
    "flag or none": lambda good: ["no", 1, 0, 1.0, [], torch.tensor([True, False])],
    "number": lambda good: [None, *BAD["number or none"](good)],
    "number or none": lambda good: [
        *["1", True, [1.0], 1j, NAN, INF, 10**400, np.bool_(False), np.zeros(2)],
        *[torch.zeros(2), torch.tensor(True), torch.zeros((), device="meta"), torch.ones((), requires_grad=True)],
    ],
    "int": lambda good: [None, *NOT_INTS],
    "int or none": lambda good: NOT_INTS,
    "size": lambda good: [None, *NOT_INTS, -1, 2**70],
    "size or none": lambda good: [*NOT_INTS, -1, 2**70],
    "count": lambda good: [None, *NOT_INTS, -1],
    "count or none": lambda good: [*NOT_INTS, -1],
    "prefix": lambda good: [*NOT_INTS, -1, 2**70, (good,), good.keys],
    "window": lambda good: [
        *[5, "ab", (1,), (1, 2, 3), (1.5, 0), (0, "1"), (True, 0), ints(1, 2), {1: 2, 3: 4}],
        *[(-1, -1), [-1, -1], (np.int64(-1), -1)],
    ],
    "flash window": lambda good: [None, 5, "ab", (1,), (1.5, 0), (0, "1"), (True, 0), (None, 0)],
    "seed": lambda good: [0.5, "x", True, 2**70, -(2**63) - 1, 2**63, [1], torch.tensor(1.0), ints(1, 2)],
    "stats": lambda good: [
        *[None, 5, True, "max_logits", {"max_logits": 1}, torch.zeros(2)],
        *[("entropy",), ("max_logits", 5), ("max_logits", None), [["max_logits"]]],
    ],
    "backend": lambda good: [5, ["cpu"], "fast", ("cpu",), b"cpu", True],
    "mask": lambda good: ["causal", 5, torch.ones(8, 8, dtype=torch.bool), torch.zeros(8, 8), [masks.Causal()]],
    "attn_mask": lambda good: ["causal", 5, ints(1, 2), torch.zeros(3, 9, dtype=torch.bool), [True], nested()],
    "state": lambda good: ["s", 5, torch.zeros(2), (torch.zeros(2),), (1, 2)],
    "cache": lambda good: [None, "cache", torch.zeros(2), (torch.zeros(2),)],
    "feature_map": lambda good: ["softmax", 5, None, ("relu", 5), ("relu",), ["relu", "relu"]],
    "dtype": lambda good: ["float32", torch.int32, None, torch.complex64, torch.zeros(2), float],
    "device": lambda good: ["gpu", 1.5, torch.zeros(2), "meta"],
    "values": lambda good: ["35", 1.5, {3: 4}, object(), [1.5], ["1"], [2**70], torch.zeros(3), [None], *not_strided(ints(1))],
}

Entry = tuple[Callable[..., Any], Callable[[], dict[str, Any]], dict[str, str]]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


SCALARS = {"scale": "number or none", "softcap": "number"}
RULES = {"causal": "flag", "window": "window", **SCALARS, "sink": "tensor or none"}
CALL = {
    **{"q": "tensor", "k": "tensor", "v": "tensor", "mask": "mask", **RULES},
    **{"dropout_p": "number", "dropout_seed": "seed", "deterministic": "flag or none", "batch_invariant": "flag or none"},
}
RETURNS = {"return_lse": "flag", "return_stats": "stats"}


def dense() -> dict[str, Any]:
    return {"q": normal(2, 8, 4, 16), "k": normal(2, 9, 2, 16), "v": normal(2, 9, 2, 16)}


def packed() -> dict[str, Any]:
    cu = {"cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 4, 9), "seqused_k": ints(4, 3)}
    return {**{name: t[0] for name, t in dense().items()}, **cu, "max_seqlen_q": 8, "max_seqlen_k": 9}


def packed_lengths() -> dict[str, Any]:
    return {name: value for name, value in packed().items() if not name.startswith("max")}


def quantized() -> dict[str, Any]:
    return {name: t.to(torch.float8_e4m3fn) for name, t in dense().items()}


def paged() -> dict[str, Any]:
    pages = {"k": normal(4, 8, 2, 16), "v": normal(4, 8, 2, 16), "block_table": torch.arange(4, dtype=torch.int32).view(2, 2)}
    return {"q": normal(8, 4, 16), **pages, "cu_seqlens_q": ints(0, 3, 8), "seqused_k": ints(9, 12)}


def sdpa() -> dict[str, Any]:
    return {"query": normal(2, 4, 8, 16), "key": normal(2, 4, 9, 16), "value": normal(2, 4, 9, 16)}


def cache() -> KVCache:
    return KVCache(torch.zeros(2, 32, 2, 16), torch.zeros(2, 32, 2, 16), ints(5, 9))


def pool() -> dict[str, Any]:
    pages = {"k_pages": torch.zeros(8, 8, 2, 16), "v_pages": torch.zeros(8, 8, 2, 16)}
    return {**pages, "block_table": torch.arange(8, dtype=torch.int32).view(2, 4), "lengths": ints(5, 9)}


def rows() -> dict[str, Any]:
    return {"q": normal(2, 8, 4, 16), "k": normal(2, 8, 2, 16), "v": normal(2, 8, 2, 8)}


def token() -> dict[str, Any]:
    return {name: t[:, 0] for name, t in rows().items()} | {"state": LinearState.zeros(2, 2, 16, 8)}


def delta_rows() -> dict[str, Any]:
    tensors = {"q": normal(2, 8, 2, 16), "k": normal(2, 8, 2, 16), "v": normal(2, 8, 4, 8)}
    return {**tensors, "beta": torch.rand(2, 8, 4), "decay": -torch.rand(2, 8, 4)}


def flash() -> dict[str, Any]:
    return {name: normal(2, 8, 2, 16) for name in "qkv"}


def flash_packed() -> dict[str, Any]:
    lengths = {"cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 3, 8), "max_seqlen_q": 8, "max_seqlen_k": 8}
    return {**{name: normal(8, 2, 16) for name in "qkv"}, **lengths}


def flash_cache() -> dict[str, Any]:
    held = {"k_cache": torch.zeros(2, 32, 2, 16), "v_cache": torch.zeros(2, 32, 2, 16), "cache_seqlens": ints(5, 9)}
    return {"q": normal(2, 1, 2, 16), **held, "k": normal(2, 1, 2, 16), "v": normal(2, 1, 2, 16)}


FLASH = {
    **{"dropout_p": "number", "softmax_scale": "number or none", "causal": "flag", "window_size": "flash window"},
    **{"softcap": "number", "deterministic": "flag or none", "return_attn_probs": "flag"},
}
LINEAR = {
    **{"q": "tensor", "k": "tensor", "v": "tensor", "feature_map": "feature_map", "normalize": "flag", "eps": "number"},
    **{"scale": "number", "state": "state", "backend": "backend"},
}
DELTA = {
    **{"q": "tensor", "k": "tensor", "v": "tensor", "beta": "tensor", "decay": "tensor or none", "state": "tensor or none"},
    **{"scale": "number or none", "normalize_qk": "flag", "eps": "number"},
}
SIZES = {"batch": "size", "max_seqlen": "size", "kv_heads": "size", "head_dim": "size", "head_dim_v": "size or none"}
SIZED = {"batch": 2, "max_seqlen": 32, "kv_heads": 2, "head_dim": 16}


def module(**options: Any) -> LinearAttention:
    return LinearAttention(**{"dim": 16, "heads": 2, **options})


ENTRIES: dict[str, Entry] = {
    "attention": (warploom.attention, dense, {**CALL, **RETURNS, "backend": "backend"}),
    "attention_varlen": (
        warploom.attention_varlen,
        packed,
        {
            **{**CALL, **RETURNS, "backend": "backend", "cu_seqlens_q": "index", "cu_seqlens_k": "index"},
            **{"seqused_k": "index", "max_seqlen_q": "count or none", "max_seqlen_k": "count or none"},
        },
    ),
    "attention_varlen of pages": (warploom.attention_varlen, paged, {"block_table": "index", "seqused_k": "index"}),
    "scaled_dot_product_attention": (
        warploom.scaled_dot_product_attention,
        sdpa,
        {
            **{"query": "tensor", "key": "tensor", "value": "tensor", "attn_mask": "attn_mask", "dropout_p": "number"},
            **{"is_causal": "flag", "scale": "number or none", "enable_gqa": "flag"},
        },
    ),
    "explain": (warploom.explain, dense, {**CALL, **RETURNS, "backend": "backend", "is_causal": "flag"}),
    "prepare": (warploom.prepare, dense, {**CALL, "return_stats": "stats", "backend": "backend"}),
    "attention_varlen of a cache": (
        warploom.attention_varlen,
        lambda: {"q": normal(8, 4, 16), "k": PagedKVCache(**pool()), "cu_seqlens_q": ints(0, 3, 8)},
        {"q": "tensor", **RULES, "cu_seqlens_q": "index", "batch_invariant": "flag or none", "return_lse": "flag"},
    ),
    "batch_invariant": (warploom.batch_invariant, lambda: {"enabled": False}, {"enabled": "flag"}),
    "strict": (warploom.strict, lambda: {"enabled": False}, {"enabled": "flag"}),
    "decode": (
        warploom.decode,
        lambda: {"q": normal(2, 1, 4, 16), "cache": cache()},
        {
            **{"q": "tensor", "cache": "cache", **SCALARS, "window": "window", "sink": "tensor or none"},
            **{"return_lse": "flag", "backend": "backend"},
        },
    ),
    "decode with a SharedPrefix": (
        lambda **given: warploom.decode(normal(2, 1, 4, 16), PagedKVCache(**pool()), **given),
        lambda: {"prefix": PagedKVCache(**pool()).shared_prefix()},
        {"prefix": "prefix"},
    ),
    "SharedPrefix": (warploom.SharedPrefix, lambda: {"keys": ints(0, 0, 0)}, {"keys": "index"}),
    "KVCache": (
        KVCache,
        lambda: {"k": torch.zeros(2, 32, 2, 16), "v": torch.zeros(2, 32, 2, 16), "lengths": ints(5, 9)},
        {"k": "tensor", "v": "tensor", "lengths": "index"},
    ),
    "KVCache.allocate": (KVCache.allocate, lambda: dict(SIZED), {**SIZES, "dtype": "dtype", "device": "device"}),
    "KVCache.append": (
        lambda **given: cache().append(**given),
        lambda: {"k": normal(2, 1, 2, 16), "v": normal(2, 1, 2, 16)},
        {"k": "tensor", "v": "tensor"},
    ),
    "PagedKVCache": (
        PagedKVCache,
        pool,
        {"k_pages": "tensor", "v_pages": "tensor", "block_table": "index", "lengths": "index"},
    ),
    "PagedKVCache.allocate": (
        PagedKVCache.allocate,
        lambda: {**SIZED, "page_size": 8},
        {**SIZES, "page_size": "count", "dtype": "dtype", "device": "device"},
    ),
    "PagedKVCache.append": (
        lambda **given: PagedKVCache(**pool()).append(**given),
        lambda: {"k": normal(2, 1, 2, 16), "v": normal(2, 1, 2, 16), "slot_mapping": ints(3, 4).view(2, 1)},
        {"k": "tensor", "v": "tensor", "slot_mapping": "index"},
    ),
    "linear_attention": (
        warploom.linear_attention,
        lambda: {**rows(), "lengths": ints(8, 3), "decay": -torch.ones(2)},
        {**LINEAR, "causal": "flag", "return_state": "flag", "lengths": "index", "decay": "tensor or none"},
    ),
    "linear_attention of packed sequences": (
        warploom.linear_attention,
        lambda: {**{name: t[0] for name, t in rows().items()}, "cu_seqlens": ints(0, 3, 8)},
        {"cu_seqlens": "index"},
    ),
    "linear_attention_step": (warploom.linear_attention_step, token, LINEAR),
    "gated_delta_rule": (
        warploom.gated_delta_rule,
        lambda: {**delta_rows(), "state": torch.zeros(2, 4, 16, 8), "lengths": ints(8, 3)},
        {**DELTA, "return_state": "flag", "lengths": "index", "backend": "backend"},
    ),
    "gated_delta_rule of packed sequences": (
        warploom.gated_delta_rule,
        lambda: {**{name: t[0] for name, t in delta_rows().items()}, "cu_seqlens": ints(0, 3, 8)},
        {"cu_seqlens": "index"},
    ),
    "gated_delta_step": (
        warploom.gated_delta_step,
        lambda: {**{name: t[:, 0] for name, t in delta_rows().items()}, "state": torch.zeros(2, 4, 16, 8)},
        {**{n: kind if n != "state" else "tensor" for n, kind in DELTA.items()}, "inplace": "flag", "backend": "backend"},
    ),
    "LinearState.zeros": (
        LinearState.zeros,
        lambda: {"batch": 2, "heads_kv": 2, "E": 16, "M": 8},
        {"batch": "size", "heads_kv": "size", "E": "size", "M": "size", "dtype": "dtype", "device": "device"},
    ),
    "RandomFeatures": (
        RandomFeatures,
        lambda: {"head_dim": 8},
        {"head_dim": "count", "features": "count or none", "seed": "int", "temperature": "number or none"},
    ),
    "LinearAttention": (
        LinearAttention,
        lambda: {"dim": 16, "heads": 2},
        {
            **{"dim": "count", "heads": "count", "kv_heads": "count or none", "head_dim": "count or none"},
            **{"head_dim_v": "count or none", "feature_map": "feature_map", "normalize": "flag", "eps": "number"},
            **{"scale": "number", "bias": "flag", "backend": "backend"},
        },
    ),
    "LinearAttention.forward": (
        lambda **given: module()(**given),
        lambda: {"queries": normal(2, 8, 16), "keys": normal(2, 8, 16), "values": normal(2, 8, 16), "lengths": ints(8, 3)},
        {
            **{"queries": "tensor", "keys": "tensor or none", "values": "tensor or none", "lengths": "index"},
            **{"state": "state", "return_state": "flag"},
        },
    ),
    "CausalLinearAttention.step": (
        lambda **given: CausalLinearAttention(16, 2).step(**given),
        lambda: {"x": normal(2, 16), "state": LinearState.zeros(2, 2, 8, 8)},
        {"x": "tensor", "state": "state"},
    ),
    "GatedDeltaNet": (
        GatedDeltaNet,
        lambda: {"dim": 16, "heads": 2},
        {
            **{"dim": "count", "heads": "count", "heads_v": "count or none", "head_dim": "count or none", "taps": "count"},
            **{"head_dim_v": "count or none", "decay": "flag", "beta_max": "number", "eps": "number", "bias": "flag"},
            "backend": "backend",
        },
    ),
    "GatedDeltaNet.forward": (
        lambda **given: GatedDeltaNet(16, 2)(**given),
        lambda: {"x": normal(2, 8, 16), "lengths": ints(8, 3)},
        {"x": "tensor", "lengths": "index", "state": "state", "return_state": "flag"},
    ),
    "quantize": (
        warploom.fp8.quantize,
        packed_lengths,
        {
            **{"q": "tensor", "k": "tensor", "v": "tensor", "hadamard": "flag", "seed": "int"},
            **{"cu_seqlens_q": "index", "cu_seqlens_k": "index", "seqused_k": "index"},
        },
    ),
    "attention of FP8": (
        warploom.attention,
        lambda: {**quantized(), "descale": tuple(torch.ones(1) for _ in range(3))},
        RULES,
    ),
    "flash_attn_func": (flash_attn.flash_attn_func, flash, {"q": "tensor", "k": "tensor", "v": "tensor", **FLASH}),
    "flash_attn_kvpacked_func": (
        flash_attn.flash_attn_kvpacked_func,
        lambda: {"q": normal(2, 8, 2, 16), "kv": normal(2, 8, 2, 2, 16)},
        {"q": "tensor", "kv": "tensor", **FLASH},
    ),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        lambda: {"qkv": normal(2, 8, 3, 2, 16)},
        {"qkv": "tensor", **FLASH},
    ),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        flash_packed,
        {
            **{"q": "tensor", "k": "tensor", "v": "tensor", **FLASH, "cu_seqlens_q": "index", "cu_seqlens_k": "index"},
            **{"max_seqlen_q": "count or none", "max_seqlen_k": "count or none"},
        },
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda: {n: t for n, t in flash_packed().items() if n not in "kv"} | {"kv": normal(8, 2, 2, 16)},
        {"kv": "tensor", "cu_seqlens_q": "index", "max_seqlen_k": "count or none"},
    ),
    "flash_attn_varlen_qkvpacked_func": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda: {"qkv": normal(8, 3, 2, 16), "cu_seqlens": ints(0, 3, 8), "max_seqlen": 8},
        {"qkv": "tensor", "cu_seqlens": "index", "max_seqlen": "count or none", **FLASH},
    ),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        flash_cache,
        {
            **{"q": "tensor", "k_cache": "tensor", "v_cache": "tensor", "k": "tensor", "v": "tensor"},
            **{"cache_seqlens": "index", "softmax_scale": "number or none", "causal": "flag", "window_size": "flash window"},
            **{"softcap": "number", "return_softmax_lse": "flag", "rotary_interleaved": "flag", "num_splits": "int"},
        },
    ),
    "padding_bounds": (
        collators.padding_bounds,
        lambda: {"attention_mask": torch.ones(2, 8, dtype=torch.int64)},
        {"attention_mask": "tensor", "causal": "flag", "window": "window"},
    ),
    "cu_seqlens_bounds": (
        collators.cu_seqlens_bounds,
        lambda: {"cu_seqlens": ints(0, 3, 8), "tokens": 8},
        {"cu_seqlens": "tensor", "tokens": "count", "causal": "flag", "window": "window"},
    ),
    "position_ids_bounds": (
        collators.position_ids_bounds,
        lambda: {"position_ids": torch.arange(8)[None]},
        {"position_ids": "tensor", "causal": "flag", "window": "window"},
    ),
    "BoundsCollator": (
        collators.BoundsCollator,
        lambda: {"collator": dict, "causal": True},
        {"causal": "flag", "window": "window"},
    ),
    "Chunked": (masks.Chunked, lambda: {"size": 4}, {"size": "count"}),
    "SlidingWindow": (masks.SlidingWindow, lambda: {"left": 4, "right": 2}, {"left": "int or none", "right": "int or none"}),
    "Padding": (masks.Padding, lambda: {"mask_2d_or_lengths": [3, 4]}, {"mask_2d_or_lengths": "values"}),
    "Document": (masks.Document, lambda: {"lengths": [3, 4]}, {"lengths": "values", "causal": "flag"}),
    "Document.from_cu_seqlens": (
        masks.Document.from_cu_seqlens,
        lambda: {"cu_seqlens": [0, 4]},
        {"cu_seqlens": "values", "causal": "flag"},
    ),
    "Document.from_segment_ids": (
        lambda segment_ids, causal=True: masks.Document.from_segment_ids(segment_ids, causal),
        lambda: {"segment_ids": [0, 0, 1]},
        {"segment_ids": "values", "causal": "flag"},
    ),
    "Document.from_position_ids": (
        lambda position_ids, causal=True: masks.Document.from_position_ids(position_ids, causal),
        lambda: {"position_ids": [0, 1, 0]},
        {"position_ids": "values", "causal": "flag"},
    ),
    "PrefixLM": (masks.PrefixLM, lambda: {"prefix": 3}, {"prefix": "values"}),
    "PrefixDocument": (
        masks.PrefixDocument,
        lambda: {"lengths": [3], "prefixes": [1]},
        {"lengths": "values", "prefixes": "values"},
    ),
    "SharedQuestion": (
        masks.SharedQuestion,
        lambda: {"question": 3, "answers": [3, 4]},
        {"question": "values", "answers": "values"},
    ),
    "GlobalWindow": (
        masks.GlobalWindow,
        lambda: {"global_tokens": 2, "left": 3, "right": 0},
        {"global_tokens": "values", "left": "int or none", "right": "int or none"},
    ),
    "CausalBlockwise": (masks.CausalBlockwise, lambda: {"block_lengths": [3, 4]}, {"block_lengths": "values"}),
    "Tree": (masks.Tree, lambda: {"parents": [-1, 0]}, {"parents": "values"}),
    "BidirectionalSpans": (
        masks.BidirectionalSpans,
        lambda: {"starts": [0, 4], "lengths": [2, 1]},
        {"starts": "values", "lengths": "values"},
    ),
    "QKSparse": (masks.QKSparse, lambda: {"dropped": [1, 2]}, {"dropped": "values"}),
    "RandomEviction": (masks.RandomEviction, lambda: {"rows": [1, 2]}, {"rows": "values"}),
    "BlockDiffusion": (masks.BlockDiffusion, lambda: {"length": 4, "block": 2}, {"length": "count", "block": "count"}),
    "ColumnMask": (
        masks.ColumnMask,
        lambda: {"lts": ints(1, 2), "lte": ints(2, 2), "uts": ints(0, 0), "ute": ints(1, 1)},
        {"lts": "tensor", "lte": "tensor or none", "uts": "tensor or none", "ute": "tensor or none", "causal": "flag"},
    ),
    "ColumnMask.from_startend_row_indices": (
        masks.ColumnMask.from_startend_row_indices,
        lambda: {"startend_row_indices": torch.zeros(1, 1, 4, 2, dtype=torch.int32), "causal": True},
        {"startend_row_indices": "tensor", "causal": "flag"},
    ),
    "ColumnMask.from_dense": (
        lambda from_dense: masks.ColumnMask.from_dense(from_dense),
        lambda: {"from_dense": torch.ones(3, 3, dtype=torch.bool)},
        {"from_dense": "tensor"},
    ),
    "ColumnMask.from_mask_mod": (
        lambda **given: masks.ColumnMask.from_mask_mod(lambda b, h, q, k: q >= k, device="cpu", **given),
        lambda: {"seqlen_q": 8, "seqlen_k": 9, "batch": 2, "heads": 3},
        {"seqlen_q": "size", "seqlen_k": "size", "batch": "size or none", "heads": "size or none"},
    ),
    **{
        f"Mask.{method}": (
            lambda method=method, **given: getattr(masks.SlidingWindow(2), method)(**given),
            lambda: {"seqlen_q": 8, "seqlen_k": 9},
            {"seqlen_q": "size", "seqlen_k": "size"} if method == "resolve" else {"seqlen_q": "size or none"},
        )
        for method in ("dense", "density", "to_startend_row_indices")
    },
    "Mask.resolve": (
        lambda **given: masks.PrefixLM(2).resolve(**given),
        lambda: {"seqlen_q": 8, "seqlen_k": 9},
        {"seqlen_q": "size", "seqlen_k": "size"},
    ),
    "Mask.tiles": (
        lambda **given: masks.Causal().tiles(**given),
        lambda: {"block_m": 4, "block_n": 4, "seqlen_q": 8, "seqlen_k": 9},
        {"block_m": "count", "block_n": "count", "seqlen_q": "size or none", "seqlen_k": "size or none"},
    ),
}
# What says its argument by another word, which its caller knows as well.
WORDS = {"mask_2d_or_lengths": "Padding"}
# Values of a kind that this argument gives a meaning of its own.
MEANT: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("padding_bounds", "attention_mask"): lambda bad: isinstance(bad, Tensor) and bad.dtype == torch.int64,
    ("SharedPrefix", "keys"): lambda bad: isinstance(bad, Tensor) and bad.device.type == "meta" and bad.dtype == torch.int32,
    ("position_ids_bounds", "position_ids"): lambda bad: isinstance(bad, Tensor) and bad.dtype == torch.int64,
}


def refused(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> str | None:
    """Why a call is not refused as it should be, or None."""
    try:
        function(**arguments)
    except (TypeError, ValueError) as error:
        said = str(error)
        return None if name in said or WORDS.get(name, name) in said else f"does not name {name}: {said[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "is taken"


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.layout} {value.device} nested={value.is_nested}"
    return repr(value)[:60]


@pytest.mark.parametrize("entry", ENTRIES)
def test_bad_values(entry: str) -> None:
    function, good, kinds = ENTRIES[entry]
    function(**good())
    wrong, tried = [], 0
    for name, kind in kinds.items():
        for bad in BAD[kind](good().get(name)):
            if MEANT.get((entry, name), lambda _: False)(bad):
                continue
            tried += 1
            why = refused(function, {**good(), name: bad}, name)
            if why is not None:
                wrong.append(f"{name}={shown(bad)}: {why}")
    assert tried
    assert not wrong, f"{len(wrong)} of {tried}:\n" + "\n".join(wrong)


def test_every_public_name_is_in_the_table() -> None:
    covered = " ".join(ENTRIES)
    public = [name for name in warploom.__all__ if not isinstance(getattr(warploom, name), types.ModuleType)]
    public.remove("AttentionStats")  # a result
    public += [name for name in masks.__all__ if name not in ("Full", "Causal", "Mask", "ResolvedMask", "TileClasses")]
    public += [name for name in vars(flash_attn) if name.startswith("flash_attn_")]
    assert [name for name in public if name not in covered] == []


def same(found: Any, expected: Any) -> bool:
    """Whether two results hold the same bits."""
    found, expected = (x if isinstance(x, (tuple, list)) else (x,) for x in (found, expected))
    tensors = [(a, b) for a, b in zip(found, expected, strict=True) if isinstance(b, Tensor)]
    return all(torch.equal(a, b) for a, b in tensors) and (bool(tensors) or found == expected)


INT_FORMS: list[Callable[[int], Any]] = [
    *[np.int8, np.int64, np.uint16, np.array, torch.tensor],
    *[lambda n: torch.tensor(n, dtype=torch.int8), lambda n: torch.tensor([n], dtype=torch.int16)],
]
NUMBER_FORMS: list[Callable[[float], Any]] = [np.float32, np.float64, np.float16, torch.tensor, lambda x: torch.tensor([x])]
FLAG_FORMS: list[Callable[[bool], Any]] = [np.bool_, torch.tensor]
WIDTHS = [torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]

# Of each entry, arguments with a good value that is an int, a number (in every form exact), a flag, an index tensor.
EQUIVALENTS: dict[str, dict[str, list[Any]]] = {
    "attention": {"scale": NUMBER_FORMS, "softcap": NUMBER_FORMS, "causal": FLAG_FORMS, "return_lse": FLAG_FORMS},
    "attention_varlen": {"max_seqlen_q": INT_FORMS, "max_seqlen_k": INT_FORMS, "cu_seqlens_q": WIDTHS, "seqused_k": WIDTHS},
    "attention_varlen of pages": {"block_table": WIDTHS, "seqused_k": WIDTHS, "cu_seqlens_q": WIDTHS},
    "scaled_dot_product_attention": {"scale": NUMBER_FORMS, "is_causal": FLAG_FORMS, "dropout_p": NUMBER_FORMS},
    "decode": {"scale": NUMBER_FORMS, "softcap": NUMBER_FORMS, "return_lse": FLAG_FORMS},
    "linear_attention": {"lengths": WIDTHS, "scale": NUMBER_FORMS, "eps": NUMBER_FORMS, "causal": FLAG_FORMS},
    "linear_attention of packed sequences": {"cu_seqlens": WIDTHS},
    "linear_attention_step": {"scale": NUMBER_FORMS, "normalize": FLAG_FORMS},
    "gated_delta_rule": {"lengths": WIDTHS, "scale": NUMBER_FORMS, "eps": NUMBER_FORMS, "normalize_qk": FLAG_FORMS},
    "gated_delta_rule of packed sequences": {"cu_seqlens": WIDTHS},
    "gated_delta_step": {"scale": NUMBER_FORMS, "normalize_qk": FLAG_FORMS, "inplace": FLAG_FORMS},
    "flash_attn_func": {"softmax_scale": NUMBER_FORMS, "causal": FLAG_FORMS, "softcap": NUMBER_FORMS},
    "flash_attn_varlen_func": {"cu_seqlens_q": WIDTHS, "cu_seqlens_k": WIDTHS, "max_seqlen_q": INT_FORMS},
    "flash_attn_with_kvcache": {"cache_seqlens": WIDTHS, "softmax_scale": NUMBER_FORMS, "causal": FLAG_FORMS},
    "padding_bounds": {"attention_mask": [torch.bool, *WIDTHS], "causal": FLAG_FORMS},
    "cu_seqlens_bounds": {"cu_seqlens": WIDTHS, "tokens": INT_FORMS},
    "position_ids_bounds": {"position_ids": WIDTHS},
}
VALUES = {
    **{"scale": 0.25, "softmax_scale": 0.25, "softcap": 0.5, "eps": 0.25, "dropout_p": 0.0},
    **{"causal": True, "is_causal": True, "return_lse": True, "normalize": True, "normalize_qk": True, "inplace": False},
}


@pytest.mark.parametrize("entry", EQUIVALENTS)
def test_what_means_the_same_is_taken(entry: str) -> None:
    function, good, _ = ENTRIES[entry]
    torch.manual_seed(0)
    given = good()

    def run(name: str, value: Any) -> Any:
        copies = {key: t.clone() if isinstance(t, Tensor) else t for key, t in given.items()}
        return function(**{**copies, name: value})

    for name, forms in EQUIVALENTS[entry].items():
        plain = given.get(name, VALUES.get(name))
        expected = run(name, plain)
        for form in forms:
            value = plain.to(form) if isinstance(form, torch.dtype) else form(plain)
            assert same(run(name, value), expected), (name, form)


@pytest.mark.parametrize("form", [*INT_FORMS, *WIDTHS])
def test_sizes_and_seeds_in_every_form(form: Any) -> None:
    def of(n: int) -> Any:
        return torch.tensor(n, dtype=form) if isinstance(form, torch.dtype) else form(n)

    sizes = {"batch": of(2), "max_seqlen": of(8), "kv_heads": of(2), "head_dim": of(16), "dtype": torch.float32}
    assert KVCache.allocate(**sizes).k.shape == (2, 8, 2, 16)
    assert PagedKVCache.allocate(**sizes, page_size=of(4)).k_pages.shape == (4, 4, 2, 16)
    assert LinearState.zeros(of(2), of(1), of(4), of(3)).s.shape == (2, 1, 4, 3)
    assert LinearAttention(of(16), of(2), kv_heads=of(1)).query_projection.weight.shape == (16, 16)
    assert torch.equal(RandomFeatures(8, seed=of(3)).weight, RandomFeatures(8, seed=3).weight)
    given = dense()
    dropped = [warploom.attention(**given, dropout_p=0.5, dropout_seed=seed) for seed in (of(7), 7)]
    assert torch.equal(*dropped)
    windowed = [warploom.attention(**given, window=window) for window in ((of(3), of(1)), (3, 1), [3, 1])]
    assert torch.equal(windowed[0], windowed[1]) and torch.equal(windowed[1], windowed[2])
    pairs = [
        (masks.SlidingWindow(of(3), of(1)), masks.SlidingWindow(3, 1)),
        (masks.Chunked(of(4)), masks.Chunked(4)),
        (masks.PrefixLM(of(4)), masks.PrefixLM(4)),
        (masks.Document([of(4), of(5)] if not getattr(of(4), "ndim", 0) else [4, 5]), masks.Document([4, 5])),
        (masks.Padding(of(5)), masks.Padding(5)),
        (masks.BlockDiffusion(of(4), of(2)), masks.BlockDiffusion(4, 2)),
    ]
    for found, expected in pairs:
        assert torch.equal(
            found.dense(8, None if expected._extent() else 9), expected.dense(8, None if expected._extent() else 9)
        )


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_masks_take_integers_of_any_width(dtype: torch.dtype) -> None:
    def of(*values: int) -> Tensor:
        return torch.tensor(values).to(dtype)

    makers: list[Callable[[Callable[..., Tensor]], masks.Mask]] = [
        lambda t: masks.Document(t(3, 2, 4)),
        lambda t: masks.Document.from_cu_seqlens(t(0, 3, 9)),
        lambda t: masks.Document.from_segment_ids(t(0, 0, 1, 1, 1, 2, 2, 2, 2)),
        lambda t: masks.Document.from_position_ids(t(0, 1, 2, 0, 1, 2, 3, 4, 0)),
        lambda t: masks.PrefixDocument(t(3, 6), t(1, 2)),
        lambda t: masks.PrefixLM(t(3)),
        lambda t: masks.SharedQuestion(t(2), t(3, 4)),
        lambda t: masks.CausalBlockwise(t(3, 2, 4)),
        lambda t: masks.BidirectionalSpans(t(1, 5), t(2, 3)),
        lambda t: masks.QKSparse(t(1, 2, 7)),
        lambda t: masks.RandomEviction(t(*[9] * 8, 4)),
        lambda t: masks.GlobalWindow(t(2), 3, 0),
        lambda t: masks.Padding(t(1, 1, 0, 1, 1, 1, 1, 1, 0)[None]),
        lambda t: masks.ColumnMask(t(*range(9))),
    ]
    for make in makers:
        assert torch.equal(make(of).dense(9, 9), make(lambda *values: ints(*values)).dense(9, 9))


def test_seeds_of_64_bits_are_exact() -> None:
    given = dense()
    for seed in (2**63 - 1, -(2**63), 2**40 + 5):
        runs = [
            warploom.attention(**given, dropout_p=0.5, dropout_seed=s) for s in (seed, torch.tensor([seed]), np.int64(seed))
        ]
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[1], runs[2])
    runs = [warploom.attention(**given, dropout_p=0.5, dropout_seed=s) for s in (5, 2**40 + 5)]
    assert not torch.equal(*runs)


@pytest.mark.parametrize("far", [2**31, 2**33 + 1, 2**62, 2**70, np.uint64(2**63)])
def test_a_window_wider_than_any_number_of_keys_is_no_window(far: Any) -> None:
    given = dense()
    everything = warploom.attention(**given)
    for backend in ("cpu", "reference"):
        for window in ((far, far), (None, far), (far, None)):
            torch.testing.assert_close(warploom.attention(**given, window=window, backend=backend), everything)
            mask = masks.SlidingWindow(*window)
            torch.testing.assert_close(warploom.attention(**given, mask=mask, backend=backend), everything)
            assert bool(mask.dense(8, 9).all()) and mask.density(8, 9) == 1.0
        assert not warploom.attention(**given, window=(-int(far), None), backend=backend).any()
    held = cache()
    held.k.normal_(), held.v.normal_()
    q = normal(2, 1, 4, 16)
    for backend in ("cpu", "reference"):
        assert torch.equal(
            warploom.decode(q, held, window=(far, 0), backend=backend), warploom.decode(q, held, backend=backend)
        )
        assert not warploom.decode(q, held, window=(None, -int(far)), backend=backend).any()


def test_minus_one_on_both_sides_is_no_window_of_ours_and_none_of_flash_attns() -> None:
    given = flash()
    for call in (
        lambda: warploom.attention(**given, window=(-1, -1)),
        lambda: warploom.decode(normal(2, 1, 4, 16), cache(), window=(-1, -1)),
        lambda: masks.SlidingWindow(-1, -1),
        lambda: warploom.explain(**given, window=(-1, -1)),
        lambda: collators.padding_bounds(torch.ones(2, 8, dtype=torch.bool), window=(-1, -1)),
    ):
        with pytest.raises(ValueError, match="None"):
            call()
    everything = warploom.attention(**given)
    assert torch.equal(flash_attn.flash_attn_func(**given, window_size=(-1, -1)), everything)
    left = warploom.attention(**given, window=(None, 0))
    assert torch.equal(flash_attn.flash_attn_func(**given, window_size=(-1, 0)), left)
    # Every other window is legal, the empty ones too, and one that intersections make.
    for window in ((-1, 0), (0, -1), (-2, -2), (-1, -2), (-3, 1)):
        shown = masks.SlidingWindow(*window).dense(8, 8)
        assert not shown.any() and not warploom.attention(**given, window=window).any()
    both = masks.SlidingWindow(-1, 5) & masks.SlidingWindow(5, -1)
    assert not both.dense(8, 8).any() and not warploom.attention(**given, mask=both).any()
