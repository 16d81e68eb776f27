"""The warps that load Q, K and V of sequences whose keys lie in pages.

A key tile is read in boxes that divide tiles and pages, each from wherever its page is, by as many warps as there are. Their
lanes look up the pages of a tile's boxes, a box each, while the tile before is on its way. A box of TMA's ends where the
sequence does, and what lies behind counts as zeros: a NaN there would not vanish against P = 0.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper import schedule
from warploom.attention.hopper.forward_producer import Producer
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.packed import RAGGED
from warploom.kernels.cute.rings import advance, expect
from warploom.kernels.cute.tiles import tma_views


class PageRing(Fields):
    """The ring of K or V."""

    atom: Any
    shared: Any  # (key, column, box, box of columns, stage)
    keys: Any  # (row, column, end, page) of a head, as ``page_rows`` has them
    full: Any  # barriers
    empty: Any
    head_dim: int


class PagedProducer(Producer):
    """``load_pages``, in the place of ``load``."""

    @cute.jit
    def load_pages(self, part, q, k, v, lse, shared, table, tma_q, tma_k, tma_v, left):
        """Every ``loaders``-th box of K one tile ahead of V; the first warp also Q of each warpgroup, once a tile."""
        config, group = self.config, lse.shape[0] // k.shape[2]
        sizes = k.shape[3] - 1, k.shape[4]
        q_turn = Int32(self.q_stages)
        k_stage, k_phase = Int32(0), Int32(1)
        v_stage, v_phase = Int32(0), Int32(1)
        landed = Int32(0)  # phase of ``v_landed``
        tile_stage, tile_phase = Int32(0), Int32(0)
        m_block, head, sequence, first, end, _, q_start, _, _, seqlen_k, shift = self.next_tile(
            shared, tile_stage, tile_phase, Int32(0), Int32(0)
        )
        while head >= 0:
            head_kv = head // group
            if const_expr(config.pack_gqa):
                head_kv = head // schedule.tile_heads(group, config.heads_per_tile)
            keys, values = self.page_rings(k, v, head_kv, shared, tma_k, tma_v)
            if first < end:
                page, slot = self.find_pages(table, sequence, end - 1, seqlen_k, sizes)
                k_stage, k_phase = self.push_pages(keys, part, end - 1, page, slot, seqlen_k, k_stage, k_phase)
                if part == 0:
                    for i in cutlass.range_constexpr(self.warpgroups):
                        place, q_phase = self.q_place(i, q_turn)
                        cute.arch.mbarrier_wait(shared.q_empty + place, q_phase)
                        self.expect_queries(shared, place)
                        queries = cute.domain_offset((q_start, 0, 0), q)
                        if const_expr(config.pack_gqa):
                            self.load_group(tma_q, queries, shared, m_block, head, group, i)
                        else:
                            n = m_block * self.warpgroups + i
                            self.load_queries(tma_q, queries[None, None, head], shared, n, place, shared.q_full + place)
                q_turn = self.next_q(q_turn)
                for j in cutlass.range(end - first - 1, unroll=1):
                    n = end - 1 - j
                    page_v, slot_v = page, slot
                    page, slot = self.find_pages(table, sequence, n - 1, seqlen_k, sizes)
                    k_stage, k_phase = self.push_pages(keys, part, n - 1, page, slot, seqlen_k, k_stage, k_phase)
                    v_stage, v_phase = self.push_pages(values, part, n, page_v, slot_v, seqlen_k, v_stage, v_phase)
                if const_expr(self.config.left):
                    unseen = shift - left - first * self.tile_n  # keys of the tile that no query sees
                    v_stage, v_phase, landed = self.push_first(
                        values, part, first, page, slot, unseen, seqlen_k, v_stage, v_phase, landed, shared
                    )
                else:
                    v_stage, v_phase = self.push_pages(values, part, first, page, slot, seqlen_k, v_stage, v_phase)
            tile_stage, tile_phase = advance(tile_stage, tile_phase, self.tile_stages)
            m_block, head, sequence, first, end, _, q_start, _, _, seqlen_k, shift = self.next_tile(
                shared, tile_stage, tile_phase, Int32(0), Int32(0)
            )

    def page_rings(self, k: Any, v: Any, head: Any, shared: Any, tma_k: Any, tma_v: Any) -> tuple[PageRing, PageRing]:
        """The rings of K and of V, of the keys of one head."""
        config, (box, box_v) = self.config, self.config.boxes
        return (
            PageRing(
                atom=tma_k, shared=cute.flat_divide(shared.k, (config.page_box, box)), keys=k[None, None, head, None, None],
                full=shared.k_full, empty=shared.k_empty, head_dim=config.head_dim,
            ),
            PageRing(
                atom=tma_v, shared=cute.flat_divide(shared.v, (config.page_box, box_v)), keys=v[None, None, head, None, None],
                full=shared.v_full, empty=shared.v_empty, head_dim=config.head_dim_v,
            ),
        )  # fmt: skip

    def last_box(self, n: Any, seqlen_k: Any) -> Any:
        """The last box of key tile ``n`` that holds a key."""
        return cutlass.min((seqlen_k - n * self.tile_n - 1) // self.config.page_box, self.tile_n // self.config.page_box - 1)

    @cute.jit
    def find_pages(self, table, sequence, n, seqlen_k, sizes):
        """Page of each lane's box of key tile ``n``, and the key in the page that the box begins with; inside of the pool.

        In the place of boxes without a key comes the last one that has some: of a box outside of its tensor TMA did not fill
        in zeros on an H100, but ended in an illegal access. Its keys are finite where those that queries see are.
        """
        page_size, pages = sizes
        box = cutlass.min(cute.arch.lane_idx(), self.last_box(n, seqlen_k))
        key = n * self.tile_n + box * self.config.page_box
        number = key // page_size
        page = table[sequence, number]
        return cutlass.min(cutlass.max(page, 0), pages - 1), key - number * page_size

    @cute.jit
    def push_pages(self, ring, part, n, page, slot, seqlen_k, stage, phase):
        """Load this warp's boxes of key tile ``n`` into the ring once its stage is free; the stage and phase that follow."""
        cute.arch.mbarrier_wait(ring.empty + stage, phase)
        self.load_boxes(ring, part, n, page, slot, seqlen_k, stage, ring.full + stage)
        return advance(stage, phase, self.stages)

    @cute.jit
    def load_boxes(self, ring, part, n, page, slot, seqlen_k, stage, barrier):
        """Every ``loaders``-th box of key tile ``n``; their bytes, zeros too, are counted by a barrier."""
        box, loaders = self.config.page_box, self.config.loaders
        boxes = self.tile_n // box
        own = (boxes - part + loaders - 1) // loaders
        expect(barrier, own * (box * ring.head_dim * 2))
        last = self.last_box(n, seqlen_k)
        for j in cutlass.range(part, boxes, loaders, unroll=1):  # unrolled, its registers would spill
            count = cutlass.min(seqlen_k - n * self.tile_n - cutlass.min(j, last) * box, box)
            at = cute.arch.shuffle_sync(slot, j) + count
            rows = cute.domain_offset((RAGGED - count, 0), ring.keys[None, None, at, cute.arch.shuffle_sync(page, j)])
            self.load_box(ring, rows, j, stage, barrier)

    def load_box(self, ring: Any, rows: Any, j: Any, stage: Any, barrier: Any) -> None:
        """The ``j``-th box of a tile, from its ``rows`` (row, column)."""
        columns = cute.size(ring.shared.shape[1])
        views = tma_views(ring.atom, ring.shared, cute.local_tile(rows, (self.config.page_box, columns), (0, None)))
        for c in range(cute.size(ring.shared.shape[3])):
            cute.copy(ring.atom, views.tiles[None, c], views.shared[None, j, c, stage], tma_bar_ptr=barrier)

    @cute.jit
    def push_first(self, ring, part, n, page, slot, unseen, seqlen_k, stage, phase, landed, shared):
        """As ``push_pages``, of the values of a query tile's first key tile, of which no query may see the first keys.

        The first warp clears these once all are there, and boxes that stand in the place of others, which may hold them too.
        """
        cute.arch.mbarrier_wait(ring.empty + stage, phase)
        if unseen > 0:
            # Not before the last such tile is there: a warp that is ahead would take the place of one that is behind.
            cute.arch.mbarrier_wait(shared.v_landed, landed ^ 1)
            self.load_boxes(ring, part, n, page, slot, seqlen_k, stage, shared.v_landed)
            if part == 0:
                cute.arch.mbarrier_wait(shared.v_landed, landed)
                values = shared.v[None, None, stage]
                self.clear_rows(values, Int32(0), unseen)
                self.clear_rows(values, (self.last_box(n, seqlen_k) + 1) * self.config.page_box, Int32(self.tile_n))
                cute.arch.sync_warp()
            landed ^= 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.full + stage)
        else:
            self.load_boxes(ring, part, n, page, slot, seqlen_k, stage, ring.full + stage)
        stage, phase = advance(stage, phase, self.stages)
        return stage, phase, landed

    @cute.jit
    def clear_rows(self, values, first, end):
        """Zero rows [first, end) of a tile of V."""
        lane = cute.arch.lane_idx()
        for row in cutlass.range(first, end, unroll=1):
            for d in cutlass.range_constexpr(self.config.head_dim_v // 32):
                values[row, d * 32 + lane] = self.dtype(0.0)
        cute.arch.fence_view_async_shared()
