"""One frozen configuration per compiled variant: key, file name, symbol and explain() text come from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.runtime.modules import ModuleSpec

_HERE = "attention/hopper"
# What the compiled code is made from.
_COMMON = (
    *(f"{_HERE}/{file}.py" for file in ("build", "config", "schedule")),
    *(
        f"kernels/cute/{file}.py"
        for file in ("arguments", "barriers", "basics", "dropout", "epilogue", "fields", "instructions")
    ),
    *(f"kernels/cute/{file}.py" for file in ("packed", "rings", "softmax", "tiles", "wgmma")),
    "runtime/compile.py",
)
_ROLES = "base", "lists", "producer", "pages", "shares", "bias", "distances", "consumers", "columns", "merge"
_FORWARD = ("forward", "near", "forward_apart", "forward_hidden", *(f"forward_{part}" for part in _ROLES))
SOURCES = (
    *_COMMON,
    *(f"kernels/cute/{file}.py" for file in ("band", "bias", "columns", "distances", "memory")),
    *(f"kernels/{file}.py" for file in ("distances", "reach")),
    *(f"{_HERE}/{file}.py" for file in _FORWARD),
)
_PAIR = ("pair", *(f"pair_{part}" for part in ("base", "producer", "consumers")))
_PARTS = "base", "bias", "distances", "columns", "deal", "drops", "dropout", "rows", "producer", "consumers", "roles", *_PAIR
_BACKWARD = ("backward", *(f"backward_{part}" for part in _PARTS))
BACKWARD_SOURCES = (
    *_COMMON,
    f"{_HERE}/near.py",
    *(f"kernels/cute/{file}.py" for file in ("bias", "columns", "distances", "memory", "row_tiles")),
    *(f"kernels/{file}.py" for file in ("distances", "reach")),
    *(f"{_HERE}/{file}.py" for file in _BACKWARD),
)


# Of a masked call past head_dim 128, key blocks that go longest first, one for each thread of the kernel before: two for each
# processor. In a simulation of causal documents, 32768 keys, processors then wait for the last one for 2 % of the time,
# otherwise 7. Three for each processor lost 2 % of shared questions and prefixes: more heads side by side, fewer tiles in L2.
LAST_BLOCKS = 256
# And so many at the most that begin a call, as they would outlast all others; lanes of a warp. They see LONGEST times as many
# tiles as the mean: a window beside 64 keys, 21 times, took 1.28 of its time where they come last, a tree, 7 times, 0.90.
FIRST_BLOCKS, LONGEST = 32, 10
# To 128, key blocks that are handed out in pieces at the most, and words of the table that says which.
CUTS = 512
MOST_SLOTS = 4096  # pieces of all blocks
TABLE = 1 + 3 * CUTS
# Of the stretches whose dQ is being cleared: how many blocks have cleared their share. They are more than can be in flight.
STRETCHES = 4


MOST_LOADERS = 3  # warps of the producer warpgroup besides the scheduler


# Words that each block leaves behind the pieces of a call over pages, of the tile whose second piece it takes: head, query
# tile, where its sequence's queries start, how many there are, and the block of its last piece.
CUT_WORDS = 5


def box_columns(span: int) -> int:
    """Columns of a TMA box: of the widest swizzle, 128, 64 or 32 bytes, of which an operand's ``span`` are whole ones."""
    return next(columns for columns in (64, 32, 16) if span % columns == 0)


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
    q_stages: int = 1  # tiles of which Q is there or on its way, 1 or 2
    right: bool = False  # keys right of p + right are hidden (causal: right = 0)
    left: bool = False  # keys left of p - left are hidden
    softcap: bool = False
    sink: bool = False
    varlen: bool = False  # packed sequences
    paged: bool = False  # whose keys lie in pages
    page_box: int = 0  # of whole TMA boxes of so many keys
    used: bool = False  # whose keys may end early (seqused_k)
    # When a step waits for its PV: "late", after its exponentials; "early", after a quarter of them; "pingpong": where ptxas
    # puts it, before most, while the warpgroups issue their products one after the other.
    pv_wait: str = "late"
    columns: bool = False  # of the mask hide rows
    q_offset: bool = False  # each batch entry has an offset, by which columns and the band count its rows
    dropout: bool = False
    split: bool = False  # may deal out the keys of tiles over all blocks
    # A tile holds so many queries (8, or more that divide 64) of each of several heads that share their keys; 0: of one head.
    pack_gqa: int = 0
    bias: str = ""  # "alibi", "distance", or none
    largest: bool = False  # the largest logit of each head is found beside
    reaches: bool = False  # key tiles so far away that ALiBi leaves nothing of them are left out

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def name(self) -> str:
        """File name and symbol."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}x{self.head_dim_v}"
        band = ("r" if self.right else "") + ("l" if self.left else "") or "full"
        parts = [self.dtype, f"d{dims}", f"{self.tile_m}x{self.tile_n}", f"s{self.stages}", band]
        features = "columns", "q_offset", "softcap", "sink", "dropout", "varlen", "used", "split"
        parts += [feature for feature in features if getattr(self, feature)]
        parts += [f"pages{self.page_box}"] if self.paged else []
        parts += [self.bias] if self.bias else []
        parts += [feature for feature in ("largest", "reaches") if getattr(self, feature)]
        parts += [self.pv_wait] if self.pv_wait != "late" else []
        parts += [f"packgqa{self.pack_gqa}"] if self.pack_gqa else []
        parts += ["q2"] if self.q_stages == 2 else []
        return "attn_fwd_sm90_" + "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.attention.hopper.build:compile_forward", config, SOURCES)

    @property
    def queries(self) -> int:
        """Query positions of a tile."""
        return self.pack_gqa or self.tile_m

    @property
    def heads_per_tile(self) -> int:
        """Heads of a tile."""
        return self.tile_m // self.queries

    @property
    def loaders(self) -> int:
        """Warps that load: over pages as many as there are, a box or more each: one is too slow for small boxes."""
        return min(MOST_LOADERS, self.tile_n // self.page_box) if self.paged else 1

    @property
    def apart(self) -> bool:
        """Whether under a column mask each warpgroup walks the key tiles of its own rows.

        Of three warpgroups, whose 192 rows under chunks of 2048 see a ninth more key tiles than 64 do, and have 2.7 times
        as many partial ones.
        """
        return self.columns and self.warpgroups > 2

    @property
    def by_double(self) -> bool:
        """Whether dropout's counters take high words of products from fp64.

        It multiplies twice as fast. H200, 32768 tokens, 64 heads over 8: 36.4 ms for 39.9; at head_dim 64, 16 heads of
        2 × 8192, 942 us for 933.
        """
        alone = not (self.columns or self.varlen or self.bias)
        return self.dropout and alone and (self.head_dim, self.head_dim_v) == (128, 128)

    @property
    def bias_product(self) -> bool:
        """Whether scores begin at a product of slopes and columns: where the tensor cores have time to spare."""
        return self.bias == "alibi" and self.head_dim <= 64 and not self.softcap

    @property
    def may_reach(self) -> bool:
        """Whether there is a variant like this one that ``reaches``."""
        alone = not (self.left or self.varlen or self.softcap or self.pack_gqa)
        return self.bias == "alibi" and alone

    @property
    def boxes(self) -> tuple[int, int]:
        """Columns of a TMA box of Q and K, and of V."""
        return box_columns(self.head_dim), box_columns(self.head_dim_v)

    @property
    def piece_floats(self) -> int:
        """What a piece of a split tile leaves in the workspace: O in fp32, and each row's maximum and sum."""
        return self.tile_m * (self.head_dim_v + 2)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of Q, of the two rings, of a bias's columns and of dropout's words.

        Barriers and the tile ring add less than 512 bytes.
        """
        ring = self.stages * self.tile_n * (self.head_dim + self.head_dim_v)
        drawn = self.tile_m * -(-self.tile_n // 32) * 16 * self.dropout
        return 2 * (self.q_stages * self.tile_m * self.head_dim + ring + 16 * self.tile_n * self.bias_product + drawn)


@dataclass(frozen=True)
class BackwardConfig:
    """What is fixed when a Hopper backward module is compiled.

    ``head_dim`` and ``head_dim_v`` are the tile's; smaller ones run in the same module by TMA bounds.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    tile_m: int  # queries a step: 64, or 128 where registers allow
    right: bool = False
    left: bool = False
    softcap: bool = False
    dlse: bool = False  # a gradient arrives through lse too
    deterministic: bool = False  # key blocks add to dQ in their order, writer warps take turns at steps
    varlen: bool = False  # packed sequences
    used: bool = False  # whose keys may end early (seqused_k)
    tile_n: int = 128  # keys a block: 64 a warpgroup, or fewer, of which one warpgroup keeps dV, the other dK
    stages: int = 2  # of the Q ring
    dout_stages: int = 2  # of the dO ring
    claims: bool = False  # the first block at a tile of dQ stores what others add to: no zeros before; not where they queue
    persistent: bool = False  # a block a processor, which takes key block after key block
    pair: bool = False  # two blocks of a cluster, of 64 keys each, exchange dS, and each adds half of the columns of dQ
    columns: bool = False  # of the mask hide rows
    q_offset: bool = False  # as of the forward
    dropout: bool = False
    bias: str = ""  # "alibi", "distance", or none
    bias_grad: bool = False  # of a table of distances
    waves: bool = False  # the heads of a group pass a query tile together; tiles fall or rise as ``schedule.in_waves`` has it
    reaches: bool = False  # as of the forward, query tiles

    @property
    def name(self) -> str:
        """File name and symbol."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}x{self.head_dim_v}"
        band = ("r" if self.right else "") + ("l" if self.left else "") or "full"
        parts = [self.dtype, f"d{dims}", f"{self.tile_m}x{self.tile_n}", f"s{self.stages}{self.dout_stages}", band]
        features = "columns", "q_offset", "softcap", "dropout", "dlse", "deterministic", "varlen", "used"
        parts += [feature for feature in features if getattr(self, feature)]
        parts += [self.bias] if self.bias else []
        parts += ["grad"] if self.bias_grad else []
        parts += [feature for feature in ("reaches", "claims", "persistent", "pair", "waves") if getattr(self, feature)]
        return "attn_bwd_sm90_" + "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.attention.hopper.build:compile_backward", config, BACKWARD_SOURCES)

    def sums(self, tiles: int) -> int:
        """Floats of dQ before it is rounded, of so many query tiles of all heads together."""
        return tiles * (self.tile_m * self.head_dim)

    def stats(self, tiles: int) -> int:
        """Floats of their rows' statistics."""
        return tiles * (self.row_statistics * self.tile_m)

    @property
    def row_statistics(self) -> int:
        """Of a row its lse and delta; and, where keys far to the right may be seen, the lse that those take."""
        return 3 if self.bias == "distance" and not self.right else 2

    @property
    def states(self) -> int:
        """Counters of a tile: one for each part of dQ that comes from one warpgroup, where key blocks queue for it or claim it.

        A pair of blocks brings four such parts, but queues once a block.
        """
        return (4 if self.pair and self.claims else 2) * (self.deterministic or self.claims)

    def counters(self, tiles: int, split: int = 0) -> int:
        """Counters of all tiles, of the eight warps' sums of each split key block, and of persistent blocks' key blocks.

        Before the last one the table of a masked call's cut key blocks, behind the counters of stretches, or the order of the
        last ones.
        """
        return tiles * self.states + 8 * split + (STRETCHES + TABLE) * self.dealt + self.ordered + int(self.persistent)

    @property
    def ordered(self) -> int:
        """How many key blocks at the end of a call go by how many query tiles they see, most first."""
        return (FIRST_BLOCKS + LAST_BLOCKS) * (self.columns and not (self.dealt or self.deterministic or self.varlen))

    @property
    def dealt(self) -> bool:
        """Whether key blocks may be handed out in pieces, as a column mask has it."""
        return self.columns and self.tile_n == 128 and not (self.deterministic or self.varlen)

    def most_split(self, tiles: int, elements: int) -> int:
        """Of how many split key blocks dq, of so many 16-bit elements, can hold the sums until it is written."""
        return max(0, elements // 2 - self.others(tiles) - 32) // (self.partial_floats + 8)

    def others(self, tiles: int, split: int = 0) -> int:
        """Floats of row statistics and counters."""
        return self.stats(tiles) + self.counters(tiles, split)

    @property
    def draws_ahead(self) -> bool:
        """Whether a warpgroup of its own draws what dropout drops: 1.25 for 1.28 of the time without; at 64 1.51 for 1.52."""
        alone = not (self.columns or self.varlen or self.bias)
        return self.dropout and self.persistent and alone and (self.head_dim, self.head_dim_v) == (128, 128)

    @property
    def roles(self) -> bool:
        """Whether one warpgroup keeps the block's dV and the other its dK, and both compute S and dP."""
        return self.tile_n < 128 and not self.pair

    @property
    def stream_k(self) -> bool:
        """Whether the steps of a call's last key blocks may be shared out (stream-K): where all blocks have the same steps."""
        alike = not (self.right or self.left or self.varlen or self.columns or self.bias == "alibi")
        return self.persistent and alike and not (self.roles or self.pair)

    @property
    def boxes(self) -> tuple[int, int, int, int]:
        """Columns of a TMA box of Q, K, V and dO."""
        # A product for dQ takes K by halves of its columns, but where a warpgroup has all columns of 64 queries.
        k = self.head_dim if self.tile_m == 128 else self.head_dim // 2
        q, v = box_columns(self.head_dim), box_columns(self.head_dim_v)
        return q, box_columns(k), v, v

    @property
    def may_reach(self) -> bool:
        """As of the forward; not where key blocks queue, or where gradients that nobody looked at may not be finite."""
        alone = not (self.left or self.varlen or self.softcap or self.deterministic or self.dlse)
        return self.bias == "alibi" and alone

    @property
    def partial_floats(self) -> int:
        """What a piece of a key block passes on to the next: dV and dK in fp32."""
        return self.tile_n * (self.head_dim + self.head_dim_v)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the kernel, in bytes.

        It holds K, V, the rings of Q and dO with their row statistics, two tiles of dS, or with roles one of P and one of
        dS, and dQ on its way out.
        """
        keys = 2 * self.tile_n * (self.head_dim + self.head_dim_v)
        rows = 2 * self.head_dim + 4 * self.row_statistics
        rings = self.tile_m * (self.stages * rows + self.dout_stages * 2 * self.head_dim_v)
        tile = 2 * self.tile_m * self.tile_n
        if self.pair:  # P, dS of both blocks, half of the other's K, three eighths of dQ
            return keys + rings + 3 * tile + self.tile_n * self.head_dim + 12 * self.tile_m * self.head_dim // 8
        return keys + rings + 2 * tile + 4 * self.tile_m * self.head_dim
