"""Problems for the compiled attention kernels: parameters as the host computes them, and which tiles they are to multiply."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.attention.packed_bounds import packed_bounds
from tests.sm90.core import Run
from tests.sm90.launch import Traced, launch
from tests.sm90.machine import Machine
from tests.sm90.ptx import Instruction
from tests.sm90.state import Launch, Warp
from warploom.attention.bounds import BLOCK, COARSE_BLOCK
from warploom.attention.hopper.config import CUTS, FIRST_BLOCKS, LAST_BLOCKS, TABLE, BackwardConfig, ForwardConfig
from warploom.attention.problem import MOST_OFFSET
from warploom.kernels.distances import head_length
from warploom.masks.intervals import ResolvedMask
from warploom.masks.tiles import column_bounds

SUMS = 7 << 44  # where what blocks hand each other lies
DROPOUT = "seed least kept first"
DROPPED = {"seed": ((2,), ()), "least": 1 << 30, "first": 0}
COUNTERS = 1 << 12
ENTRIES = 101  # of a table of distances
NO_CUT = -(1 << 30)
Tag = tuple[int, ...]


class Sequences(NamedTuple):
    """Of a packed call what its cu_seqlens and seqused_k hold."""

    starts_q: list[int]
    starts_k: list[int]
    used: list[int]

    @classmethod
    def thirds(cls, seqlen_q: int, seqlen_k: int) -> Sequences:
        """Two, the first with a third of the tokens."""
        used = [seqlen_k // 3, seqlen_k - seqlen_k // 3 - 5]
        return cls([0, seqlen_q // 3, seqlen_q], [0, seqlen_k // 3, seqlen_k], used)


class Pages(NamedTuple):
    """Of a call over pages: keys of one, how many the pool has, and those of each sequence."""

    size: int
    count: int
    table: list[list[int]]


def choose(condition: bool, a: int, b: int) -> int:
    return a if condition else b


def names_of(*parts: str | bool) -> list[str]:
    """Names that are there: ``names, condition, names, condition, …``."""
    return [name for names, there in zip(parts[::2], parts[1::2], strict=True) if there for name in str(names).split()]


def forward(
    traced: Traced,
    config: ForwardConfig,
    seqlen_q: int,
    seqlen_k: int,
    blocks: int,
    heads: int = 2,
    split: int = 0,
    left: int = 0,
    mask: ResolvedMask | None = None,
    sequences: Sequences | None = None,
    watched: range = range(0),
    pages: Pages | None = None,
    offset: int = 0,
) -> Launch:
    """One batch, one key head; of packed calls two sequences, the first with a third of the tokens, unless they are given.

    ``offset``: of the queries, where a variant takes one; ``mask`` is the whole's then.
    """
    dim, dim_v = config.head_dim, config.head_dim_v
    names = names_of(
        "q k v out lse", True, "sink", config.sink, "cu_q", config.varlen,
        "cu_k", config.varlen and not config.paged, "used", config.used, "counter", config.varlen or config.columns,
        "parts", bool(config.split), "lts lte uts ute bounds present", config.columns, "offsets", config.q_offset,
        DROPOUT, config.dropout, "slopes origin", config.bias == "alibi",
        "table spread origin", config.bias == "distance", "largest", config.largest, "pages", config.paged,
        "tma_q tma_k tma_v qk pv multiplier cap_in left right heads pair_heads split", True,
    )  # fmt: skip
    tiles = -(-heads // config.heads_per_tile) if config.pack_gqa else heads
    values: dict[str, Any] = {
        "q": ((seqlen_q, dim, heads, 1), ()),
        "k": ((seqlen_k, dim, 1, 1), ()),
        "v": ((seqlen_k, dim_v, 1, 1), ()),
        "out": ((1, seqlen_q, heads, dim_v), (seqlen_q * heads * dim_v, heads * dim_v, dim_v)),
        "lse": ((1, heads, seqlen_q), (heads * seqlen_q, seqlen_q)),
        "parts": ((2 * blocks, 1 << 16, 1), (1 << 16, 1)),
        "sink": ((heads,), ()), **DROPPED, "slopes": ((1, heads), (heads,)), "origin": ENTRIES // 2,
        "table": ((heads, ENTRIES), (ENTRIES,)), "spread": ((heads * head_length(ENTRIES),), ()),
        "largest": ((1, heads), (heads,)),
        "left": left, "right": 0, "offsets": ((1,), ()), "heads": tiles, "pair_heads": max(tiles - 1, 0), "split": split,
    }  # fmt: skip
    words = _facts(names, heads)
    if config.varlen:
        values |= {
            "q": ((seqlen_q, dim, heads), ()),
            "k": ((1 << 24, dim, 1, seqlen_k + 1), ()),
            "v": ((1 << 24, dim_v, 1, seqlen_k + 1), ()),
            "out": ((seqlen_q, heads, dim_v), (heads * dim_v, dim_v)),
            "lse": ((heads, seqlen_q), (seqlen_q,)),
            "counter": ((1,), ()),
        }  # fmt: skip
        sequences = sequences or Sequences.thirds(seqlen_q, seqlen_k)
        packed_values, starts = _packed(names, sequences)
        values, words = values | packed_values, words | starts
    if pages is not None:
        values["parts"] = ((2 * blocks + 1, 1 << 16, 1), (1 << 16, 1))
        for name, columns in (("k", dim), ("v", dim_v)):
            values[name] = ((1 << 24, columns, 1, pages.size + 1, pages.count), ())
        rows, width = len(pages.table), len(pages.table[0])
        values["pages"] = ((rows, width), (width,))
        start = names.index("pages") + 1 << 32
        words |= {start + 4 * i: page % 2**32 for i, page in enumerate(page for row in pages.table for page in row)}
    if mask is not None:
        if sequences is None:
            own = chunk_of(mask, offset, seqlen_q, seqlen_k) if config.q_offset else mask
            column_values, column_words = column_mask(names, mask, fine_and_coarse(own, seqlen_q, seqlen_k))
            column_words |= _offsets(names, offset)
        else:
            column_values, column_words = _packed_mask(names, mask, sequences, config.used)
        values |= column_values | {"counter": ((1,), ()), "pair_heads": heads}
        words |= column_words
    reads = config.columns or config.bias == "distance"
    return launch(traced, values, names, grid=blocks, words=words, reads=reads, watched=watched)


def _facts(names: list[str], heads: int) -> dict[int, int]:
    """What is said of each head's table of distances: both ends are plain, and nothing hides."""
    if "spread" not in names:
        return {}
    start = names.index("spread") + 1 << 32
    facts = [0, 0, 1, 1, 0]
    return {start + 4 * (h * head_length(ENTRIES) + i): x for h in range(heads) for i, x in enumerate(facts)}


def chunk_of(mask: ResolvedMask, offset: int, seqlen_q: int, seqlen_k: int) -> ResolvedMask:
    """What a whole's mask is for ``seqlen_q`` of its rows, from the offset on, by their own numbers and alignment."""
    first = min(max(offset, 0), MOST_OFFSET)
    past = first - (seqlen_k - seqlen_q)
    vectors = [None if t is None else t.long().sub(first).clamp(0, seqlen_q).int() for t in mask.vectors]
    left, right = (None if limit is None else limit + sign * past for limit, sign in ((mask.left, -1), (mask.right, 1)))
    return ResolvedMask(left, right, *vectors)


def _offsets(names: list[str], offset: int, batches: int = 1) -> dict[int, int]:
    """What a call's offsets say, all the same."""
    return {(names.index("offsets") + 1 << 32) + 4 * i: offset % 2**32 for i in range(batches * ("offsets" in names))}


def fine_and_coarse(mask: ResolvedMask, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The extrema of a mask's blocks as the host hands them over."""
    return torch.cat([column_bounds(mask, seqlen_q, seqlen_k, block, "cpu") for block in (BLOCK, COARSE_BLOCK)], dim=2)


def column_mask(names: list[str], mask: ResolvedMask, bounds: Tensor) -> tuple[dict[str, Any], dict[int, int]]:
    """The parameters of a column mask, and what its vectors and bounds hold."""
    given = {"lts": mask.lts, "lte": mask.lte, "uts": mask.uts, "ute": mask.ute}
    values: dict[str, Any] = {
        "bounds": (tuple(bounds.shape), (bounds.stride(0), bounds.stride(1))),
        "present": sum(1 << i for i, t in enumerate(given.values()) if t is not None),
    }
    words, shape = {}, next(tuple(t.shape) for t in given.values() if t is not None)
    for name, t in (*given.items(), ("bounds", bounds)):
        start = names.index(name) + 1 << 32
        for i, number in enumerate([] if t is None else t.flatten().tolist()):
            words[start + 4 * i] = number % 2**32
        values.setdefault(name, (shape, (shape[1] * shape[2], shape[2])))
    return values, words


def _packed(names: list[str], sequences: Sequences) -> tuple[dict[str, Any], dict[int, int]]:
    """The parameters that say where sequences are, and what they hold."""
    values, found = {}, {}
    for name, numbers in zip(("cu_q", "cu_k", "used"), sequences, strict=True):
        values[name] = ((len(numbers),), ())
        if name in names:
            start = names.index(name) + 1 << 32
            found |= {start + 4 * i: x for i, x in enumerate(numbers)}
    return values, found


def _packed_mask(
    names: list[str], mask: ResolvedMask, sequences: Sequences, with_used: bool
) -> tuple[dict[str, Any], dict[int, int]]:
    """As ``column_mask``; nobody knows what stands where no key counts: a branch on it is noticed."""
    starts_q, starts_k, used = sequences
    bounds, written = packed_bounds(mask, starts_q, starts_k, used if with_used else None)
    values, words = column_mask(names, mask, bounds)
    heads, total = next(t.shape[1:] for t in mask.vectors if t is not None)
    each = used if with_used else [b - a for a, b in pairwise(starts_k)]
    counts = {first + i for first, keys in zip(starts_k, each, strict=False) for i in range(keys)}
    for name, places, width in (
        *((name, [i for i in range(total) if i not in counts], 1) for name in ("lts", "lte", "uts", "ute")),
        ("bounds", (~written).nonzero().flatten().tolist(), 8),
    ):
        start, row = names.index(name) + 1 << 32, width * (total if width == 1 else bounds.shape[2])
        for at in (start + 4 * (h * row + width * i + n) for h in range(heads) for i in places for n in range(width)):
            words.pop(at, None)
    return values, words


def backward_names(config: BackwardConfig) -> list[str]:
    """Parameters of the kernel of key blocks, in their order; the i-th, if it is a tensor, stands at address i + 1 << 32."""
    return names_of(
        "q k v do dk dv sums", True, "partial", not config.pair, "stats", True,
        "pingpong", config.states > 0 or config.persistent or config.ordered > 0,
        "tma_q tma_k tma_v tma_do m m m", True, "m", not config.pair,
        "cu_q cu_k", config.varlen, "used", config.used,
        "seqlen_q m_blocks n_blocks batches", True, "lts lte uts ute bounds present", config.columns,
        "offsets", config.q_offset, DROPOUT, config.dropout,
        "slopes origin", config.bias == "alibi", "table spread origin", config.bias == "distance",
        "gradient", config.bias_grad, "scale softcap left right section", True,
        "items whole split each steps", not config.pair,
    )  # fmt: skip


def backward(
    traced: Traced, config: BackwardConfig, seqlen_q: int, seqlen_k: int, blocks: int, heads: int = 2,
    split: int = 0, each: int = 1, left: int = 0, bounds: Tensor | None = None, handed_out: int = 0,
    sequences: Sequences | None = None, cuts: dict[int, int] | None = None, batches: int = 1, offset: int = 0,
    section: int = 1,
) -> Launch:  # fmt: skip
    """As ``forward``; ``blocks`` 0: one for each key block, ``section`` below 0: in waves.

    ``bounds``: of a column mask, ``fine_and_coarse``; ``handed_out`` of its key blocks before the first, ``cuts``: pieces of
    those that are cut; ``batches``: so many have it in common, and what is stored to their sums is watched.
    """
    dim, dim_v = config.head_dim, config.head_dim_v
    span = config.tile_n * (2 if config.pair else 1)
    m_blocks, n_blocks = -(-seqlen_q // config.tile_m), -(-seqlen_k // span)
    values: dict[str, Any] = {
        "q": ((seqlen_q, dim, heads, batches), ()), "do": ((seqlen_q, dim_v, heads, batches), ()),
        "k": ((seqlen_k, dim, 1, batches), ()), "v": ((seqlen_k, dim_v, 1, batches), ()),
        "dk": ((1, seqlen_k, 1, dim), (seqlen_k * dim, dim, dim)),
        "dv": ((1, seqlen_k, 1, dim_v), (seqlen_k * dim_v, dim_v, dim_v)),
    }  # fmt: skip
    if config.varlen:
        sequences = sequences or Sequences.thirds(seqlen_q, seqlen_k)
        count = len(sequences.starts_q) - 1
        m_blocks, n_blocks = seqlen_q // config.tile_m + count, seqlen_k // span + count
        values |= {
            "q": ((1 << 24, dim, heads, seqlen_q + 1), ()), "do": ((1 << 24, dim_v, heads, seqlen_q + 1), ()),
            "k": ((1 << 24, dim, 1, seqlen_k + 1), ()), "v": ((1 << 24, dim_v, 1, seqlen_k + 1), ()),
            "dk": ((seqlen_k, 1, dim), (dim, dim)), "dv": ((seqlen_k, 1, dim_v), (dim_v, dim_v)),
        }  # fmt: skip
    steps, total = heads * m_blocks, n_blocks * batches
    values |= {
        "sums": ((1 << 20,), ()), "partial": ((1 << 20,), (), SUMS), "stats": ((1 << 20,), ()), "pingpong": ((COUNTERS,), ()),
        "seqlen_q": 0 if config.varlen else seqlen_q, "m_blocks": m_blocks, "n_blocks": n_blocks, "batches": batches,
        **DROPPED, "slopes": ((1, heads), (heads,)), "origin": ENTRIES // 2, "table": ((heads, ENTRIES), (ENTRIES,)),
        "spread": ((heads * head_length(ENTRIES),), ()), "gradient": ((heads, ENTRIES), (ENTRIES,)),
        "left": left, "right": 0, "offsets": ((batches,), ()), "section": section,
        "items": total - split + -(-split * steps // each),
        "whole": total - split if config.stream_k else total, "split": split, "each": each, "steps": steps,
    }  # fmt: skip
    names = backward_names(config)
    words = _facts(names, heads) | _offsets(names, offset, batches)
    if sequences is not None:
        packed_values, starts = _packed(names, sequences)
        values, words = values | packed_values, words | starts
    if bounds is not None:
        masks, count = bounds.shape[1:3]
        values |= {name: ((1, masks, seqlen_k), (masks * seqlen_k, seqlen_k)) for name in ("lts", "lte", "uts", "ute")}
        values |= {"bounds": ((1, masks, count), (masks * count * 8, count * 8)), "present": 15}
        start = names.index("bounds") + 1 << 32
        words |= {start + 4 * i: x for i, x in enumerate(bounds.flatten().tolist())}
        past = (names.index("pingpong") + 1 << 32) + 4 * COUNTERS
        if config.persistent:
            past -= 4
            words[past] = handed_out
        if config.dealt:
            words |= {past + 4 * (i - TABLE): number for i, number in enumerate(cut_table(cuts or {}))}
        if config.ordered:  # of an odd number the first one begins; others go from the last one on
            firsts = [0 if n_blocks % 2 else 1 << 30, *[1 << 30] * (FIRST_BLOCKS - 1)]
            words |= {past + 4 * (i - config.ordered): block for i, block in enumerate(firsts)}
            words |= {past + 4 * (i - LAST_BLOCKS): n_blocks - 1 - i for i in range(n_blocks)}
    return launch(
        traced, values, names, grid=blocks or n_blocks * (2 if config.pair else 1), words=words, ordered=config.deterministic,
        reads=config.columns or config.bias == "distance", cluster=2 if config.pair else 1,
        watched=range(names.index("sums") + 1 << 32, names.index("sums") + 2 << 32) if batches > 1
        else range(SUMS, SUMS + (4 << 20)) if split or cuts else range(0),
    )  # fmt: skip


def cut_table(cuts: dict[int, int]) -> list[int]:
    """What the kernel before leaves of key blocks that are cut, in so many pieces each."""
    found, more = [], 0
    for block in sorted(cuts, reverse=True):
        more += cuts[block] - 1
        found += [block - more, block, cuts[block]]
    return [more, *found, *[NO_CUT, 0, 0] * (CUTS - len(cuts))]


def before(
    traced: Traced, config: BackwardConfig, q: tuple[int, ...], k: tuple[int, ...], bounds: Tensor, section: int,
    processors: int, slots: int, offset: int = 0,
) -> Launch:  # fmt: skip
    """The first thread block of the kernel before a masked backward, counters watched; ``q``, ``k``: batch, seqlen, heads."""
    m_blocks, n_blocks = -(-q[1] // config.tile_m), -(-k[1] // (config.tile_n * (2 if config.pair else 1)))
    rows = {"out": (q, config.head_dim_v), "do": (q, config.head_dim_v), "q": (q, config.head_dim), "k": (k, config.head_dim)}
    values: dict[str, Any] = {name: ((*shape, dim), (1 << 20, 1 << 12, 1 << 8)) for name, (shape, dim) in rows.items()}
    values |= {name: ((1 << 20,), ()) for name in ("sums", "stats")}
    values |= {
        "lse": ((q[0], q[2], q[1]), (q[1] * q[2], q[1])), "counters": ((COUNTERS,), (), SUMS),
        "bounds": (tuple(bounds.shape), (bounds.stride(0), bounds.stride(1))),
        "n_blocks": n_blocks, "section": section, "left": 0, "right": 0, "m_blocks": m_blocks,
        "blocks": processors, "slots": slots, "cleared": 0, "offsets": ((q[0],), ()),
    }  # fmt: skip
    names = names_of(
        "out do lse sums stats counters q bounds", True, "offsets", config.q_offset,
        "k n_blocks section left right blocks slots m_blocks", True, "cleared", config.dealt,
    )  # fmt: skip
    start = names.index("bounds") + 1 << 32
    words = {start + 4 * i: x for i, x in enumerate(bounds.flatten().tolist())} | _offsets(names, offset, q[0])
    return launch(traced, values, names, words=words, watched=range(SUMS, SUMS + 4 * COUNTERS))


class Claims(Machine):
    """Keeps how often K was asked for when query tiles were claimed."""

    loads: int
    claimed: list[int]

    def run(self, backwards: bool = False) -> Claims:
        self.loads, self.claimed = 0, []
        super().run(backwards)
        return self

    def _load_tensor(self, x: Instruction) -> Run:
        load = super()._load_tensor(x)
        descriptor = str(x.operands[1]).strip("[](')").partition(",")[0].strip(" '")
        k = min(self.launch.boxes) + 1

        def counted(warp: Warp, mask: int) -> bool:
            done = load(warp, mask)
            if (self.one(self.value(warp, descriptor), mask) >> 40) - 1 == k:
                self.loads += 1
            return done

        return counted

    def _atom_global(self, x: Instruction) -> Run:
        atom = super()._atom_global(x)

        def noted(warp: Warp, mask: int) -> bool:
            self.claimed.append(self.loads)
            return atom(warp, mask)

        return noted

    def check(self, config: ForwardConfig, key_tiles: list[int]) -> None:
        """Of one block, whose query tiles have so many key tiles: each is claimed before the last one of the tile before."""
        boxes = config.head_dim // config.boxes[0]  # of a tile
        asked = [-(-loads // boxes) for loads in self.claimed]
        through = list(accumulate(key_tiles))
        assert asked[0] == 0 and len(asked) == len(through) + 1
        assert all(total - 1 <= each <= total for each, total in zip(asked[1:], through, strict=True)), asked


def tags(machine: Machine, names: tuple[str, ...], first: int) -> list[list[tuple[str, Tag]]]:
    """What each warpgroup of consumers multiplied, in order: tensor and coordinates of tiles, whose first columns are 0.

    ``names`` of the tensor maps, the ``first`` of which is that parameter.
    """
    warps = machine.kernel.threads // 32
    found = []
    for component, products in sorted(machine.products.items()):
        if component % warps % 4 == 0:
            found.append([(names[p - first], at[1:]) for p, at in products if at[0] == 0])
    return found


def visible(rows: range, keys: range, seqlen_q: int, seqlen_k: int, causal: bool, left: int | None = None) -> bool:
    """Whether some of these queries sees some of these keys."""
    shift = seqlen_k - seqlen_q
    for row in range(rows.start, min(rows.stop, seqlen_q)):
        end = min(seqlen_k, row + shift + 1) if causal else seqlen_k
        start = 0 if left is None else max(row + shift - left, 0)
        if max(start, keys.start) < min(end, keys.stop):
            return True
    return False
