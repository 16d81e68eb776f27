"""One frozen configuration per compiled variant: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

_HERE = "decode/hopper"
SHARED_BYTES = 227 * 1024  # of a block, at most
PAD = 8  # floats behind a row of O in shared memory, which keep what neighbouring rows store at once in different banks
# What the compiled code is made from.
SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("base", "build", "config", "consumers", "producer", "results", "split")),
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
    head_dim: int  # 64 or 128
    rows: int = 16  # queries × heads of a group that a block has
    tile_n: int = 128  # keys of a tile
    splits: int = 8  # of a sequence, at most
    box: int = 128  # keys of a TMA box: a tile's, or of pages as many as lie in one, to 16
    paged: bool = False
    softcap: bool = False
    sink: bool = False
    warps: int = 8  # that compute: each 16 rows, and a share of a tile's keys

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
        parts = [self.dtype, f"d{self.head_dim}", f"m{self.rows}", f"n{self.tile_n}", f"s{self.splits}"]
        parts += [f"w{self.warps}"]
        parts += [f"paged{self.box}"] if self.paged else []
        parts += [feature for feature in ("softcap", "sink") if getattr(self, feature)]
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
        return self.rows * (self.head_dim + PAD + 2)

    @property
    def exchanged_floats(self) -> int:
        """What warps with the same rows hand over at once, half of them to the other half."""
        return self.row_groups * (self.key_groups // 2) * self.state_floats

    def merged_floats(self, cluster: int) -> int:
        """What a block keeps of its splits, of which it shares a sequence's with the ``cluster``."""
        return self.row_groups * self.state_floats if cluster == 1 else self.splits // cluster * self.part_floats

    def slots(self, cluster: int) -> int:
        """Of the ring, each for a tile of K or of V: as many as shared memory holds beside the rest."""
        rest = 4 * (self.exchanged_floats + self.merged_floats(cluster)) + 2048  # barriers, and gaps for alignment
        return min((SHARED_BYTES - rest) // self.slot_bytes, 24)

    @property
    def clusters(self) -> tuple[int, ...]:
        """Sizes of clusters, from all splits' to one block for all, whose rings have four slots at least."""
        sizes = [self.splits >> n for n in range(self.splits.bit_length())]
        return tuple(size for size in sizes if self.slots(size) >= 4)
