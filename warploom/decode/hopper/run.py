"""Running a call: the module, how many blocks share a sequence, the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from warploom.decode.hopper import plan
from warploom.decode.hopper.config import DecodeConfig
from warploom.decode.hopper.latent_config import LatentConfig
from warploom.decode.problem import DecodeArgs
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like

# A window that ends nowhere, as the kernel knows it; distances are added to positions in 32 bits.
FAR = 2**30


def readable(args: DecodeArgs) -> bool:
    """Whether TMA can read the cache: every key and value from a multiple of 16 bytes on."""
    odd = args.k.data_ptr() | args.v.data_ptr()
    for t in (args.k, args.v):
        for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True):
            odd |= 2 * stride if size > 1 else 0
    return not odd & 15


def forward(args: DecodeArgs) -> tuple[Tensor, Tensor]:
    """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse, fp32 (batch, heads_q, T)."""
    q = args.q
    batch, queries, heads_q, _ = q.shape
    out = q.new_empty((batch, queries, heads_q, args.v.shape[3]))
    lse = q.new_empty((batch, heads_q, queries), dtype=torch.float32)
    variant, numbers = _plan_of(args)
    function = function_of(variant)
    sink = None if args.sink is None else args.sink.float().contiguous()
    with on_device(q):
        function(aligned(q), args.k, args.v, out, lse, args.lengths, args.block_table, sink, *numbers)
    return out, lse


class Ready:
    """A decode call whose cache, shapes and options are known: what is left of the host's work."""

    def __init__(self, args: DecodeArgs, function: Callable[..., None], numbers: tuple[Any, ...]) -> None:
        q = args.q
        batch, queries, heads_q, _ = q.shape
        self._cache = args.k, args.v
        self._contents = args.lengths, args.block_table
        self._device, self._function, self._numbers = q.device.index, function, numbers
        self._out = like((batch, queries, heads_q, args.v.shape[3]), q.dtype, q.device)
        self._lse = like((batch, heads_q, queries), torch.float32, q.device)

    def __call__(self, q: Tensor, sink: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None] | None:
        """Out and lse; None where this q or device does not fit and the call must take the long way."""
        if q.data_ptr() % 16 or torch._C._cuda_getDevice() != self._device:
            return None
        out, lse = torch.empty_like(self._out), torch.empty_like(self._lse)
        if sink is not None:
            sink = sink.float()
        self._function(q, *self._cache, out, lse, *self._contents, sink, *self._numbers)
        return out, lse


def ready(args: DecodeArgs) -> Ready | None:
    """The short way for calls like this one, which has run; None where there is none."""
    q = args.q
    if q.device.index != torch._C._cuda_getDevice() or any(stride % 8 for stride in q.stride()[:3]):
        return None
    variant, numbers = _plan_of(args)
    return Ready(args, function_of(variant), numbers)


def variant_of(args: DecodeArgs) -> DecodeConfig:
    """The variant that runs a call."""
    table = args.block_table
    size = plan.page_size(None if table is None else args.k.shape[1], table is not None and table.shape[1] == 1)
    sink, softcap = args.sink is not None, args.softcap != 0.0
    return plan.config(args.q.dtype, args.k.shape[3], args.v.shape[3], size, softcap, sink)


def _plan_of(args: DecodeArgs) -> tuple[DecodeConfig, tuple[Any, ...]]:
    """The variant, and the numbers that its module takes behind the tensors."""
    variant = variant_of(args)
    batch, table = args.q.shape[0], args.block_table
    shift = 31 if table is None or table.shape[1] == 1 else args.k.shape[1].bit_length() - 1
    blocks = processors(args.q.device.index)
    cluster = plan.cluster(variant, batch * args.k.shape[2], blocks)
    left = FAR if args.left is None else max(min(args.left, FAR - 1), -FAR)
    least = plan.LEAST // variant.tile_n
    band = (left, max(args.right, -FAR))
    return variant, (args.scale, args.softcap, *band, args.capacity, shift, least, cluster, blocks)


def function_of(variant: DecodeConfig | LatentConfig) -> Callable[..., None]:
    """The compiled variant."""
    function = _ready.get(variant)
    if function is None:
        function = _ready[variant] = modules.fetch(variant.spec)
    return function


_ready: dict[DecodeConfig | LatentConfig, Callable[..., None]] = {}


@cache
def processors(index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(index).multi_processor_count
