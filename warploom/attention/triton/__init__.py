"""Portable GPU kernels in Triton: forward, backward, column masks, packed and paged sequences.

FlashAttention-2 (arXiv 2307.08691) with the tile classes of FlashMask (arXiv 2410.01359). The backward pass computes
scores twice, once by key columns for dK and dV and once by query rows for dQ: no atomics, so equal bits in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.attention.bounds import BLOCK, with_bounds
from warploom.attention.stats import StatsBackend
from warploom.runtime.device import capability
from warploom.runtime.triton_backend import TritonBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from warploom.attention.problem import AttentionArgs, AttentionProblem
    from warploom.attention.triton.config import Config


class Triton(TritonBackend, StatsBackend):
    """Dense, packed and paged calls with any mask, from 16 to 256 dims a head."""

    def supports(self, problem: AttentionProblem) -> str | None:
        refused = self.tensors_refusal(problem.device, problem.dtype)
        if refused is not None:
            return refused
        if problem.fp8_pages and capability(torch.device(problem.device)) < 89:
            return "reads FP8 pages on GPUs of compute capability 8.9 and up"
        for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if not 16 <= dim <= 256 or dim % 8:
                return f"takes {name} from 16 to 256 in steps of 8, not {dim}"
        if problem.backward and problem.layout == "paged":
            return "has no gradients for a paged cache, whose pages several sequences may share"
        return None

    def prepare(self, args: AttentionArgs) -> AttentionArgs:
        """The call with the bounds of its column mask, computed once for all layers that share the mask's tensors."""
        return with_bounds(args)

    def describe(self, problem: AttentionProblem) -> str:
        """What a batch-invariant call has that others do not."""
        if not problem.batch_invariant:
            return ""
        return "batch-invariant: the tiles of packed calls, keys first to last, so that a row's bits depend on no other row"

    def tiles(self, args: AttentionArgs) -> tuple[tuple[int, int], int]:
        """Queries × keys of the forward tiles that this very call takes, and how many keys are skipped at once, for explain().

        A band skips tile by tile, column vectors skip blocks of columns.
        """
        tiling = _config(args).forward
        columns = args.lts is not None or args.ute is not None
        return (tiling.m, tiling.n), max(tiling.n, BLOCK) if columns else tiling.n

    def backward_tiles(self, args: AttentionArgs) -> dict[str, tuple[int, int]]:
        """Of this very call, given a gradient of out that is as contiguous as autograd's."""
        config = _config(args)
        return {name: (t.m, t.n) for name, t in (("dq", config.dq), ("dk", config.dkdv), ("dv", config.dkdv))}

    def forward(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
        from warploom.attention.triton.run import forward as run

        return run(args)

    def bind(self, args: AttentionArgs) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """What launches further calls with the metadata of this one: (q, k, v, sink) to out and lse.

        Of packed calls (q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_k), of paged ones block_table too; under a column
        mask its vectors and their bounds behind those; with dropout the seed comes last.
        """
        if args.q_offset is not None or args.bias is not None or args.k_scale is not None:
            return None
        if args.q.numel() == 0 or args.k.numel() == 0:
            return None
        from warploom.attention.triton.run import bind as run

        return run(args)

    def bind_backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """What launches further backward passes: (dout, dlse, out, lse) and what ``bind`` takes to dq, dk, dv and dsink."""
        from warploom.attention.triton.run import bind_backward as run

        return run(args, dout, dlse, out, lse)

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv and dsink (empty without a sink) in the dtypes of q, k, v and sink; dbias where it is asked for."""
        from warploom.attention.triton.run import backward as run

        return run(args, dout, dlse, out, lse)

    def stats(
        self, args: AttentionArgs, lse: Tensor | None, max_logits: bool, column_sums: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Max logits, and column sums by a second look at the scores, one tile at a time."""
        from warploom.attention.triton.stats import stats as run

        return run(args, lse if column_sums else None, max_logits)


def _config(args: AttentionArgs) -> Config:
    """The tiles that a call takes; for explain(), which launches nothing."""
    from warploom.attention.triton.call import Call

    if (args.lts is not None or args.ute is not None) and args.cu_seqlens_q is None:
        # What ``prepare`` would bring; that it is there is what counts.
        args = args._replace(bounds=args.q.new_empty((1, 1, 1, 8), dtype=torch.int32))
    return Call.of(args).config


BACKEND = Triton()
