"""Running the kernels of stats."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from warploom.attention.problem import AttentionArgs
from warploom.attention.triton.call import UNIT, Call, Variant, dims, is_wide, lse_strides, read_bounds
from warploom.attention.triton.config import Tiling, stats_tiling
from warploom.attention.triton.stats_kernel import largest_kernel, stats_kernel
from warploom.runtime.device import capability, on_device
from warploom.runtime.triton_launch import Launch


def stats(args: AttentionArgs, lse: Tensor | None, max_logits: bool) -> tuple[Tensor | None, Tensor | None]:
    """Max logits, if asked for, and column sums, if given lse, as `warploom.attention.stats.AttentionStats` has them."""
    q, k = args.q, args.k
    call = Call.of(args)
    tiling = stats_tiling(call.variant.features, capability(q.device), _boxed(args, call.variant.unit), max_logits)
    tiles, batches = call.tiles(call.seqlen_k, tiling.n)
    sums = largest = found = None
    steps = (0, 0)
    if lse is not None:
        lse = lse.contiguous()
        shape = (call.heads, call.seqlen_k) if call.packed else (call.batches, call.heads, call.seqlen_k)
        sums, steps = torch.empty(shape, dtype=torch.float32, device=q.device), lse_strides(lse.shape)
    if max_logits:
        largest = torch.empty((batches, call.heads, tiles), dtype=torch.float32, device=q.device)
        found = torch.empty((call.batches, call.heads), dtype=torch.float32, device=q.device)
    variant = call.variant._replace(wide=is_wide(args, (q, k), max(tiling.m, tiling.n)))
    launch = _stats_launch(variant, tiling, lse is not None, max_logits)
    cu_q, cu_k, used, _ = call.sequences
    rows: Tensor | TensorDescriptor = q
    if tiling.boxes:
        by_head = q.transpose(1, 2)
        rows = TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), [1, 1, tiling.m, dims(variant)["D"]])
    with on_device(q):
        launch(
            (tiles * batches * call.heads, 1),
            *(rows, k, lse, sums, largest, *call.vectors, read_bounds(args), cu_q, cu_k, used, args.bias),
            *(*call.strides[:6], *steps, *call.mask_strides, *call.bounds_strides, call.batches, tiles, *call.lengths),
            *(*call.mask[:4], *call.bias),
        )
        if largest is not None and call.batches:
            starts = cu_q if cu_k is None else cu_k
            _largest_launch(tiling.n, cu_q is not None)(
                (call.batches * call.heads, 1), starts, largest, found, call.batches, call.heads, tiles, call.seqlen_k
            )
    return found, sums


def _boxed(args: AttentionArgs, unit: int) -> bool:
    """Whether a descriptor can say what is read of the queries: it knows a tensor's end, but no sequence's."""
    q = args.q
    usual = args.cu_seqlens_q is None and q.element_size() == 2 and unit == UNIT and q.data_ptr() % 16 == 0
    return usual and min(q.shape) > 0 and min(q.stride()) > 0


@cache
def _stats_launch(variant: Variant, tiling: Tiling, sums: bool, largest: bool) -> Launch:
    """The flags keep apart launches that give None for different pointers."""
    found = dims(variant)
    options: dict[str, Any] = {
        "DIM": found["DIM"],
        "D": found["D"],
        "M": tiling.m,
        "N": tiling.n,
        "UNIT": variant.unit,
        "BOXES": tiling.boxes,
        "WIDE": variant.wide,
        "DESCENDING": variant.descending,
        "BIAS": "" if variant.bias is None else variant.bias.kind,
        "BIAS_UNIT": 0 if variant.bias is None else variant.bias.unit,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        **({} if tiling.registers is None else {"maxnreg": tiling.registers}),
    }
    return Launch(stats_kernel, options, direct=variant.direct)


@cache
def _largest_launch(n: int, packed: bool) -> Launch:
    """As above."""
    return Launch(largest_kernel, {"N": n, "WIDTH": 128, "num_warps": 4}, direct=True)
