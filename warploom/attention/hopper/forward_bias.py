"""ALiBi in the forward: the accumulators of scores begin at it, and QKᵀ adds to them.

Along a side of the diagonal -slope · |d| rises or falls by a constant from column to column, in all rows and tiles alike; what
else depends on the row and the tile joins the row's maximum. So most key tiles begin at slope times column: at head_dim 64 by a
product of depth 16, as the tensor cores have time to spare there; else by an instruction an element, written among the
exponentials of the tile before, which leave issue slots, where its registers are free. Tiles that the diagonal crosses begin
at |d| of every element. A softcap comes before the bias, which is then added to the scores.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.attention.hopper.forward_base import ForwardBase
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.bias import Slopes, slope_of, slopes_of
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import from_bfloat16, magnitude, pack16, times
from warploom.kernels.cute.tiles import placed, tile_layout
from warploom.kernels.cute.wgmma import BY_K, IN_REGISTERS, product, words

PIECES = 16  # the depth of a product, of which a slope takes three
SIGNS = -0x7FFF8000  # of both halves of a word


class Alibi(Fields):
    """ALiBi of a warpgroup's rows; with several heads in a tile each of a thread's two rows has its own slope."""

    slopes: Slopes
    slope: Any  # as scores are before they are scaled; with a softcap in log2 units
    apart: Any  # of each row: distance to this thread's first column of key tile 0
    right_first: Any  # key tiles from this one on lie right of all queries of the warpgroup
    product: Any  # of slopes and columns, where scores begin at that
    left: Any  # its operands
    right: Any
    pieces: Any  # of each row's slope: what this thread holds of the left operand


class BiasedScores(ForwardBase):
    """What consumer warpgroups do for a bias."""

    def alibi(self, bias: Any, shared: Any) -> Alibi | None:
        slopes = slopes_of(bias) if self.biased else None
        if slopes is None:
            return None
        mma, left, right = None, None, None
        if self.multiplies:
            mma = product(BFloat16, (64, self.tile_n, PIECES), IN_REGISTERS, BY_K, BY_K)
            thread = mma.get_slice(0)
            left = mma.make_fragment_A(thread.partition_shape_A((64, PIECES)))
            right = mma.make_fragment_B(thread.partition_B(shared.alibi))
        return Alibi(
            slopes=slopes,
            slope=cute.make_rmem_tensor(2 if self.config.pack_gqa else 1, Float32),
            apart=cute.make_rmem_tensor(2, Float32),
            right_first=cute.make_rmem_tensor(1, Int32),
            product=mma,
            left=left,
            right=right,
            pieces=cute.make_rmem_tensor(2, Int32) if self.multiplies else None,
        )

    @cute.jit
    def alibi_columns(self, storage):
        """The right operand of the product: each key's column, counted from the tile's last, once for each piece of a slope."""
        keys = placed(storage, tile_layout(BFloat16, (self.tile_n, PIECES), 1, PIECES))
        for key in cutlass.range(cute.arch.thread_idx()[0], self.tile_n, self.threads, unroll=1):
            for i in cutlass.range_constexpr(PIECES):
                column = (key + 1 - self.tile_n).to(Float32) if const_expr(i < 3) else Float32(0.0)
                keys[key, i, 0] = BFloat16(column)
        cute.arch.fence_view_async_shared()
        return keys

    @cute.jit
    def set_bias(self, work, batch, places, shift):
        """The slopes and distances of a tile's rows."""
        alibi, first_column = work.alibi, cute.arch.lane_idx() % 4 * 2
        for r in cutlass.range_constexpr(2):
            query, head = places[r]
            alibi.apart[r] = (query + shift + alibi.slopes.origin - first_column).to(Float32)
            if const_expr(r < cute.size(alibi.slope)):
                slope = slope_of(alibi.slopes, batch, head)
                alibi.slope[r] = slope if const_expr(self.config.softcap) else slope / work.multiplier
            if const_expr(self.multiplies):
                alibi.pieces[r] = self.pieces(self.slope_at(work, r))

    @cute.jit
    def pieces(self, slope):
        """A slope as the sum of three bf16, of which the first lane of a quad has two, the second one."""
        first = pack16(slope, Float32(0.0), BFloat16)
        rest = slope - from_bfloat16(first, 0)
        second = pack16(rest, Float32(0.0), BFloat16)
        third = pack16(rest - from_bfloat16(second, 0), Float32(0.0), BFloat16)
        quarter = cute.arch.lane_idx() % 4
        return choose(quarter == 0, first | (second << 16), choose(quarter == 1, third, 0))

    @cute.jit
    def gemm_alibi(self, work, n, stage):
        """QKᵀ of key tile ``n``, which the diagonal does not cross, added to slopes times columns: one group."""
        alibi = work.alibi
        left = words(alibi.left)
        for r in cutlass.range_constexpr(2):
            piece = alibi.pieces[r]
            if const_expr(not self.config.right):
                piece = piece ^ SIGNS if n >= alibi.right_first[0] else piece
            left[r], left[r + 2] = piece, Int32(0)
        biasing, scoring = cute.make_mma_atom(alibi.product.op), cute.make_mma_atom(work.mma_qk.op)
        warpgroup.fence()
        biasing.set(warpgroup.Field.ACCUMULATE, False)
        cute.gemm(biasing, work.acc_s, alibi.left[None, None, 0], alibi.right[None, None, 0, 0], work.acc_s)
        scoring.set(warpgroup.Field.ACCUMULATE, True)
        for i in cutlass.range_constexpr(cute.size(work.k, mode=[2])):
            cute.gemm(scoring, work.acc_s, work.q[None, None, i], work.k[None, None, i, stage], work.acc_s)
        warpgroup.commit_group()

    @cute.jit
    def left_tiles(self, work, rows, seqlen_q, shift):
        """Key tiles to the first that does not lie left of all queries of ``rows``; which lie right is kept."""
        alibi, tile_n = work.alibi, self.tile_n
        first, past = rows
        if const_expr(not self.config.right):
            last = cutlass.min(past, seqlen_q) - 1 + shift + alibi.slopes.origin
            alibi.right_first[0] = cute.ceil_div(cutlass.max(last, 0), tile_n)
        return cutlass.max(first + shift + alibi.slopes.origin + 1, 0) // tile_n

    def slope_at(self, work: Any, r: int) -> Any:
        slope = work.alibi.slope
        return slope[r % cute.size(slope)]

    def column_at(self, c: int) -> float:
        """A thread's c-th column of a row, counted from its first."""
        return float(c // 2 * 8 + c % 2)

    @cute.jit
    def begin_crossed(self, work, n):
        """Scores of key tile ``n`` begin at the bias."""
        rows = work.rows_s
        for r in cutlass.range_constexpr(2):
            slope = -self.slope_at(work, r)
            apart = work.alibi.apart[r] - (n * self.tile_n).to(Float32)
            for c in cutlass.range_constexpr(self.tile_n // 4):
                rows[r, c] = magnitude(apart - self.column_at(c)) * slope

    @cute.jit
    def pack_and_begin(self, work, n):
        """P as an operand, and in its place what scores of key tile ``n`` begin at, unless the diagonal crosses it."""
        rows, packed = work.rows_s, words(work.p)
        slopes = [self.toward(work, r, n) for r in range(2)]
        last = self.column_at(self.tile_n // 4 - 1)
        for i in cutlass.range_constexpr(cute.size(packed)):
            r, c = i % 2, i // 2 * 2
            packed[i] = pack16(rows[r, c], rows[r, c + 1], self.dtype)
            for j in cutlass.range_constexpr(2):
                rows[r, c + j] = times(slopes[r], self.column_at(c + j) - last)

    @cute.jit
    def toward(self, work, r, n):
        """By how much a row's scores rise from a column to the next, in a key tile that the diagonal does not cross."""
        slope = self.slope_at(work, r)
        if const_expr(not self.config.right):
            slope = -slope if n >= work.alibi.right_first[0] else slope
        return slope

    @cute.jit
    def row_parts(self, work, n, crossed):
        """What is still to be added to the scores of each row."""
        parts = []
        for r in cutlass.range_constexpr(2):
            if const_expr(crossed):
                parts.append(Float32(0.0))
            else:
                last = self.column_at(self.tile_n // 4 - 1)
                if const_expr(self.multiplies):  # which counts columns from the tile's first
                    last = float(self.tile_n - 1) - (cute.arch.lane_idx() % 4 * 2).to(Float32)
                apart = work.alibi.apart[r] - (n * self.tile_n).to(Float32) - last
                parts.append(-apart * self.toward(work, r, n))
        return parts

    @cute.jit
    def add_bias(self, work, n):
        """To capped scores of key tile ``n``."""
        rows = work.rows_s
        for r in cutlass.range_constexpr(2):
            slope = self.slope_at(work, r)
            apart = work.alibi.apart[r] - (n * self.tile_n).to(Float32)
            for c in cutlass.range_constexpr(self.tile_n // 4):
                rows[r, c] = rows[r, c] - magnitude(apart - self.column_at(c)) * slope
