"""Running a call: views that TMA can read, the band, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from warploom.attention.hopper.plan import LONG, config
from warploom.attention.hopper.schedule import heads_in_pairs
from warploom.attention.problem import AttentionArgs
from warploom.attention.views import aligned, reach, seen
from warploom.runtime import modules
from warploom.runtime.device import on_device

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    if args.cu_seqlens_q is not None:
        return _packed(args)
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    out, lse = _outputs(q, v, (batch, heads, seqlen_q))
    left, right = args.left, args.right
    if left is not None or right is not None:
        first, end = seen(seqlen_q, seqlen_k, left, right)
        if first >= end:
            out.zero_()
            lse.fill_(float("-inf")) if args.sink is None else lse.copy_(args.sink[:, None].expand(lse.shape))
            return out, lse
        if first > 0 or end < seqlen_k:
            # Keys that no query sees stay outside of what TMA reads: a NaN among their values would not vanish against P = 0.
            k, v = k[:, first:end], v[:, first:end]
            left = None if left is None else left - (seqlen_k - end)
            right = None if right is None else right + (seqlen_k - end)
    function, tile_m = _function(args, seqlen_k)
    m_blocks = -(-seqlen_q // tile_m)
    blocks = min(processors(q.device.index), m_blocks * batch * heads)
    pair_heads = heads_in_pairs(m_blocks, batch * heads, blocks)
    _launch(function, args, (q, k, v, out, lse), (None, None, None, None), (left, right), pair_heads, blocks)
    return out, lse


def _packed(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    q, cu_q, cu_k, used = args.q, args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k
    assert cu_q is not None
    out, lse = _outputs(q, args.v, (q.shape[1], q.shape[0]))
    function, tile_m = _function(args, args.max_seqlen_k or 0)
    cu_q = cu_q.contiguous()
    cu_k = cu_q if cu_k is None else cu_k.contiguous()
    counter = cu_q.new_zeros(1)
    vectors = (cu_q, cu_k, None if used is None else used.contiguous(), counter)
    most = (q.shape[0] // tile_m + cu_q.shape[0]) * q.shape[1]
    blocks = min(processors(q.device.index), most)
    _launch(function, args, (q, args.k, args.v, out, lse), vectors, (args.left, args.right), 0, blocks)
    return out, lse


def warm(args: AttentionArgs) -> None:
    """Load or build the call's module, and launch it on one token: CUDA loads its code at the first launch."""
    function, _ = _function(args, args.max_seqlen_k or 0 if args.cu_seqlens_q is not None else args.k.shape[1])
    vectors: tuple[Tensor | None, ...] = (None, None, None, None)
    if args.cu_seqlens_q is not None:
        ones = args.cu_seqlens_q.new_tensor([0, 1])
        vectors = (ones, ones, None if args.seqused_k is None else ones[1:], ones.new_zeros(1))
        q, k, v = (t.new_zeros((1, *t.shape[1:])) for t in (args.q, args.k, args.v))
        out, lse = _outputs(q, v, (q.shape[1], 1))
    else:
        q, k, v = (t.new_zeros((1, 1, *t.shape[2:])) for t in (args.q, args.k, args.v))
        out, lse = _outputs(q, v, (1, q.shape[2], 1))
    _launch(function, args, (q, k, v, out, lse), vectors, (args.left, args.right), 0, 1)


def _outputs(q: Tensor, v: Tensor, lse_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty(shape, dtype=q.dtype, device=q.device), torch.empty(lse_shape, dtype=torch.float32, device=q.device)


def _function(args: AttentionArgs, seqlen_k: int) -> tuple[Callable[..., None], int]:
    """The compiled variant and its query tile."""
    key = (
        DTYPES[args.q.dtype],
        args.q.shape[-1],
        args.v.shape[-1],
        args.right is not None,
        args.left is not None,
        seqlen_k >= LONG,
        args.softcap != 0.0,
        args.sink is not None,
        args.cu_seqlens_q is not None,
        args.seqused_k is not None,
    )
    ready = _ready.get(key)
    if ready is None:
        variant = config(*key)
        if modules.loaded(variant.spec) is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{variant.name} is not loaded, which a capturing stream cannot do: make such a call before")
        ready = _ready[key] = modules.load(variant.spec), variant.tile_m
    return ready


_ready: dict[tuple[object, ...], tuple[Callable[..., None], int]] = {}


def _launch(
    function: Callable[..., None],
    args: AttentionArgs,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    vectors: tuple[Tensor | None, ...],
    band: tuple[int | None, int | None],
    pair_heads: int,
    blocks: int,
) -> None:
    q, k, v, out, lse = tensors
    sink = None if args.sink is None else args.sink.float().contiguous()
    left, right = map(reach, band)
    inputs = (aligned(q), aligned(k), aligned(v), out, lse, sink, *vectors)
    with on_device(q):
        function(*inputs, args.scale, args.softcap, left, right, pair_heads, blocks)


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
