"""What all families check of q, k, v and the numbers beside them; `warploom.runtime.arguments` reads single values."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from warploom.runtime import arguments


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast, fp32, fp16 and bf16 inputs take the autocast dtype, as torch's own attention's do."""
    if not isinstance(q, Tensor) or q.device.type == "meta" or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(t: Tensor) -> Tensor:
        eligible = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if eligible else t

    return cast(q), cast(k), cast(v)


def check_tensors(q: object, k: object, v: object, rank: int, layout: str, kv_rank: int | None = None) -> None:
    """Type, rank, dtype, device and shape agreement of q, k and v; raises in the user's words."""
    kv_rank = rank if kv_rank is None else kv_rank
    for name, t, ndim in (("q", q, rank), ("k", k, kv_rank), ("v", v, kv_rank)):
        if arguments.strided(name, t).ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {tuple(t.shape)}")  # type: ignore[attr-defined]
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if q.dtype not in arguments.FLOATS:
        raise TypeError(f"q has dtype {q.dtype}; attention takes float16, bfloat16, float32 or float64")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} but q has {q.dtype}; give all three one dtype, or use torch.autocast")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} but q is on {q.device}; move them to one device")
    arguments.with_values("q", q)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must agree in all but the last dimension, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head_dim must be at least 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(f"q has {heads_q} heads, which is not a multiple of the {heads_kv} heads of k and v")


def last_contiguous(t: Tensor) -> Tensor:
    """t, or a copy where its last dimension is strided."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def finite(name: str, value: Any) -> None:
    """A number that is neither infinite nor NaN."""
    # Comparisons rather than math.isfinite, which torch.compile cannot trace on a symbolic float.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be a finite number, got {value}")


def scalars(scale: Any, softcap: Any, dropout_p: Any, head_dim: int) -> tuple[float, float, float]:
    """The scalar keywords as floats within their ranges; a scale of None is 1/√head_dim."""
    scale = 1.0 / math.sqrt(head_dim) if scale is None else arguments.number("scale", scale)
    softcap, dropout_p = arguments.number("softcap", softcap), arguments.number("dropout_p", dropout_p)
    finite("scale", scale)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (off) or a positive finite number, got {softcap}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    return float(scale), float(softcap), float(dropout_p)


def check_sink(sink: Tensor | None, q: Tensor) -> None:
    """A sink is one logit a query head."""
    if sink is None:
        return
    if not isinstance(sink, Tensor) or sink.dtype not in arguments.FLOATS:
        raise TypeError(f"sink must be a floating point tensor of shape ({q.shape[-2]},), got {arguments.describe(sink)}")
    arguments.strided("sink", sink)
    if sink.shape != (q.shape[-2],):
        raise ValueError(f"sink must have shape ({q.shape[-2]},), one logit a query head, got {tuple(sink.shape)}")
    if sink.device != q.device:
        raise ValueError(f"sink is on {sink.device} but q is on {q.device}")


def check_starts(name: str, cu: Tensor, total: int, longest: int | None = None) -> None:
    """Values of starts of packed sequences, which may be read: from 0, never falling, within the tokens and the longest."""
    values = cu.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    lengths = [b - a for a, b in pairwise(values)]
    for n, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name} must not decrease, got {values[n]} then {values[n + 1]} at index {n + 1}")
    if values[-1] > total:
        raise ValueError(f"{name} ends at {values[-1]}, past the {total} packed tokens")
    if longest is not None and lengths and max(lengths) > longest:
        which = name.replace("cu_seqlens", "max_seqlen")
        raise ValueError(f"{which} is {longest} but the longest sequence of {name} has {max(lengths)} tokens")
