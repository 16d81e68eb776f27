"""The compiled forward kernels over pages played through: what is read from where, without a hang or a race."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.hopper.played import Pages, Sequences, forward, tags
from tests.compiled import Built, machine_code
from tests.plain import ceil_div, plain
from tests.sm90.machine import Machine
from warploom.attention.features import Features
from warploom.attention.hopper import schedule
from warploom.attention.hopper.config import ForwardConfig
from warploom.attention.hopper.plan import config
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

PAGED: dict[str, Any] = {"varlen": True, "used": True, "paged": True}
CORE = {
    "head_dim 128, causal, boxes of 16": config(Features(torch.bfloat16, 128, 128, right=True, page_box=16, **PAGED), True),
    "head_dim 64, window, boxes of 64": config(
        Features(torch.bfloat16, 64, 64, right=True, left=True, page_box=64, **PAGED), True
    ),
}
GROUPS = "head_dim 128, few queries of groups, boxes of 16"
CORE[GROUPS] = config(Features(torch.bfloat16, 128, 128, right=True, page_box=16, **PAGED), True, each=8)
SHORT = "head_dims 104 and 200, window, boxes of 16"
CORE[SHORT] = config(Features(torch.float16, 104, 200, right=True, left=True, page_box=16, **PAGED), False)
RAGGED, HEADS = 1 << 24, 2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(CORE, "sm_90a", tmp_path_factory)


@pytest.mark.parametrize("name", CORE)
def test_resources(name: str, built: Built) -> None:
    variant, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert facts["registers"] <= 65536 // (128 * (variant.warpgroups + 1))
    listing = machine_code(cubin)
    assert "UTMALDG.5D" in listing and "LDL" not in listing and "STL" not in listing


class Loading(Machine):
    """Keeps what was loaded: the tensor map, its coordinates, and where to."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.loaded: list[tuple[int, tuple[int, ...], int]] = []
        super().__init__(*given, **options)

    def _land(self, target: Any, start: int, size: int, barrier: Any, warp: Any, tag: Any) -> None:
        self.loaded.append((*tag, start))
        super()._land(target, start, size, barrier, warp, tag)


def wanted(variant: ForwardConfig, sequences: Sequences, pages: Pages, left: int) -> Counter[tuple[int, ...]]:
    """Coordinates of the boxes of K, and their places in a tile, of all query tiles."""
    key_tiles = plain("kernels/cute/band.py", "key_tiles", cute=SimpleNamespace(ceil_div=ceil_div))
    box, columns = variant.page_box, variant.boxes[0]
    found: Counter[tuple[int, ...]] = Counter()
    tiles = -(-HEADS // variant.heads_per_tile)
    for n, (first_q, past_q) in enumerate(pairwise(sequences.starts_q)):
        queries, keys = past_q - first_q, min(sequences.used[n], pages.size * len(pages.table[n]))
        for row in range(0, queries, variant.queries):
            first, end = key_tiles(variant, row, row + variant.queries, queries, keys, keys - queries, left, 0)
            for key in range(first * variant.tile_n, end * variant.tile_n, box):
                at = min(key, (keys - 1) // box * box)  # in the place of boxes without a key the last one that has some
                count, slot = min(keys - at, box), at % pages.size
                page = min(max(pages.table[n][at // pages.size], 0), pages.count - 1)
                for column in range(0, variant.head_dim, columns):
                    place = 2 * (column * variant.tile_n + key % variant.tile_n * columns)
                    found[column, RAGGED - count, 0, slot + count, page, place] += tiles
    return found


def check_loads(
    name: str, built: Built, page_size: int, used: list[int], starts: list[int], blocks: int = 2, split: int = 0
) -> Loading:
    """All boxes of the call's key tiles come, each once."""
    variant, traced, seed = CORE[name], built.traced(name), random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    width = -(-max(384, *used) // page_size)
    table = [[draw.choice((draw.randrange(2 * width), -5, 2**31 - 1)) for _ in range(width)] for _ in used]
    sequences, pages, left = Sequences(starts, [], used), Pages(page_size, 2 * width, table), 40
    options: dict[str, Any] = {"left": left, "sequences": sequences, "pages": pages, "split": split}
    launch = forward(traced, variant, starts[-1] + 3, 0, blocks, HEADS, **options)
    machine = Loading(traced.kernel, launch, seed, blocks)
    machine.run()
    _, of_k, of_v = sorted(launch.boxes)
    want = wanted(variant, sequences, pages, left)
    for parameter in (of_k, of_v):  # whose head dims are the same
        found = [(*at, start) for tensor, at, start in machine.loaded if tensor == parameter]
        stage = 2 * variant.tile_n * variant.head_dim
        base = min((start for *_, start in found), default=0)
        assert Counter((*at, (start - base) % stage) for *at, start in found) == want
    return machine


LENGTHS = [([100, 260], [0, 150, 350]), ([70, 333], [0, 70, 110]), ([0, 20], [0, 0, 30])]


@pytest.mark.parametrize(("used", "starts"), LENGTHS, ids=str)
@pytest.mark.parametrize("page_size", [64, 192])
@pytest.mark.parametrize("name", [name for name in CORE if name != SHORT])
def test_pages_of_every_tile(name: str, page_size: int, used: list[int], starts: list[int], built: Built) -> None:
    """Inside of the pool whatever the table holds, no key behind a sequence's last one, and no box without a key."""
    check_loads(name, built, page_size, used, starts)


# Keys, starts of queries, blocks: one long sequence; a long one among others, one without queries; several tiles for a head.
SHARED = [([1500], [0, 5], 3), ([30, 900, 1100, 200], [0, 3, 8, 8, 20], 4), ([300, 2600], [0, 140, 148], 6)]


@pytest.mark.parametrize(("used", "starts", "blocks"), SHARED, ids=str)
@pytest.mark.parametrize("name", [name for name in CORE if CORE[name].split])
def test_shares_of_all_key_tiles(name: str, used: list[int], starts: list[int], blocks: int, built: Built) -> None:
    """No block multiplies more than its share, and each key tile is there once."""
    machine, variant = check_loads(name, built, 64, used, starts, blocks, split=1), CORE[name]
    total, longest = ceil_div(HEADS, variant.heads_per_tile), 0  # of the tokens past the last sequence
    for keys, (start, past) in zip(used, pairwise(starts), strict=True):
        tiles, each = (
            ceil_div(past - start, variant.queries) * ceil_div(HEADS, variant.heads_per_tile),
            ceil_div(keys, variant.tile_n),
        )
        total, longest = total + tiles * each, max(longest, each if tiles else 0)
    share = schedule.share(total, longest, blocks, 1, lambda condition, a, b: a if condition else b)
    products = tags(machine, ("q", "k", "v"), min(machine.launch.boxes))
    found = [sum(kind == "k" for kind, _ in group) for group in products]
    assert 0 < max(found) <= share < longest


def test_tiles_of_one_tile_of_keys_whose_first_a_window_hides(built: Built) -> None:
    """Warps that load run ahead of the one that clears keys, but not into the next tile's turn to be cleared."""
    traced, seed = built.traced(SHORT), random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    used = [draw.randint(40, 80) for _ in range(12)]
    starts = [4 * n for n in range(13)]
    sequences, pages = Sequences(starts, [], used), Pages(48, 24, [[2 * n, 2 * n + 1] for n in range(12)])
    launch = forward(traced, CORE[SHORT], 48, 0, 1, HEADS, left=9, sequences=sequences, pages=pages)
    Machine(traced.kernel, launch, seed, 1).run()
