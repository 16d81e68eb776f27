"""Under warploom.batch_invariant() a decode call as one of attention_varlen() over the cache's pages, whose bits it has."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.decode.problem import DecodeArgs
from warploom.runtime import invariance
from warploom.runtime.op import settled_dtypes


def as_chunk(args: DecodeArgs, backend: str | None) -> tuple[Tensor, Tensor] | None:
    """Out (batch, T, heads_q, head_dim_v) and lse, fp32 (batch, heads_q, T); None where attention_varlen() has no such call.

    The queries of a sequence are the last rows of its prompt. A contiguous cache is one of a page a sequence.
    """
    if args.tree is not None or args.bias is not None or args.k_scale is not None or args.latent:
        return None
    batch, queries = args.q.shape[:2]
    device, table = args.q.device, args.block_table
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    with torch.no_grad(), settled_dtypes(args.q):
        out, lse = invariance.attend(
            args.q.flatten(0, 1),
            args.k,
            args.v,
            torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=device),
            max_seqlen_q=queries,
            seqused_k=args.lengths,
            block_table=table,
            window=(args.left, args.right),
            scale=args.scale,
            softcap=args.softcap,
            sink=args.sink,
            return_lse=True,
            backend=backend,
            batch_invariant=True,
        )
    return out.unflatten(0, (batch, queries)), lse.unflatten(1, (batch, queries)).transpose(0, 1).contiguous()
