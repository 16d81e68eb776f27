"""Which variant serves a call, and the named set that `warploom build` prepares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from warploom.attention.features import Features
from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import BackwardConfig, ForwardConfig
from warploom.attention.problem import BOXES

if TYPE_CHECKING:
    from warploom.attention.problem import AttentionProblem

DTYPES = (torch.float16, torch.bfloat16)
Variant = TypeVar("Variant", ForwardConfig, BackwardConfig)


@dataclass(frozen=True)
class Tile:
    """Query rows (64 a warpgroup) by keys, stages of the K and V rings, and what else ForwardConfig has of that name."""

    warpgroups: int
    keys: int
    stages: int = 2
    pv_wait: str = "late"
    q_stages: int = 1


@dataclass(frozen=True)
class Tiling:
    """Tiles by the kind of call; docs/lab-notes/attention-hopper-forward.md has the measurements. None: as ``dense``."""

    dense: Tile
    short: Tile | None = None  # dense causal calls of fewer than LONG keys, one head a tile
    # Dense calls of one head a tile and of a ``shape``: see there.
    brief: Tile | None = None
    square: Tile | None = None
    few: Tile | None = None
    other: Tile | None = None  # windows and packed sequences
    columns: Tile | None = None  # under a column mask: keys are whole blocks of its bounds
    dropout: Tile | None = None  # its bits need registers too
    softcap: Tile | None = None  # of the 160 registers that three warpgroups leave a thread, its constants spill some


LONG = 2048
REACH = 4096  # keys from which on it pays to read q, k and v once more for how far from the diagonal keys count under ALiBi
MOST_BLOCKS = 65535  # along the second and the third axis of a grid
BRIEF = 80
SQUARE = range(193, 257)
FEW = 4096
# (head_dim, head_dim_v) of the tile, in order; smaller head dims run in the next larger one by TMA bounds.
TILINGS = {
    # 16384 keys full: with ping-pong 589 TFLOP/s, without 551. 1024 keys causal: 256x64 363, 192x128 327.
    (64, 64): Tiling(
        Tile(3, 128, 3, "pingpong"),
        short=Tile(4, 64, 4, "early"),
        brief=Tile(3, 80, 2, "pingpong"),  # 2 × 4096 queries, 77 keys, 16 heads: 22.3 us, 128 keys a tile 25.3
        # 64 × 197 queries and keys, 12 heads: 45.0 us, 192x128 52.1; one stage of Q 46.6, two 44.2.
        square=Tile(4, 64, 4, "early", 2),
        other=Tile(3, 128, 3, "early"),
        columns=Tile(3, 128, 3, "pingpong"),
        dropout=Tile(2, 128, 3, "pingpong"),  # 4 × 4096 tokens, 16 heads, causal: 457 us, early 520, 192x128 475
        softcap=Tile(2, 128),
    ),
    (96, 96): Tiling(
        Tile(3, 112), columns=Tile(2, 128), dropout=Tile(2, 128), softcap=Tile(2, 112)
    ),  # 4096 keys: 650, early no better
    # 16384 keys full: 749; late 699, and 192x80 724. 4 × 4096 queries, 77 keys, 16 heads: 192x80 44.7 us, 128x80 51.2, 57.7.
    # Causal, 32 heads over 8: 512 queries × 16384 keys in turns 188 us, early 189 to 275 from launch to launch, as if
    # warpgroups of some blocks did the same at the same time; 1024 queries 354 and 400 us, 4096 × 4096 201 and 208.
    (128, 128): Tiling(
        Tile(2, 128, 2, "early"),
        brief=Tile(3, 80, 2, "early"),
        few=Tile(2, 128, 2, "pingpong"),
        dropout=Tile(2, 128, 2, "pingpong"),  # 4 × 4096 tokens, 16 heads, causal: 607 us, early 687
    ),
    (192, 128): Tiling(Tile(2, 128, 2, "early")),  # 8192 keys causal: 760; late 713
    (192, 192): Tiling(
        Tile(2, 112), columns=Tile(2, 64), dropout=Tile(2, 96)
    ),  # as wide as shared memory allows, here and below
    # Early and ping-pong no better. 1024 keys causal: 1.03 of 80 keys.
    (256, 256): Tiling(Tile(2, 80), short=Tile(2, 64), columns=Tile(2, 64), dropout=Tile(2, 64)),
}


WITH_BIAS = ((64, 64), (128, 128))  # head dims of which `warploom build` prepares kernels with a bias


BANDS: tuple[dict[str, Any], ...] = ({}, {"right": True}, {"right": True, "left": True})  # of what `warploom build` prepares


def tile_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The smallest tile that holds both head dims, which is the first: rounded here and nowhere else."""
    return next(dims for dims in TILINGS if dims[0] >= head_dim and dims[1] >= head_dim_v)


@cache
def with_largest(variant: ForwardConfig) -> ForwardConfig:
    """The variant that finds the largest logits too; kept, as its name and module are found once."""
    return replace(variant, largest=True)


@cache
def with_reach(variant: Variant) -> Variant:
    """The variant that leaves out what is too far away to count under ALiBi; kept, too."""
    return replace(variant, reaches=True)


def may_be_too_far(batch: int, heads: int, seqlen_k: int, right: int | None, origin: int = 0) -> bool:
    """Whether a dense call takes a variant that reaches: for REACH keys or more, of which each query sees the nearest.

    ``heads``, of queries and of keys, and batch entries are axes of the grid that measures norms.
    """
    far = seqlen_k >= REACH and (right is None or right >= 0) and not origin
    return far and max(batch, heads) <= MOST_BLOCKS


def _may_be_too_far(problem: AttentionProblem) -> bool:
    return may_be_too_far(problem.batch, problem.heads_q + problem.heads_kv, problem.seqlen_k, problem.right)


@cache
def config(features: Features, long: bool, each: int = 0, shape: str = "") -> ForwardConfig:
    """The variant of a call's features; ``long`` as LONG has it, ``each`` what ``pack_gqa``, ``shape`` what ``shape`` says.

    Batch-invariant calls, of whatever lengths, have the tiles of packed ones.
    """
    dims = tile_dims(features.head_dim, features.head_dim_v)
    tiling = TILINGS[dims]
    tile: Tile | None = tiling.dense
    if features.columns:
        tile = tiling.columns or tiling.dense
        for asked, own in ((features.softcap, tiling.softcap), (features.dropout, tiling.dropout)):
            if asked and own and own.keys == tile.keys:
                tile = replace(own, pv_wait="early") if own.pv_wait == "pingpong" else own  # in turns it was not run on a GPU
        if features.dropout and dims == (192, 128):  # shared memory has no room for more beside bits and words
            tile = Tile(2, 64, 2, "early")
    elif features.softcap:
        tile = tiling.softcap
        if features.dropout and tile is None:  # both: the fewest keys that there are
            tile = tiling.columns
    elif features.dropout:
        tile = tiling.dropout
    elif features.left or features.varlen or features.batch_invariant:
        tile = tiling.other
    elif features.right and not long and not each:
        tile = tiling.short
    elif features.right:
        tile = tiling.few if shape == "few" else None
    elif shape in ("brief", "square") and not features.bias:  # whose registers they leave no room for
        tile = tiling.brief if shape == "brief" else tiling.square
    if features.bias == "alibi" and each and dims == (96, 96):
        tile = tiling.softcap  # slopes of two heads would spill, too
    tile = tile or tiling.dense
    if features.bias == "alibi" and tile.pv_wait == "early" and dims > (64, 64):
        tile = replace(tile, pv_wait="pingpong")  # 16384 keys causal: 1.01 of the time without a bias, early 1.14
    return ForwardConfig(
        features.dtype_name,
        *dims,
        tile.keys,
        warpgroups=tile.warpgroups,
        stages=tile.stages,
        pv_wait=tile.pv_wait,
        q_stages=tile.q_stages,
        split=not ((features.left if features.paged else features.varlen) or features.columns or features.dropout),
        pack_gqa=each,
        page_box=next((box for box in BOXES if features.page_box % box == 0 and tile.keys % box == 0), 1) * features.paged,
        **features.flags(ForwardConfig),
    )


# Rounds of query tiles from which on a call under a column mask ends evenly enough in any order.
EVEN_ROUNDS = 16


def last_tiles(m_blocks: int, heads: int, blocks: int) -> int:
    """How many first query tiles of each head end a call under a column mask, as ``masked_tile`` has them: about one round."""
    tiles = m_blocks * heads
    return min(-(-blocks // heads), m_blocks - 1) if blocks < tiles < EVEN_ROUNDS * blocks else 0


# Queries of each head in a tile that holds several; none: every tile holds one head.
PACK_GQA: tuple[int, ...] = (8, 32)
MANY = 128  # queries, from which on no tile holds several heads
# Key tiles' worth of time that splitting costs: the workspace is written and read, and another kernel launched.
SPLIT_COST = 16


def pack_gqa(queries: int, group: int, rows: int) -> int:
    """How many queries of each head of a group a tile of so many rows holds, where that halves the tiles or better; else 0."""
    found = 0
    fewest = -(-queries // rows) * group // 2
    for each in PACK_GQA:
        tiles = -(-queries // each) * -(-group // (rows // each))
        if tiles <= fewest:
            found, fewest = each, tiles - 1
    return found


def few_queries(longest: int, mean: int) -> int:
    """By how many queries tiles over pages hold several heads: the mean of sequences where not all are as long as ``longest``.

    Beside a chunk of a prompt many sequences may have one query each, and without ``max_seqlen_q`` the longest has them all.
    """
    return min(longest, mean) if mean else longest


def may_share(sequences: int, heads: int, tiles: int, n_blocks: int, blocks: int) -> bool:
    """Whether the longest query tile over pages may have SPLIT_COST key tiles more than a block's share, as lengths have it.

    ``heads``: tiles for the same queries, of ``tiles`` in all, with ``n_blocks`` key tiles at the most. Of the longest sequence
    there are as many tiles as ``heads``, of others one key tile is certain.
    """
    total = tiles * n_blocks if sequences == 1 else heads * n_blocks + max(tiles - heads, 0)
    return n_blocks * blocks >= total + SPLIT_COST * blocks


def shape(seqlen_q: int, seqlen_k: int) -> str:
    """Lengths that tiles are chosen by: "brief" and "square" without a mask, "few" with a causal one, else none.

    "brief" is BRIEF keys or fewer, of which less of a tile is empty; "square" so many queries that one tile of four
    warpgroups holds them and of three two, and as many keys at the most; "few" is FEW queries or fewer for LONG keys or more.
    """
    if seqlen_k <= BRIEF:
        return "brief"
    if seqlen_q in SQUARE and seqlen_k < SQUARE.stop:
        return "square"
    return "few" if seqlen_q <= FEW and seqlen_k >= LONG else ""


def config_for(problem: AttentionProblem) -> ForwardConfig:
    """The variant that runs a problem."""
    problem = as_masked(problem)
    features, long = Features.of(problem), problem.seqlen_k >= LONG
    group = problem.heads_q // problem.heads_kv
    if features.paged and not features.batch_invariant:
        queries = few_queries(problem.seqlen_q, problem.mean_q)
        return config(features, long, pack_gqa(queries, group, config(features, long).tile_m))
    if features.varlen or features.batch_invariant:
        return config(features, long)
    variant = config(features, long)
    # Else heads may have masks of their own, or elements are known by their heads.
    if not (features.columns or features.dropout):
        each = 0  # of heads with a table of distances each
        if features.bias != "distance":
            each = pack_gqa(problem.seqlen_q, group, variant.tile_m)
        variant = config(features, long, each, "" if each else shape(problem.seqlen_q, problem.seqlen_k))
    return with_reach(variant) if variant.may_reach and _may_be_too_far(problem) else variant


def walked(variant: ForwardConfig) -> int:
    """Queries for which key tiles are computed or skipped together: a warpgroup's, where each goes by its own rows.

    That is under a band, and under a column mask where warpgroups go apart. Key tiles are loaded for all of a query tile.
    """
    masked = variant.right or variant.left or variant.columns
    together = not masked or variant.pack_gqa or (variant.columns and not variant.apart)
    return variant.queries if together else variant.tile_m // variant.warpgroups


LEAST_BOX = 16  # keys: more copies a tile take longer than its products


def as_masked(problem: AttentionProblem) -> AttentionProblem:
    """The problem under a column mask that a problem with query offsets is run as (`offsets`), or itself."""
    return replace(problem, columns=("lts",)) if problem.q_offset and not problem.columns else problem


def as_wide(problem: AttentionProblem) -> AttentionProblem:
    """The problem over pages of 16 bits that a problem over FP8 pages is run as (`wide_pages`), or itself."""
    return replace(problem, fp8_pages=False, page_box=LEAST_BOX) if problem.fp8_pages else problem


def pages_refusal(problem: AttentionProblem) -> str | None:
    """Why the forward does not take a problem's pages, or None."""
    if problem.page_box < LEAST_BOX:
        return f"takes pages of whole {LEAST_BOX} keys"
    if problem.backward:
        return "computes no gradient over pages"
    if problem.bias:
        return "takes no bias over pages"
    if problem.dropout:
        return "takes no dropout over pages"
    return None


def offsets_refusal(problem: AttentionProblem) -> str | None:
    """Why the forward does not take a problem with query offsets, or None."""
    if problem.layout != "dense":
        return "takes no query offsets of packed sequences"
    if problem.dropout:
        return "takes no dropout with query offsets"
    if problem.bias:
        return "takes no bias with query offsets"
    if problem.batch_invariant:
        return "promises no batch invariance with query offsets"
    return None


# Tiles whose kernels over pages ran on a GPU, in bfloat16 under a limit on the right; softcap and sink did not.
PAGED_TILES = (64, 64), (128, 128), (256, 256)


def pages_unchecked(problem: AttentionProblem) -> str | None:
    """Why the forward, which was not run on such pages on a GPU yet, leaves a problem to others unless it is named; or None."""
    if problem.layout != "paged":
        return None
    checked = tile_dims(problem.head_dim, problem.head_dim_v) in PAGED_TILES and problem.dtype == torch.bfloat16
    if checked and problem.right is not None and not (problem.softcap or problem.sink):
        return None
    return "was not run on such pages on a GPU yet: ask for it by backend='hopper'"


def invariance_refusal(problem: AttentionProblem) -> str | None:
    """Why a batch-invariant problem is not for the forward, which takes all problems of a kind or none; or None."""
    if problem.bias:
        return "promises batch invariance without a bias alone"
    if problem.dropout and problem.left is not None:  # of which only some lengths are run here
        return "promises no batch invariance of dropout under a window"
    if problem.layout == "paged" and problem.left is not None:  # whose key tiles begin elsewhere than packed calls'
        return "promises no batch invariance of a window over pages"
    return None


def largest_refusal(features: Features, few: bool) -> str | None:
    """Why the forward does not find a call's largest logits, or None; ``few``: fewer than MANY queries of grouped heads."""
    if features.columns or features.left or features.q_offset:
        return "finds no largest logits under a column mask or a window, or with query offsets"
    if features.dropout or features.softcap or features.sink or features.bias:  # a softcap's tanh is no closer than P needs
        return "finds no largest logits beside dropout, a softcap, a sink or a bias"
    if features.varlen or features.batch_invariant or few:
        return f"finds no largest logits of packed or batch-invariant calls, or of fewer than {MANY} queries of grouped heads"
    if features.dtype != torch.bfloat16:  # compiled, not run on a GPU yet; nor were other head dims than those of WITH_BIAS
        return "finds largest logits of calls in bfloat16 alone"
    return None


def bias_refusal(problem: AttentionProblem) -> str | None:
    """Why the forward does not take a problem's bias, or None."""
    if problem.bias == "tensor":
        return "takes no bias but ALiBi and tables of distances"
    if problem.columns:
        return "takes no bias under a column mask"
    if max(problem.head_dim, problem.head_dim_v) > 128:
        return "takes no bias past head_dim 128"
    if problem.bias == "distance":
        if problem.softcap or problem.dropout:
            return "takes no table of distances beside a softcap or dropout"
        if problem.sink or problem.seqused or tile_dims(problem.head_dim, problem.head_dim_v) not in WITH_BIAS:  # as below
            return "takes no table of distances beside a sink, with seqused_k, or at head dims from 72 to 96"
    if problem.dtype != torch.bfloat16:  # compiled without a spill, not run on a GPU yet
        return "takes a bias of calls in bfloat16 alone"
    if problem.softcap and problem.dropout:
        return "takes no bias beside both a softcap and dropout"
    return None


def bias_backward_refusal(features: Features) -> str | None:
    """Why the backward does not take a call's bias, which the forward takes, or None."""
    if features.bias == "distance":
        if features.deterministic:
            if features.bias_grad:
                return "adds to the gradient of a table in any order"
            # Compiled, not compared with anything on a GPU yet.
            return "has no deterministic backward beside a table of distances"
        if features.dlse:  # rows' dS sum to dLSE, where the gradient of the far left's entry has them sum to 0
            return "takes no gradient through lse beside a table of distances"
        return None
    if features.bias_grad:
        return "computes no gradient of slopes"
    if max(backward_dims(features)) == 128:  # registers spill
        if features.softcap:
            return "has no kernel for a bias beside a softcap past head_dim 96"
        if features.dropout and features.varlen:
            return "has no kernel for a bias beside dropout of packed calls past head_dim 96"
    return None


def named_set() -> list[ForwardConfig]:
    """The forward variants that `warploom build` prepares.

    Full, causal and windows, dense, packed or under a column mask, with one of softcap and sink at most; full and causal ones
    under a column mask of packed sequences, and batch-invariant ones; and without those for what ``shape`` tells apart, and for
    up to 8 queries of heads that share their keys. In bfloat16, of the head dims that models have with them: with ALiBi dense
    ones, full or causal, those that reach too, and causal packed ones; dense ones with a table of distances, full or causal;
    long causal ones that find their largest logits. Causal ones over pages of 16 keys, the size that a cache has
    where none is asked for, and for up to 8 and to 32 queries of such heads those that dispatch takes unasked.

    Others (windows without a right limit, several features, seqused_k) are compiled when first called for.
    """
    extras: tuple[dict[str, Any], ...] = ({}, {"columns": True}, {"varlen": True}, {"sink": True}, {"softcap": True})
    found: dict[ForwardConfig, None] = {}
    for extra, dims, band, long, dtype in product(extras, TILINGS, BANDS, (False, True), DTYPES):
        found[config(Features(dtype, *dims, **band | extra), long)] = None
    for dims, varlen, long in product(WITH_BIAS, (False, True), (False, True)):
        found[config(Features(torch.bfloat16, *dims, right=True, varlen=varlen, bias="alibi"), long)] = None
    for dims in WITH_BIAS:
        found[config(Features(torch.bfloat16, *dims, bias="alibi"), True)] = None
        for right in (False, True):
            found[with_reach(config(Features(torch.bfloat16, *dims, right=right, bias="alibi"), True))] = None
        found[with_largest(config(Features(torch.bfloat16, *dims, right=True), True))] = None
    for dims, right, long in product(WITH_BIAS, (False, True), (False, True)):
        found[config(Features(torch.bfloat16, *dims, right=right, bias="distance"), long)] = None
    for dims, right, dtype in product(TILINGS, (False, True), DTYPES):
        found[config(Features(dtype, *dims, right=right, columns=True, varlen=True), True)] = None
        found.update({config(Features(dtype, *dims, right=right), True, each): None for each in PACK_GQA[:1]})
    for dims, right, dtype in product(TILINGS, (False, True), DTYPES):
        found[config(Features(dtype, *dims, right=right, batch_invariant=True), True)] = None
    for dims, dtype in product(TILINGS, DTYPES):
        pages: dict[str, Any] = {"varlen": True, "used": True, "paged": True, "page_box": 16}
        found[config(Features(dtype, *dims, right=True, **pages), True)] = None
        if dims in PAGED_TILES and dtype == torch.bfloat16:
            found.update({config(Features(dtype, *dims, right=True, **pages), True, each): None for each in PACK_GQA})
        found.update({config(Features(dtype, *dims), False, shape=name): None for name in ("brief", "square")})
        found[config(Features(dtype, *dims, right=True), True, shape="few")] = None
    return list(found)


# Of the backward by (head_dim, head_dim_v) of its tile: queries a step, keys a block, stages of the dO ring. Smaller head dims
# run in the next larger tile by TMA bounds. Past 128 a warpgroup keeps dV and the other dK, of as many keys as registers hold.
BACKWARD_TILES = {
    (64, 64): (128, 128, 2),
    (96, 96): (64, 128, 2),  # 4096 keys: 522 TFLOP/s; in the tile of 128 452
    (128, 128): (80, 128, 2),  # 16384 keys causal: 632 TFLOP/s; 64 queries 601
    (192, 128): (64, 112, 1),  # 8192 keys full: 557; 96 keys 518, 64 354
    (192, 192): (64, 96, 1),  # 16384 keys: 562, dQ in two pieces and two stages 486; 64 keys 392
    (256, 256): (64, 64, 1),  # 16384 keys: 588; 80 keys, not in pairs of blocks, 463
}
# Where blocks come in pairs, as BackwardConfig has it.
PAIRS = {(256, 256)}

# Head dims whose causal calls may go in waves.
IN_WAVES = 128, 128

# Up to so many queries, key blocks of a causal call store their first dQ of a tile in place of adding it to zeros; where blocks
# begin with the same tile they would wait for each other. Keys of 1024, head_dim 64 313 TFLOP/s and 303, 128 341 and 305; 4096,
# 506 and 502, 562 and 551; 8192, 32 heads over 8, 555 and 606: grouped heads up to fewer.
SHORT, SHORT_GROUPED = 4096, 1536


# Up to so many queries a causal column mask at head_dim 128 has steps of 64 queries, which waste less at the ends of what keys
# see; longer ones of 80. H200, 8192 queries: chunks 1.03, a tree 1.02, causal documents 1.02, a shared question 1.00, random
# eviction 0.97; 32768: chunks 1.02, causal documents 0.98.
SHORT_MASKED = 8192


def is_short(seqlen_q: int, grouped: bool, masked: bool = False) -> bool:
    """Whether a call has few queries, which differs where heads are grouped and under a column mask."""
    return seqlen_q <= (SHORT_MASKED if masked else SHORT_GROUPED if grouped else SHORT)


def backward_dims(features: Features) -> tuple[int, int]:
    """Head dims of the backward's tile that holds a call's."""
    return next(dims for dims in BACKWARD_TILES if dims[0] >= features.head_dim and dims[1] >= features.head_dim_v)


def takes_columns(features: Features) -> bool:
    """Whether the backward has a kernel for this call's column mask: where registers suffice; of packed calls to 128."""
    dims, softcap, dropout = backward_dims(features), features.softcap, features.dropout
    if max(dims) < 128:
        spills = dropout and softcap and features.deterministic
    elif max(dims) == 128:
        spills = softcap or (dropout and features.deterministic)
    else:
        spills = (softcap and (features.deterministic or dims in PAIRS)) or features.varlen
    return not spills


def takes_dropout(features: Features) -> bool:
    """Whether the backward has a kernel for this call's dropout: beside a softcap to head_dim 64, else registers spill."""
    return not (features.dropout and features.softcap and max(features.head_dim, features.head_dim_v) > 64)


@cache
def backward_config(features: Features, short: bool, waves: bool = False) -> BackwardConfig:
    """The variant for a call's features; ``short`` as ``is_short`` has it, ``waves``: in waves."""
    dims = backward_dims(features)
    tile_m, tile_n, dout_stages = BACKWARD_TILES[dims]
    left, softcap, varlen, deterministic = features.left, features.softcap, features.varlen, features.deterministic
    biased = features.bias and dims == (64, 64)
    if softcap or features.dropout or (tile_m == 80 and (left or (features.columns and (varlen or deterministic)))):
        tile_m = 64  # registers leave no room for more
    if tile_m == 80 and features.columns and features.right and short:
        tile_m = 64
    # A word of the scheduler's would spill; packed calls of 128 queries a step have not run on a GPU.
    if features.columns and tile_m == 128 and (varlen or (left and not deterministic)):
        tile_m = 64
    if biased and (deterministic or (features.bias == "distance" and varlen)):
        tile_m = 64
    if (softcap or features.dropout) and tile_n == 112:
        tile_n = 96  # constants, or Philox, would spill
    claims = short and features.right and not (left or deterministic or features.used or features.columns)
    return BackwardConfig(
        features.dtype_name,
        *dims,
        tile_m,
        tile_n=tile_n,
        dout_stages=dout_stages,
        claims=claims and (tile_n == 128 or (dims in PAIRS and not varlen)),
        # With a softcap, or a packed window at head_dim 64, its loop would spill. Lengths that differ within a call leave the
        # order of pairs to the hardware.
        persistent=(tile_n == 128 and not (deterministic or softcap or ((left or biased) and varlen and dims == (64, 64))))
        or (features.columns and (tile_n == 128 or dims in PAIRS))
        or (dims in PAIRS and not (deterministic or softcap or varlen)),
        pair=dims in PAIRS,
        waves=waves,
        **features.flags(BackwardConfig),
    )


def waves(variant: BackwardConfig, heads: int, seqlen_k: int, shared: int) -> tuple[int, int]:
    """As ``schedule.waves``, for a call that a variant serves; (0, 0): not in waves.

    That is at head_dim 128 where the query heads of the blocks in flight, ``shared`` bytes for each key head, do not fit into
    L2, and blocks would pass the tiles of one after the other head each at its own time: 1.00 to 1.34 of the speed. At others
    0.85 to 1.17, to 96 about 0.99.
    """
    if not variant.right or variant.left or variant.claims or variant.deterministic or variant.varlen or variant.columns:
        return 0, 0
    if variant.bias == "distance":  # whose near tiles differ from head to head
        return 0, 0
    if (variant.head_dim, variant.head_dim_v) != IN_WAVES or not _exceeds_l2(variant, seqlen_k, shared):
        return 0, 0
    return schedule.waves(heads, -(-seqlen_k // variant.tile_n))


def _exceeds_l2(variant: BackwardConfig, seqlen_k: int, shared: int) -> bool:
    """Whether the query heads of the blocks in flight do not fit into L2."""
    return max(1, 128 // -(-seqlen_k // variant.tile_n)) * shared > schedule.L2_BYTES


def in_turns(variant: BackwardConfig, heads: int, group: int, seqlen_k: int, shared: int) -> int:
    """Key heads of a section of a deterministic call; below 0: of one in waves, as ``schedule.in_turns`` has it.

    Waves are for grouped heads that do not fit into L2. By simulation a causal call of 64 heads over 8, 32768 keys of 128,
    finds 0.99 of its tiles in memory without them, 0.07 with them.
    """
    if variant.right and not (variant.left or variant.columns) and group > 1 and _exceeds_l2(variant, seqlen_k, shared):
        return -schedule.abreast(heads)
    return schedule.section(heads, -(-seqlen_k // variant.tile_n), shared)


def shared_bytes(seqlen_q: int, group: int, head_dim: int, head_dim_v: int) -> int:
    """Of Q, dO and dQ of a key head's group of query heads."""
    return seqlen_q * group * 4 * (head_dim + head_dim_v)


def backward_config_for(problem: AttentionProblem, dlse: bool = False) -> BackwardConfig:
    """The variant that runs a problem's backward; ``dlse``: a gradient arrives through lse."""
    features = Features.of(as_masked(problem), dlse)
    short = is_short(problem.seqlen_q, problem.heads_q > problem.heads_kv, features.columns)
    variant = backward_config(features, short)
    group = problem.heads_q // problem.heads_kv
    shared = shared_bytes(problem.seqlen_q, group, problem.head_dim, problem.head_dim_v)
    several = group > 1 and waves(variant, problem.batch * problem.heads_kv, problem.seqlen_k, shared)[1] > 0
    variant = replace(variant, waves=True) if several else variant
    return with_reach(variant) if variant.may_reach and _may_be_too_far(problem) else variant


def workspace(problem: AttentionProblem) -> int:
    """Bytes that the backward of a dense call allocates besides gradients."""
    variant = backward_config_for(problem)
    rows = problem.batch * problem.heads_q
    tiles = rows * -(-problem.seqlen_q // variant.tile_m)
    return 4 * workspace_floats(variant, tiles, rows * problem.seqlen_q * problem.head_dim, problem.sink)


def workspace_floats(variant: BackwardConfig, tiles: int, elements: int, sink: bool, split: int = 0) -> int:
    """Words that the backward allocates besides gradients: dQ in fp32, and behind it row statistics and counters.

    The latter stand in dq itself, whose 16-bit ``elements`` are written last of all, if they fit there and no gradient of
    ``sink`` is to be computed from them.
    """
    others = variant.others(tiles, split)
    return variant.sums(tiles) + (others if sink or 2 * others > elements else 0)


def backward_set() -> list[BackwardConfig]:
    """The backward variants that `warploom build` prepares.

    Full, causal and windows, each plain, short, deterministic or packed, causal ones in waves, and with column masks, short or
    not, deterministic or not; full and causal ones packed under a column mask; with ALiBi dense ones, full or causal, those
    that reach too, and causal packed ones; dense ones with a table of distances and its gradient or none, full or causal.

    Others are compiled when first called for.
    """
    extras: tuple[tuple[dict[str, Any], bool], ...] = (
        ({}, False),
        ({}, True),
        ({"deterministic": True}, False),
        ({"varlen": True}, False),
        ({"varlen": True}, True),
    )
    found = {
        backward_config(Features(dtype, *dims, **band | extra), short): None
        for (extra, short), dims, band, dtype in product(extras, BACKWARD_TILES, BANDS, DTYPES)
    }
    for deterministic, dims, band, dtype in product((False, True), BACKWARD_TILES, BANDS, DTYPES):
        features = Features(dtype, *dims, **band | {"columns": True, "deterministic": deterministic})
        if takes_columns(features):
            found |= {backward_config(features, short): None for short in (False, True)}
    for dims, right, dtype in product(BACKWARD_TILES, (False, True), DTYPES):
        features = Features(dtype, *dims, columns=True, varlen=True, right=right)
        if takes_columns(features):
            found[backward_config(features, False)] = None
    for dims, varlen, short in product(WITH_BIAS, (False, True), (False, True)):
        found[backward_config(Features(torch.bfloat16, *dims, right=True, varlen=varlen, bias="alibi"), short)] = None
    found |= {backward_config(Features(torch.bfloat16, *dims, bias="alibi"), False): None for dims in WITH_BIAS}
    for dims, right, short in product(WITH_BIAS, (False, True), (False, True)):
        found[with_reach(backward_config(Features(torch.bfloat16, *dims, right=right, bias="alibi"), short))] = None
    for dims, right, grad, short in product(WITH_BIAS, *((False, True),) * 3):
        features = Features(torch.bfloat16, *dims, right=right, bias="distance", bias_grad=grad)
        found[backward_config(features, short)] = None
    found |= {backward_config(Features(dtype, *IN_WAVES, right=True), False, waves=True): None for dtype in DTYPES}
    return list(found)
