"""The scales of an FP8 cache: what they may be, and the quantising append."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from warploom.decode.contents import check_append
from warploom.decode.ops import append_op
from warploom.decode.problem import AppendArgs
from warploom.kernels.e4m3 import E4M3, quantized, rotate, scales_of
from warploom.runtime import arguments

Granularity = Literal["tensor", "head", "token"]
GRANULARITIES = ("tensor", "head", "token")


def check_scales(k_name: str, k: Tensor, k_scale: Any, v_scale: Any, hadamard_seed: Any) -> None:
    """Types, shapes and devices of what makes an FP8 cache, which no other cache has."""
    given = {"k_scale": k_scale, "v_scale": v_scale}
    if k.dtype != E4M3:
        for name, value in (*given.items(), ("hadamard_seed", hadamard_seed)):
            if value is not None:
                raise TypeError(f"{name} goes with a cache of torch.float8_e4m3fn, and {k_name} has dtype {k.dtype}")
        return
    arguments.integer("hadamard_seed", hadamard_seed, *arguments.INT64, optional=True)
    heads = k.shape[2]
    for name, scale in given.items():
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            raise TypeError(f"{name} must be a float32 tensor for a cache of {k.dtype}, got {arguments.describe(scale)}")
        arguments.strided(name, scale)
        if tuple(scale.shape) not in ((1,), (heads,), tuple(k.shape[:3])):
            raise ValueError(
                f"{name} must have shape (1,), (heads_kv,) = ({heads},) or that of a scale a token and head, "
                f"{tuple(k.shape[:3])}, got {tuple(scale.shape)}"
            )
        if scale.device != k.device:
            raise ValueError(f"{name} is on {scale.device} but {k_name} is on {k.device}")
    if k_scale.ndim != v_scale.ndim:
        raise ValueError(
            f"k_scale and v_scale must both have a scale a token or neither, got shapes {tuple(k_scale.shape)} and "
            f"{tuple(v_scale.shape)}"
        )


def scale_memory(k: Tensor, granularity: Any) -> tuple[Tensor, Tensor]:
    """Scales of a new cache, all 1."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of 'tensor', 'head', 'token', got {granularity!r}")
    shape = {"tensor": (1,), "head": (k.shape[2],), "token": tuple(k.shape[:3])}[granularity]
    return torch.ones(shape, device=k.device), torch.ones(shape, device=k.device)


def append_quantized(args: AppendArgs, k_scale: Tensor, v_scale: Tensor, hadamard_seed: int | None) -> None:
    """An append to an FP8 cache: keys are rotated; a scale a token is made here, others are taken as they are."""
    check_append(args, quantises=True)
    k = args.k if hadamard_seed is None else rotate(args.k, hadamard_seed)
    if k_scale.ndim > 1:
        new_k, new_v = scales_of(k), scales_of(args.v)
        kept = k_scale[..., None], v_scale[..., None]
        append_op(*kept, *args[2:5], new_k[..., None], new_v[..., None], False)
    else:
        new_k, new_v = k_scale, v_scale
    caches, new = (args.k_cache, args.v_cache), (quantized(k, new_k), quantized(args.v, new_v))
    # As bytes: they are copied, and not every device knows the type.
    append_op(*(t.view(torch.uint8) for t in caches), *args[2:5], *(t.view(torch.uint8) for t in new), args.advance)
