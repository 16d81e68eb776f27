"""Split-KV decode in Triton: one kernel over fixed splits of each sequence, one that merges them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.decode.backend import DecodeBackend
from warploom.runtime.device import capability
from warploom.runtime.triton_backend import TritonBackend

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.decode.problem import AppendArgs, AppendFp8Args, DecodeArgs, DecodeProblem
    from warploom.decode.triton.launch import Ready


def _latent_refusal(head_dim: int, head_dim_v: int) -> str | None:
    if not 16 <= head_dim_v <= 512 or head_dim_v % 8:
        return f"takes head_dim_v from 16 to 512 in steps of 8 of a latent cache, not {head_dim_v}"
    if head_dim - head_dim_v > 128 or head_dim % 8:
        return f"takes at most 128 columns behind a latent cache's values, in steps of 8, not {head_dim - head_dim_v}"
    return None


class Triton(TritonBackend, DecodeBackend):
    """Caches of either kind, from 16 to 256 dims a head; latent ones to 512, and 128 more that are not values."""

    def supports(self, problem: DecodeProblem) -> str | None:
        refused = self.tensors_refusal(problem.device, problem.dtype)
        if refused is not None:
            return refused
        if problem.fp8 and capability(torch.device(problem.device)) < 89:
            return "reads FP8 caches on GPUs of compute capability 8.9 and up"
        if problem.capacity >= 2**31:
            return f"counts keys in 32 bits; the cache's capacity is {problem.capacity}"
        if problem.latent:
            return _latent_refusal(problem.head_dim, problem.head_dim_v)
        for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if not 16 <= dim <= 256 or dim % 8:
                return f"takes {name} from 16 to 256 in steps of 8, not {dim}"
        return None

    def describe(self, problem: DecodeProblem) -> str:
        """How it cuts sequences, and what it shares."""
        from warploom.decode.triton.plan import described

        return described(problem)

    def forward(self, args: DecodeArgs) -> tuple[Tensor, Tensor]:
        """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse, fp32 (batch, heads_q, T)."""
        from warploom.decode.triton.launch import forward as run

        return run(args)

    def bind(self, args: DecodeArgs) -> Ready | None:
        """What runs later calls that differ from this one, which has run, in the contents of q and sink alone."""
        from warploom.decode.triton.launch import ready

        return ready(args)

    def appends(self, device: str) -> bool:
        return device == "cuda"

    def append(self, args: AppendArgs) -> None:
        from warploom.decode.triton.tokens import append as run

        run(args)

    def quantizes(self, args: AppendFp8Args) -> bool:
        from warploom.kernels.rotation import in_kernels

        dim, dim_v = args.k.shape[-1], args.v.shape[-1]
        if not args.k.is_cuda or args.k.dtype == torch.float64 or max(dim, dim_v) > 512:
            return False
        if args.seed is not None and not in_kernels(dim):
            return False
        # Of 10.0 Triton 3.6 is not known to round to e4m3.
        return capability(args.k.device) in (89, 90)

    def append_fp8(self, args: AppendFp8Args) -> None:
        from warploom.decode.triton.fp8_tokens import append as run

        run(args)


BACKEND = Triton()
