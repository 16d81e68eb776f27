"""One frozen configuration per compiled variant: key, file name and symbol come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

CHUNK = 64  # tokens
COLUMNS = 64  # of a TMA box, and value columns of a warpgroup
# What prepare leaves of a chunk of a value head, in fp32 words: two lower triangular matrices (CHUNK, CHUNK) in 16 bits and
# five rows of CHUNK fp32. A matrix is cut into boxes of 16 columns, each from its first row on that is not 0; a box lies as it
# does in shared memory, with a swizzle of 32 bytes.
BOX = 16
BOX_ROWS = tuple(range(CHUNK, 0, -BOX))
MATRIX = sum(BOX_ROWS) * BOX // 2
NUMBERS = 5 * CHUNK
ITEM = 2 * MATRIX + NUMBERS
# The rows: what multiplies k S and q S, for keys and queries as they are given; beta; what then multiplies kᵀ Y; and the decay
# of the whole chunk. For gradients also sums of decays in two parts, and what rows of k and q are multiplied by.
READS, QUERIES, BETA, WRITES, WHOLE, COARSE, FINE, OF_K, OF_Q = range(9)
ALL_NUMBERS = 9 * CHUNK
BACK_ITEM = 2 * MATRIX + ALL_NUMBERS
# Of the row WHOLE walks read the first eight. From here on, in a sequence's last chunk, each warp of the walk that keeps leaves
# its part of the product of the last state and its gradient.
CLOSING = 8
# How a call with decays says that no sequence begins with a state.
NO_STATE = 2
_HERE = "delta/hopper"
_SHARED = (
    *(f"kernels/cute/{file}.py" for file in ("arguments", "basics", "fields", "instructions", "memory")),
    *(f"kernels/cute/{file}.py" for file in ("packed", "tiles", "wgmma")),
    "runtime/compile.py",
)
PREPARE_SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "inverse", "numbers", "prepare", "prepare_head", "place")),
    *_SHARED,
)


@dataclass(frozen=True)
class PrepareConfig:
    """What is fixed when prepare is compiled; lengths, strides, heads and numbers are not."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128; smaller dims are filled up with zeros
    blocks: int = 4  # on a multiprocessor, whose shared memory they fill
    gradients: bool = False  # for a backward pass

    @property
    def name(self) -> str:
        """File name and symbol."""
        return f"delta_prepare_sm90_{self.dtype}_d{self.width}_b{self.blocks}{'_back' * self.gradients}"

    @property
    def item(self) -> int:
        """fp32 words of a chunk of a value head."""
        return BACK_ITEM if self.gradients else ITEM

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.delta.hopper.build:compile_prepare", config, PREPARE_SOURCES)


FORWARD_SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("forward", "walk", "walk_base", "walk_consumer", "walk_producer")),
    *(f"kernels/cute/{file}.py" for file in ("barriers", "rings")),
    *PREPARE_SOURCES,
)


@dataclass(frozen=True)
class WalkConfig:
    """What is fixed when a walk is compiled; lengths, strides and heads are not."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128
    warpgroups: int = 2  # of COLUMNS value columns each, in a block
    stages: int = 3

    @property
    def stage_bytes(self) -> int:
        """What is loaded for a chunk."""
        return 2 * CHUNK * (2 * self.width + self.warpgroups * COLUMNS) + 4 * ITEM


@dataclass(frozen=True)
class ForwardConfig:
    """What is fixed when both kernels of a forward pass are compiled, which one call launches."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128
    warpgroups: int = 2  # of COLUMNS value columns each, in a block of the walk

    @property
    def prepare(self) -> PrepareConfig:
        """The kernel that goes first."""
        return PrepareConfig(self.dtype, self.width)

    @property
    def walk(self) -> WalkConfig:
        """The other one."""
        return WalkConfig(self.dtype, self.width, self.warpgroups)

    @property
    def name(self) -> str:
        """File name and symbol."""
        return f"delta_forward_sm90_{self.dtype}_d{self.width}_b{self.prepare.blocks}_w{self.warpgroups}s{self.walk.stages}"

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.delta.hopper.build:compile_forward", config, FORWARD_SOURCES)


BACK_SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("back", "back_base", "back_consumer", "build", "config", "keep")),
    *(f"{_HERE}/{file}.py" for file in ("keep_consumer", "walk_base")),
    *(f"kernels/cute/{file}.py" for file in ("barriers", "rings")),
    *_SHARED,
)


@dataclass(frozen=True)
class KeepConfig:
    """What is fixed when the walk is compiled that leaves states and Y for gradients."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128
    warpgroups: int = 1  # of COLUMNS value columns each, in a block
    again: bool = False  # states alone, from the Y of an earlier walk
    stages: int = 4

    @property
    def name(self) -> str:
        """File name and symbol."""
        return f"delta_keep_sm90_{self.dtype}_d{self.width}_w{self.warpgroups}s{self.stages}{'_again' * self.again}"

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.delta.hopper.build:compile_keep", config, BACK_SOURCES)

    @property
    def stage_bytes(self) -> int:
        """What is loaded for a chunk."""
        return 2 * CHUNK * (self.width + self.warpgroups * COLUMNS) + 4 * (NUMBERS if self.again else MATRIX + NUMBERS)


@dataclass(frozen=True)
class BackConfig:
    """What is fixed when the walk back is compiled, which leaves the gradients of states and of values."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128
    warpgroups: int = 1  # of COLUMNS value columns each, in a block
    stages: int = 3

    @property
    def name(self) -> str:
        """File name and symbol."""
        return f"delta_back_sm90_{self.dtype}_d{self.width}_w{self.warpgroups}s{self.stages}"

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.delta.hopper.build:compile_back", config, BACK_SOURCES)

    @property
    def stage_bytes(self) -> int:
        """What is loaded for a chunk."""
        return 2 * CHUNK * (2 * self.width + self.warpgroups * COLUMNS) + 4 * (2 * MATRIX + NUMBERS)


GRADIENT_SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "gradients", "gradients_asked", "gradients_base", "gradients_read")),
    *(f"{_HERE}/{file}.py" for file in ("gradients_written", "place", "walk_base")),
    *(f"kernels/cute/{file}.py" for file in ("barriers", "rings")),
    *_SHARED,
)


@dataclass(frozen=True)
class GradientConfig:
    """What is fixed when the kernel of all other gradients is compiled."""

    dtype: str  # "bfloat16"
    width: int  # of the tile of keys: 64 or 128
    stages: int = 2

    @property
    def name(self) -> str:
        """File name and symbol."""
        return f"delta_gradients_sm90_{self.dtype}_d{self.width}_s{self.stages}"

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.delta.hopper.build:compile_gradients", config, GRADIENT_SOURCES)

    @property
    def stage_bytes(self) -> int:
        """What is loaded for COLUMNS value columns of a chunk of a value head."""
        return 2 * COLUMNS * (2 * self.width + 3 * CHUNK)
