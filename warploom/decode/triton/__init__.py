"""Split-KV decode in Triton: one kernel over fixed splits of each sequence, one that merges them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.decode.problem import DecodeArgs, DecodeProblem
    from warploom.decode.triton.launch import Ready

_HAS_TRITON = find_spec("triton") is not None


def available() -> str | None:
    if not _HAS_TRITON:
        return "the triton package is not installed (pip install 'warploom[triton]')"
    if not _interpreting() and not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


def supports(problem: DecodeProblem) -> str | None:
    if problem.device != "cuda" and not (problem.device == "cpu" and _interpreting()):
        return f"runs on CUDA tensors, not on {problem.device}"
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 or float32, not {problem.dtype}"
    if problem.dtype == torch.bfloat16 and problem.device == "cpu":
        return "Triton's interpreter multiplies bfloat16 as integers"
    if problem.capacity >= 2**31:
        return f"counts keys in 32 bits; the cache's capacity is {problem.capacity}"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not 16 <= dim <= 256 or dim % 8:
            return f"takes {name} from 16 to 256 in steps of 8, not {dim}"
    return None


def forward(args: DecodeArgs) -> tuple[Tensor, Tensor]:
    """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse, fp32 (batch, heads_q, T)."""
    from warploom.decode.triton.launch import forward as run

    return run(args)


def ready(args: DecodeArgs) -> Ready | None:
    """A short way for later calls that differ from this one, which has run, in the contents of q and sink alone."""
    from warploom.decode.triton.launch import ready as prepare

    return prepare(args)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    k: Tensor,
    v: Tensor,
    advance: bool,
) -> None:
    """Write new keys and values into a cache, in place; see `warploom.decode.cache`."""
    from warploom.decode.triton.tokens import append as run

    run(k_cache, v_cache, lengths, block_table, slot_mapping, k, v, advance)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
