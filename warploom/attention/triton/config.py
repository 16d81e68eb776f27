"""Tiles of the attention kernels: one table, no search at run time. Times are in docs/lab-notes/attention-triton.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from warploom.attention.features import Features


@dataclass(frozen=True)
class Tiling:
    """Sizes of one kernel variant."""

    m: int  # query rows of a tile
    n: int  # keys of a tile
    warps: int
    stages: int
    registers: int | None = None  # a cap a thread, so that two programs share a multiprocessor
    boxes: bool = False  # the tiles that the loop reads come through the copy engine, from tensor descriptors


@dataclass(frozen=True)
class Config:
    """The kernels of one head_dim and dtype."""

    forward: Tiling
    dkdv: Tiling
    dq: Tiling
    # Which of dK and dV a launch computes: both where the accumulators fit in registers, else one after the other.
    dkdv_parts: tuple[str, ...] = ("kv",)
    # They sum dscores of a bias that the others do not: of a tensor whose elements are shared, and by distance, where tiles of
    # one diagonal are added, so that they are square. Compiled, not timed, where nothing is said.
    dbias: Tiling = Tiling(32, 32, 4, 1)
    dtable: Tiling = Tiling(32, 32, 4, 1)


# Measured on an H200, bf16, 2 × 8k tokens, 2048 channels, causal, ms; the runner-up follows each.
_HOPPER = {
    # Forward 1.37 against 1.71 with 8 warps; dK/dV 2.12 against 2.31 with 2 stages; dQ 1.36 against 1.37 at 64×64.
    64: Config(Tiling(128, 64, 4, 3), Tiling(64, 64, 4, 3), Tiling(128, 64, 4, 3)),
    # Forward 1.16 against 1.21 at two programs a multiprocessor; dK/dV 2.13 against 2.15 at 64×64 (full: 3.54 against
    # 3.83); dQ 1.33 against 1.40 at 128×32.
    128: Config(Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 3), Tiling(128, 64, 8, 3)),
    # Forward 1.10 against 1.27 at 128×32; dK and dV 2.98 against 3.26 in one launch (full: 4.94 against 8.03); dQ 1.92
    # against 2.01 at 128×32.
    256: Config(Tiling(128, 64, 8, 2), Tiling(32, 128, 8, 3), Tiling(128, 64, 8, 1), ("v", "k")),
}
# 160 KiB of shared memory a block (A100) and less: the same shapes with fewer stages, or halved. Compiled, not timed.
_AMPERE = {
    64: Config(Tiling(128, 64, 8, 3), Tiling(64, 64, 4, 2), Tiling(128, 64, 4, 2)),
    128: Config(Tiling(128, 64, 8, 2), Tiling(32, 64, 4, 2), Tiling(64, 64, 4, 2)),
    256: Config(Tiling(64, 32, 4, 2), Tiling(16, 32, 4, 1), Tiling(32, 32, 4, 1)),
}
# fp32 operands are three TF32 products through registers: small tiles.
_FLOAT32 = {
    64: Config(Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
    128: Config(Tiling(64, 32, 8, 2), Tiling(32, 32, 4, 1), Tiling(32, 32, 4, 1)),
    256: Config(Tiling(32, 32, 8, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 4, 1)),
}


# Under a column mask, whose kernels need more registers and whose programs are shorter. Measured on an H200 over five masks
# of 2 × 8k tokens, mean ratio of the runner-up.
_HOPPER_COLUMNS = {
    # Forward 1.12 times 128×64; dK/dV 1.05 times 2 stages; dQ 1.19 times 128×64 with 8 warps.
    64: replace(_HOPPER[64], forward=Tiling(64, 64, 4, 3), dq=Tiling(64, 64, 4, 3)),
    # dK/dV 1.06 times 32×128 and 1.08 times 64×128; dQ 1.03 times 64×32.
    128: replace(_HOPPER[128], dkdv=Tiling(32, 64, 4, 3)),
    # Forward 1.02 times 128×32; dK and dV 1.29 times one launch for both; dQ 1.05 times 128×64.
    256: replace(_HOPPER[256], dq=Tiling(128, 32, 8, 2)),
}


# Where tensor descriptors can say what is read; times as above, of the same kernel through pointers second.
_BOXES = {
    # Forward 1.30 against 1.36; dK/dV 2.11 against 2.21; dQ 1.31 against 1.37.
    64: Config(Tiling(64, 64, 4, 3, boxes=True), Tiling(128, 64, 4, 2, boxes=True), Tiling(64, 64, 4, 3, boxes=True)),
    # Forward 1.07 against 1.14; dK/dV 1.67 against 2.19, and 2.06 at 64×128; dQ 1.32 against 1.31, full 2.37 against 2.63.
    128: Config(Tiling(64, 64, 4, 3, boxes=True), Tiling(64, 64, 4, 2, boxes=True), Tiling(128, 64, 8, 3, boxes=True)),
    # No gain: forward 1.10 against 1.09, dQ 1.89 against 1.92, dK and dV 3.11 against 2.96.
    256: _HOPPER[256],
}
# Causal documents and a shared question, ms.
_BOXES_COLUMNS = {
    # Forward 0.62 and 1.00 against 0.60 and 0.97: pointers; dK/dV 0.77 and 1.31 against 0.80 and 1.40; dQ 0.62 and 0.97
    # against 0.63 and 1.00.
    64: replace(_HOPPER_COLUMNS[64], dkdv=Tiling(128, 64, 4, 2, boxes=True), dq=Tiling(64, 64, 4, 3, boxes=True)),
    # Forward 0.45 and 0.69 against 0.49 and 0.72; dK/dV 0.62 and 1.09 against 0.77 and 1.38; dQ 0.57 and 0.86 against 0.58
    # and 0.87.
    128: replace(_BOXES[128], dq=Tiling(64, 64, 4, 2, boxes=True)),
    # Forward 0.47 and 0.66 against 0.53 and 0.75.
    256: replace(_HOPPER_COLUMNS[256], forward=Tiling(128, 64, 8, 2, boxes=True)),
}


# With a bias beside a column mask or dropout, whose addresses and values want as many registers as scores do. Compiled,
# not timed: of the tiles tried, those that leave the fewest registers on the stack (full and causal, bf16 and fp32 biases).
_SQUARE, _SMALL = Tiling(64, 64, 8, 2), Tiling(32, 32, 8, 2)
_CROWDED = {
    64: Config(Tiling(128, 32, 8, 2), _SQUARE, _SQUARE, dbias=_SQUARE, dtable=_SQUARE),
    128: Config(Tiling(128, 32, 8, 2), _SQUARE, _SQUARE, dbias=_SQUARE, dtable=_SQUARE),
    256: Config(Tiling(64, 32, 8, 2), Tiling(32, 64, 8, 2), Tiling(64, 32, 8, 2), ("v", "k"), dbias=_SMALL, dtable=_SMALL),
}
# With a bias that is read from memory, element by element: its layout becomes that of the scores, and rows are summed across
# warps. Measured on an H200, 16 heads of 4,096 tokens, a matrix a head, ms of one batch entry, then of four that share it.
_BIASED = {
    # Forward 0.62, 2.45; dK/dV 0.81, 3.18; dQ 1.09, 3.18; the gradient of all four 4.12.
    64: Config(Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), dbias=Tiling(64, 128, 8, 2)),
    # Forward 1.50, 6.00; dK/dV 1.27, 5.00; dQ 1.19, 3.29; the gradient 4.79.
    128: Config(Tiling(64, 32, 4, 2), Tiling(32, 64, 4, 2), Tiling(128, 64, 8, 2), dbias=Tiling(128, 64, 8, 2)),
    256: _CROWDED[256],
}
# With a table of distances, which is read into registers at once. Measured on an H200, T5's buckets of 2 × 8,192 tokens, 2,048
# channels, not causal, ms; before, through shared memory, at the tiles above.
_DISTANCES = {
    # Forward 4.0 against 28.2; dK/dV 5.5 against 35.5; dQ 4.6 against 30.9; the gradient 4.4 against 20.6.
    64: Config(Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3), dtable=Tiling(64, 64, 4, 2, boxes=True)),
    # Forward 2.9 against 15.1; dK/dV 4.4 against 21.6; dQ 3.2 against 17.8; the gradient 3.9 against 12.8.
    128: Config(Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 3), dtable=Tiling(64, 64, 4, 2, boxes=True)),
    256: _CROWDED[256],
}
# Where the copy engine brings a tensor's tiles; likewise.
_BIASED_BOXES = {
    # Forward 0.23, 0.85; dK/dV 0.36, 1.37 (0.44, 1.69 with boxes); dQ 0.37, 1.03; the gradient 1.95.
    64: Config(
        Tiling(64, 64, 4, 3, boxes=True), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 3, boxes=True),
        dbias=Tiling(64, 64, 4, 2, boxes=True),
    ),
    # Forward 0.34, 1.33; dK/dV 0.58, 2.27; dQ 0.54, 1.64, and 0.49, 1.56 at 128×64 in three stages, which ask for 257 of 227
    # KiB where the bias is fp32; the gradient 2.28, and 2.76 at 128×64 with 8 warps.
    128: Config(
        Tiling(128, 64, 8, 3, boxes=True), Tiling(64, 64, 4, 2, boxes=True), Tiling(64, 64, 4, 2, boxes=True),
        dbias=Tiling(64, 64, 4, 2, boxes=True),
    ),
    256: _CROWDED[256],
}  # fmt: skip


# Over FP8 pages, whose tiles are widened in registers. Compiled, not timed: of the tiles tried, those that leave no register on
# the stack, with scales by token and by head.
_FP8_PAGES = {64: Tiling(128, 64, 8, 3), 128: Tiling(128, 64, 8, 2), 256: Tiling(64, 32, 8, 1)}


# The kernel of stats: a tile of scores, and as much again for their sums. Compiled, not timed: of the tiles tried, those that
# leave the least on the stack. Before Hopper keys stay in registers, of each warp those that it multiplies.
_STATS = {64: Tiling(64, 128, 8, 3), 128: Tiling(64, 128, 8, 3), 256: Tiling(64, 64, 8, 2)}
_STATS_AMPERE = {64: Tiling(32, 128, 8, 3), 128: Tiling(32, 128, 8, 3), 256: Tiling(16, 64, 4, 2)}
_STATS_FLOAT32 = {64: Tiling(32, 32, 4, 1), 128: Tiling(16, 32, 4, 1), 256: Tiling(16, 32, 8, 1)}
# Under no more than a band, on Hopper: three programs a multiprocessor, whose products and exponentials take turns.
_SUMS = {64: Tiling(64, 128, 4, 2, 168), 128: Tiling(64, 128, 4, 2, 168), 256: Tiling(64, 64, 4, 2)}


@dataclass(frozen=True)
class Shared:
    """How batch entries that share a matrix make dQ and its gradient together."""

    tiling: Tiling
    entries: dict[int, int]  # the most of a launch, whose accumulators registers hold, by the bytes of a bias's element

    def launches(self, batches: int, itemsize: int) -> tuple[int, ...]:
        """Batch entries of each launch; none where they would be more than two.

        A sum of the launches before is kept in the gradient, which rounds it: once is what an element's own rounding allows.
        """
        most = self.entries.get(itemsize, 0)
        if batches < 2 or batches > 2 * most:
            return ()
        return (batches,) if batches <= most else (batches - batches // 2, batches // 2)


# Keys and values of all entries are staged at once, beside their queries and dO: fp32 at 128 has no room. Compiled, not timed:
# tiles and entries that leave nothing on the stack in the loops.
_SHARED = {
    64: Shared(Tiling(128, 32, 8, 2, boxes=True), {2: 4, 4: 3}),
    128: Shared(Tiling(128, 32, 8, 2, boxes=True), {2: 2}),
}


def shared_tiling(features: Features, capability: int) -> Shared | None:
    """The variant for a call whose batch entries share a matrix, which descriptors read; None where there is none."""
    width = next(w for w in (64, 128, 256) if max(features.head_dim, features.head_dim_v) <= w)
    plain = not (features.columns or features.dropout or features.q_offset or features.batch_invariant)
    return _SHARED.get(width) if plain and features.bias == "tensor" and capability // 10 == 9 else None


@cache
def stats_tiling(features: Features, capability: int, boxes: bool, largest: bool) -> Tiling:
    """The tiles of the kernel of stats; `boxes`: a descriptor can say what it reads of queries; `largest`: scores too."""
    width = next(w for w in (64, 128, 256) if features.head_dim <= w)
    if features.dtype == torch.float32:
        return _STATS_FLOAT32[width]
    if capability < 90:
        found = _STATS_AMPERE[width]
    elif features.columns or capability // 10 != 9:
        found = _STATS[width]
    else:
        found = _SUMS[width]
    if features.bias in ("tensor", "distance"):
        found = replace(found, n=64, warps=8, stages=2, registers=None)
    # Sums of a key have one order, whatever else is asked for.
    boxes = boxes and 90 <= capability < 120
    return replace(found, boxes=boxes, registers=found.registers if boxes and not largest else None)


@cache
def config(features: Features, capability: int, boxes: bool, bias_boxes: bool = False) -> Config:
    """The variant for a call's dtype, the wider of its head dims, its mask and a compute capability (90 for Hopper).

    `boxes`: tensor descriptors can say all that the kernels read of queries, keys and values. They can of dense calls alone: no
    matter to a batch-invariant one, whose tiles are those of packed calls. `bias_boxes`: likewise of a bias.
    """
    width = next(w for w in (64, 128, 256) if max(features.head_dim, features.head_dim_v) <= w)
    if features.bias in ("tensor", "distance"):
        if features.dtype != torch.float32 and 90 <= capability < 120:
            if features.columns or features.dropout:
                return _CROWDED[width]
            if features.bias == "distance":
                found = _DISTANCES[width]
            else:
                found = (_BIASED_BOXES if bias_boxes else _BIASED)[width]
            return found if boxes and not features.batch_invariant else _by_pointers(found)
        if features.dtype == torch.float32:
            return replace(_unstaged(_FLOAT32[width]), dbias=Tiling(16, 16, 4, 1), dtable=Tiling(16, 16, 4, 1))
        return _unstaged(_AMPERE[width])
    if features.dtype == torch.float32:
        return _FLOAT32[width]
    # 10x and 12x: sm_100 holds what Hopper's does, sm_120 only 99 KiB.
    if not 90 <= capability < 120:
        return _AMPERE[width]
    if features.fp8_pages:
        return replace(_HOPPER[width], forward=_FP8_PAGES[width])
    if boxes and not features.batch_invariant:
        found = (_BOXES_COLUMNS if features.columns else _BOXES)[width]
    else:
        found = (_HOPPER_COLUMNS if features.columns else _HOPPER)[width]
    if features.dropout and width == 256:
        # Random words change their layout through shared memory: with three stages dK asks for 228.5 of 227 KiB.
        found = replace(found, dkdv=replace(found.dkdv, stages=2))
    return found


def _by_pointers(found: Config) -> Config:
    """The same without boxes of queries, keys and values."""
    names = ("forward", "dkdv", "dq", "dbias", "dtable")
    return replace(found, **{name: replace(getattr(found, name), boxes=False) for name in names})


def _unstaged(found: Config) -> Config:
    """The same tiles one at a time: stages of a bias in fp32 take more shared memory than those of keys."""
    names = ("forward", "dkdv", "dq")
    return replace(found, **{name: replace(getattr(found, name), stages=1) for name in names})
