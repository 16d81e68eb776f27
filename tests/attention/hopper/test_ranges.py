"""Which key tiles a warpgroup computes and masks: the forward's own text, run on integers, against what each row sees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plain import CUTLASS, ceil_div, plain

BAND, CONSUMERS = "kernels/cute/band.py", "attention/hopper/forward_consumers.py"
MASK_BITS = 24
cute = SimpleNamespace(ceil_div=ceil_div)
key_tiles, whole_tiles = (plain(BAND, name, cute=cute) for name in ("key_tiles", "whole_tiles"))


class Nothing:
    """Stands for what has no part in the choice of tiles: barriers, tensors, products."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Nothing:
        return self

    def __add__(self, other: Any) -> Nothing:
        return self


NOTHING = Nothing()


class Walk:
    """One query tile of a block walked over by ``compute``: its warpgroup's key tiles, skipped and computed, in their order."""

    compute = plain(
        CONSUMERS,
        "Consumers.compute",
        **{"key_tiles": key_tiles, "whole_tiles": whole_tiles, "WARPGROUP": 128},
        **{name: name for name in ("NEAR", "FAR_LEFT", "FAR_RIGHT")},
        **{name: NOTHING for name in ("gemm", "pack", "release", "warpgroup")},
        advance=lambda stage, phase, stages: (stage, phase),
        cute=SimpleNamespace(
            arch=SimpleNamespace(
                make_warp_uniform=lambda x: x,
                warp_idx=lambda: 4,
                thread_idx=lambda: (0, 0, 0),
                mbarrier_wait=lambda *_: None,
            )
        ),
    )

    def __init__(self, config: Any, row: int, seqlen_q: int, seqlen_k: int, first: int, end: int) -> None:
        """The first warpgroup of a query tile whose first row is ``row``, which has key tiles [first, end)."""
        self.config, self.tile_m, self.warpgroups, self.stages, self.tile_stages, self.dtype = config, 64, 1, 2, 2, None
        self.biased = self.begins = self.multiplies = self.reads_distances = False
        shift = seqlen_k - seqlen_q
        assert row % 64 == 0
        self.tiles = iter([(row // 64, 0, 0, first, end, -1, 0, seqlen_q, 0, seqlen_k, shift), (-1,) * 11])
        self.events: list[tuple[str, int, bool]] = []

    def next_tile(self, *_: Any) -> tuple[int, ...]:
        return next(self.tiles)

    def rows(self, *_: Any) -> Nothing:
        return NOTHING

    def q_place(self, group: int, turn: int) -> tuple[int, int]:
        return group, turn

    def next_q(self, turn: int) -> int:
        return turn ^ 1

    with_queries = rows

    def place(self, m_block: int, head: int, local: int, members: int, seqlen_q: int) -> tuple[int, int]:
        return 64 * m_block + local, head

    def skip(self, shared: Any, group: int, stage: int, phase: int) -> tuple[int, int]:
        self.events.append(("skipped", -1, False))
        return stage, phase

    def softmax(self, work: Any, n: int, masked: bool) -> None:
        self.events.append(("computed", n, masked))

    def step(self, work: Any, n: int, last: int, stage: int, phase: int, masked: bool, *_: Any) -> tuple[int, int]:
        self.events.append(("computed", n, masked))
        return stage, phase

    def pass_ping_pong(self, group: int) -> None: ...

    wait_ping_pong = pass_ping_pong

    def set_limits(self, *_: Any) -> None: ...

    start = keep_scale = rescale = epilogue = while_scoring = find_scales = pack = set_limits

    def finish(self, work: Any, stage: int, phase: int) -> tuple[int, int]:
        return stage, phase


def walked(config: Any, row: int, seqlen_q: int, seqlen_k: int, left: int, right: int, first: int, end: int) -> Walk:
    walk = Walk(config, row, seqlen_q, seqlen_k, first, end)
    lse, keys = SimpleNamespace(shape=(1, 1, seqlen_q)), (seqlen_k, 64, 1, 1)
    walk.compute(NOTHING, lse, None, None, keys, 0, None, None, NOTHING, NOTHING, NOTHING, 1.0, 1.0, left, right)
    return walk


def calls(count: int) -> Iterator[tuple[int, int, int, int, int | None, int | None]]:
    draw = random.Random(1)
    for _ in range(count):
        lengths = draw.randint(1, 700), draw.randint(1, 900)
        tile_n, groups = draw.choice([64, 80, 112, 128]), draw.choice([2, 3, 4])
        left = draw.choice([None, None, -140, -5, 0, 3, 60, 128, 300])
        yield *lengths, tile_n, groups, left, draw.choice([None, 0, 0, -7, 5, 130])


def test_every_row_gets_its_keys() -> None:
    draw, masked_ones, whole_ones, skipped_ones = random.Random(2), 0, 0, 0
    for seqlen_q, seqlen_k, tile_n, groups, left, right in calls(4000):
        call = (seqlen_q, seqlen_k, left, right, tile_n)
        config = SimpleNamespace(
            tile_n=tile_n, left=left is not None, right=right is not None, pack_gqa=0, varlen=False, split=False, largest=False
        )
        shift, band = seqlen_k - seqlen_q, (left or 0, right or 0)
        tile = draw.randrange(ceil_div(seqlen_q, 64 * groups)) * 64 * groups
        first, end = key_tiles(config, tile, tile + 64 * groups, seqlen_q, seqlen_k, shift, *band)
        for top in range(tile, tile + 64 * groups, 64):
            events = walked(config, top, seqlen_q, seqlen_k, *band, first, end).events
            computed = [(n, masked) for what, n, masked in events if what == "computed"]
            # All warpgroups pass the same number of tiles, or one would wait for ever.
            assert len(events) == max(end - first, 0), call
            before = next((at for at, event in enumerate(events) if event[0] == "computed"), len(events))
            assert [n for n, _ in computed] == [end - 1 - before - at for at in range(len(computed))], call
            assert top < seqlen_q or not computed, call
            reached: set[int] = set()
            for row in range(top, min(top + 64, seqlen_q)):
                low = 0 if left is None else max(0, row + shift - left)
                high = seqlen_k if right is None else min(seqlen_k, row + shift + right + 1)
                seen = range(low // tile_n, (high - 1) // tile_n + 1) if low < high else range(0)
                assert set(seen) <= {n for n, _ in computed}, (call, row)
                reached |= set(seen)
                assert all(low <= n * tile_n and high >= (n + 1) * tile_n for n, masked in computed if not masked), (call, row)
            if (left is None or left >= 0) and (right is None or right >= 0):
                assert reached == {n for n, _ in computed}, call  # as explain() counts them
            masked_ones += sum(masked for _, masked in computed)
            whole_ones += sum(not masked for _, masked in computed)
            skipped_ones += len(events) - len(computed)
    assert min(masked_ones, whole_ones, skipped_ones) > 1000


@pytest.mark.parametrize("tile_n", [64, 80, 112, 128])
@pytest.mark.parametrize("left", [False, True])
def test_a_mask_leaves_the_columns_between_its_limits(tile_n: int, left: bool) -> None:
    """A thread has columns 8 i and 8 i + 1 of a row, counted from its first; limits count from there too."""
    hidden = -1e9
    names = {"MASK_BITS": MASK_BITS, "Float32": SimpleNamespace(inf=-hidden), "cutlass": CUTLASS}
    own_columns, lowest_bits, mask, element = (
        plain(CONSUMERS, f"Consumers.{name}", **names) for name in ("own_columns", "lowest_bits", "mask", "element")
    )
    thread = SimpleNamespace(tile_n=tile_n, config=SimpleNamespace(left=left))
    thread.own_columns = lambda limit: own_columns(thread, limit)
    thread.lowest_bits = lambda count: lowest_bits(thread, count)
    thread.element = lambda c: element(thread, c)
    columns = [8 * (c // 2) + c % 2 for c in range(tile_n // 4)]
    for n in (0, 3):
        for end in range(-30, tile_n + 30):
            start = (end * 7) % (tile_n + 40) - 20
            ends, starts = (end + n * tile_n, tile_n // 2 + n * tile_n), (start + n * tile_n, n * tile_n)
            rows = {(r, c): 1.0 for r in range(2) for c in range(len(columns))}
            limits = {(r, side): (ends, starts)[side][r] for r in range(2) for side in range(2)}
            mask(thread, rows, limits, n)
            for (r, c), value in rows.items():
                at = n * tile_n + columns[c]
                assert (value == 1.0) == (at < ends[r] and (not left or at >= starts[r])), (n, end, start, r, c)
                assert value in (1.0, hidden)
