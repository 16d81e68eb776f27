"""Running a call: views that cp.async can read, the band, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from warploom.attention.ampere.plan import config
from warploom.attention.band import reach, seen
from warploom.attention.features import Features
from warploom.attention.problem import AttentionArgs
from warploom.runtime import modules
from warploom.runtime.alignment import aligned


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q)."""
    q, k, v = args.q, args.k, args.v
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    left, right = args.left, args.right
    if left is not None or right is not None:
        first, end = seen(seqlen_q, seqlen_k, left, right)
        if first >= end:
            out.zero_()
            lse.fill_(float("-inf")) if args.sink is None else lse.copy_(args.sink[:, None].expand(lse.shape))
            return out, lse
        if first > 0 or end < seqlen_k:
            # Keys that no query sees are cut off: a NaN among their values would not vanish against P = 0.
            k, v = k[:, first:end], v[:, first:end]
            left = None if left is None else left - (seqlen_k - end)
            right = None if right is None else right + (seqlen_k - end)
    function = _function(args)
    sink = None if args.sink is None else args.sink.float().contiguous()
    inputs = (aligned(q), aligned(k), aligned(v), out, lse, sink)
    if q.device.index == torch._C._cuda_getDevice():
        function(*inputs, args.scale, args.softcap, reach(left), reach(right))
    else:
        with torch.cuda.device(q.device):
            function(*inputs, args.scale, args.softcap, reach(left), reach(right))
    return out, lse


def _function(args: AttentionArgs) -> Callable[..., None]:
    """The compiled variant."""
    variant = config(capability(args.q.device.index), Features.of_args(args))
    function = _ready.get(variant.spec.name)
    if function is None:
        function = _ready[variant.spec.name] = modules.fetch(variant.spec)
    return function


_ready: dict[str, Callable[..., None]] = {}  # by the variant's name


@cache
def capability(index: int | None) -> tuple[int, int]:
    """A device's compute capability."""
    return torch.cuda.get_device_capability(index)
