"""Calls over FP8 pages: one launch writes what the pages hold as numbers of q's dtype, and the call runs over those.

That reads and writes each key once, where a kernel that widens tiles in registers does so again for every query tile. Numbers
are rounded to q's dtype once they are scaled, as FP8 tensors are that no kernel multiplies as FP8.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.attention.hopper.plan import LEAST_BOX
from warploom.attention.problem import AttentionArgs
from warploom.runtime.device import on_device

if TYPE_CHECKING:
    from warploom.runtime.triton_launch import Launch

PAGE = LEAST_BOX  # keys of a page that is written: modules for such pages are among the named ones
MOST = 2**31  # bytes that may be written
_ROWS = 32  # keys of a program


def refusal(args: AttentionArgs) -> str | None:
    """Why a call over FP8 pages is not run so: what would be written is large."""
    size = args.k.shape[2] * (args.k.shape[3] + args.v.shape[3]) * args.q.element_size()
    if args.cu_seqlens_q is not None and (args.cu_seqlens_q.shape[0] - 1) * _keys(args) * size > MOST:
        return f"writes FP8 pages as 16 bits up to {MOST >> 30} GiB"
    return None


def widen(args: AttentionArgs) -> AttentionArgs:
    """The call with pages in q's dtype in place of those of FP8."""
    from warploom.kernels.triton.widths import power_of_two

    k, v, table, lengths = args.k, args.v, args.block_table, args.seqused_k
    assert table is not None and lengths is not None and args.k_scale is not None and args.v_scale is not None
    batch, keys, heads = len(lengths), _keys(args), k.shape[2]
    made = [args.q.new_empty((batch * keys // PAGE, PAGE, heads, t.shape[3])) for t in (k, v)]
    used = torch.empty_like(lengths, memory_format=torch.contiguous_format)
    own = table.new_empty((batch, keys // PAGE))
    if batch * keys * heads:
        dims = k.shape[3], v.shape[3]
        launch = _launch(*dims, *map(power_of_two, dims), args.q.dtype, args.q.device.index)
        strides = *k.stride()[:3], *v.stride()[:3], *_of_scales(args.k_scale), *_of_scales(args.v_scale), *table.stride()
        with on_device(args.q):
            launch(
                (batch * heads * -(-keys // _ROWS), 1),
                *(k, v, args.k_scale, args.v_scale, table, lengths.contiguous(), *made, used, own),
                *(*strides, k.shape[1], keys, heads, k.shape[0]),
            )
    return args._replace(k=made[0], v=made[1], seqused_k=used, block_table=own, k_scale=None, v_scale=None)


def _keys(args: AttentionArgs) -> int:
    """Keys of a sequence at the most, up to whole pages, two or more: a call of one page a sequence runs another module."""
    assert args.block_table is not None
    most = min(args.max_seqlen_k or 0, args.block_table.shape[1] * args.k.shape[1])
    return max(-(-most // PAGE), 2) * PAGE


def _of_scales(scale: Tensor) -> tuple[int, int, int]:
    """Strides by page, slot and head: of a scale a token and head, a head, or a tensor."""
    if scale.ndim == 3:
        return scale.stride(0), scale.stride(1), scale.stride(2)
    return 0, 0, scale.stride(0) if len(scale) > 1 else 0


@lru_cache(maxsize=64)
def _launch(dim: int, dim_v: int, width: int, width_v: int, dtype: torch.dtype, device: int | None) -> Launch:
    """The launch of one variant; ``dtype`` and ``device`` tell apart calls that need binaries of their own."""
    from warploom.kernels.triton.wide_pages import widen_kernel
    from warploom.runtime.triton_launch import Launch

    constants = {"DIM": dim, "DIM_V": dim_v, "WIDTH": width, "WIDTH_V": width_v, "ROWS": _ROWS, "PAGE": PAGE, "num_warps": 4}
    return Launch(widen_kernel, constants, direct=False)
