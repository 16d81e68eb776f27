"""One frozen configuration per compiled variant of the walk: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

COLUMNS = 64  # of c and out that a warpgroup owns, and of a TMA box
_HERE = "linear/hopper"
# What the compiled code is made from.
SOURCES = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "walk", "walk_base", "walk_pair", "walk_producer")),
    *(f"{_HERE}/{file}.py" for file in ("walk_consumers", "walk_logs", "walk_sums", "walk_terms")),
    *(f"kernels/cute/{file}.py" for file in ("arguments", "barriers", "basics", "fields")),
    *(f"kernels/cute/{file}.py" for file in ("instructions", "rings", "tiles", "wgmma")),
    "runtime/compile.py",
)


@dataclass(frozen=True)
class WalkConfig:
    """What is fixed when a walk is compiled; lengths, strides and the scale are not.

    ``head_dim`` is of a and b, ``head_dim_v`` of c and out, both of the tile: smaller ones run in the same module by TMA
    bounds.
    """

    dtype: str  # "bfloat16"
    head_dim: int  # 64, 128, 192 or 256
    head_dim_v: int  # a multiple of 64
    reverse: bool = False  # out of a token sums over itself and later ones
    weighted: bool = False  # weights multiply the rows of c in reverse, else those of out
    biased: bool = False  # in reverse, of a weighted walk: a bias of each j is taken from all products a_i . b_j
    wide: bool = False  # out is fp32
    fading: bool = False  # all products fade by sums of logs up to each token within its chunk, in log2; weights where cut
    a_head: bool = False  # weights are one log a head, which all its tokens have, in place of sums
    cut: bool = False  # sequences are cut into segments, which begin from the segments' own states before them
    terms: bool = False  # of one that fades also what the gradient of its logs is made of: see ``walk_terms``
    paired: bool = False  # of keys' gradients with terms, with the walk of values' gradients in step: see ``walk_pair``
    finds: bool = False  # of values' gradients, behind walks that left terms, also the gradient of the logs: see ``walk_logs``
    chunk: int = 64  # tokens of a step
    stages: int = 3  # of the rings of a and b
    c_stages: int = 2  # of the ring of c
    groups: int = 1  # warpgroups that keep the state, each with COLUMNS columns of c and out
    cluster: int = 2  # blocks that share what they load of a and b; a divisor of ``blocks`` and of head_dim / 64

    @property
    def sums_logs(self) -> bool:
        """Whether a warp sums the logs within each chunk; segments' come in sums, which their own states need too."""
        return self.fading and not (self.a_head or self.cut)

    @property
    def weighs_rows(self) -> bool:
        """Whether weights multiply the rows of c."""
        return (self.weighted and self.reverse) or self.fading

    @property
    def keeps_until(self) -> bool:
        """Whether shared memory has room for UNTIL of ``walk_sums``: else each thread finds it."""
        return self.head_dim <= 128

    @property
    def early_values(self) -> bool:
        """Whether rows of c are weighed under the product with the state.

        At 4 × 32 × 8192 and 128 dims dk and dv of a token's logs take 263 us for 287, out 284 for 288; of one log a head out
        269 for 266; at 8 × 16 × 2048 a pass with terms 264 for 253. Of one warpgroup ptxas would wait for the product there.
        """
        return self.sums_logs and self.groups == 2 and not self.terms

    @property
    def fades_ahead(self) -> bool:
        """Whether factors are loaded before the product with the state, whose operands' registers ptxas gives them else."""
        return self.fading and self.groups == 1 and not self.terms

    @property
    def meets(self) -> bool:
        """Whether the scores' warpgroup sums pairs of tokens of a chunk for the gradient of the logs."""
        return self.terms and not self.reverse

    @property
    def first(self) -> bool:
        """Whether it needs what comes before it: a pass for the logs' gradient's first walk, and cut ones of other passes."""
        return (self.terms and self.reverse) or (self.cut and not (self.terms or self.finds))

    @property
    def early(self) -> bool:
        """Whether it begins before the kernel before it ends, and lets the one behind it: in segments, or for logs' gradient.

        But for the first such a walk needs nothing of the walks before it, which are under way once all before them has ended;
        it waits for them at its end, so that what comes behind it may read what they leave. Not of one log a head where
        sequences are whole: no reason is known but that its two walks side by side once took 3506 us for 965.
        """
        return self.cut or ((self.terms or self.finds) and not self.a_head)

    @property
    def in_step(self) -> int:
        """Blocks of a cluster that wait for each other before a stage of a is filled again."""
        return 2 if self.paired else self.cluster

    @property
    def beside(self) -> WalkConfig:
        """Of a pair the walk of values' gradients: what its code reads of a configuration, no module of its own."""
        return replace(self, terms=False)

    @property
    def blocks(self) -> int:
        """Blocks of a head."""
        return self.head_dim_v // (self.groups * COLUMNS)

    @property
    def parts(self) -> int:
        """Of ``terms``: warpgroups of a head, each of which leaves its own."""
        return self.blocks * self.groups

    @property
    def name(self) -> str:
        """File name and symbol."""
        parts = [self.dtype, f"d{self.head_dim}", f"v{self.head_dim_v}", f"{self.chunk}s{self.stages}x{self.c_stages}"]
        parts.append(f"c{self.cluster}g{self.groups}")
        features = ("reverse", "weighted", "biased", "wide", "fading", "a_head", "cut", "terms", "paired", "finds")
        parts += [feature for feature in features if getattr(self, feature)]
        return "linear_walk_sm90_" + "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.linear.hopper.build:compile_walk", config, SOURCES)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the rings of a and b, of c and of x, of a tile of scores, of out on its way, of sums and of logs."""
        boxes = self.c_stages + (self.stages if self.terms else 0)
        inputs = self.chunk * (2 * self.stages * self.head_dim + boxes * self.groups * COLUMNS)
        return 2 * (inputs + self.chunk * (self.chunk + self.groups * COLUMNS)) + 4 * (self.sums + self.logs)

    @property
    def logs(self) -> int:
        """Numbers in shared memory of what fades: of a token of a stage two or, with UNTIL, three (see ``walk_sums``)."""
        return (2 + self.keeps_until) * self.stages * self.chunk if self.fading else 0

    @property
    def sums(self) -> int:
        """Of ``terms``: numbers in shared memory on their way to a sum over warps."""
        return self.chunk * (4 * self.groups + 2 * 5) if self.terms else 0
