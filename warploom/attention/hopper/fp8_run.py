"""Running a call of FP8 numbers: K and V as the kernel reads them, scales of blocks, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.attention.band import seen
from warploom.attention.features import Features
from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.attention.hopper.fp8_plan import MOST_KEYS, OUT_DTYPES, fp8_config
from warploom.attention.hopper.run import counter_on, launch_on, numbers_of, parts_shape_of, processors
from warploom.attention.hopper.schedule import heads_in_pairs, tiles_to_split
from warploom.attention.problem import AttentionArgs
from warploom.runtime import modules
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
    if args.k.shape[-3] > MOST_KEYS or _sees_nothing(args) or _hides_first_keys(args):
        return "has no FP8 kernel for these lengths and this band"
    variant = fp8_config(Features.of_args(args), out_dtype)
    if variant.name in _ready or modules.cannot_build() is None:
        return None
    return modules.absence(variant.spec)


def _hides_first_keys(args: AttentionArgs) -> bool:
    """Whether a window may hide a sequence's first keys from all queries.

    Their values would be read beside others, and a NaN does not vanish against P = 0; TMA leaves out what is behind the last.
    """
    if args.left is None:
        return False
    if args.cu_seqlens_q is None:
        return seen(args.q.shape[1], args.k.shape[1], args.left, args.right)[0] > 0
    return args.cu_seqlens_k is not None or args.seqused_k is not None or args.left < 0


def forward(args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor], out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and lse of a call whose q, k and v are e4m3 with these scales, as `warploom.fp8.Fp8Tensor` has them."""
    function, variant = _function(args, out_dtype)
    q, k, v, device = args.q, args.k, args.v, args.q.device
    packed = args.cu_seqlens_q is not None
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype, device=device)
    heads, blocks = q.shape[-2], processors(device.index)
    left, right, split, pairs, parts = args.left, args.right, 0, 0, None
    starts: tuple[Tensor | None, ...] = (None, None, None, None)
    if packed:
        assert args.cu_seqlens_q is not None
        lse = torch.empty(heads, q.shape[0], dtype=torch.float32, device=device)
        cu_q = args.cu_seqlens_q.contiguous()
        cu_k = cu_q if args.cu_seqlens_k is None else args.cu_seqlens_k.contiguous()
        used = None if args.seqused_k is None else args.seqused_k.contiguous()
        starts = cu_q, cu_k, used, counter_on(device)
        blocks = min(blocks, (q.shape[0] // variant.tile_m + cu_q.shape[0]) * heads)
    else:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=device)
        end = seen(seqlen_q, seqlen_k, left, right)[1]
        # As for 16 bits, keys that no query sees are not read.
        left = None if left is None else left - (seqlen_k - end)
        right = None if right is None else right + (seqlen_k - end)
        k, v = k[:, :end], v[:, :end]
        m_blocks = -(-seqlen_q // variant.tile_m)
        tiles = m_blocks * batch * heads
        if left is None and (right is None or 4 * seqlen_q <= seqlen_k):
            split, blocks = tiles_to_split(tiles, -(-end // variant.tile_n), blocks, SPLIT_COST, right is None)
        parts = lse  # not read: of the type
        if split:
            parts = torch.empty(parts_shape_of(blocks, variant), dtype=torch.float32, device=device)
        blocks = min(blocks, tiles) if not split else blocks
        shared = end * (k.shape[-1] + v.shape[-1]) * k.shape[-2] // heads
        pairs = heads_in_pairs(m_blocks, batch * heads, blocks, shared)
    sink = None if args.sink is None else args.sink.float().contiguous()
    given = (
        *(read_by_tma(q), quads_readable(read_by_tma(k)), keys_together(v)),
        *(out, lse, *scales_of_blocks(args, scales), sink, *starts, parts),
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
        if variant.split and not torch.cuda.is_current_stream_capturing():
            _first_launch(args.q.device, function, variant)  # of what merges pieces too, which a captured call may need first
    return function, variant


_ready: dict[str, Callable[..., None]] = {}  # by the variant's name


def _first_launch(device: torch.device, function: Callable[..., None], variant: Fp8ForwardConfig) -> None:
    """Launch the module's kernels on one token: CUDA loads their code when they are first launched."""
    lead = (1,) if variant.varlen else (1, 1)
    q = torch.zeros(*lead, 1, variant.head_dim, dtype=torch.uint8, device=device)
    v = torch.zeros(*lead, 1, variant.head_dim_v, dtype=torch.uint8, device=device)
    out = torch.empty(v.shape, dtype=getattr(torch, variant.dtype), device=device)
    lse = torch.empty(*lead[1:], 1, 1, dtype=torch.float32, device=device)
    scales = [torch.ones(*lead, 1, dtype=torch.float32, device=device)] * 3
    ones = torch.ones(2, dtype=torch.int32, device=device)
    ones[0] = 0
    starts: tuple[Tensor | None, ...] = (None, None, None, None)
    if variant.varlen:
        starts = ones, ones, ones[1:] if variant.used else None, torch.zeros(1, dtype=torch.int32, device=device)
    sink = torch.zeros(1, dtype=torch.float32, device=device) if variant.sink else None
    parts = torch.empty(parts_shape_of(1, variant), dtype=torch.float32, device=device) if variant.split else None
    given = (q, quads_readable(q), keys_together(v), out, lse, *scales, sink, *starts, parts)
    launch_on(device.index, function, (*given, 1.0, 1.0, 0, 0, 1, int(variant.split), 1))


def _sees_nothing(args: AttentionArgs) -> bool:
    """Whether there is nothing to launch a kernel for."""
    if 0 in args.q.shape or 0 in args.k.shape or keeps_nothing(args.left, args.right):
        return True
    if args.cu_seqlens_q is not None:
        return False
    first, end = seen(args.q.shape[1], args.k.shape[1], args.left, args.right)
    return first >= end


def scales_of_blocks(args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Scales of each block and head, (batch, blocks, heads) or of packed sequences (blocks, heads), where others are views."""
    found = []
    for t, scale in zip((args.q, args.k, args.v), scales, strict=True):
        heads = t.shape[-2]
        if scale.ndim == 1:
            if args.cu_seqlens_q is None:
                scale = scale.expand(t.shape[0], -(-t.shape[1] // SCALED), heads)
            else:
                scale = scale.expand(t.shape[0] // SCALED + max(args.cu_seqlens_q.shape[0] - 1, 1), heads)
        found.append(scale)
    return found


def read_by_tma(t: Tensor) -> Tensor:
    """The bytes of q or k, or of a copy where rows do not start at multiples of 16 bytes."""
    t = t.view(torch.uint8)
    return t if _steps(t, t.ndim - 1) else t.clone(memory_format=torch.contiguous_format)


def quads_readable(k: Tensor) -> Tensor:
    """K, or a copy with room for whole quads of keys: memory that the last one reaches into must be there.

    What it holds does not matter, as its scores are hidden.
    """
    keys = k.ndim - 3
    missing = -k.shape[keys] % QUAD if keys else QUAD - 1
    last = k.storage_offset() + sum((n - 1) * step for n, step in zip(k.shape, k.stride(), strict=True))
    if last + missing * k.stride(keys) < k.untyped_storage().nbytes():
        return k
    room = k.new_zeros((*k.shape[:keys], k.shape[keys] + missing, *k.shape[keys + 1 :]))
    room.narrow(keys, 0, k.shape[keys]).copy_(k)
    return room.narrow(keys, 0, k.shape[keys])


def keys_together(v: Tensor) -> Tensor:
    """The bytes of V, whose keys are to be contiguous, as quantize() stores them on a GPU, or of a copy in which they are."""
    v = v.view(torch.uint8)
    keys = v.ndim - 3
    if _steps(v, keys):
        return v
    room = v.new_empty((*v.shape[:keys], *v.shape[keys + 1 :], -(-v.shape[keys] // 16) * 16))
    found = room.movedim(-1, keys).narrow(keys, 0, v.shape[keys])
    return found.copy_(v)


def _steps(t: Tensor, contiguous: int) -> bool:
    """Whether one dimension is contiguous and all others step by multiples of 16 bytes, from one on."""
    others = [step for i, step in enumerate(t.stride()) if i != contiguous]
    return t.stride(contiguous) == 1 and not any([step % 16 for step in others]) and not t.data_ptr() % 16
