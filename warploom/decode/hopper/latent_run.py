"""Running a call over a latent cache: the module, how many blocks share a sequence, the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warploom.decode.hopper import latent_plan as plan
from warploom.decode.hopper.latent_config import HEAD_DIM_V, STATS, TILE, LatentConfig
from warploom.decode.hopper.run import FAR, function_of, processors
from warploom.decode.problem import DecodeArgs
from warploom.runtime.alignment import aligned
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like


class _Launch(NamedTuple):
    """What the host knows of a call."""

    variant: LatentConfig
    numbers: tuple[Any, ...]  # that the module takes behind the tensors
    sizes: tuple[int, int, int]  # of the workspace: parts, their stats, what blocks keep


def readable(args: DecodeArgs) -> bool:
    """Whether TMA can read the cache: every key from a multiple of 16 bytes on."""
    odd = args.k.data_ptr()
    for size, stride in zip(args.k.shape[:3], args.k.stride()[:3], strict=True):
        odd |= 2 * stride if size > 1 else 0
    return not odd & 15


def forward(args: DecodeArgs) -> tuple[Tensor, Tensor]:
    """Out (batch, T, heads_q, 512) in q's dtype and lse, fp32 (batch, heads_q, T)."""
    q = args.q
    batch, queries, heads, _ = q.shape
    out = q.new_empty((batch, queries, heads, HEAD_DIM_V))
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    launch = _plan_of(args)
    function = function_of(launch.variant)
    with on_device(q):
        _run(function, launch, aligned(q.flatten(1, 2)), args.k, out, lse, (args.lengths, args.block_table))
    return out, lse


class Ready:
    """A decode call whose cache, shapes and options are known: what is left of the host's work."""

    def __init__(self, args: DecodeArgs, launch: _Launch, function: Callable[..., None]) -> None:
        q = args.q
        batch, queries, heads, _ = q.shape
        self._k, self._contents = args.k, (args.lengths, args.block_table)
        self._device, self._function, self._launch = q.device.index, function, launch
        self._out = like((batch, queries, heads, HEAD_DIM_V), q.dtype, q.device)
        self._lse = like((batch, heads, queries), torch.float32, q.device)

    def __call__(
        self, q: Tensor, sink: Tensor | None, return_lse: bool, found: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Out and lse, whoever shares keys; None where this q or device does not fit and the call must take the long way."""
        if q.data_ptr() % 16 or torch._C._cuda_getDevice() != self._device:
            return None
        out, lse = torch.empty_like(self._out), torch.empty_like(self._lse)
        _run(self._function, self._launch, q.flatten(1, 2), self._k, out, lse, self._contents)
        return out, lse


def ready(args: DecodeArgs) -> Ready | None:
    """The short way for calls like this one, which has run; None where there is none."""
    q = args.q
    if q.device.index != torch._C._cuda_getDevice() or not q.is_contiguous():
        return None
    launch = _plan_of(args)
    return Ready(args, launch, function_of(launch.variant))


def _plan_of(args: DecodeArgs) -> _Launch:
    """How a call is launched; nothing in it changes a bit of any sequence's result."""
    table = args.block_table
    size, one = (None, False) if table is None else (args.k.shape[1], table.shape[1] == 1)
    batch, queries, heads, _ = args.q.shape
    few = plan.few(queries, heads)
    variant = plan.config(args.q.dtype, size, one, plan.pairs(queries, heads), few)
    least = plan.FEW_LEAST if few else plan.LEAST
    shift = 31 if size is None or one else size.bit_length() - 1
    # Where a split has fewer tiles at least, so many more of them are counted.
    units, tiles = batch * plan.row_blocks(queries, heads), -(-args.capacity // TILE) * plan.LEAST // least
    blocks = processors(args.q.device.index) // variant.cluster * variant.cluster
    log = plan.blocks_log(units, tiles, blocks)
    parts_log = plan.parts_log(tiles, log)
    parts = (units << parts_log) * variant.rows if log else 0
    left = FAR if args.left is None else max(min(args.left, FAR - 1), -FAR)
    band = (left, max(args.right, -FAR))
    cuts = (least, plan.MOST_LOG, log, parts_log, plan.levels(tiles, log))
    numbers = (args.scale, *band, args.capacity, shift, *cuts, blocks)
    kept = 0 if few else plan.kept_floats(tiles, log, min(blocks, units << log))
    sizes = (max(parts * HEAD_DIM_V, 4), max(STATS * parts, 4), max(kept, 4))
    return _Launch(variant, numbers, sizes)


def _run(
    function: Callable[..., None], launch: _Launch, q: Tensor, k: Tensor, out: Tensor, lse: Tensor,
    contents: tuple[Tensor, Tensor | None],
) -> None:  # fmt: skip
    """Launch the kernels, with a workspace."""
    workspace = torch.empty(sum(launch.sizes), dtype=torch.float32, device=q.device).split(launch.sizes)
    function(q, k, out.flatten(1, 2), lse, *contents, *workspace, *launch.numbers)
