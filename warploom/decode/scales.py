"""The scales of an FP8 cache: what they may be, and the quantising append."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from warploom.decode.contents import check_append
from warploom.decode.ops import append_fp8_op
from warploom.decode.problem import AppendArgs
from warploom.kernels.e4m3 import E4M3
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
    """Scales of a new cache, all 1. Those of a head lie side by side: a program reads one head's keys."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of 'tensor', 'head', 'token', got {granularity!r}")
    if granularity == "token":
        pages, page_size, heads = k.shape[:3]
        k_scale, v_scale = (torch.ones((pages, heads, page_size), device=k.device).transpose(1, 2) for _ in range(2))
        return k_scale, v_scale
    shape = (1,) if granularity == "tensor" else (k.shape[2],)
    return torch.ones(shape, device=k.device), torch.ones(shape, device=k.device)


def append_quantized(args: AppendArgs, k_scale: Tensor, v_scale: Tensor, hadamard_seed: int | None) -> None:
    """An append to an FP8 cache: keys are rotated; a scale a token is made, others are taken as they are."""
    check_append(args, quantises=True)
    caches = (t.view(torch.uint8) for t in (args.k_cache, args.v_cache))
    append_fp8_op(*caches, k_scale, v_scale, *args[2:7], hadamard_seed, args.advance)
