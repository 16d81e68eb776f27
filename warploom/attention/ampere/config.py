"""One frozen configuration per compiled forward variant: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from warploom.runtime.modules import ModuleSpec

if TYPE_CHECKING:
    from warploom.smem.layout import Tile

_HERE = "attention/ampere"
# What the compiled code is made from.
SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "forward", "layout")),
    *(f"kernels/cute/{file}.py" for file in ("arguments", "band", "basics", "epilogue", "fields", "instructions", "softmax")),
    "runtime/compile.py",
    "smem/layout.py",
    "smem/swizzle.py",
)


@dataclass(frozen=True)
class ForwardConfig:
    """What is fixed when a module is compiled; lengths, strides, scale, band and softcap values are not.

    ``head_dim`` is the tile's, for q, k and v; smaller ones are filled up with zeros. ``swizzle`` and ``pad`` are for the
    shared-memory laboratory: without either, every ldmatrix has bank conflicts.
    """

    dtype: str  # "float16" or "bfloat16"
    head_dim: int  # 64 or 128
    tile_n: int  # keys, a multiple of 16
    warps: int = 4
    atoms: int = 2  # of 16 query rows a warp
    stages: int = 2  # of the ring of K and V tiles; 1: the load of each runs under the other's product
    blocks: int = 2  # resident on a multiprocessor at once, which bounds the registers
    q_registers: bool = False  # Q stays in registers instead of being read from shared memory for every key tile
    right: bool = False  # keys right of p + right are hidden (causal: right = 0)
    left: bool = False  # keys left of p - left are hidden
    softcap: bool = False
    sink: bool = False
    swizzle: bool = True
    pad: int = 0  # elements after each row of a tile, instead of a swizzle
    arch: str = "sm_80"

    @property
    def tile_m(self) -> int:
        return 16 * self.atoms * self.warps

    @property
    def name(self) -> str:
        """File name and symbol."""
        band = ("r" if self.right else "") + ("l" if self.left else "") or "full"
        shape = f"{self.tile_m}x{self.tile_n}"
        parts = [self.dtype, f"d{self.head_dim}", shape, f"w{self.warps}", f"s{self.stages}", f"b{self.blocks}", band]
        parts += ["qr"] if self.q_registers else []
        parts += [feature for feature in ("softcap", "sink") if getattr(self, feature)]
        parts += [] if self.swizzle else [f"pad{self.pad}"]
        return f"attn_fwd_{self.arch.replace('_', '')}_" + "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, self.arch, "warploom.attention.ampere.build:compile_forward", config, SOURCES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of Q and of the rings of K and V."""
        return (self.tile_m + 2 * self.stages * self.tile_n) * (self.head_dim + self.pad) * 2

    def tile(self, rows: int) -> Tile:
        """A plain tile of Q, K or V."""
        from warploom.smem.layout import Tile  # with all of the laboratory

        return Tile(rows, self.head_dim, "f16", pad=self.pad)
