"""Running a call: views that TMA can read, the band, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from warploom.attention.hopper.config import ForwardConfig
from warploom.attention.hopper.plan import LONG, SPLIT_COST, config, pack_gqa
from warploom.attention.hopper.schedule import heads_in_pairs, tile_heads, tiles_to_split
from warploom.attention.problem import AttentionArgs
from warploom.attention.views import aligned, reach, seen, stepped
from warploom.runtime import modules
from warploom.runtime.arguments import keeps_nothing

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    tensors: tuple[Tensor | None, ...] = (args.q, args.k, args.v, args.sink)
    if args.cu_seqlens_q is not None:
        tensors += (args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k)
    return bind(args)(*tensors)


def bind(args: AttentionArgs) -> Callable[..., tuple[Tensor, Tensor]]:
    """A call made ready: takes any q, k, v and sink that differ from these in contents and addresses only.

    Of packed calls also cu_seqlens_q, cu_seqlens_k and seqused_k.
    """
    if args.cu_seqlens_q is not None:
        return _bind_packed(args)
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    out_shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (batch, heads, seqlen_q)
    device, index = q.device, q.device.index
    left, right = args.left, args.right
    first, end = seen(seqlen_q, seqlen_k, left, right)
    if first >= end:
        return partial(_nothing_seen, lse_shape)
    # Keys that no query sees stay outside of what TMA reads: a NaN among their values would not vanish against P = 0.
    cut = first > 0 or end < seqlen_k
    left = reach(None if left is None else left - (seqlen_k - end))
    right = reach(None if right is None else right + (seqlen_k - end))
    members = heads // k.shape[2]
    function, variant = _function(args, seqlen_k, (seqlen_q, members))
    m_blocks = -(-seqlen_q // variant.queries)
    rows = batch * (k.shape[2] * tile_heads(members, variant.heads_per_tile) if variant.pack_gqa else heads)
    tiles, blocks = m_blocks * rows, processors(index)
    split = 0
    # A window's tiles see few keys each, and so do the first of a causal call with as many queries as keys.
    if args.left is None and (args.right is None or 4 * seqlen_q <= seqlen_k):
        n_blocks = -(-(end - first) // variant.tile_n)
        split, blocks = tiles_to_split(tiles, n_blocks, blocks, SPLIT_COST, args.right is None)
    parts_shape = _parts_shape(blocks, variant)
    blocks = min(blocks, tiles) if not split else blocks
    shared = k.element_size() * (end - first) * (k.shape[-1] + v.shape[-1]) // members
    numbers = (args.scale, args.softcap, left, right, heads_in_pairs(m_blocks, rows, blocks, shared), split, blocks)
    like_out, like_lse = _like(out_shape, q.dtype, device), _like(lse_shape, torch.float32, device)
    readable = all(map(stepped, (q, k, v)))

    def launch(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(like_out), torch.empty_like(like_lse)
        if cut:
            k, v = k[:, first:end], v[:, first:end]
        q, k, v = _read_by_tma(readable, q, k, v)
        if sink is not None:
            sink = sink.float().contiguous()
        parts = torch.empty(parts_shape, dtype=torch.float32, device=device) if split else lse  # not read: of the type
        _launch(index, function, (q, k, v, out, lse, sink, None, None, None, None, parts, *numbers))
        return out, lse

    return launch


def _read_by_tma(readable: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of what TMA cannot read; ``readable``: strides are fine, and only addresses may not be."""
    if not readable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return aligned(q), aligned(k), aligned(v)
    return q, k, v


def _nothing_seen(lse_shape: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(q, v, lse_shape)
    out.zero_()
    return out, lse.fill_(float("-inf")) if sink is None else lse.copy_(sink[:, None].expand(lse_shape))


def _nothing_seen_packed(
    lse_shape: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_q: Tensor, *_: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(q, v, lse_shape)
    out.zero_()
    lse.fill_(float("-inf"))
    if sink is not None:
        # Tokens past the last sequence have no sink.
        inside = torch.arange(lse_shape[1], device=q.device) < cu_q[-1]
        lse = torch.where(inside, sink.float()[:, None], lse)
    return out, lse


def _bind_packed(args: AttentionArgs) -> Callable[..., tuple[Tensor, Tensor]]:
    """As ``bind``, of packed sequences, whose starts and lengths may differ too."""
    q, cu_q = args.q, args.cu_seqlens_q
    assert cu_q is not None
    lse_shape, device, index = (q.shape[1], q.shape[0]), q.device, q.device.index
    if keeps_nothing(args.left, args.right):
        return partial(_nothing_seen_packed, lse_shape)
    function, variant = _function(args, args.max_seqlen_k or 0)
    most = (q.shape[0] // variant.tile_m + cu_q.shape[0]) * q.shape[1]
    blocks = min(processors(index), most)
    numbers = (args.scale, args.softcap, reach(args.left), reach(args.right), 0, 0, blocks)
    like_out = _like((*q.shape[:-1], args.v.shape[-1]), q.dtype, device)
    like_lse = _like(lse_shape, torch.float32, device)
    readable = all(map(stepped, (q, args.k, args.v)))
    box, box_v = variant.boxes
    whole = q.shape[-1] > variant.head_dim - box and args.v.shape[-1] > variant.head_dim_v - box_v  # as ``filled`` has it

    def launch(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_q: Tensor, cu_k: Tensor | None, used: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(like_out), torch.empty_like(like_lse)
        cu_q = cu_q.contiguous()
        cu_k = cu_q if cu_k is None else cu_k.contiguous()
        if used is not None:
            used = used.contiguous()
        if sink is not None:
            sink = sink.float().contiguous()
        counter = _counter(device)
        if not whole:
            q, k, v = _filled(variant, q, k, v)
        q, k, v = _read_by_tma(readable, q, k, v)
        _launch(index, function, (q, k, v, out, lse, sink, cu_q, cu_k, used, counter, None, *numbers))
        return out, lse

    return launch


# Counters of packed calls, zeroed many at a time, by device and stream.
_COUNTERS = 256
_counters: dict[tuple[torch.device, int], list[Tensor]] = {}


def _counter(device: torch.device) -> Tensor:
    """A zero on the device that no other launch counts with.

    A captured call zeroes its own: it runs again. Others take one that their stream zeroed before, which costs the host less.
    """
    if device.index != torch._C._cuda_getDevice() or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    try:
        return _counters[device, stream].pop()
    except (KeyError, IndexError):
        _counters[device, stream] = fresh = list(torch.zeros(_COUNTERS, 1, dtype=torch.int32, device=device).unbind())
        return fresh.pop()


def _like(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element expanded to a shape: ``torch.empty_like`` of it takes the host half as long as ``torch.empty``."""
    return _element(dtype, device).expand(shape)


@cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def _filled(variant: ForwardConfig, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    box, box_v = variant.boxes
    return filled(q, variant.head_dim, box), filled(k, variant.head_dim, box), filled(v, variant.head_dim_v, box_v)


def filled(t: Tensor, columns: int, box: int) -> Tensor:
    """``t``, or a copy of as many columns as the tile has where the tile's last TMA box would hold none of its own.

    Packed tensors are described to TMA by an address far before their first row. A box all of whose columns are past the
    last one then ended in an illegal access on an H100.
    """
    return t if t.shape[-1] > columns - box else torch.nn.functional.pad(t, (0, columns - t.shape[-1]))


def warm(args: AttentionArgs) -> None:
    """Load or build the call's module, and launch it on one token."""
    if args.cu_seqlens_q is None:
        few = args.q.shape[1], args.q.shape[2] // args.k.shape[2]
        _first_launch(args, *_function(args, args.k.shape[1], few))
    else:
        _first_launch(args, *_function(args, args.max_seqlen_k or 0))


def _first_launch(args: AttentionArgs, function: Callable[..., None], variant: ForwardConfig) -> None:
    """Launch the module's kernels on one token: CUDA loads their code when they are first launched."""
    vectors: tuple[Tensor | None, ...] = (None, None, None, None)
    shape: tuple[int, ...] = (1, 1)
    if args.cu_seqlens_q is not None:
        ones = args.cu_seqlens_q.new_tensor([0, 1])
        vectors = (ones, ones, None if args.seqused_k is None else ones[1:], ones.new_zeros(1))
        shape = (1,)
    q, k, v = (t.new_zeros((*shape, *t.shape[len(shape) :])) for t in (args.q, args.k, args.v))
    out, lse = _outputs(q, v, (*shape[1:], q.shape[-2], 1))
    split = int(variant.split)
    parts = lse.new_empty(_parts_shape(1, variant)) if split else None
    sink = None if args.sink is None else args.sink.float().contiguous()
    numbers = (args.scale, args.softcap, reach(args.left), reach(args.right), 0, split, 1)
    if args.cu_seqlens_q is not None:
        q, k, v = _filled(variant, q, k, v)
    _launch(q.device.index, function, (q, k, v, out, lse, sink, *vectors, parts, *numbers))


def _parts_shape(blocks: int, variant: ForwardConfig) -> tuple[int, int, int]:
    """Two pieces a block."""
    return 2 * blocks, variant.piece_floats // variant.tile_m, variant.tile_m


def _outputs(q: Tensor, v: Tensor, lse_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty(shape, dtype=q.dtype, device=q.device), torch.empty(lse_shape, dtype=torch.float32, device=q.device)


def _function(
    args: AttentionArgs, seqlen_k: int, few: tuple[int, int] | None = None
) -> tuple[Callable[..., None], ForwardConfig]:
    """The compiled variant; ``few``: queries, and heads that share their keys, of a call whose tiles may hold several heads."""
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
    each = 0 if few is None else pack_gqa(*few, config(*key).tile_m)
    ready = _ready.get((*key, each))
    if ready is None:
        variant = config(*key, each)
        capturing = torch.cuda.is_current_stream_capturing()
        if each and modules.loaded(variant.spec) is None and (capturing or modules.cannot_come(variant.spec)):
            return _function(args, seqlen_k)  # one head a tile takes longer, but its module may be here
        if modules.loaded(variant.spec) is None and capturing:
            raise RuntimeError(f"{variant.name} is not loaded, which a capturing stream cannot do: make such a call before")
        ready = _ready[(*key, each)] = modules.load(variant.spec), variant
        if variant.split and not capturing:
            _first_launch(args, *ready)  # of what merges pieces too, which a captured call may be the first to need
    return ready


_ready: dict[tuple[object, ...], tuple[Callable[..., None], ForwardConfig]] = {}


def _launch(index: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a module's function with its tensors' device current; asking costs less than a context."""
    if index == torch._C._cuda_getDevice():
        function(*arguments)
    else:
        with torch.cuda.device(index):
            function(*arguments)


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
