"""Running a call: views that TMA can read, the band, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from warploom.attention.hopper.config import ForwardConfig
from warploom.attention.hopper.plan import LONG, config
from warploom.attention.hopper.schedule import heads_in_pairs, tiles_to_split
from warploom.attention.problem import AttentionArgs
from warploom.attention.views import aligned, reach, seen, stepped
from warploom.runtime import modules
from warploom.runtime.device import on_device

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    if args.cu_seqlens_q is not None:
        return _packed(args)
    return bind(args)(args.q, args.k, args.v, args.sink)


Launch = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def bind(args: AttentionArgs) -> Launch:
    """A dense call made ready: takes any q, k, v and sink that differ from these in contents and addresses only."""
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    out_shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (batch, heads, seqlen_q)
    dtype, device, index = q.dtype, q.device, q.device.index
    alike = q.shape == out_shape and q.is_contiguous()
    left, right = args.left, args.right
    first, end = seen(seqlen_q, seqlen_k, left, right)
    if first >= end:
        return partial(_nothing_seen, lse_shape)
    # Keys that no query sees stay outside of what TMA reads: a NaN among their values would not vanish against P = 0.
    cut = first > 0 or end < seqlen_k
    left = reach(None if left is None else left - (seqlen_k - end))
    right = reach(None if right is None else right + (seqlen_k - end))
    function, variant = _function(args, seqlen_k)
    m_blocks = -(-seqlen_q // variant.tile_m)
    tiles, blocks = m_blocks * batch * heads, processors(index)
    split = 0
    # A window's tiles see few keys each, and so do the first of a causal call with as many queries as keys.
    if args.left is None and (args.right is None or 4 * seqlen_q <= seqlen_k):
        split = tiles_to_split(tiles, -(-(end - first) // variant.tile_n), blocks, args.right is None)
    parts_shape = _parts_shape(blocks, variant)
    if not split:
        blocks = min(blocks, tiles)
    numbers = (args.scale, args.softcap, left, right, heads_in_pairs(m_blocks, batch * heads, blocks), split, blocks)
    readable = all(map(stepped, (q, k, v)))

    def launch(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q) if alike else torch.empty(out_shape, dtype=dtype, device=device)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        if cut:
            k, v = k[:, first:end], v[:, first:end]
        if not readable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            q, k, v = aligned(q), aligned(k), aligned(v)
        if sink is not None:
            sink = sink.float().contiguous()
        parts = torch.empty(parts_shape, dtype=torch.float32, device=device) if split else lse  # not read: of the type
        if index == torch._C._cuda_getDevice():
            function(q, k, v, out, lse, sink, None, None, None, None, parts, *numbers)
        else:
            with torch.cuda.device(index):
                function(q, k, v, out, lse, sink, None, None, None, None, parts, *numbers)
        return out, lse

    return launch


def _nothing_seen(lse_shape: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(q, v, lse_shape)
    out.zero_()
    return out, lse.fill_(float("-inf")) if sink is None else lse.copy_(sink[:, None].expand(lse_shape))


def _packed(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    q, cu_q, cu_k, used = args.q, args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k
    assert cu_q is not None
    out, lse = _outputs(q, args.v, (q.shape[1], q.shape[0]))
    function, variant = _function(args, args.max_seqlen_k or 0)
    cu_q = cu_q.contiguous()
    cu_k = cu_q if cu_k is None else cu_k.contiguous()
    counter = cu_q.new_zeros(1)
    vectors = (cu_q, cu_k, None if used is None else used.contiguous(), counter, None)
    most = (q.shape[0] // variant.tile_m + cu_q.shape[0]) * q.shape[1]
    blocks = min(processors(q.device.index), most)
    _launch(function, variant, args, (q, args.k, args.v, out, lse), vectors, (args.left, args.right), 0, blocks)
    return out, lse


def filled(t: Tensor, columns: int, box: int) -> Tensor:
    """``t``, or a copy of as many columns as the tile has where the tile's last TMA box would hold none of its own.

    Packed tensors are described to TMA by an address far before their first row. A box all of whose columns are past the
    last one then ended in an illegal access on an H100.
    """
    return t if t.shape[-1] > columns - box else torch.nn.functional.pad(t, (0, columns - t.shape[-1]))


def warm(args: AttentionArgs) -> None:
    """Load or build the call's module, and launch it on one token."""
    _first_launch(args, *_function(args, args.max_seqlen_k or 0 if args.cu_seqlens_q is not None else args.k.shape[1]))


def _first_launch(args: AttentionArgs, function: Callable[..., None], variant: ForwardConfig) -> None:
    """Launch the module's kernels on one token: CUDA loads their code when they are first launched."""
    vectors: tuple[Tensor | None, ...] = (None, None, None, None)
    if args.cu_seqlens_q is not None:
        ones = args.cu_seqlens_q.new_tensor([0, 1])
        vectors = (ones, ones, None if args.seqused_k is None else ones[1:], ones.new_zeros(1))
        q, k, v = (t.new_zeros((1, *t.shape[1:])) for t in (args.q, args.k, args.v))
        out, lse = _outputs(q, v, (q.shape[1], 1))
    else:
        q, k, v = (t.new_zeros((1, 1, *t.shape[2:])) for t in (args.q, args.k, args.v))
        out, lse = _outputs(q, v, (1, q.shape[2], 1))
    split = int(variant.split)
    vectors = (*vectors, lse.new_empty(_parts_shape(1, variant)) if split else None)
    _launch(function, variant, args, (q, k, v, out, lse), vectors, (args.left, args.right), split, 1)


def _parts_shape(blocks: int, variant: ForwardConfig) -> tuple[int, int, int]:
    """Two pieces a block."""
    return 2 * blocks, variant.piece_floats // variant.tile_m, variant.tile_m


def _outputs(q: Tensor, v: Tensor, lse_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], v.shape[-1])
    return torch.empty(shape, dtype=q.dtype, device=q.device), torch.empty(lse_shape, dtype=torch.float32, device=q.device)


def _function(args: AttentionArgs, seqlen_k: int) -> tuple[Callable[..., None], ForwardConfig]:
    """The compiled variant."""
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
        capturing = torch.cuda.is_current_stream_capturing()
        if modules.loaded(variant.spec) is None and capturing:
            raise RuntimeError(f"{variant.name} is not loaded, which a capturing stream cannot do: make such a call before")
        ready = _ready[key] = modules.load(variant.spec), variant
        if variant.split and not capturing:
            _first_launch(args, *ready)  # of what merges pieces too, which a captured call may be the first to need
    return ready


_ready: dict[tuple[object, ...], tuple[Callable[..., None], ForwardConfig]] = {}


def _launch(
    function: Callable[..., None],
    variant: ForwardConfig,
    args: AttentionArgs,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    vectors: tuple[Tensor | None, ...],
    band: tuple[int | None, int | None],
    split: int,
    blocks: int,
) -> None:
    q, k, v, out, lse = tensors
    if args.cu_seqlens_q is not None:
        box, box_v = variant.boxes
        q, k, v = filled(q, variant.head_dim, box), filled(k, variant.head_dim, box), filled(v, variant.head_dim_v, box_v)
    sink = None if args.sink is None else args.sink.float().contiguous()
    left, right = map(reach, band)
    inputs = (aligned(q), aligned(k), aligned(v), out, lse, sink, *vectors)
    with on_device(q):
        function(*inputs, args.scale, args.softcap, left, right, 0, split, blocks)


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
