"""Under warploom.batch_invariant() a decode call as one of attention_varlen() over the cache's pages, whose bits it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.bias import Bias
from warploom.decode.problem import DecodeArgs
from warploom.kernels.pages import PagedCache
from warploom.runtime import invariance
from warploom.runtime.op import settled_dtypes


@dataclass(frozen=True, eq=False)
class _Pages(PagedCache):
    """A validated call's cache as pages, a contiguous one with a page for each sequence; queries are rotated already."""

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    hadamard_seed: int | None = None


class ChunkCall(NamedTuple):
    """A call of attention_varlen()."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def chunk_call(args: DecodeArgs, bias: Bias | None, backend: str | None) -> ChunkCall | None:
    """The call whose rows a decode call's queries are, the last ones of a prompt; None where attention_varlen() has none.

    ``bias``: the call's, as the user gave it.
    """
    if args.tree is not None or args.latent:
        return None
    batch, queries = args.q.shape[:2]
    device, table = args.q.device, args.block_table
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    pages = _Pages(args.k, args.v, table, args.lengths, args.k_scale, args.v_scale)
    keywords = {
        "cu_seqlens_q": torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=device),
        "max_seqlen_q": queries,
        "window": (args.left, args.right),
        "scale": args.scale,
        "softcap": args.softcap,
        "sink": args.sink,
        "bias": bias,
        "return_lse": True,
        "backend": backend,
        "batch_invariant": True,
    }
    return ChunkCall((args.q.flatten(0, 1), pages), keywords)


def as_chunk(args: DecodeArgs, bias: Bias | None, backend: str | None) -> tuple[Tensor, Tensor] | None:
    """Out (batch, T, heads_q, head_dim_v) and lse, fp32 (batch, heads_q, T), of that call; None where there is none."""
    call = chunk_call(args, bias, backend)
    if call is None:
        return None
    with torch.no_grad(), settled_dtypes(args.q):
        out, lse = invariance.attend(*call.arguments, **call.keywords)
    shape = args.q.shape[:2]
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1).contiguous()
