"""The loader warp of the FP8 forward; the scheduler is that of 16-bit calls. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from warploom.attention.hopper.forward_columns import ColumnProducer
from warploom.attention.hopper.forward_producer import KeyRing
from warploom.attention.hopper.fp8_base import E4M3, QUAD, SCALED, first_block, sequence_quads
from warploom.attention.hopper.fp8_config import Fp8ForwardConfig
from warploom.kernels.cute.rings import advance, expect
from warploom.kernels.cute.tiles import load_tile, tma_views


class Fp8Producer(ColumnProducer):
    """The roles of the producer's warps: those of `ColumnProducer`, but for ``load_fp8``."""

    config: Fp8ForwardConfig
    neighbours = QUAD

    @property
    def claims_late(self) -> bool:
        """Under a column mask, by ``load_lists``; ``load_fp8`` does not."""
        return self.config.columns

    @cute.jit
    def load_fp8(self, q, k, v, members, shared, tma_q, tma_k, tma_v):
        """Q of each warpgroup once a tile, then K one tile ahead of V."""
        config = self.config
        q_phase = Int32(1)
        k_stage, k_phase = Int32(0), Int32(1)
        v_stage, v_phase = Int32(0), Int32(1)
        tile_stage, tile_phase = Int32(0), Int32(0)
        m_block, head, batch, first, end, _, q_start, _, k_start, seqlen_k, _ = self.next_tile(
            shared, tile_stage, tile_phase, Int32(0), Int32(0)
        )
        while head >= 0:
            head_kv = head // members
            if const_expr(config.varlen):
                tq = cute.domain_offset((q_start, 0), q[None, None, head])
                tk = sequence_quads(k, head_kv, k_start, seqlen_k)
                tv = cute.domain_offset((0, first_block(k_start, batch) * SCALED), v[None, None, head_kv])
            else:
                tq, tk, tv = q[None, None, head, batch], k[None, None, None, head_kv, batch], v[None, None, head_kv, batch]
            keys, values = self.key_rings(tk, tv, shared, tma_k, tma_v)
            if first < end:
                k_stage, k_phase = self.push_keys(keys, end - 1, k_stage, k_phase)
                for i in cutlass.range_constexpr(self.warpgroups):
                    cute.arch.mbarrier_wait(shared.q_empty + i, q_phase)
                    self.expect_queries(shared, i)
                    self.load_queries(tma_q, tq, shared, m_block * self.warpgroups + i, i, shared.q_full + i)
                q_phase ^= 1
                for j in cutlass.range(end - first - 1, unroll=1):
                    k_stage, k_phase = self.push_keys(keys, end - 2 - j, k_stage, k_phase)
                    v_stage, v_phase = self.push(values, end - 1 - j, v_stage, v_phase)
                v_stage, v_phase = self.push(values, first, v_stage, v_phase)
            tile_stage, tile_phase = advance(tile_stage, tile_phase, self.tile_stages)
            m_block, head, batch, first, end, _, q_start, _, k_start, seqlen_k, _ = self.next_tile(
                shared, tile_stage, tile_phase, Int32(0), Int32(0)
            )

    @cute.jit
    def seen_keys(self, k_start, seqlen_k, shift, left, right):
        """As of 16 bits, but first keys stay, with which blocks of scales begin: values of hidden ones are zeros."""
        if const_expr(self.config.right):
            seqlen_k = cutlass.max(cutlass.min(seqlen_k, seqlen_k + right), 0)
        return k_start, seqlen_k, shift

    def expect_queries(self, shared: Any, i: Any) -> None:
        """The barrier of warpgroup ``i``'s Q waits for its bytes."""
        expect(shared.q_full, 64 * self.config.head_dim, i)

    def key_rings(self, k: Any, v: Any, shared: Any, tma_k: Any, tma_v: Any) -> tuple[KeyRing, KeyRing]:
        """The rings of K and of V of one head, K as quads of keys and V as (head_dim, seqlen).

        ``tma_k`` is the copy and the tiles in shared memory as it fills them.
        """
        config, (tma_k, loads_k) = self.config, tma_k
        gk = cute.local_tile(k, (2, self.tile_n // QUAD, config.boxes[0]), (None, None, None))
        gv = cute.local_tile(v, (config.head_dim_v, self.tile_n), (0, None))
        keys, values = tma_views(tma_k, loads_k, gk, 3), tma_views(tma_v, shared.v, gv)
        return (
            KeyRing(tma=keys, full=shared.k_full, empty=shared.k_empty, bytes=self.tile_n * config.head_dim),
            KeyRing(tma=values, full=shared.v_full, empty=shared.v_empty, bytes=self.tile_n * config.head_dim_v),
        )

    @cute.jit
    def push_keys(self, ring, n, stage, phase):
        """As ``push``, half after half of each box of K's columns."""
        boxes = self.config.head_dim // self.config.boxes[0]
        cute.arch.mbarrier_wait(ring.empty + stage, phase)
        expect(ring.full, ring.bytes, stage)
        for box in cutlass.range_constexpr(boxes):
            for half in cutlass.range_constexpr(2):
                load_tile(ring.tma, (half, n, box), (stage * boxes + box) * 2 + half, ring.full, stage)
        return advance(stage, phase, self.stages)

    @cute.jit
    def clear_value(self, values, key, column):
        """Zero in the place of a value in shared memory, (head_dim, key)."""
        values[column, key] = E4M3(0.0)
