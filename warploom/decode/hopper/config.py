"""One frozen configuration per compiled variant: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

_HERE = "decode/hopper"
# What the compiled code is made from.
SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("base", "build", "config", "consumers", "merge", "producer", "results", "split")),
    *(
        f"kernels/cute/{file}.py"
        for file in ("arguments", "barriers", "basics", "fields", "instructions", "memory", "rings", "softmax", "tiles")
    ),
    "runtime/compile.py",
)


@dataclass(frozen=True)
class DecodeConfig:
    """What is fixed when a module is compiled; lengths, strides, scale, window and the batch are not.

    ``head_dim`` is the tile's, for q, k and v; smaller ones run in the same module by TMA bounds.
    """

    dtype: str  # "float16" or "bfloat16"
    head_dim: int  # 64, 128 or 256
    rows: int = 16  # queries × heads of a group that a block has: 16, 32 or 64
    tile_n: int = 64  # keys of a tile
    slots: int = 6  # of the ring, for a tile of K or of V each, where a cluster shares a sequence's keys
    slots_alone: int = 5  # and where one block has them
    blocks: int = 2  # resident on a multiprocessor at once, which bounds the registers
    cluster: int = 8  # blocks that share a sequence's keys
    groups: bool = False  # several clusters may share them
    paged: bool = False
    softcap: bool = False
    sink: bool = False
    warps: int = 4  # that compute: each 16 rows, and a share of a tile's keys
    probe: str = ""

    @property
    def box(self) -> int:
        """Keys of a TMA box."""
        return 16 if self.paged else self.tile_n

    @property
    def row_groups(self) -> int:
        """Warps that share no row."""
        return self.rows // 16

    @property
    def key_groups(self) -> int:
        """Warps that share a tile's keys."""
        return self.warps // self.row_groups

    @property
    def name(self) -> str:
        """File name and symbol."""
        ring = f"s{self.slots}{self.slots_alone}"
        parts = [self.dtype, f"d{self.head_dim}", f"m{self.rows}", f"n{self.tile_n}", ring, f"b{self.blocks}", f"c{self.cluster}"]
        parts += [f"w{self.warps}"] if self.warps != 4 else []
        parts += [self.probe] if self.probe else []
        parts += [feature for feature in ("groups", "paged", "softcap", "sink") if getattr(self, feature)]
        return "decode_sm90_" + "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.decode.hopper.build:compile_decode", config, SOURCES)

    @property
    def slot_bytes(self) -> int:
        """A tile of K or of V."""
        return self.tile_n * self.head_dim * 2

    @property
    def state_floats(self) -> int:
        """What a warp has of O, and of its rows' maxima and sums."""
        return 32 * (self.head_dim // 2 + 4)

    @property
    def part_floats(self) -> int:
        """O of a block's rows, with a maximum and a sum each, in the order of rows."""
        return self.rows * (self.head_dim + 8 + 2)

    def shared_bytes(self, alone: bool) -> int:
        """Shared memory of the ring and of what is merged; barriers add less than 256 bytes."""
        slots, merged = (self.slots_alone, self.row_groups * self.state_floats) if alone else (self.slots, self.part_floats)
        exchange = self.row_groups * self.state_floats if self.key_groups > 1 else 0
        return slots * self.slot_bytes + 4 * (max(exchange, merged) if not alone else exchange + merged)
