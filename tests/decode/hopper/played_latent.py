"""Kernels of latent caches played through: their problems, and what holds for each of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.sm90.launch import Traced, launch
from tests.sm90.machine import Machine
from tests.sm90.mutants import check_barriers
from tests.sm90.state import Launch
from warploom.decode.hopper.latent_config import HEAD_DIM, HEAD_DIM_V, PIECE, PIECES, TILE

FAR = 1 << 30
NAMES = [
    "q", "k", "out", "lse", "lengths", "table", "parts", "stats", "kept", "tma_q", "tma_k", "mma", "mma", "mma", "multiplier",
    "left", "right", "capacity", "page_shift", "least", "most_log", "blocks_log", "parts_log", "levels",
    "items",
]  # fmt: skip


def problem(
    traced: Traced, lengths: list[int], blocks: int, blocks_log: int = 0, queries: int = 1, left: int = FAR,
    *, rows: int, row_blocks: int, least: int, most_log: int, levels: int, cluster: int,
) -> Launch:  # fmt: skip
    """Pages of 16 keys in turn, splits of ``least`` tiles; ``row_blocks``: blocks that share a sequence's rows."""
    capacity, batch, page = 1024, len(lengths), 16
    each = capacity // page
    values: dict[str, Any] = {
        "q": ((rows, HEAD_DIM, batch), ()), "k": ((page, HEAD_DIM, 1, each * batch), ()),
        "out": ((batch, rows, HEAD_DIM_V), (rows * HEAD_DIM_V, HEAD_DIM_V)),
        "lse": ((batch, rows // queries, queries), (rows, queries)),
        "lengths": ((batch,), ()), "table": ((batch, each), (each,)),
        **{name: ((1 << 24,), ()) for name in ("parts", "stats", "kept")},
        "left": left, "right": 0, "capacity": capacity, "page_shift": 4, "least": least, "most_log": most_log,
        "blocks_log": blocks_log, "parts_log": blocks_log and most_log, "levels": levels,
        "items": batch * row_blocks << blocks_log,
    }  # fmt: skip
    words = {(NAMES.index("lengths") + 1 << 32) + 4 * i: length for i, length in enumerate(lengths)}
    words |= {(NAMES.index("table") + 1 << 32) + 4 * i: i for i in range(each * batch)}
    return launch(traced, values, NAMES, grid=blocks, words=words, cluster=cluster)


def play(traced: Traced, launched: Launch, blocks: int) -> int:
    """Play a launch by a drawn order, in which nothing may hang or race: how often a tile's last columns are multiplied."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    machine = Machine(traced.kernel, launched, seed, blocks).run()
    for block in machine.blocks:
        assert not {barrier.name: barrier.come for barrier in block.named.values() if barrier.come}
    k = max(machine.launch.boxes)
    found = [Counter(at for parameter, at in products if parameter == k) for products in machine.products.values()]
    return sum(at[0] == HEAD_DIM - PIECE for products in found for at in products.elements())


def tiles_of(lengths: list[int]) -> int:
    """Tiles of all sequences."""
    return sum(-(-length // TILE) for length in lengths)


def check_each_barrier(traced: Traced, launched: Launch, named: Callable[[random.Random, list[Any]], list[Any]]) -> None:
    """A barrier that lets everybody pass is noticed: three drawn ones of shared memory, and of those with names ``named``."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    block = Machine(traced.kernel, launched, 0).run().blocks[0]
    assert len(block.mbarriers) == 2 + 2 * (PIECES + 2)
    draw = random.Random(seed)
    some = [*draw.sample([*block.mbarriers], 3), *named(draw, [b.name for b in block.named.values()])]
    check_barriers(traced.kernel, launched, some)
