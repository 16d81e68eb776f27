"""One frozen configuration per compiled variant: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

CHUNK = 64  # tokens
COLUMNS = 64  # of a TMA box, and value columns of a warpgroup
# What prepare leaves of a chunk of a value head, fp32 words: two matrices (CHUNK, CHUNK) in 16 bits, each as it lies in shared
# memory, and four rows of CHUNK fp32.
MATRIX = CHUNK * CHUNK // 2
ITEM = 2 * MATRIX + 4 * CHUNK
# The rows: what multiplies k S, q S and kᵀ Y, for keys and queries as they are given; and the decay of the whole chunk.
READS, QUERIES, WRITES, WHOLE = 0, 1, 2, 3
_HERE = "delta/hopper"
_SHARED = (
    *(f"kernels/cute/{file}.py" for file in ("arguments", "basics", "fields", "instructions", "memory")),
    *(f"kernels/cute/{file}.py" for file in ("packed", "tiles", "wgmma")),
    "runtime/compile.py",
)
PREPARE_SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "inverse", "prepare", "prepare_head", "place")),
    *_SHARED,
)


@dataclass(frozen=True)
class PrepareConfig:
    """What is fixed when prepare is compiled; lengths, strides, heads and numbers are not."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128; smaller dims are filled up with zeros
    blocks: int = 3  # on a multiprocessor

    @property
    def name(self) -> str:
        """File name and symbol."""
        return f"delta_prepare_sm90_{self.dtype}_d{self.width}_b{self.blocks}"

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.delta.hopper.build:compile_prepare", config, PREPARE_SOURCES)


WALK_SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "place", "walk", "walk_base", "walk_consumer", "walk_producer")),
    *(f"kernels/cute/{file}.py" for file in ("barriers", "rings")),
    *_SHARED,
)


@dataclass(frozen=True)
class WalkConfig:
    """What is fixed when a walk is compiled; lengths, strides and heads are not."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128
    warpgroups: int = 2  # of COLUMNS value columns each, in a block
    stages: int = 3

    @property
    def name(self) -> str:
        """File name and symbol."""
        return f"delta_walk_sm90_{self.dtype}_d{self.width}_w{self.warpgroups}s{self.stages}"

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.delta.hopper.build:compile_walk", config, WALK_SOURCES)

    @property
    def stage_bytes(self) -> int:
        """What is loaded for a chunk."""
        return 2 * CHUNK * (2 * self.width + self.warpgroups * COLUMNS) + 4 * ITEM
