"""What the shapes of a decode call decide: how sequences are cut, how many programs run, which binaries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from warploom.decode.problem import DecodeProblem
from warploom.decode.triton.config import Config, config, latent_config, latent_widths, shared_blocks
from warploom.decode.triton.kernels import merge_kernel, split_kernel
from warploom.decode.triton.parts import CONTIGUOUS, NARROW, NEAR, ONE_PAGE, SCATTERED, TILE_IN_PAGE, WIDE
from warploom.decode.triton.prefix import share_kernel
from warploom.kernels.triton.widths import power_of_two, tile_widths
from warploom.runtime.triton_launch import Launch

# Programs of one launch beyond which a program walks several units: those that find nothing to do cost time too.
_PROGRAMS = 4096
# Programs for eight units of a sequence, where all units are more than run at once: the first three walk two units each.
_WALKING = 5
# Programs that read what neighbours share: two on each multiprocessor of an H100 or H200, as registers allow. They are there
# before those of the sequences' own keys, and end at once where nothing is shared.
_SHARING = 264
# Rows that a merge takes at once where it may have nothing to do: few programs end sooner.
_MERGING = 1024
# Bytes of keys and values that a prefix might spare, and sequences, below which each reads it by itself. On an H200, all but 64
# keys shared, 16 × 1,536 (94 MB) took 26.3 us for 25.2 without, 4 × 8,192 (101 MB) 37.2 for 32.9, and 2 × 65,536 (268 MB) 114
# for 99; 8 × 4,096 (117 MB) took 26.3 for 34.2. Nothing shared, 16 × 1,024 took 28.7 for 24.2, 8 × 4,096 46.9 for 44.7.
_LEAST_SPARED, _LEAST_SHARING = 112 << 20, 4
# What `share_kernel` is compiled for of the split kernel's constants.
_SHARE = (
    "T", "HEADS_KV", "GROUP", "HEAD_DIM", "HEAD_DIM_V", "M", "N", "D", "DV", "SPLIT", "MAX_SPLITS", "HALVED", "PAGES", "LEAST",
    "SOFTCAP", "TREE", "TREE_DEPTHS", "FP8", "PAIRS", "BIAS", "UNIT", "STEP", "PAGE", "PLACES", "SAME", "PDL", "launch_pdl",
    "num_warps",
)  # fmt: skip
# Up to so many keys of a sequence so many groups are enough for programs to take whole ones, which end without a merge: on an
# H200 16 sequences of 1,024 took 29.2 us for 32.4, of 2,048 46.7 for 53.8 (8 key heads), unlike ones to 4,096 117 for 102. FP8
# was not timed so.
_SHORT, _FEW = 2048, 120
# So many groups, of one a sequence, are enough where sequences fill seven eighths of the cache (programs are of like work), lie
# in small pages, and heads of a key are no power of two: such programs have 200 registers, two are on a multiprocessor, and
# all run at once. On an H200 32 sequences of 4,096 over pages of 16 took 137.5 us for 149.2 (40 heads over 8). In rows, of any
# heads, so many that all run at once, two on a multiprocessor, are enough, with four stages: 131.9 us for 139.2, with 32 heads
# 132.1 for 136.3. With three stages, of which three programs would fit, it took 157.
_ALIKE = 240
# Groups from which on sequences that have several are taken by groups: fewer are too few rounds, whose last one is long.
_MANY = 1000
# Keys that an entry of a table is read for, where no page has fewer and a thread copies from several rows of so many keys, as
# of rows of 256 bytes. By an entry a row, head_dim 128 over pages of 16 took 196 registers for 152, of which a multiprocessor
# holds two programs for three; of rows of 128 bytes 60 instructions a tile less than so.
_STEP = 16
# Registers of a thread that leave room for three programs of 128 threads.
_REGISTERS = 168
# Parts that the merge loads at once, whole groups of them; twice as many where there are more, of few columns each.
_AHEAD = 16
# Elements that strides count in where they can: 16 bytes of a dtype of 16 bits, and those of one of 8 bits.
UNIT = 8
UNIT_FP8 = 16


class BiasVariant(NamedTuple):
    """What a binary depends on of a bias."""

    kind: str
    dtype: torch.dtype
    wide: bool  # a stride takes 64 bits


class Shape(NamedTuple):
    """Everything static about a call."""

    batch: int
    queries: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    capacity: int
    page_size: int
    table_width: int  # 0: contiguous
    dtype: torch.dtype
    sink: torch.dtype | None
    tree: bool
    tree_depths: bool  # a window or a bias under a tree
    fp8: bool
    bias: BiasVariant | None
    latent: bool
    left: int | None
    softcap: bool
    prefix: str  # "found" on the device, "keys" of all sequences, "" without
    places: int  # WIDE, NARROW or NEAR: what holds distances of keys, values and their scales
    same: bool  # pages and keys of v lie as far apart as those of k
    unit: int  # strides of q, k and v count in these; with 1 pointers need not lie at multiples of 16 bytes either
    device: int | None  # None: the interpreter


class _Ways(NamedTuple):
    """How programs take units, as `split_kernel` tells."""

    final: bool
    single: bool
    by_keys: bool
    once: bool


@dataclass(frozen=True)
class Plan:
    """The launches of a call."""

    grid: tuple[int, int]
    merge_grid: tuple[int, int]
    programs: int  # of a sequence, kv head and row block
    grouped: int  # 1: programs take groups of splits; 0: none; more: by the keys of all sequences, as `takes_groups` has it
    crowded: int  # keys of a sequence from which on programs take both halves of a split
    max_units: int  # places for parts of a sequence's row
    parts: int  # in all
    split: Launch
    merge: Launch | None  # None: one unit, whose program writes the result
    chunk: int  # neighbours whose rows one program takes of a split that they share, 0 where nothing is shared
    share: Launch | None  # before the split kernel; None where nothing is shared
    share_grid: tuple[int, int]
    whole: bool  # beside parts, the split kernel writes results: of sequences that share nothing, or are one group


@lru_cache(maxsize=4096)
def plan(shape: Shape) -> Plan:
    """The plan of a shape; nothing in it changes a bit of any sequence's result."""
    s = shape
    group = s.heads_q // s.heads_kv
    rows = s.queries * group
    c = _config(s, rows)
    # Whole tiles from the first visible key on: at most this many keys of a sequence are seen.
    reach = s.capacity if s.left is None else min(s.capacity, max(s.left + s.queries + c.block_n, 0))
    max_splits = max(min(c.max_splits, -(-reach // c.split)), 1)
    row_blocks = -(-rows // c.block_m)
    pairs = s.batch * s.heads_kv * row_blocks
    halves, half = min(reach, c.halved), c.split // 2
    blocks = _shared_blocks(s, c, rows, "" if s.bias is None else s.bias.kind) if max_splits > 1 else 0
    grouped = _grouped(s, c, pairs, max_splits, reach, blocks)
    crowded = -(-c.crowd * c.split // pairs)
    # The kernels group splits of up to twice the least size; a longer sequence has a unit a split.
    if grouped == 1 and reach <= 2 * c.split * c.max_splits:
        units = max_units = -(-max_splits // c.group)
    else:
        units = max(max_splits, -(-min(halves, crowded) // half))
        max_units = max(max_splits, -(-halves // half))
    programs = min(_walking(s, c, pairs, units), max(_PROGRAMS // pairs, 4))
    final = max_units == 1
    single = grouped > 1 and max_splits <= c.group
    chunk = items = 0
    if blocks:
        most = blocks * c.block_m // rows
        chunks = -(-s.batch // most)
        chunk = -(-s.batch // chunks)  # chunks as even as they can be
        items = s.heads_kv * chunks * max(min(s.capacity // c.split, c.max_splits), halves // half)
        max_units = max(max_splits, -(-halves // half))
    pdl = s.device is not None and torch.cuda.get_device_capability(s.device)[0] >= 9
    # Over pages, where sequences of one group may be taken split by split, three programs a multiprocessor end sooner than two.
    # So they do with FP8 in rows: on an H200 16 sequences of 8,192 took 78.4 us for 79.2, of head_dim 256 139.6 for 143.2.
    three = single if s.table_width else _pairs(s)
    deep = (grouped > 0 and not three) or _deeper(pairs * programs, c, s)
    once = programs >= units and not blocks and _spared(c, s) and (units == 1 or _at_once(s, pairs * programs))
    ways = _Ways(final, single, grouped > 1, once)
    merge_dim = min(_merge_dim(s.batch * s.heads_q * s.queries, c, _pairs(s) and grouped > 0), power_of_two(s.head_dim_v))
    least = reach <= c.split * c.max_splits
    ahead = _ahead(max_units, merge_dim) // c.group
    split, merge = _constants(s, c, ways, deep, pdl, least, merge_dim, ahead, blocks)
    rows = s.batch * s.heads_q * s.queries
    direct = s.unit > 1 and not (s.bias and s.bias.wide)
    sharing = {n: split[n] for n in _SHARE if n in split} | {"BLOCKS": blocks, "num_stages": c.stages}
    return Plan(
        grid=(pairs, programs),
        merge_grid=(min(rows, _MERGING) if final else rows, -(-s.head_dim_v // merge_dim)),
        programs=programs,
        grouped=grouped,
        crowded=crowded,
        max_units=max_units,
        parts=rows * max_units,
        split=Launch(split_kernel, split, direct=direct),
        merge=None if final and not blocks else Launch(merge_kernel, merge, direct=True),
        chunk=chunk,
        share=Launch(share_kernel, sharing, direct=direct) if blocks else None,
        share_grid=(min(items, _SHARING), 1),
        whole=single or (final and blocks > 0),
    )


def _walking(s: Shape, c: Config, pairs: int, units: int) -> int:
    """Programs for the units of a sequence, row block and kv head.

    A program alone on a multiprocessor does not keep up with its share of the memory. So the last round of equal programs, 68
    of 2,048 on an H200, which holds 396, takes half as long as a full one. With programs of two units first fewer are alone at
    the end.

    Where two programs a multiprocessor have all units by twos, each has two, of rows on Hopper as `_on_hopper` tells. The
    hardware fills multiprocessors by turns: of 320 programs for 512 units some had five units on an H200 and others three,
    41.6 us for 40.1 (4 × 8,192).
    """
    if c.block_m == 64 or s.latent or s.device is None or pairs * units <= 3 * _processors(s.device):
        return units
    if pairs * units <= 4 * _processors(s.device) and _on_hopper(c, s):
        return -(-units // 2)
    return -(-units * _WALKING // 8)


def _spared(c: Config, s: Shape) -> bool:
    """Whether programs of one unit are spared a loop (ONCE).

    On an H200 1 × 8,192 took 17.0 us for 17.4, FP8 over pages of 16 88 for 85. At head_dim 256 it spills, and was not timed.
    """
    return c.block_m < 64 and max(s.head_dim, s.head_dim_v) <= 128 and not (_pairs(s) and s.table_width)


def _at_once(s: Shape, programs: int) -> bool:
    """Whether multiprocessors hold all programs, so that one without work takes no time of others."""
    return s.device is None or programs <= 3 * _processors(s.device)


def _ahead(units: int, merge_dim: int) -> int:
    """Parts that the merge loads at once."""
    return 2 * _AHEAD if units > _AHEAD and merge_dim <= 32 else _AHEAD


def _merge_dim(rows: int, c: Config, groups: bool) -> int:
    """Columns of a program of the merge, a warp: few, which read much at once, until the programs of all rows take turns.

    ``groups``: parts are whole groups, of FP8, and few: 512 rows of two on an H200 took 80.3 us of a call for 81.2.
    """
    if rows >= (512 if groups else 2048 if c.block_m == 64 else 1024):  # 1,280 rows of 16 parts: 140.2 us for 142.5 with 32
        return 128
    return 64 if c.block_m == 64 else 32


def _grouped(s: Shape, c: Config, pairs: int, max_splits: int, reach: int, blocks: int) -> int:
    """`Plan.grouped`."""
    if s.latent:
        return 0
    if max_splits == 1 and c.halved:
        return 1  # both halves of a lone split are one program's, which writes the result
    full = min(c.full, _FEW) if reach <= _SHORT and not s.fp8 else c.full
    groups = pairs * -(-max_splits // c.group)
    # Who decides was not timed with FP8 and tiles of 64 rows.
    if c.block_m == 64 or s.fp8 or s.left is not None or blocks:
        return int(groups >= full)
    if max_splits <= c.group:
        if groups >= full:
            return 1
        return s.batch * reach // 8 * 7 if _alike(s, c, groups) else 0
    if groups < _MANY:
        return 0
    size = c.split if reach <= c.split * c.max_splits else 2 * c.split
    return max(_MANY * c.group * size * s.batch // pairs, 2)


def _alike(s: Shape, c: Config, groups: int) -> bool:
    """Whether groups of whole sequences may be taken where lengths are alike, as `_ALIKE` tells."""
    if groups < _ALIKE:
        return False
    if s.table_width:
        group = s.heads_q // s.heads_kv
        return s.page_size <= 2 * _STEP and group & (group - 1) > 0
    return _on_hopper(c, s) and groups <= 2 * _processors(s.device or 0)


def _deeper(programs: int, c: Config, s: Shape) -> bool:
    """Whether programs have one stage more, and a multiprocessor two of them in place of three.

    Only where two rounds of two hold them all and one of three does not: what is left of that would be alone, and the products
    of a program alone do not keep up with the memory. Else three are as fast, to 5 % faster on an H200, and so they are over
    pages and at head_dim 64, whose tiles are half as many bytes.
    """
    return _holds_two(c, s) and 3 < programs / _processors(s.device or 0) <= 4


def _holds_two(c: Config, s: Shape) -> bool:
    """Whether a multiprocessor holds two programs with a stage more, and three without."""
    middle = 64 < max(s.head_dim, s.head_dim_v) <= 128  # past it registers allow two programs
    if c.block_m > 16 or not middle or s.table_width or s.latent or s.dtype.itemsize != 2 or _pairs(s) or s.device is None:
        return False
    return torch.cuda.get_device_capability(s.device)[0] in (9, 10)


def _on_hopper(c: Config, s: Shape) -> bool:
    """As `_holds_two`, of what was timed on an H200 alone."""
    return _holds_two(c, s) and torch.cuda.get_device_capability(s.device)[0] == 9


@lru_cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def worth_sharing(p: DecodeProblem) -> bool:
    """Whether reading a prefix once may take less time, if all sequences share all that they can hold."""
    itemsize = 1 if p.fp8 else p.dtype.itemsize
    spared = (p.batch - 1) * p.capacity * p.heads_kv * (p.head_dim + p.head_dim_v) * itemsize
    return p.device != "cuda" or (spared >= _LEAST_SPARED and p.batch >= _LEAST_SHARING)


def _shared_blocks(s: Shape | DecodeProblem, c: Config, rows: int, bias: str) -> int:
    """Tiles of rows that one program takes of a split that neighbours share; 0 where the call does not look for one.

    Sharing takes rows of two sequences at least. A window ends before or within what is shared, other biases than ALiBi hide
    keys of one sequence that another sees, and a latent cache's accumulators fill the registers: these calls go the plain way.
    """
    if not s.prefix or s.latent or s.left is not None or bias not in ("", "alibi") or s.batch < 2:
        return 0
    blocks = shared_blocks(c, s.head_dim, s.head_dim_v, s.dtype.itemsize)
    return blocks if blocks * c.block_m >= 2 * rows else 0


def described(problem: DecodeProblem) -> str:
    """How a call is cut, in words."""
    p = problem
    rows = p.queries * p.heads_q // p.heads_kv
    c = _config(p, rows)
    short = f"splits of {c.split // 2} keys, {c.split} past {c.halved}" if c.halved else f"splits of {c.split} keys"
    words = f"{short}, longer ones past {c.split * c.max_splits}, {c.block_m} rows × {c.block_n} keys a tile"
    if not p.prefix:
        return words
    blocks = _shared_blocks(p, c, rows, p.bias) if p.capacity > c.split and worth_sharing(p) else 0
    if not blocks:
        return f"{words}; each sequence reads the prefix itself"
    return f"{words}; the prefix's whole splits are read once for up to {min(blocks * c.block_m // rows, p.batch)} sequences"


def _pairs(s: Shape | DecodeProblem) -> bool:
    """Whether tiles are of pairs of FP8 numbers. Strides do not count: they change no bit."""
    return s.fp8 and s.dtype.itemsize == 2


def _pages(s: Shape, c: Config) -> Any:
    """Where a tile's keys lie."""
    if s.table_width < 2:
        return ONE_PAGE if s.table_width else CONTIGUOUS
    return TILE_IN_PAGE if s.page_size % c.block_n == 0 else SCATTERED


def _limit(s: Shape, c: Config, blocks: int) -> dict[str, int]:
    """A limit of registers for tiles over small pages, of which a multiprocessor's memory holds three programs.

    On an H200 16 sequences of 8,192 over pages of 16 took 137.3 us for 138.4 without it; of head_dim 64,
    where nothing is shared, 76.7 for 75.9. What else is not here would spill, or runs by two (`_ALIKE`).
    """
    group = s.heads_q // s.heads_kv
    width = max(s.head_dim, s.head_dim_v)
    few = s.queries == 1 and c.block_m == 16 and s.dtype.itemsize == 2 and width <= 128 and (width > 64 or blocks > 0)
    plain = not (s.fp8 or s.latent or s.softcap or s.bias) and s.left is None and group & (group - 1) == 0
    return {"maxnreg": _REGISTERS} if few and plain else {}


def _step(s: Shape, width: int) -> int:
    """Keys of a tile, scattered over pages, that an entry of the table is read for."""
    return _STEP if s.page_size % _STEP == 0 and width * s.dtype.itemsize >= 256 and not s.fp8 else 1


def _config(s: Shape | DecodeProblem, rows: int) -> Config:
    if s.latent:
        return latent_config(rows, s.dtype.itemsize, s.heads_kv)
    return config(rows, s.head_dim, s.head_dim_v, s.dtype.itemsize, s.heads_kv, _pairs(s))


def _constants(
    s: Shape, c: Config, ways: _Ways, deep: bool, pdl: bool, least: bool, merge_dim: int, ahead: int, blocks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constexprs and options of the two kernels."""
    pages = _pages(s, c)
    shared = {
        "T": s.queries,
        "HEAD_DIM_V": s.head_dim_v,
        "N": c.block_n,
        "SPLIT": c.split,
        "MAX_SPLITS": c.max_splits,
        "GROUP_SPLITS": c.group,
        "HALVED": c.halved,
        "LEAST": least,
        "HAS_LEFT": s.left is not None,
        "SINK": s.sink is not None,
        "SINGLE": ways.single,
        "BY_KEYS": ways.by_keys,
        "PDL": pdl,
    }
    if pdl:
        shared["launch_pdl"] = True
    rest = 0
    if s.latent:
        width, rest = latent_widths(s.head_dim, s.head_dim_v, s.dtype.itemsize)
        width_v = width
    else:
        width, width_v = tile_widths(s.head_dim, s.head_dim_v, s.dtype.itemsize)
        if _pairs(s):
            # Tensor cores multiply 16 columns at least, and even and odd ones are apart.
            width, width_v = max(width, 32), max(width_v, 32)
    # Tiles over pages whose places were looked at: as few instructions as can be.
    spare = pages in (TILE_IN_PAGE, SCATTERED) and c.block_m < 64 and not s.latent
    # In rows the compiler adds distances of 32 bits up in 64: 477 instructions a tile for 387.
    places = s.places if spare else min(s.places, NARROW.value)
    if _pairs(s) and pages not in (TILE_IN_PAGE, SCATTERED):
        places = WIDE.value
    split = {
        "HEADS_KV": s.heads_kv,
        "GROUP": s.heads_q // s.heads_kv,
        "HEAD_DIM": s.head_dim,
        "M": c.block_m,
        "D": width,
        "DV": width_v,
        "REST": rest,
        "PAGES": pages.value,
        "STEP": _step(s, width) if pages == SCATTERED else 1,
        "SOFTCAP": s.softcap,
        "TREE": s.tree,
        "TREE_DEPTHS": s.tree_depths,
        "FP8": s.fp8,
        "PAIRS": _pairs(s),
        "BIAS": "" if s.bias is None else s.bias.kind,
        "LATENT": s.latent,
        "FINAL": ways.final,
        "ALONE": c.block_m >= 64 and not s.latent,
        "ONCE": ways.once,
        "UNIT": s.unit,
        "SHARED": blocks > 0,
        "PLACES": places,
        "SAME": s.same and places == NEAR.value and not _pairs(s),
        "DISTANCES": (spare and pages == SCATTERED) or _pairs(s),
        # Of pages that hold the 16 keys of a step there are few sizes: binaries know them.
        "PAGE": s.page_size if spare and pages == SCATTERED and s.page_size >= _STEP else 0,
        "num_warps": c.warps,
        # Of fewer than 64 rows the deeper pipeline's memory allows two programs a multiprocessor.
        "num_stages": c.stages + (deep and c.block_m < 64),
    }
    if pdl and spare and pages == SCATTERED:
        split |= _limit(s, c, blocks)
    return shared | split, shared | {
        "DV": merge_dim, "AHEAD": ahead, "SHARED": blocks > 0, "TREE": s.tree and blocks > 0,
        "FINAL": ways.final and blocks > 0, "num_warps": 1,
    }  # fmt: skip
