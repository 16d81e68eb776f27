"""Portable GPU kernels in Triton: forward, backward, column masks, packed and paged sequences.

FlashAttention-2 (arXiv 2307.08691) with the tile classes of FlashMask (arXiv 2410.01359). The backward pass computes
scores twice, once by key columns for dK and dV and once by query rows for dQ: no atomics, so equal bits in every run.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from warploom.attention.triton.bounds import BLOCK, prepared_bounds

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.attention.problem import AttentionArgs, AttentionProblem

# Read here once: torch.compile does not trace the lookup.
_HAS_TRITON = find_spec("triton") is not None


def available() -> str | None:
    if not _HAS_TRITON:
        return "the triton package is not installed (pip install 'warploom[triton]')"
    if not _interpreting() and not torch.cuda.is_available():
        return "no CUDA device is visible"
    return None


def supports(problem: AttentionProblem) -> str | None:
    if problem.device != "cuda" and not (problem.device == "cpu" and _interpreting()):
        return f"runs on CUDA tensors, not on {problem.device}"
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 or float32, not {problem.dtype}"
    if problem.dtype == torch.bfloat16 and problem.device == "cpu":
        return "Triton's interpreter multiplies bfloat16 as integers"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not 16 <= dim <= 256 or dim % 8:
            return f"takes {name} from 16 to 256 in steps of 8, not {dim}"
    if problem.backward and problem.layout == "paged":
        return "has no gradients for a paged cache, whose pages several sequences may share"
    return None


def prepare(args: AttentionArgs) -> AttentionArgs:
    """The call with the bounds of its column mask, computed once for all layers that share the mask's tensors."""
    if args.bounds is not None or args.cu_seqlens_q is not None or (args.lts is None and args.ute is None):
        return args
    return args._replace(bounds=prepared_bounds(args.mask, args.q.shape[1], args.k.shape[1]))


def tiles(args: AttentionArgs) -> tuple[tuple[int, int], int]:
    """Queries × keys of the forward tiles that this very call takes, and how many keys are skipped at once, for explain().

    A band skips tile by tile, column vectors skip blocks of columns.
    """
    from warploom.attention.triton.call import Call

    columns = args.lts is not None or args.ute is not None
    if columns and args.cu_seqlens_q is None:  # which ``prepare`` would bring; that they are there is what counts
        args = args._replace(bounds=args.q.new_empty((1, 1, 1, 8), dtype=torch.int32))
    tiling = Call.of(args).config.forward
    return (tiling.m, tiling.n), max(tiling.n, BLOCK) if columns else tiling.n


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    from warploom.attention.triton.run import forward as run

    return run(args)


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink (empty without a sink) in the dtypes of q, k, v and sink."""
    from warploom.attention.triton.run import backward as run

    return run(args, dout, dlse, out, lse)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
