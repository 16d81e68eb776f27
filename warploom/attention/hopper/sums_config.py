"""One frozen configuration per compiled variant of column sums: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.attention.hopper.config import box_columns
from warploom.runtime.modules import ModuleSpec

ROWS = 64  # queries of a tile, which one warpgroup takes
WARPGROUPS = 2  # consumers
CHUNKS = 2  # of a tile of keys: while one's exponentials are taken, the other's product runs
_HERE = "attention/hopper"
# What the compiled code is made from.
SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("config", "sums", "sums_base", "sums_build", "sums_config", "sums_consumers")),
    *(f"kernels/cute/{file}.py" for file in ("arguments", "barriers", "basics", "fields", "instructions", "powers")),
    *(f"kernels/cute/{file}.py" for file in ("rings", "softmax", "tiles", "wgmma")),
    "runtime/compile.py",
)


@dataclass(frozen=True)
class SumsConfig:
    """What is fixed when a module of column sums is compiled; lengths, strides, scale and window values are not.

    ``head_dim`` is the tile's, a multiple of 32: smaller ones run in the same module by TMA bounds.
    """

    dtype: str  # "float16" or "bfloat16"
    head_dim: int
    chunk: int = 128  # keys of a product
    k_slots: int = 4  # chunks of keys that are there or on their way
    stages: int = 4  # of the ring of queries, a tile for each warpgroup
    right: bool = False  # keys right of p + right are hidden (causal: right = 0)
    left: bool = False  # keys left of p - left are hidden
    softcap: bool = False
    # Of 16 neighbouring exponentials so many are polynomials, on the pipes that add and multiply.
    share: int = 0

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return self.chunk * CHUNKS

    @property
    def name(self) -> str:
        """File name and symbol."""
        band = ("r" if self.right else "") + ("l" if self.left else "") or "full"
        parts = [self.dtype, f"d{self.head_dim}", f"{ROWS}x{self.tile_n}", f"s{self.stages}", band]
        parts += ["softcap"] if self.softcap else []
        parts += [f"p{self.share}"] if self.share else []
        return "attn_sums_sm90_" + "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.attention.hopper.sums_build:compile_sums", config, SOURCES)

    @property
    def box(self) -> int:
        """Columns of a TMA box."""
        return box_columns(self.head_dim)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of keys, the ring of queries and the warps' sums; barriers add less than 256 bytes."""
        tiles = self.k_slots * self.chunk + self.stages * WARPGROUPS * ROWS
        return 2 * tiles * self.head_dim + 4 * 2 * WARPGROUPS * 4 * self.tile_n
