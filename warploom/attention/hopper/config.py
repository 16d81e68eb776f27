"""One frozen configuration per compiled forward variant: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardConfig:
    """What is fixed when a Hopper forward module is compiled; lengths, strides, scale and window values are not.

    ``head_dim`` and ``head_dim_v`` are the tile's, multiples of 32: smaller ones run in the same module by TMA bounds.
    """

    dtype: str  # "float16" or "bfloat16"
    head_dim: int
    head_dim_v: int
    tile_n: int
    warpgroups: int = 2  # consumers; each owns 64 query rows
    stages: int = 2  # of the K ring and of the V ring
    right: bool = False  # keys right of p + right are hidden (causal: right = 0)
    left: bool = False  # keys left of p - left are hidden
    ping_pong: bool = True  # one warpgroup's softmax under the other's GEMMs

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def name(self) -> str:
        """File name and symbol."""
        band = ("r" if self.right else "") + ("l" if self.left else "") or "full"
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}x{self.head_dim_v}"
        tail = "" if self.ping_pong else "_free"
        return f"attn_fwd_sm90_{self.dtype}_d{dims}_{self.tile_m}x{self.tile_n}_s{self.stages}_{band}{tail}"
