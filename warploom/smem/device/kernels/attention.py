"""The forward of `attention/ampere` in the laboratory's layouts: one kernel with its swizzle, with padding, with neither."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from warploom.runtime import modules

if TYPE_CHECKING:
    from warploom.attention.ampere.config import ForwardConfig

PAD = 8  # elements after each row
HEADS, HEAD_DIM = 16, 128


def refusal() -> str | None:
    """Why the forward cannot run here, or None."""
    from warploom.attention import ampere

    return ampere.BACKEND.available() or modules.cannot_build()


def layouts() -> dict[str, ForwardConfig]:
    """The variants for this device by layout, the same but for `swizzle` and `pad`."""
    swizzled = _variant()
    plain = replace(swizzled, swizzle=False)
    return {"plain": plain, "padded": replace(plain, pad=PAD), "swizzled": swizzled}


def causal() -> ForwardConfig:
    """The swizzled variant under a causal mask."""
    return _variant(right=True)


def _variant(right: bool = False) -> ForwardConfig:
    from warploom.attention.ampere.plan import config
    from warploom.attention.features import Features

    return config(torch.cuda.get_device_capability(), Features(torch.bfloat16, HEAD_DIM, HEAD_DIM, right=right))


def name(layout: str) -> str:
    return f"attention_{layout}"


def wavefronts(config: ForwardConfig, seqlen: int, batch: int = 1) -> dict[str, tuple[int, int]]:
    """(wavefronts, ideal) of each access: HEADS heads, every query sees every key."""
    from warploom.attention.ampere import traffic

    return traffic.wavefronts(config, batch * HEADS * -(-seqlen // config.tile_m), -(-seqlen // config.tile_n))


def draw(seqlen: int, batch: int = 1, seed: int = 0) -> list[Tensor]:
    """q, k, v: (batch, seqlen, HEADS, HEAD_DIM) bf16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, seqlen, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=generator).bfloat16().cuda() for _ in range(3)]


def forward(config: ForwardConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Out (batch, seqlen, HEADS, HEAD_DIM); compiles the variant at its first use."""
    out = torch.empty_like(q)
    lse = q.new_empty((len(q), HEADS, q.shape[1]), dtype=torch.float32)
    modules.load(config.spec)(q, k, v, out, lse, None, HEAD_DIM**-0.5, 0.0, 0, 0)
    return out


class Check:
    """Errors of an output: the first head against fp64, relative to a model of a correct flash kernel."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> None:
        one_q, one_k, one_v = (t[0, :, 0].double() for t in (q, k, v))
        scores = one_q @ one_k.T * HEAD_DIM**-0.5
        if causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf)
        self._want = torch.softmax(scores, dim=-1) @ one_v
        # A flash kernel also rounds P, unnormalised, before it meets V.
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        low = (p.bfloat16().double() @ one_v / p.sum(-1, keepdim=True)).bfloat16().double()
        self._once = (low - self._want).abs().max()

    def __call__(self, out: Tensor) -> float:
        """The largest error over that of the roundings that any flash kernel makes."""
        return float((out[0, :, 0].double() - self._want).abs().max() / self._once)
