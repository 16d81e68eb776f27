"""`warploom explain`: the plan of a call described by its shapes; nothing of the call's size is allocated."""

from __future__ import annotations

import argparse
import json

import torch

import warploom
from warploom.attention.plan import Plan
from warploom.commands.mask_argument import parse_mask

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def run(options: argparse.Namespace) -> int:
    plan = make_plan(options)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    return 0


def make_plan(options: argparse.Namespace) -> Plan:
    """What `warploom.explain()` says of tensors of these shapes."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here, and a plan holds for the machine it is made on")

    def tensor(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        # Rows that overlap: the shape of the call without its memory. Strides of 8 elements are as good to every kernel as
        # those of a contiguous tensor, which strides of 0 are not.
        shape = (options.batch, seqlen, heads, dim)
        needed = sum(8 * max(0, length - 1) for length in shape[:3]) + dim
        row = torch.zeros(needed, dtype=DTYPES[options.dtype], device=device, requires_grad=options.backward)
        return row.as_strided(shape, (8, 8, 8, 1))

    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    seqlen_k = options.seqlen if options.seqlen_k is None else options.seqlen_k
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    mask = None if options.mask is None else parse_mask(options.mask).to(device)
    return warploom.explain(
        tensor(options.seqlen, options.heads, options.head_dim),
        tensor(seqlen_k, kv_heads, options.head_dim),
        tensor(seqlen_k, kv_heads, head_dim_v),
        mask=mask,
        causal=options.causal,
        window=options.window,
        softcap=options.softcap,
        sink=torch.zeros(options.heads, device=device) if options.sink else None,
        dropout_p=options.dropout,
        deterministic=options.deterministic or None,
        backend=options.backend,
    )
