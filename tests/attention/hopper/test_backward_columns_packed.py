"""The compiled backward of packed sequences under a column mask played through: each sequence's own tiles, keys and turns."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from tests.attention.hopper.played import Sequences, backward, backward_names, tags
from tests.attention.hopper.test_backward_columns import Turning, drawn
from tests.attention.packed_bounds import packed_bounds
from tests.compiled import Built, machine_code
from tests.sm90.core import Run
from tests.sm90.lanes import LANES, UNKNOWN, lane
from tests.sm90.ptx import Instruction
from tests.sm90.state import Warp
from warploom.attention.features import Features
from warploom.attention.hopper.plan import backward_config
from warploom.masks import tiles
from warploom.masks.intervals import ResolvedMask
from warploom.runtime import modules

pytestmark = pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")

FP16, BF16 = torch.float16, torch.bfloat16
PACKED = {
    name: backward_config(Features(*features, columns=True, varlen=True, **flags), short=False)
    for name, (*features, flags) in {
        "head_dim 128": (BF16, 128, 128, {}),
        "head_dim 128, causal, used": (BF16, 128, 128, {"right": True, "used": True}),
        "head_dim 64, window": (FP16, 64, 64, {"right": True, "left": True}),
        "head_dim 96, causal, used, dropout": (FP16, 96, 96, {"right": True, "used": True, "dropout": True}),
        "head_dim 128, causal, deterministic": (BF16, 128, 128, {"right": True, "deterministic": True}),
        "head_dim 64, window, used, deterministic": (
            FP16, 64, 64, {"right": True, "left": True, "used": True, "deterministic": True},
        ),
    }.items()
}  # fmt: skip
RESOURCES = PACKED | {
    name: backward_config(Features(*features, columns=True, varlen=True, used=True, dlse=True, **flags), short=False)
    for name, (*features, flags) in {
        "head_dim 128, window": (FP16, 128, 128, {"right": True, "left": True}),
        "head_dim 128, window, deterministic": (BF16, 128, 128, {"right": True, "left": True, "deterministic": True}),
        "head_dim 96, window, softcap, deterministic": (
            BF16, 96, 96, {"right": True, "left": True, "softcap": True, "deterministic": True},
        ),
        "head_dim 96, window, dropout": (FP16, 96, 96, {"right": True, "left": True, "dropout": True}),
        "head_dim 64, causal, softcap, dropout": (BF16, 64, 64, {"right": True, "softcap": True, "dropout": True}),
    }.items()
}  # fmt: skip
# A short one, keys without queries, queries without keys, neither, one of several tiles; and tokens behind the last.
QUERIES, KEYS, USED, BEHIND = [17, 0, 40, 0, 230, 100], [129, 50, 0, 0, 300, 70], [128, 50, 0, 0, 280, 0], 9
LEFT, RAGGED = 200, 1 << 24


class Recording(Turning):
    """Counts the 16 bytes stored at each address of global memory, and keeps which words were read."""

    def __init__(self, *args: Any) -> None:
        self.written: Counter[int] = Counter()
        self.read: set[int] = set()
        super().__init__(*args)

    def _st_global(self, x: Instruction) -> Run:
        def store(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[0]))
            self.written.update(lane(where, i) for i in range(LANES) if mask >> i & 1)
            return True

        return store

    def _ld_global(self, x: Instruction) -> Run:
        run = super()._ld_global(x)

        def load(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[1]))
            self.read.update(lane(where, i) for i in range(LANES) if mask >> i & 1 and lane(where, i) is not UNKNOWN)
            return run(warp, mask)

        return load


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(RESOURCES, "sm_90a", tmp_path_factory)


class Problem:
    """A mask of so many heads over packed sequences, two query heads of one key head."""

    def __init__(self, name: str, heads: int, seed: int) -> None:
        self.name, self.config = name, PACKED[name]
        self.counted = USED if self.config.used else KEYS
        self.sequences = Sequences([0, *accumulate(QUERIES)], [0, *accumulate(KEYS)], self.counted)
        self.total_q, self.total_k = sum(QUERIES) + BEHIND, sum(KEYS) + BEHIND
        generator = torch.Generator().manual_seed(seed)
        lengths = zip(QUERIES, [*KEYS[:-1], KEYS[-1] + BEHIND], strict=True)
        parts = [drawn(heads, max(queries, 1), keys, False, generator).resolve(queries, keys) for queries, keys in lengths]
        vectors = [torch.cat(t, dim=2) for t in zip(*(part.vectors for part in parts), strict=True)]
        self.mask = ResolvedMask(LEFT if self.config.left else None, 0 if self.config.right else None, *vectors)

    def play(self, built: Built, seed: int, processors: int) -> Recording:
        traced = built.traced(self.name)
        bounds, written = packed_bounds(self.mask, *self.sequences)
        launch = backward(
            traced, self.config, self.total_q, self.total_k, processors, bounds=bounds, left=LEFT, sequences=self.sequences
        )
        start = backward_names(self.config).index("bounds") + 1 << 32
        for i in (~written).repeat(bounds.shape[1]).repeat_interleave(8).nonzero().flatten().tolist():
            del launch.words[start + 4 * i]  # nobody knows what stands there: a branch on it is noticed
        return Recording(traced.kernel, replace(launch, watched=range(1)), seed, processors).run()  # type: ignore[return-value]

    def steps(self) -> list[tuple[int, int, int, int, bool]]:
        """(Sequence, key block, first row, head, whether all of it is visible) of tiles that are not hidden."""
        config, found = self.config, []
        for n, queries in enumerate(QUERIES):
            first, keys = self.sequences.starts_k[n], self.counted[n]
            own = ResolvedMask(*self.mask[:2], *(t[..., first : first + keys] for t in self.mask.vectors))
            if not keys:
                continue
            wide, edges = tiles.column_bounds(own, queries, keys, config.tile_n), tiles.block_edges(keys, config.tile_n)
            for m in range(0, queries, config.tile_m):
                stop = min(m + config.tile_m, queries)
                classes = tiles.classify_row_block(wide, edges, m, stop, own.left, own.right, queries, keys)[0]
                for head in range(2):
                    row = classes[min(head, len(classes) - 1)].tolist()
                    whole = [kind == tiles.FULL and (i + 1) * config.tile_n <= keys for i, kind in enumerate(row)]
                    found += [(n, i, m, head, whole[i]) for i, kind in enumerate(row) if kind != tiles.HIDDEN]
        return found

    def columns(self, blocks: set[tuple[int, int]]) -> set[int]:
        """Packed keys of blocks of sequences."""
        found: set[int] = set()
        for n, block in blocks:
            first, keys = self.sequences.starts_k[n], self.counted[n]
            found.update(first + i for i in range(block * self.config.tile_n, min((block + 1) * self.config.tile_n, keys)))
        return found


def tokens(at: tuple[int, ...]) -> tuple[int, int]:
    """(Token, head) of a tile's first row: rows of a sequence count back from its end, which is the last coordinate."""
    row, head, end = at
    return row - RAGGED + end, head


@pytest.mark.parametrize("name, heads", list(zip(PACKED, [1, 2, 2, 1, 2, 1], strict=True)))
def test_each_sequence_alone(name: str, heads: int, built: Built) -> None:
    """Its visible tiles once, from its own keys and queries; gradients of every key once; nothing hangs or races.

    When deterministic, at each query tile those that see it, by their number in the sequence, whoever is first.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    problem = Problem(name, heads, seed)
    machine, steps = problem.play(built, seed, 1 + seed % 3), problem.steps()
    config, starts_q, starts_k, _ = problem.config, *problem.sequences
    found = [
        (tokens(one)[0], *tokens(other))
        for products in tags(machine, ("q", "k", "v", "do"), min(machine.launch.boxes))
        for (left, one), (right, other) in pairwise(products)
        if (left, right) == ("v", "do")
    ]
    assert sorted(found) == sorted((starts_k[n] + i * config.tile_n, starts_q[n] + m, head) for n, i, m, head, _ in steps)
    assert sum(map(len, machine.added.values())) == 2 * len(steps)
    assert len(machine.added) == 2 * len({(n, m, head) for n, _, m, head, _ in steps})

    if config.deterministic:
        turns = defaultdict(list)
        for n, i, m, head, _ in sorted(steps):
            tile = starts_q[n] // config.tile_m + n + m // config.tile_m
            turns[head * (problem.total_q // config.tile_m + len(QUERIES)) + tile].append(i + 1)
        first = min(machine.turns) >> 32 << 32
        assert {(at - first) // 8: order for at, order in machine.turns.items()} == turns

    names = backward_names(config)
    for gradient, dim in (("dk", config.head_dim), ("dv", config.head_dim_v)):
        start = names.index(gradient) + 1 << 32
        own = {at - start: count for at, count in machine.written.items() if at >> 32 == start >> 32}
        assert own == dict.fromkeys(range(0, 2 * dim * starts_k[-1], 16), 1)
    start = names.index("lts") + 1 << 32
    read = {(at - start) // 4 for at in machine.read if at >> 32 == start >> 32}
    for head in range(heads):
        mine = [step for step in steps if heads == 1 or step[3] == head]
        tested = problem.columns({(n, i) for n, i, _, _, whole in mine if not whole})
        there = problem.columns({(n, i) for n, i, *_ in steps})
        assert tested <= {at - head * problem.total_k for at in read if at // problem.total_k == head} <= there


@pytest.mark.parametrize("name", RESOURCES)
def test_resources(name: str, built: Built) -> None:
    """No spills, and no wait between products that are issued together: more would mean that ptxas serialised wgmma."""
    _, facts, cubin = built[name]
    assert facts["stack"] == 0, "registers spill"
    assert len(re.findall(r"WARPGROUP\.DEPBAR", machine_code(cubin))) == 2 * 4 + 1
