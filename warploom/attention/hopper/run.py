"""Running a call: views that TMA can read, the band, the module, the launch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from warploom.attention.hopper.plan import LONG, config
from warploom.attention.hopper.schedule import heads_in_pairs
from warploom.attention.problem import AttentionArgs
from warploom.runtime import modules

# Bands reach at most this far, so that sums with row and column numbers stay in 32 bits.
_FAR = 1 << 29
_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32 (batch, heads, seqlen_q)."""
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, head_dim_v = k.shape[1], v.shape[3]
    out = q.new_empty((batch, seqlen_q, heads, head_dim_v))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    left, right = args.left, args.right
    sink = None if args.sink is None else args.sink.float().contiguous()
    if left is not None or right is not None:
        first, end = seen(seqlen_q, seqlen_k, left, right)
        if first >= end:
            out.zero_()
            lse.fill_(float("-inf")) if sink is None else lse.copy_(sink[:, None].expand(lse.shape))
            return out, lse
        if first > 0 or end < seqlen_k:
            # Keys that no query sees stay outside of what TMA reads: a NaN among their values would not vanish against P = 0.
            k, v = k[:, first:end], v[:, first:end]
            left = None if left is None else left - (seqlen_k - end)
            right = None if right is None else right + (seqlen_k - end)
    variant = config(
        _DTYPES[q.dtype],
        head_dim,
        head_dim_v,
        right is not None,
        left is not None,
        seqlen_k >= LONG,
        args.softcap != 0.0,
        sink is not None,
    )
    spec = variant.spec
    function = modules.loaded(spec)
    if function is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{spec.name} is not loaded, which a capturing stream cannot do: make one such call before")
        function = modules.load(spec)
    m_blocks = -(-seqlen_q // variant.tile_m)
    blocks = min(processors(q.device.index), m_blocks * batch * heads)
    function(
        aligned(q),
        aligned(k),
        aligned(v),
        out,
        lse,
        sink,
        args.scale,
        args.softcap,
        _near(left),
        _near(right),
        heads_in_pairs(m_blocks, batch * heads, blocks),
        blocks,
    )
    return out, lse


def seen(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> tuple[int, int]:
    """Keys [first, end) that some query's band holds."""
    shift = seqlen_k - seqlen_q
    first = 0 if left is None else max(0, shift - left)
    end = seqlen_k if right is None else min(seqlen_k, seqlen_k + right)
    return first, end


def aligned(t: Tensor) -> Tensor:
    """``t``, or a copy where TMA cannot read it: 16-byte steps from a 16-byte boundary, the last dimension contiguous."""
    batch, seqlen, heads, one = t.stride()
    if one == 1 and not (batch | seqlen | heads) & 7 and not t.data_ptr() & 15:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _near(reach: int | None) -> int:
    return 0 if reach is None else max(-_FAR, min(reach, _FAR))


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
