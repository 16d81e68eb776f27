"""One frozen configuration per compiled variant of latent caches, and the sizes that all of them share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

HEAD_DIM, HEAD_DIM_V = 576, 512  # columns of a key, and those of them that are values
ROWS = 64  # queries × heads that a block has: wgmma's least
FEW_ROWS = 16  # of a block whose products have keys, and columns of values, where wgmma takes 64
TILE = 64  # keys
PIECE = 64  # columns of a tile that a TMA box has, and a row of swizzled shared memory
PIECES = HEAD_DIM // PIECE
HALF = HEAD_DIM_V // 2  # columns of O that a warpgroup keeps
PIECE_BYTES = TILE * PIECE * 2
THREADS = 256  # that compute
# Of a total of several splits a thread keeps its O in global memory; a row's reference and sum are in shared memory.
TOTAL_FLOATS = HALF // 2
STATS = 4  # floats of a part's row beside its O: its reference, a sum of each warpgroup, one unused

_HERE = "decode/hopper"
# What the compiled code is made from.
SOURCES = (
    *(
        f"{_HERE}/latent_{file}.py"
        for file in ("base", "build", "config", "consumers", "few", "kernel", "memory", "merge", "producer", "results")
    ),
    *(
        f"kernels/cute/{file}.py"
        for file in (
            "arguments", "barriers", "basics", "epilogue", "fields", "instructions", "rings", "softmax", "tiles", "wgmma"
        )
    ),
    "runtime/compile.py",
)  # fmt: skip


@dataclass(frozen=True)
class LatentConfig:
    """What is fixed when a module is compiled; lengths, strides, scale, window and the batch are not."""

    dtype: str  # "float16" or "bfloat16"
    box: int = TILE  # keys of a TMA box: a tile's, or of pages as many as lie in one
    paged: bool = False
    pair: bool = False  # two blocks of rows are a cluster, and each asks for half of their tiles for both
    few: bool = False  # a sequence has at most FEW_ROWS rows

    @property
    def boxes(self) -> int:
        """Of a tile's piece."""
        return TILE // self.box

    @property
    def rows(self) -> int:
        """Of a block."""
        return FEW_ROWS if self.few else ROWS

    @property
    def cluster(self) -> int:
        """Blocks."""
        return 2 if self.pair else 1

    @property
    def name(self) -> str:
        """File name and symbol."""
        paged = f"_paged{self.box}" if self.paged else ""
        return f"decode_latent_sm90_{self.dtype}{paged}" + "_pair" * self.pair + "_few" * self.few

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.decode.hopper.latent_build:compile_latent", config, SOURCES)
