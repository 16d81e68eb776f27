"""Two walks in reverse side by side: that of keys' gradients, which leaves terms, and that of values' gradients.

One reads v, dO, q and k, the other k, q and dO. Blocks of a cluster of two have one head, each one of the walks, and no stage
of the first tensor is filled again before both have read it. So neither is more than the stages of a ring ahead, and what both
read comes from memory once: 6 tensors' bytes where the walks one after the other have 9. A chunk's chain is the longer part of
its time: few heads, which leave processors idle, gain.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync

from warploom.kernels.cute.basics import WARPGROUP
from warploom.kernels.cute.rings import meet
from warploom.kernels.cute.tiles import tile_layout, tma_load, tma_store
from warploom.kernels.cute.wgmma import BY_K, BY_MN, IN_REGISTERS, IN_SHARED, product
from warploom.linear.hopper.config import COLUMNS, WalkConfig
from warploom.linear.hopper.walk import LOADER, Walk


class Pair(Walk):
    """The kernel of one configuration, itself the walk of keys' gradients; ``__call__`` is what gets compiled."""

    def __init__(self, config: WalkConfig):
        super().__init__(config)
        self.of_values = Walk(config.beside)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen, heads, ·), as those that follow
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        weights: cute.Tensor | None,  # as a walk's, as what follows
        logs: cute.Tensor | None,
        dots: cute.Tensor,
        totals: cute.Tensor,
        scale: Float32,
        stream: Any,
    ):
        """Describe the TMA copies and launch two blocks of each head."""
        config = self.config
        q, k, v, dout, dk, dv = [
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0])) for t in (q, k, v, dout, dk, dv)
        ]
        tile = (config.chunk, COLUMNS)
        box = tile_layout(self.dtype, tile, 1, COLUMNS)
        (tma_q, q), (tma_k, k), (tma_v, v), (tma_dout, dout) = [tma_load(t, box, tile) for t in (q, k, v, dout)]
        (tma_dk, dk), (tma_dv, dv) = [tma_store(t, box, tile) for t in (dk, dv)]
        self.kernel(
            q, k, v, dout, dk, dv, weights, logs, dots, totals, tma_q, tma_k, tma_v, tma_dout, tma_dk, tma_dv,
            product(self.dtype, (64, config.chunk, 16), IN_SHARED, BY_K, BY_K),
            product(self.dtype, (64, config.chunk, 16), IN_REGISTERS, BY_K, BY_K),
            product(self.dtype, (64, config.chunk, 16), IN_SHARED, BY_MN, BY_K),
            product(self.dtype, (64, config.head_dim, 16), IN_REGISTERS, BY_K, BY_MN),
            tile_layout(self.dtype, (config.chunk, config.head_dim), config.stages, COLUMNS),
            tile_layout(self.dtype, tile, config.stages * self.boxes, COLUMNS),
            tile_layout(self.dtype, tile, config.c_stages * config.groups, COLUMNS), box,
            tile_layout(self.dtype, tile, config.groups, COLUMNS), scale,
        ).launch(
            grid=[2 * dk.shape[2] * dk.shape[3], 1, 1],
            block=[(2 + config.groups) * WARPGROUP, 1, 1],
            cluster=[2, 1, 1],
            stream=stream,
            use_pdl=config.early,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        weights: cute.Tensor | None,
        logs: cute.Tensor | None,
        dots: cute.Tensor,
        totals: cute.Tensor,
        tma_q: cute.CopyAtom,
        tma_k: cute.CopyAtom,
        tma_v: cute.CopyAtom,
        tma_dout: cute.CopyAtom,
        tma_dk: cute.CopyAtom,
        tma_dv: cute.CopyAtom,
        mma_scores: cute.TiledMma,
        mma_inter: cute.TiledMma,
        mma_intra: cute.TiledMma,
        mma_update: cute.TiledMma,
        layout_ab: cute.ComposedLayout,
        layout_boxes: cute.ComposedLayout,
        layout_c: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
        layout_out: cute.ComposedLayout,
        scale: Float32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOADER:
            for atom in (tma_q, tma_k, tma_v, tma_dout, tma_dk, tma_dv):
                cpasync.prefetch_descriptor(atom)
        shared = self.share(layout_ab, layout_boxes, layout_c, layout_p, layout_out)
        self.init_barriers(warp, shared)
        self.begin_early()
        products = (mma_scores, mma_inter, mma_intra, mma_update)
        index = cute.arch.block_idx()[0]
        if index % 2 == 0:
            self.play(
                warp, index // 2, shared, (v, dout, q, dk, k), (tma_v, tma_dout, tma_q, tma_k, tma_dk), products, weights,
                None, None, None, (dots, totals), (logs,), scale,
            )  # fmt: skip
        else:
            self.of_values.play(
                warp, index // 2, shared, (k, q, dout, dv, None), (tma_k, tma_q, tma_dout, None, tma_dv), products, weights,
                None, None, None, (None, None), (logs,), scale,
            )  # fmt: skip
        meet(2)  # the other block may still come to this one's barriers
