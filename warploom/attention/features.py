"""What a call carries: the one list of features that kernels are chosen, named, kept and compiled by."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from warploom.attention.problem import page_box

if TYPE_CHECKING:
    from warploom.attention.problem import AttentionArgs, AttentionProblem


class Features(NamedTuple):
    """A call without its lengths, heads and values: what another kernel may be compiled for.

    Dispatch has a problem and a launch has arguments: ``of`` and ``of_args`` read the same features from either.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    right: bool = False  # keys right of p + right are hidden (causal: right = 0)
    left: bool = False  # keys left of p - left are hidden
    columns: bool = False  # of the mask hide rows
    softcap: bool = False
    sink: bool = False
    dropout: bool = False
    varlen: bool = False  # packed sequences
    paged: bool = False  # whose keys lie in pages
    used: bool = False  # whose keys may end early (seqused_k)
    deterministic: bool = False  # gradients have equal bits in every run
    dlse: bool = False  # a gradient arrives through lse too
    q_offset: bool = False  # queries are chunks of longer sequences
    bias: str = ""  # the kind of an additive bias
    bias_grad: bool = False  # which has a gradient
    batch_invariant: bool = False  # a sequence's bits depend on nothing but itself
    fp8_pages: bool = False  # keys and values are e4m3 with scales
    page_box: int = 0  # keys that a copy may bring of a page, as a problem has it

    @classmethod
    def of(cls, problem: AttentionProblem, dlse: bool = False) -> Features:
        return cls(
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            right=problem.right is not None,
            left=problem.left is not None,
            columns=bool(problem.columns),
            softcap=problem.softcap,
            sink=problem.sink,
            dropout=problem.dropout,
            varlen=problem.layout != "dense",
            paged=problem.layout == "paged",
            used=problem.seqused,
            deterministic=problem.deterministic,
            dlse=dlse,
            q_offset=problem.q_offset,
            bias=problem.bias,
            bias_grad=problem.bias_grad,
            batch_invariant=problem.batch_invariant,
            fp8_pages=problem.fp8_pages,
            page_box=problem.page_box,
        )

    @classmethod
    def of_args(cls, args: AttentionArgs, dlse: bool = False) -> Features:
        """At every launch: by position, which takes half as long."""
        q = args.q
        return cls(
            q.dtype,
            q.shape[-1],
            args.v.shape[-1],
            args.right is not None,
            args.left is not None,
            args.lts is not None or args.lte is not None or args.uts is not None or args.ute is not None,
            args.softcap != 0.0,
            args.sink is not None,
            args.dropout_p > 0.0,
            args.cu_seqlens_q is not None,
            args.block_table is not None,
            args.seqused_k is not None,
            args.deterministic,
            dlse,
            args.q_offset is not None,
            args.bias_kind,
            args.bias_grad,
            args.batch_invariant,
            args.k_scale is not None,
            page_box(args),
        )

    @property
    def dtype_name(self) -> str:
        """As a configuration has it."""
        return str(self.dtype).removeprefix("torch.")

    def flags(self, config: Any) -> dict[str, Any]:
        """Those that a configuration, a dataclass, has as fields of the same names; the others are no matter to its kernels."""
        names = {field.name for field in fields(config)}
        return {name: flag for name, flag in self._asdict().items() if isinstance(flag, (bool, str)) and name in names}
