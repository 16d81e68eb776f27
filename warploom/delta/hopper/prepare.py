"""What a chunk's walk needs that no state enters, for all chunks at once.

With D_ij = e^(G_i - G_j) the decay from token j to token i, and q and k normalized, S0 the state before the chunk:

    Y = V - e^G k S0 - A Y,    A_ij = D_ij (k_i . k_j) beta_j  for j < i,
    out = scale (e^G q S0 + P beta Y),    P_ij = D_ij (q_i . k_j)  for j <= i,
    S = e^G_last S0 + sum_j e^(G_last - G_j) k_j beta_j Y_j.

(Yang et al., 2024, arXiv 2412.06464, section 3.3, whose U is beta Y.) A block has a chunk of one key head: a warpgroup forms
q kᵀ and k kᵀ, then each warp takes a value head of its group, decays them, and inverts I + A (`prepare_head`).

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from warploom.delta.hopper.config import CHUNK, COLUMNS, MATRIX
from warploom.delta.hopper.inverse import BLOCK_BYTES
from warploom.delta.hopper.place import Place, place_of_slot
from warploom.delta.hopper.prepare_head import FRAGMENT_BYTES, PrepareHead, Room
from warploom.kernels.cute.basics import WARPGROUP, choose
from warploom.kernels.cute.instructions import bits_of, cp_async16, from_bfloat16, from_half, load_shared, store_shared
from warploom.kernels.cute.tiles import tile_layout
from warploom.kernels.cute.wgmma import BY_K, IN_SHARED, gemm, product

WARPS = 4
BLOCKS_BELOW = 10  # of 16 × 16, on and below the diagonal


class Prepare(PrepareHead):
    """The kernel of one configuration; ``__call__`` is what gets compiled."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen, heads, E)
        k: cute.Tensor,
        beta: cute.Tensor,  # (batch, seqlen, heads_v) fp32; in a forward pass words of `numbers`
        decay: cute.Tensor,  # as beta; not read without `decays`
        lengths: cute.Tensor,  # (batch,) int32, or empty
        cu: cute.Tensor,  # (sequences + 1,) int32, or empty
        prepared: cute.Tensor,  # (slots * heads_v, config.item) fp32
        scale: Float32,
        eps: Float32,
        normalize: Int32,
        decays: Int32,
        stream: Any,
    ):
        """Launch a block for each slot of each key head."""
        mma = product(self.dtype, (64, CHUNK, 16), IN_SHARED, BY_K, BY_K)
        layout = tile_layout(self.dtype, (CHUNK, self.config.width), 1, COLUMNS)
        slots = prepared.shape[0] // beta.shape[2]
        self.kernel(q, k, beta, decay, lengths, cu, prepared, mma, layout, scale, eps, normalize, decays).launch(
            grid=[slots * k.shape[2], 1, 1],
            block=[WARPGROUP, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.config.blocks,
            preferred_smem_carveout=100,  # per cent
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        beta: cute.Tensor,
        decay: cute.Tensor,
        lengths: cute.Tensor,
        cu: cute.Tensor,
        prepared: cute.Tensor,
        mma: cute.TiledMma,
        layout: cute.ComposedLayout,
        scale: Float32,
        eps: Float32,
        normalize: Int32,
        decays: Int32,
    ):
        size = cute.cosize(layout)

        @cute.struct
        class Storage:
            # Queries and keys; then for each warp a matrix before it leaves, and blocks that are inverted.
            tiles: cute.struct.Align[cute.struct.MemRange[self.dtype, max(2 * size, WARPS * (2 * MATRIX + BLOCK_BYTES))], 1024]
            products: cute.struct.Align[cute.struct.MemRange[cutlass.Int8, 2 * BLOCKS_BELOW * FRAGMENT_BYTES], 16]
            numbers: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * 3 * CHUNK], 16]
            norms: cute.struct.Align[cute.struct.MemRange[Float32, 2 * CHUNK], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * CHUNK], 16]

        cute.arch.griddepcontrol_launch_dependents()
        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        heads = k.shape[2]
        index = cute.arch.block_idx()[0]
        slot = index // heads
        head = index - slot * heads
        batch, start, first, live = place_of_slot(slot, lengths, cu, k.shape[1], CHUNK)
        if first < live:
            at = Place(batch=batch, start=start, first=first, live=live)
            self.play(storage, mma, layout, at, q, k, beta, decay, prepared, slot, head, scale, eps, normalize, decays)

    @cute.jit
    def play(self, storage, mma, layout, at, q, k, beta, decay, prepared, slot, head, scale, eps, normalize, decays):
        """A chunk of a key head."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        tiles = storage.tiles.data_ptr()
        tile_q, tile_k = (
            cute.make_tensor(cute.recast_ptr(tiles + i * cute.cosize(layout), layout.inner, dtype=self.dtype), layout.outer)
            for i in range(2)
        )
        address_q, address_k = tiles.toint(), (tiles + cute.cosize(layout)).toint()
        self.load(q, at, head, address_q)
        self.load(k, at, head, address_k)
        # Under the same wait as queries and keys.
        group = beta.shape[2] // k.shape[2]
        loaded = cute.make_rmem_tensor(4, Float32)
        numbers = storage.numbers.data_ptr().toint() + warp * (3 * CHUNK * 4)
        own = head * group + cutlass.min(warp, group - 1)
        if const_expr(not self.config.gradients):
            self.ask_numbers(at, beta, decay, own, lane, numbers)
        cute.arch.cp_async_commit_group()
        if const_expr(self.config.gradients):
            self.load_numbers(at, beta, decay, own, lane, loaded)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if const_expr(not self.config.gradients):
            self.take_numbers(at, beta, decay, own, lane, numbers, loaded)
        part = mma.get_slice(0)
        left_q, left_k = (mma.make_fragment_A(part.partition_A(tile)) for tile in (tile_q, tile_k))
        right = mma.make_fragment_B(part.partition_B(tile_k))
        qk, kk = (mma.make_fragment_C(part.partition_shape_C((CHUNK, CHUNK))) for _ in range(2))
        gemm(mma, kk, left_k[None, None, None, 0], right[None, None, None, 0], False)
        gemm(mma, qk, left_q[None, None, None, 0], right[None, None, None, 0], False)
        sums, norms = storage.sums.data_ptr().toint(), storage.norms.data_ptr().toint()
        if normalize != 0:
            self.add_squares(address_q, sums)
        warpgroup.wait_group(0)
        self.put_diagonal(kk, norms, warp, lane)
        cute.arch.sync_threads()
        self.put_norms(at, sums, norms, scale, eps, normalize)
        cute.arch.sync_threads()
        products = storage.products.data_ptr().toint()
        self.put_products(kk, qk, products, norms, warp, lane)
        cute.arch.sync_threads()
        room = Room(
            staging=tiles + warp * (2 * MATRIX),
            keys=products,
            queries=products + BLOCKS_BELOW * FRAGMENT_BYTES,
            blocks=address_q + (WARPS * 4 * MATRIX + warp * (2 * BLOCK_BYTES)),
            numbers=numbers,
            norms=norms,
        )
        for i in cutlass.range(warp, group, WARPS, unroll=1):
            if i != warp:
                if const_expr(self.config.gradients):
                    self.load_numbers(at, beta, decay, head * group + i, lane, loaded)
                else:
                    self.ask_numbers(at, beta, decay, head * group + i, lane, numbers)
                    cute.arch.cp_async_commit_group()
                    cute.arch.cp_async_wait_group(0)
                    self.take_numbers(at, beta, decay, head * group + i, lane, numbers, loaded)
            self.play_head(room, at, prepared, Int64(slot) * beta.shape[2] + (head * group + i), decays, lane, loaded)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load(self, x, at, head, target):
        """A chunk into the tile at ``target``, with zeros past what counts and past E."""
        own = cute.arch.thread_idx()[0]
        pieces = self.config.width // 8  # of 16 bytes, in a row
        rows = WARPGROUP // pieces
        row, piece = own // pieces, own % pieces
        stride = Int64(2) * x.stride[1]
        source = x.iterator.toint() + (
            Int64(2) * (Int64(at.batch) * x.stride[0] + Int64(head) * x.stride[2] + Int64(piece * 8))
            + Int64(at.start + at.first + row) * stride
        )
        whole = choose(piece * 8 < x.shape[3], 16, 0)
        left = at.live - at.first - row
        for i in cutlass.range_constexpr(CHUNK // rows):
            to = target + piece // 8 * (CHUNK * 128) + (row + i * rows) * 128 + ((piece % 8) ^ ((row + i * rows) % 8)) * 16
            size = choose(i * rows < left, whole, 0)
            cp_async16(to, 0, source + (i * rows) * stride, size)

    @cute.jit
    def add_squares(self, address, sums):
        """Sums of squares of half a row of a tile each."""
        own = cute.arch.thread_idx()[0]
        row, half = own % CHUNK, own // CHUNK
        total = Float32(0.0)
        count = self.config.width // 16
        for i in cutlass.range_constexpr(count):
            piece = half * count + i
            four = load_shared(address + piece // 8 * (CHUNK * 128) + row * 128 + ((piece % 8) ^ (row % 8)) * 16, 0, 4)
            for x in four:
                for part in cutlass.range_constexpr(2):
                    value = self.half(bits_of(x), part)
                    total = total + value * value
        store_shared(sums + (half * CHUNK + row) * 4, 0, [total])

    def half(self, word: Any, part: int) -> Any:
        """One of a word's two numbers."""
        return from_bfloat16(word, part) if self.dtype is cutlass.BFloat16 else from_half(word, part)

    @cute.jit
    def put_diagonal(self, kk, norms, warp, lane):
        """|k|² of each row, from the diagonal of k kᵀ."""
        row = lane // 4
        for tile in cutlass.range_constexpr(CHUNK // 16):
            if warp == tile:  # noqa: SIM102
                if lane % 4 == row // 2:
                    for r in cutlass.range_constexpr(2):
                        value = kk[8 * tile + 6 * r]
                        if row % 2 == 1:
                            value = kk[8 * tile + 6 * r + 1]
                        store_shared(norms + (16 * tile + row + 8 * r) * 4, 0, [value])

    @cute.jit
    def put_norms(self, at, sums, norms, scale, eps, normalize):
        """What rows of k and q are multiplied by; 0 where they do not count."""
        own = cute.arch.thread_idx()[0]
        if own < CHUNK:
            of_k, of_q = Float32(0.0), Float32(0.0)
            if at.first + own < at.live:
                of_k, of_q = Float32(1.0), scale
                if normalize != 0:
                    squares = load_shared(norms + own * 4, 0, 1)[0]
                    both = [load_shared(sums + (i * CHUNK + own) * 4, 0, 1)[0] for i in range(2)]
                    of_k = cute.math.rsqrt(squares + eps)
                    of_q = scale * cute.math.rsqrt(both[0] + both[1] + eps)
            store_shared(norms + own * 4, 0, [of_k])
            store_shared(norms + (CHUNK + own) * 4, 0, [of_q])

    @cute.jit
    def put_products(self, kk, qk, products, norms, warp, lane):
        """The products of normalized rows, as fragments of the blocks on and below the diagonal.

        Below it those of keys have their signs turned.
        """
        row, column = warp * 16 + lane // 4, lane % 4 * 2
        of_k = [load_shared(norms + row * 4, 32 * r, 1)[0] for r in range(2)]
        of_q = [load_shared(norms + row * 4, 4 * CHUNK + 32 * r, 1)[0] for r in range(2)]
        for tile in cutlass.range_constexpr(CHUNK // 16):
            if tile <= warp:
                across = [x for n in range(2) for x in load_shared(norms + column * 4, (16 * tile + 8 * n) * 4, 2)]
                to = products + (warp * (warp + 1) // 2 + tile) * FRAGMENT_BYTES + lane * 16
                sign = Float32(1.0) if tile == warp else Float32(-1.0)
                for n in cutlass.range_constexpr(2):
                    for acc, left, start in ((kk, [x * sign for x in of_k], 0), (qk, of_q, BLOCKS_BELOW * FRAGMENT_BYTES)):
                        values = [acc[8 * tile + 4 * n + i] * left[i // 2] * across[2 * n + i % 2] for i in range(4)]
                        store_shared(to, start + n * 512, values)
