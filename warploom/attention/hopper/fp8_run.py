"""Running a call of FP8 numbers: K and V as the kernel reads them, scales of blocks, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warploom.attention.band import reach, seen
from warploom.attention.bounds import with_bounds
from warploom.attention.features import Features
from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.attention.hopper.fp8_plan import MOST_KEYS, OUT_DTYPES, fp8_config, tile_dims
from warploom.attention.hopper.plan import last_tiles
from warploom.attention.hopper.run import column_mask, counter_on, filled, launch_on, numbers_of, parts_shape_of, processors
from warploom.attention.hopper.schedule import heads_in_pairs, section, tiles_to_split
from warploom.attention.problem import AttentionArgs
from warploom.runtime import modules, traced
from warploom.runtime.arguments import keeps_nothing

SCALED = 128  # rows that share a scale
QUAD = 4  # keys that the kernel reads together
# Key tiles' worth of time that splitting costs: as long as for 16 bits, whose tiles take longer.
SPLIT_COST = 24
UNPACKED = (None, None, None, None)  # of a dense call: starts of queries and keys, keys that are used, a counter


def refusal(args: AttentionArgs, out_dtype: torch.dtype, fast: bool) -> str | None:
    """Why a call whose shapes and features have a kernel is kept from it, or None."""
    if args.scale <= 0.0:
        return "takes FP8 with a positive scale only"
    if out_dtype not in OUT_DTYPES:
        return f"has no FP8 kernel with a result in {str(out_dtype).removeprefix('torch.')}"
    if 0 in args.q.shape or 0 in args.k.shape or keeps_nothing(args.left, args.right):
        return "has nothing to multiply"
    if args.cu_seqlens_q is not None:
        sequences = args.cu_seqlens_q.shape[0] - 1
        if args.k.shape[0] > MOST_KEYS:
            return f"takes at most {MOST_KEYS} packed tokens in FP8"
        if SCALED * sequences > args.k.shape[0]:
            return f"takes FP8 in packed sequences of {SCALED} keys or more on average"
    else:
        first, end = seen(args.q.shape[1], args.k.shape[1], args.left, args.right)
        if first >= end:
            return "has nothing to multiply"
        if first > 0 and not (args.lts is not None or args.ute is not None):
            # Their values would be read beside others, and a NaN does not vanish against P = 0; TMA leaves out what is behind.
            return "has no FP8 kernel where a window hides the first keys from all queries"
    features = Features.of_args(args)
    # Flags alone, not numbers: a module's file is named by its config, in which False and 0 differ.
    rest = [
        _settled(value) if isinstance(features._field_defaults[name], bool) else value
        for name, value in zip(features._fields[3:], features[3:], strict=True)
    ]
    return _module_refusal(
        out_dtype, _settled(fast), features.dtype, *tile_dims(features.head_dim, features.head_dim_v), *rest
    )


def _settled(flag: object) -> bool:
    """A flag, or a number that a tracer has in its place, by a branch, which bool() is not."""
    settled = False
    if flag:
        settled = True
    return settled


@traced.constant
def _module_refusal(out_dtype: torch.dtype, fast: bool, *fields: Any) -> str | None:
    """Why the module can be neither loaded nor built here; ``fields`` are those of the call's Features."""
    return _found.refusal((out_dtype, fast, *fields), lambda: [fp8_config(Features(*fields), out_dtype, fast).spec])


_found = traced.Found()


def forward(
    args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor], out_dtype: torch.dtype, fast: bool
) -> tuple[Tensor, Tensor]:
    """Out and lse of a call whose q, k and v are e4m3 with these scales, as `warploom.fp8.Fp8Tensor` has them."""
    if args.cu_seqlens_q is not None:
        return _forward_packed(args, scales, out_dtype, fast)
    if args.lts is not None or args.ute is not None:
        return _forward_columns(args, scales, out_dtype, fast)
    function, variant = _function(args, out_dtype, fast)
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
    given = (
        *(read_by_tma(q), quads_readable(read_by_tma(k)), keys_together(v)),
        *(out, lse, *scales_of_blocks(args, scales), _logits(args), *UNPACKED, parts, None),
        *numbers_of(args, left, right, pairs, split, blocks),
    )
    launch_on(device.index, function, given)
    return out, lse


def _forward_packed(
    args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor], out_dtype: torch.dtype, fast: bool
) -> tuple[Tensor, Tensor]:
    """As ``forward``, of packed sequences."""
    function, variant = _function(args, out_dtype, fast)
    q, cu_q, device = args.q, args.cu_seqlens_q, args.q.device
    assert cu_q is not None
    tokens, heads, _ = q.shape
    out = torch.empty(tokens, heads, args.v.shape[2], dtype=out_dtype, device=device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=device)
    cu_q = cu_q.contiguous()
    cu_k = cu_q if args.cu_seqlens_k is None else args.cu_seqlens_k.contiguous()
    used = None if args.seqused_k is None else args.seqused_k.contiguous()
    blocks = min(processors(device.index), (tokens // variant.tile_m + cu_q.shape[0]) * heads)
    k = filled(read_by_tma(args.k), variant.head_dim, variant.boxes[0])
    given = (
        *(read_by_tma(q), quads_readable(k), values_by_block(args.v, cu_q, cu_k, used, args.left, args.right)),
        *(out, lse, *scales_of_blocks(args, scales), _logits(args), cu_q, cu_k, used, counter_on(device), None, None),
        *numbers_of(args, args.left, args.right, blocks=blocks),
    )
    launch_on(device.index, function, given)
    return out, lse


def _forward_columns(
    args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor], out_dtype: torch.dtype, fast: bool
) -> tuple[Tensor, Tensor]:
    """As ``forward``, under a column mask: keys that its band hides are among those whose values count as zeros."""
    function, variant = _function(args, out_dtype, fast)
    q, k, v, device = args.q, args.k, args.v, args.q.device
    (batch, seqlen_q, heads, head_dim), (_, seqlen_k, heads_kv, head_dim_v) = q.shape, v.shape
    out = torch.empty(batch, seqlen_q, heads, head_dim_v, dtype=out_dtype, device=device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=device)
    m_blocks = -(-seqlen_q // variant.tile_m)
    pairs = section(batch * heads, m_blocks, seqlen_k * (head_dim + head_dim_v) * heads_kv // heads)
    blocks = min(processors(device.index), m_blocks * batch * heads)
    args = with_bounds(args)
    given = (
        *(read_by_tma(q), quads_readable(read_by_tma(k)), keys_together(v)),
        *(out, lse, *scales_of_blocks(args, scales), _logits(args), None, None, None, counter_on(device), None),
        column_mask(args.lts, args.lte, args.uts, args.ute, args.bounds),
        *numbers_of(args, args.left, args.right, pairs, last_tiles(m_blocks, batch * heads, blocks), blocks),
    )
    launch_on(device.index, function, given)
    return out, lse


def _logits(args: AttentionArgs) -> Tensor | None:
    """The sink's."""
    return None if args.sink is None else args.sink.float().contiguous()


def warm(args: AttentionArgs, out_dtype: torch.dtype, fast: bool) -> None:
    """Load or build the call's module, and launch it on one token."""
    function, variant = _function(args, out_dtype, fast)
    _first_launch(args.q.device, function, variant)


def _function(args: AttentionArgs, out_dtype: torch.dtype, fast: bool) -> tuple[Callable[..., None], Fp8ForwardConfig]:
    """The compiled variant."""
    variant = fp8_config(Features.of_args(args), out_dtype, fast)
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
    sink = torch.zeros(1, dtype=torch.float32, device=device) if variant.sink else None
    starts: tuple[Tensor | None, ...] = UNPACKED
    if variant.varlen:
        ones = torch.arange(2, dtype=torch.int32, device=device)
        starts = ones, ones, ones[1:] if variant.used else None, torch.zeros(1, dtype=torch.int32, device=device)
        v = v.new_zeros(1, variant.head_dim_v, SCALED).permute(2, 0, 1)
    mask: tuple[Tensor | int, ...] | None = None
    if variant.columns:
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        starts = None, None, None, counter
        mask = *(counter.view(1, 1, 1),) * 4, counter.new_zeros(1, 1, 2, 8), 0  # a block and a coarse one
    parts = torch.empty(parts_shape_of(1, variant), dtype=torch.float32, device=device) if variant.split else None
    given = (q, quads_readable(q), v if variant.varlen else keys_together(v), out, lse, *scales, sink, *starts, parts, mask)
    launch_on(device.index, function, (*given, 1.0, 1.0, 0, 0, 1, int(variant.split), 1))


def scales_of_blocks(args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Scales of each block and head, (batch, blocks, heads), packed (blocks, heads); those of heads and tensors as views."""
    found = []
    for t, scale in zip((args.q, args.k, args.v), scales, strict=True):
        if args.cu_seqlens_q is None:
            blocks: tuple[int, ...] = t.shape[0], -(-t.shape[1] // SCALED), t.shape[2]
        else:
            blocks = _blocks(t.shape[0], args.cu_seqlens_q), t.shape[1]
        found.append(scale if scale.ndim > 1 else scale.expand(blocks))
    return found


def _blocks(total: int, cu_seqlens: Tensor) -> int:
    """Blocks of packed sequences."""
    return total // SCALED + max(cu_seqlens.shape[0] - 1, 1)


def values_by_block(v: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor | None, left: int | None, right: int | None) -> Tensor:
    """The bytes of packed V, whose sequences begin new blocks of 128 keys, keys contiguous: TMA begins at multiples of 16.

    Zeros fill blocks up, and stand for what no query sees: a NaN there would not vanish against P = 0.
    """
    v = v.view(torch.uint8)
    left, right = [side if side is None else reach(side) for side in (left, right)]
    shape = v.shape[1], v.shape[2], _blocks(v.shape[0], cu_k) * SCALED
    if v.is_cuda and max(v.stride()) < 2**31:
        from warploom.kernels.triton.fp8_values import lay_values

        found = v.new_empty(shape)
        lay_values(found, v, cu_q, cu_k, used, left, right)
        return found.permute(2, 0, 1)
    starts = cu_k.long()
    row = torch.arange(v.shape[0], device=v.device)
    owner = torch.searchsorted(starts[1:], row, right=True).clamp(max=cu_k.shape[0] - 2)
    past = starts.diff() if used is None else used
    first = torch.zeros_like(past) if left is None else past - cu_q.diff() - left
    past = past if right is None else past + min(right, 0)
    place = row - starts[owner]
    seen = (place >= first[owner]) & (place < past[owner])
    found = v.new_zeros(shape)
    found[..., ((starts[owner] // SCALED + owner) * SCALED + place)[seen]] = v.permute(1, 2, 0)[..., seen]
    return found.permute(2, 0, 1)


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
    last = k.storage_offset() + sum([(n - 1) * step for n, step in zip(k.shape, k.stride(), strict=True)])
    if last + missing * k.stride(keys) < k.untyped_storage().nbytes():
        return k
    room = k.new_zeros(*k.shape[:keys], k.shape[keys] + missing, *k.shape[keys + 1 :])
    room.narrow(keys, 0, k.shape[keys]).copy_(k)
    return room.narrow(keys, 0, k.shape[keys])


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
