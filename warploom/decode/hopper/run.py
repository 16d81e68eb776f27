"""Running a call."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from warploom.decode.hopper import plan
from warploom.decode.problem import DecodeArgs
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.device import on_device

FAR = 2**30


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def forward(args: DecodeArgs, variant=None, cluster=None, groups=1, blocks=None, least=plan.LEAST) -> tuple[Tensor, Tensor]:
    """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse, fp32 (batch, heads_q, T)."""
    q, k, v = args.q, args.k, args.v
    batch, queries, heads_q, head_dim = q.shape
    heads_kv = k.shape[2]
    rows = queries * (heads_q // heads_kv)
    paged = args.block_table is not None
    shift = 31
    if paged and args.block_table.shape[1] > 1:
        shift = k.shape[1].bit_length() - 1
    if variant is None:
        page_size = None if not paged else 16 if shift == 31 else k.shape[1]
        variant = plan.config(q.dtype, max(head_dim, v.shape[3]), rows, page_size, args.softcap != 0.0, args.sink is not None)
    count = processors(q.device.index)
    if cluster is None:
        cluster = plan.cluster(variant, batch * heads_kv * -(-rows // variant.rows), count)
    out = q.new_empty((batch, queries, heads_q, v.shape[3]))
    lse = q.new_empty((batch, heads_q, queries), dtype=torch.float32)
    parts = q.new_empty((lse.numel() * groups * (v.shape[3] + 1),), dtype=torch.float32) if variant.groups else None
    sink = None if args.sink is None else args.sink.float().contiguous()
    left = FAR if args.left is None else max(min(args.left, FAR - 1), -FAR)
    function = modules.fetch(variant.spec)
    with on_device(q):
        function(
            aligned(q), k, v, out, lse, parts, args.lengths, args.block_table, sink, args.scale, args.softcap, left,
            max(args.right, -FAR), args.capacity, shift, least, groups, cluster, blocks or count,
        )  # fmt: skip
    return out, lse
