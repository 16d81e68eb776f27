"""What the forward kernel moves through shared memory: predicted by the laboratory from the layout of its tiles alone."""

from __future__ import annotations

from collections import Counter

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.layout import swizzled
from warploom.smem import copies
from warploom.smem.layout import Tile
from warploom.smem.walk import count


def wavefronts(config: ForwardConfig, blocks: int, key_tiles: int) -> dict[str, tuple[int, int]]:
    """(wavefronts, ideal) of each access, of ``blocks`` query tiles that walk over ``key_tiles`` whole key tiles each.

    A block also asks for one pair of tiles past the last, which reads nothing and stores zeros that nobody reads.
    """
    layout = swizzled(config.tile(16)) if config.swizzle else config.tile(16)

    def tile(rows: int) -> Tile:
        return Tile(rows, config.head_dim, "f16", config.pad, layout.swizzles)

    times = 1 if config.q_registers else key_tiles
    moves = (
        (copies.NAME, copies.count(tile(config.tile_m)), 1),
        (copies.NAME, copies.count(tile(config.tile_n)), 2 * key_tiles),
        (copies.NAME, count("sts.128", tile(config.tile_n)), 2 * (config.stages - 1)),
        ("ldmatrix.x4", count("ldmatrix.x4", tile(16 * config.atoms)), config.warps * times),
        ("ldmatrix.x4", count("ldmatrix.x4", tile(config.tile_n)), config.warps * key_tiles),
        ("ldmatrix.x4.trans", count("ldmatrix.x4.trans", tile(config.tile_n)), config.warps * key_tiles),
    )
    all_of, ideal = Counter[str](), Counter[str]()
    for name, found, often in moves:
        all_of[name] += blocks * often * found.wavefronts
        ideal[name] += blocks * often * found.ideal
    return {name: (all_of[name], ideal[name]) for name in all_of}
