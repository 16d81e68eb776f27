"""Running a call of FP8 numbers: K and V as the kernel reads them, scales of blocks, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warploom.attention.band import seen
from warploom.attention.features import Features
from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.attention.hopper.fp8_plan import OUT_DTYPES, fp8_config, tile_dims
from warploom.attention.hopper.run import launch_on, numbers_of, parts_shape_of, processors
from warploom.attention.hopper.schedule import heads_in_pairs, tiles_to_split
from warploom.attention.problem import AttentionArgs
from warploom.runtime import modules, traced
from warploom.runtime.arguments import keeps_nothing

SCALED = 128  # rows that share a scale
QUAD = 4  # keys that the kernel reads together
# Key tiles' worth of time that splitting costs: as long as for 16 bits, whose tiles take longer.
SPLIT_COST = 24


def refusal(args: AttentionArgs, out_dtype: torch.dtype) -> str | None:
    """Why a call whose shapes and features have a kernel is kept from it, or None."""
    if args.scale <= 0.0:
        return "takes FP8 with a positive scale only"
    if out_dtype not in OUT_DTYPES:
        return f"has no FP8 kernel with a result in {str(out_dtype).removeprefix('torch.')}"
    if 0 in args.q.shape or 0 in args.k.shape or keeps_nothing(args.left, args.right):
        return "has nothing to multiply"
    first, end = seen(args.q.shape[1], args.k.shape[1], args.left, args.right)
    if first >= end:
        return "has nothing to multiply"
    if first > 0:
        # Their values would be read beside others, and a NaN does not vanish against P = 0; TMA leaves out what is behind.
        return "has no FP8 kernel where a window hides the first keys from all queries"
    features = Features.of_args(args)
    # What is not text is a flag.
    flags = [each if isinstance(each, str) else _settled(each) for each in features[3:]]
    return _module_refusal(out_dtype, features.dtype, *tile_dims(features.head_dim, features.head_dim_v), *flags)


def _settled(flag: bool | int) -> bool:
    """The flag as a number that a tracer has, by a branch, which bool() is not."""
    settled = False
    if flag:
        settled = True
    return settled


@traced.constant
def _module_refusal(out_dtype: torch.dtype, *fields: Any) -> str | None:
    """Why the module can be neither loaded nor built here; ``fields`` are those of the call's Features."""
    return _found.refusal((out_dtype, *fields), lambda: [fp8_config(Features(*fields), out_dtype).spec])


_found = traced.Found()


def forward(args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor], out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and lse of a call whose q, k and v are e4m3 with these scales, as `warploom.fp8.Fp8Tensor` has them."""
    function, variant = _function(args, out_dtype)
    q, k, v, device = args.q, args.k, args.v, args.q.device
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, heads_kv, head_dim_v) = q.shape, v.shape
    out = torch.empty(batch, seqlen_q, heads, head_dim_v, dtype=out_dtype, device=device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=device)
    left, right = args.left, args.right
    end = seen(seqlen_q, seqlen_k, left, right)[1]
    # As for 16 bits, keys that no query sees are not read.
    left = None if left is None else left - (seqlen_k - end)
    right = None if right is None else right + (seqlen_k - end)
    k, v = k[:, :end], v[:, :end]
    m_blocks = -(-seqlen_q // variant.tile_m)
    tiles, blocks, split = m_blocks * batch * heads, processors(device.index), 0
    if left is None and (right is None or 4 * seqlen_q <= seqlen_k):
        split, blocks = tiles_to_split(tiles, -(-end // variant.tile_n), blocks, SPLIT_COST, right is None)
    parts = lse  # not read: of the type
    if split:
        parts = torch.empty(parts_shape_of(blocks, variant), dtype=torch.float32, device=device)
    blocks = min(blocks, tiles) if not split else blocks
    pairs = heads_in_pairs(m_blocks, batch * heads, blocks, end * (head_dim + head_dim_v) * heads_kv // heads)
    sink = None if args.sink is None else args.sink.float().contiguous()
    given = (
        *(read_by_tma(q), quads_readable(read_by_tma(k)), keys_together(v)),
        *(out, lse, *scales_of_blocks(args, scales), sink, parts),
        *numbers_of(args, left, right, pairs, split, blocks),
    )
    launch_on(device.index, function, given)
    return out, lse


def warm(args: AttentionArgs, out_dtype: torch.dtype) -> None:
    """Load or build the call's module, and launch it on one token."""
    function, variant = _function(args, out_dtype)
    _first_launch(args.q.device, function, variant)


def _function(args: AttentionArgs, out_dtype: torch.dtype) -> tuple[Callable[..., None], Fp8ForwardConfig]:
    """The compiled variant."""
    variant = fp8_config(Features.of_args(args), out_dtype)
    function = _ready.get(variant.name)
    if function is None:
        function = _ready[variant.name] = modules.fetch(variant.spec)
        if not torch.cuda.is_current_stream_capturing():
            _first_launch(args.q.device, function, variant)  # of what merges pieces too, which a captured call may need first
    return function, variant


_ready: dict[str, Callable[..., None]] = {}  # by the variant's name


def _first_launch(device: torch.device, function: Callable[..., None], variant: Fp8ForwardConfig) -> None:
    """Launch the module's kernels on one token: CUDA loads their code when they are first launched."""
    q = torch.zeros(1, 1, 1, variant.head_dim, dtype=torch.uint8, device=device)
    v = torch.zeros(1, 1, 1, variant.head_dim_v, dtype=torch.uint8, device=device)
    out = torch.empty(v.shape, dtype=getattr(torch, variant.dtype), device=device)
    lse = torch.empty(1, 1, 1, dtype=torch.float32, device=device)
    scales = [torch.ones(1, 1, 1, dtype=torch.float32, device=device)] * 3
    sink = torch.zeros(1, dtype=torch.float32, device=device) if variant.sink else None
    parts = torch.empty(parts_shape_of(1, variant), dtype=torch.float32, device=device)
    given = (q, quads_readable(q), keys_together(v), out, lse, *scales, sink, parts)
    launch_on(device.index, function, (*given, 1.0, 1.0, 0, 0, 1, 1, 1))


def scales_of_blocks(args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Scales of each block and head, (batch, blocks, heads); those of heads and tensors as views."""
    found = []
    for t, scale in zip((args.q, args.k, args.v), scales, strict=True):
        blocks = t.shape[0], -(-t.shape[1] // SCALED), t.shape[2]
        found.append(scale if scale.ndim > 1 else scale.expand(blocks))
    return found


def read_by_tma(t: Tensor) -> Tensor:
    """The bytes of q or k, or of a copy where rows do not start at multiples of 16 bytes."""
    t = t.view(torch.uint8)
    return t if _steps(t, t.ndim - 1) else t.clone(memory_format=torch.contiguous_format)


def quads_readable(k: Tensor) -> Tensor:
    """K, or a copy with room for whole quads of keys: memory that the last one reaches into must be there.

    What it holds does not matter, as its scores are hidden.
    """
    missing = -k.shape[1] % QUAD
    last = k.storage_offset() + sum([(n - 1) * step for n, step in zip(k.shape, k.stride(), strict=True)])
    if last + missing * k.stride(1) < k.untyped_storage().nbytes():
        return k
    room = k.new_zeros(k.shape[0], k.shape[1] + missing, *k.shape[2:])
    room[:, : k.shape[1]] = k
    return room[:, : k.shape[1]]


def keys_together(v: Tensor) -> Tensor:
    """The bytes of V, or of a copy whose keys are contiguous, as they are in (batch, heads, head_dim_v, seqlen)."""
    v = v.view(torch.uint8)
    if _steps(v, 1):
        return v
    batch, seqlen, heads, dim = v.shape
    room = v.new_empty(batch, heads, dim, -(-seqlen // 16) * 16)
    return room[..., :seqlen].permute(0, 3, 1, 2).copy_(v)


def _steps(t: Tensor, contiguous: int) -> bool:
    """Whether one dimension is contiguous and all others step by multiples of 16 bytes, from one on."""
    others = [step for i, step in enumerate(t.stride()) if i != contiguous]
    return t.stride(contiguous) == 1 and not any([step % 16 for step in others]) and not t.data_ptr() % 16
