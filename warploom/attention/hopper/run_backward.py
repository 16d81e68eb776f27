"""Running a backward pass: views, workspaces, the order of blocks, the launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.attention.hopper.config import BackwardConfig
from warploom.attention.hopper.plan import backward_config
from warploom.attention.hopper.run import DTYPES, on_device
from warploom.attention.hopper.schedule import section
from warploom.attention.problem import AttentionArgs
from warploom.attention.views import aligned, reach, seen
from warploom.runtime import modules


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink (empty without a sink) in the dtypes of q, k, v and sink."""
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    gradients: tuple[Tensor, ...] = dq, dk, dv
    left, right = args.left, args.right
    first, end = 0, seqlen_k
    if left is not None or right is not None:
        first, end = seen(seqlen_q, seqlen_k, left, right)
        if first >= end:
            return dq.zero_(), dk.zero_(), dv.zero_(), _dsink(args, dlse, None, lse)
        if first > 0 or end < seqlen_k:
            # As in the forward: keys that no query sees stay outside of what TMA reads.
            for t in (dk, dv):
                t[:, :first].zero_()
                t[:, end:].zero_()
            k, v, *keys = (t[:, first:end] for t in (k, v, dk, dv))
            gradients = (dq, *keys)
            left = None if left is None else left - (seqlen_k - end)
            right = None if right is None else right + (seqlen_k - end)
    function, variant = _function(args, dlse is not None)
    rows = batch * heads * -(-seqlen_q // variant.tile_m)
    sums = q.new_empty(rows * variant.tile_m * variant.head_dim, dtype=torch.float32)
    stats = q.new_empty(rows * 2 * variant.tile_m, dtype=torch.float32)
    turns = q.new_empty(2 * rows, dtype=torch.int32) if args.deterministic else None
    together = 1
    if args.deterministic or args.right is not None:
        shared = seqlen_q * heads // k.shape[2] * 4 * (q.shape[3] + v.shape[3])
        together = section(batch * k.shape[2], -(-k.shape[1] // variant.tile_n), shared)
    inputs = [aligned(t) for t in (q, k, v, out, dout)]
    tensors = (*inputs, lse.contiguous(), dlse, *gradients, sums, stats, turns)
    with on_device(q):
        function(*tensors, args.scale, args.softcap, reach(left), reach(right), together)
    delta = None
    if args.sink is not None:
        tiles = stats.view(batch, heads, -1, 2, variant.tile_m)[:, :, :, 1]
        delta = tiles.flatten(2)[:, :, :seqlen_q]
    return dq, dk, dv, _dsink(args, dlse, delta, lse)


def _dsink(args: AttentionArgs, dlse: Tensor | None, delta: Tensor | None, lse: Tensor) -> Tensor:
    """-sum over queries of exp(sink - lse) · (rowsum(dO∘O) - dLSE); ``delta`` is what is in brackets, None: O is 0."""
    if args.sink is None:
        return args.q.new_empty(0)
    if delta is None:
        delta = torch.zeros_like(lse) if dlse is None else -dlse
    share = torch.exp(args.sink.float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(share * delta).sum((0, 2)).to(args.sink.dtype)


def _function(args: AttentionArgs, dlse: bool) -> tuple[Callable[..., None], BackwardConfig]:
    key = (
        DTYPES[args.q.dtype],
        args.q.shape[-1],
        args.v.shape[-1],
        args.right is not None,
        args.left is not None,
        args.softcap != 0.0,
        dlse,
        args.deterministic,
    )
    ready = _ready.get(key)
    if ready is None:
        variant = backward_config(*key)
        if modules.loaded(variant.spec) is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{variant.name} is not loaded, which a capturing stream cannot do: make such a call before")
        ready = _ready[key] = modules.load(variant.spec), variant
    return ready


_ready: dict[tuple[object, ...], tuple[Callable[..., None], BackwardConfig]] = {}
