"""Running the kernel of column sums: views that TMA can read, the band, the module, the launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from warploom.attention.band import reach
from warploom.attention.features import Features
from warploom.attention.hopper.run import launch_on, processors
from warploom.attention.hopper.sums_config import SumsConfig
from warploom.attention.hopper.sums_plan import sums_config
from warploom.attention.problem import AttentionArgs
from warploom.runtime import modules
from warploom.runtime.alignment import aligned
from warploom.runtime.arguments import keeps_nothing


def column_sums(args: AttentionArgs, lse: Tensor) -> Tensor:
    """As `warploom.attention.stats.AttentionStats` has them, of a dense call and its lse."""
    q, k = args.q, args.k
    batch, _, heads, _ = q.shape
    seqlen_k = k.shape[1]
    shape = batch, heads, seqlen_k
    if keeps_nothing(args.left, args.right):
        return torch.zeros(shape, dtype=torch.float32, device=q.device)
    function, variant = module_of(args)
    sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    blocks = min(processors(q.device.index), -(-seqlen_k // variant.tile_n) * batch * heads)
    numbers = args.scale, args.softcap, reach(args.left), reach(args.right), blocks
    launch_on(q.device.index, function, (aligned(q), aligned(k), lse.contiguous(), sums, *numbers))
    return sums


def module_of(args: AttentionArgs) -> tuple[Callable[..., None], SumsConfig]:
    """The kernel of a call's columns, loaded or built, and its variant."""
    variant = sums_config(Features.of_args(args))
    function = _ready.get(variant.name)
    if function is None:
        function = _ready[variant.name] = modules.fetch(variant.spec)
    return function, variant


_ready: dict[str, Callable[..., None]] = {}  # by the variant's name
