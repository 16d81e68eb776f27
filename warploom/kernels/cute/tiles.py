"""Tiles in shared memory, and how TMA moves them. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from warploom.kernels.cute.fields import Fields


def tile_layout(dtype: Any, tile: tuple[int, int], stages: int, box: int, order: tuple[int, int, int] = (0, 1, 2)) -> Any:
    """Row-major tiles, one after the other, with a swizzle of ``box`` columns: 128, 64 or 32 bytes."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}[box * dtype.width // 8]
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (*tile, stages), order=order)


def placed(storage: Any, layout: Any) -> Any:
    """Shared memory as a tensor of a swizzled layout."""
    return storage.get_tensor(layout.outer, swizzle=layout.inner)


def transposed(tiles: Any) -> Any:
    """Tiles (row, column, stage) as (column, row, stage)."""
    return cute.make_tensor(tiles.iterator, cute.select(tiles.layout, mode=[1, 0, 2]))


def tma_load(tensor: Any, layout: Any, tile: tuple[int, int], multicast: bool = False) -> Any:
    """The TMA load of one tile, for all blocks of a cluster if ``multicast``, and the tensor of its coordinates."""
    operation = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(operation, tensor, cute.select(layout, mode=[0, 1]), tile)


def tma_store(tensor: Any, layout: Any, tile: tuple[int, int]) -> Any:
    """The TMA store of one tile, and the tensor of its coordinates."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, cute.select(layout, mode=[0, 1]), tile)


class Tma(Fields):
    """A TMA copy between tiles of global memory and stages of shared memory."""

    atom: Any
    shared: Any  # (copy, stage)
    tiles: Any  # (copy, tile)


def tma_views(atom: Any, shared: Any, tiles: Any, modes: int = 2) -> Tma:
    """Shared and global tiles, of so many ``modes``, as the TMA copy takes them."""
    shared, tiles = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, modes), cute.group_modes(tiles, 0, modes)
    )
    return Tma(atom=atom, shared=shared, tiles=tiles)


def load_tile(tma: Tma, tile: Any, stage: Any, barriers: Any, index: Any = 0, mask: Any = None) -> None:
    """Load a tile, to the blocks of the cluster in ``mask`` if given; the ``index``-th barrier counts its bytes."""
    at = tile if isinstance(tile, tuple) else (tile,)
    source = tma.tiles if tile is None else tma.tiles[(None, *at)]
    target = tma.shared[None, stage]
    more = {} if mask is None else {"mcast_mask": mask}
    cute.copy(tma.atom, source, target, tma_bar_ptr=barriers + index, **more)
