"""One frozen configuration per compiled variant: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

_HERE = "decode/hopper"
# What the compiled code is made from.
SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "consumers", "merge", "producer", "split")),
    *(
        f"kernels/cute/{file}.py"
        for file in ("arguments", "basics", "epilogue", "fields", "instructions", "memory", "rings", "softmax", "tiles")
    ),
    "runtime/compile.py",
)


@dataclass(frozen=True)
class DecodeConfig:
    """What is fixed when a module is compiled; lengths, strides, scale, window and how sequences are cut are not.

    ``head_dim`` is the tile's, for q, k and v; smaller ones run in the same module by TMA bounds.
    """

    dtype: str  # "float16" or "bfloat16"
    head_dim: int  # 64, 128 or 256
    rows: int = 16  # queries × heads of a group that a block has: 16, 32 or 64
    tile_n: int = 64  # keys of a stage
    stages: int = 3
    blocks: int = 2  # resident on a multiprocessor at once, which bounds the registers
    paged: bool = False
    softcap: bool = False
    sink: bool = False
    warps: int = 4  # that compute: each 16 rows, and a share of a tile's keys

    @property
    def box(self) -> int:
        """Keys of a TMA box."""
        return 16 if self.paged else self.tile_n

    @property
    def key_groups(self) -> int:
        """Warps that share a tile's keys."""
        return self.warps * 16 // self.rows

    @property
    def name(self) -> str:
        """File name and symbol."""
        parts = [self.dtype, f"d{self.head_dim}", f"m{self.rows}", f"n{self.tile_n}", f"s{self.stages}", f"b{self.blocks}"]
        parts += [f"w{self.warps}"] if self.warps != 4 else []
        parts += [feature for feature in ("paged", "softcap", "sink") if getattr(self, feature)]
        return "decode_sm90_" + "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.decode.hopper.build:compile_decode", config, SOURCES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the rings; barriers and row statistics add less than 1024 bytes."""
        return 2 * self.stages * self.tile_n * self.head_dim * 2
