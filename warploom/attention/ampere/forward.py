"""The forward kernel: cp.async fills a ring of K and V tiles, ldmatrix feeds mma.m16n8k16, each warp owns 16 or 32 rows.

S stays in a warp's registers and becomes the A operand of PV where it is (Dao, FlashAttention-2, arXiv 2307.08691).
The exponentials of 16 keys run under the PV of the 16 keys before. O is divided by the sums once, at the end, and rescaled
only for key tiles in which some row's maximum has grown.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.attention.ampere.config import ForwardConfig
from warploom.attention.ampere.layout import Places, swizzled
from warploom.kernels.cute.band import key_tiles, whole_tiles
from warploom.kernels.cute.basics import DTYPES, LOG2_E, choose
from warploom.kernels.cute.epilogue import quad_words, store_words
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import cp_async16, exp2, hidden, ldmatrix_x4, mma_m16n8k16, pack16, reciprocal
from warploom.kernels.cute.softmax import capped, finite, log_sum_exp, multipliers, with_sink

# Copies are issued so many at a time (with a softcap, without): on Hopper each batch behind an ldmatrix costs three empty
# loads, and larger batches cost registers.
BATCH = {True: 3, False: 2}


class Work(Fields):
    """What a thread works on, and what it keeps."""

    q: Any  # where this lane reads its rows of Q, K and V, in bytes
    k: Any
    v: Any
    multiplier: Any  # exp2 takes scores times this; under a softcap the scores become log2 units before
    cap_in: Any
    acc: Any  # O: (atom, 8 columns, 4)
    row_max: Any  # of the raw scores, or of log2 units under a softcap
    row_sum: Any  # of this thread's columns
    held: Any  # Q, where registers hold it
    hidden: Any  # columns of a row that are hidden start here, and visible ones at ``visible``, less this thread's first column
    visible: Any
    end: Any


class Copy(Fields):
    """This thread's share of the copies of a tensor."""

    start: Any  # of the tensor's first tile
    next: Any  # where the next tile to load is
    stride: Any  # of rows, in bytes
    row: Any
    size: Any  # 16 bytes, or 0 past head_dim, where there are zeros
    to: Any  # in the first tile of the ring


class AmpereForward:
    """softmax(scale · q kᵀ + band) v for one configuration; ``__call__`` is what gets compiled."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.dim = config.head_dim
        self.atoms = config.atoms
        self.rows = 2 * config.atoms  # a thread's, 8 apart
        self.threads = 32 * config.warps
        self.places = Places(swizzled(config.tile(16)) if config.swizzle else config.tile(16))
        self.pitch = self.places.tile.pitch_bytes
        self.pieces = config.head_dim // 8  # of 16 bytes, in a row
        self.pass_rows = self.threads // self.pieces  # rows that the block copies at once

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        k: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim)
        v: cute.Tensor,  # (batch, seqlen_k, heads_kv, head_dim_v)
        out: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        lse: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32
        sink: cute.Tensor | None,  # (heads_q,) fp32
        scale: Float32,
        softcap: Float32,
        left: Int32,
        right: Int32,
        stream: Any,
    ):
        """Launch a block for every query tile of every head."""
        multiplier, cap_in = multipliers(self.config, scale, softcap)
        blocks = cute.ceil_div(lse.shape[2], self.tile_m) * lse.shape[1] * lse.shape[0]
        self.kernel(q, k, v, out, lse, sink, multiplier, cap_in, left, right).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.config.blocks,
            preferred_smem_carveout=100,  # per cent
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        multiplier: Float32,
        cap_in: Float32,
        left: Int32,
        right: Int32,
    ):
        config = self.config
        tile_bytes = self.tile_n * self.pitch
        sizes = (self.tile_m * self.pitch, config.stages * tile_bytes, config.stages * tile_bytes)

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[cutlass.Int8, sizes[0]], 1024]
            k: cute.struct.Align[cute.struct.MemRange[cutlass.Int8, sizes[1]], 1024]
            v: cute.struct.Align[cute.struct.MemRange[cutlass.Int8, sizes[2]], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        heads_q, seqlen_q = lse.shape[1], lse.shape[2]
        seqlen_k, heads_kv = k.shape[1], k.shape[2]
        m_blocks = cute.ceil_div(seqlen_q, self.tile_m)
        m_block, head, batch = self.block(cute.arch.block_idx()[0], m_blocks, heads_q)
        head_kv = head // (heads_q // heads_kv)
        shift = seqlen_k - seqlen_q
        top, past = m_block * self.tile_m, (m_block + 1) * self.tile_m
        first, end = key_tiles(config, top, past, seqlen_q, seqlen_k, shift, left, right)
        whole_first, whole_end = whole_tiles(config, top, past, first, seqlen_q, seqlen_k, shift, left, right)

        thread = cute.arch.thread_idx()[0]
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = warp * (16 * self.atoms) + lane // 4  # of the tile; and those 8, 16, 24 below
        row_q = m_block * self.tile_m + row

        # A lane's row in a 16 × 16 block: Q and V go down 16 rows and then right, K right and then down.
        down = self.places.base(lane % 16, lane // 16 * 8)
        across = self.places.base(lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8)
        work = Work(
            q=storage.q.data_ptr().toint() + warp * (16 * self.atoms * self.pitch) + down,
            k=storage.k.data_ptr().toint() + across,
            v=storage.v.data_ptr().toint() + down,
            multiplier=multiplier,
            cap_in=cap_in,
            acc=cute.make_rmem_tensor(self.atoms * self.dim // 2, Float32),
            row_max=cute.make_rmem_tensor(self.rows, Float32),
            row_sum=cute.make_rmem_tensor(self.rows, Float32),
            held=cute.make_rmem_tensor(self.atoms * self.dim // 4, Int32) if config.q_registers else None,
            hidden=row_q + shift + right + 1 - lane % 4 * 2,
            visible=row_q + shift - left - lane % 4 * 2,
            end=seqlen_k - lane % 4 * 2,
        )
        work.acc.fill(0.0)
        work.row_max.fill(-Float32.inf)
        work.row_sum.fill(0.0)

        if first < end:
            copy_k = self.copier(k, batch, head_kv, storage.k, thread)
            copy_v = self.copier(v, batch, head_kv, storage.v, thread)
            copy_q = self.copier(q, batch, head, storage.q, thread)
            self.load_edge(copy_q, self.tile_m, m_block, seqlen_q)
            self.load_edge(copy_k, self.tile_n, end - 1, seqlen_k)
            self.load_edge(copy_v, self.tile_n, end - 1, seqlen_k)
            cute.arch.cp_async_commit_group()
            copy_k.next[0] = copy_k.start + Int64((end - 2) * self.tile_n) * copy_k.stride
            copy_v.next[0] = copy_v.start + Int64((end - 2) * self.tile_n) * copy_v.stride
            for ahead in cutlass.range_constexpr(1, config.stages - 1):
                slot = Int32(ahead * tile_bytes)
                for load in self.loads(copy_k, end - 1 - ahead, first, slot) + self.loads(copy_v, end - 1 - ahead, first, slot):
                    load()
                cute.arch.cp_async_commit_group()
            if const_expr(config.q_registers):
                cute.arch.cp_async_wait_group(config.stages - 2)
                cute.arch.sync_threads()
                self.hold(work)

            n = end - 1
            stage = Int32(0)  # its byte offset in the ring
            for _ in cutlass.range(end - cutlass.max(whole_end, first), unroll=1):
                stage = self.step(work, copy_k, copy_v, n, first, stage, True)
                n -= 1
            for _ in cutlass.range(n + 1 - whole_first, unroll=1):
                stage = self.step(work, copy_k, copy_v, n, first, stage, False)
                n -= 1
            if const_expr(config.left):
                for _ in cutlass.range(n + 1 - first, unroll=1):
                    stage = self.step(work, copy_k, copy_v, n, first, stage, True)
                    n -= 1
            cute.arch.cp_async_wait_group(0)
        # Found out again: registers that these would take all through the loops are worth more.
        m_block, head, batch = self.block(hidden(cute.arch.block_idx()[0]), m_blocks, heads_q)
        thread = hidden(cute.arch.thread_idx()[0])
        row_q = m_block * self.tile_m + thread // 32 * (16 * self.atoms) + thread % 32 // 4
        logit = -Float32.inf
        if const_expr(config.sink):
            logit = sink[head] * LOG2_E  # type: ignore[index]
        self.epilogue(work, out[batch, None, head, None], lse[batch, head, None], logit, thread % 32, row_q, seqlen_q)

    # Which queries and keys

    def block(self, index: Any, m_blocks: Any, heads_q: Any) -> tuple[Any, Any, Any]:
        """Query tile, head and batch of a block: the tiles of one head, which share its keys, run side by side."""
        head = index // m_blocks
        m_block = index - head * m_blocks
        if self.config.right:
            m_block = m_blocks - 1 - m_block  # the rows that see most keys first
        batch = head // heads_q
        return m_block, head - batch * heads_q, batch

    # Global to shared memory

    def copier(self, t: Any, batch: Any, head: Any, storage: Any, thread: Any) -> Copy:
        """This thread's 16 bytes of a row, in every ``pass_rows``-th row of a tile."""
        row, piece = thread // self.pieces, thread % self.pieces
        start = t.iterator.toint() + 2 * (Int64(batch) * t.stride[0] + Int64(head) * t.stride[2] + Int64(piece * 8))
        stride = 2 * t.stride[1]
        return Copy(
            start=start + Int64(row) * stride,
            next=cute.make_rmem_tensor(1, Int64),
            stride=stride,
            row=row,
            size=choose(piece * 8 < t.shape[3], 16, 0),
            to=storage.data_ptr().toint() + self.places.base(row, piece * 8),
        )

    def load_edge(self, copy: Copy, rows: int, tile: Any, length: Any) -> None:
        """Load a tile that may reach past the tensor's ``length`` rows, with zeros there."""
        source = copy.start + Int64(tile * rows) * copy.stride
        left_over = length - tile * rows - copy.row
        for i in range(rows // self.pass_rows):
            self.copy_pass(copy, i, source, choose(i * self.pass_rows < left_over, copy.size, 0), Int32(0))

    def loads(self, copy: Copy, tile: Any, first: Any, slot: Any) -> list[Callable[[], None]]:
        """The steps of loading the next whole tile, of smaller keys, which do nothing for a tile before ``first``."""
        source = copy.next[0]
        size = choose(tile >= first, copy.size, 0)
        copy.next[0] = source - copy.stride * self.tile_n

        def one(i: int) -> Callable[[], None]:
            return lambda: self.copy_pass(copy, i, source, size, slot)

        return [one(i) for i in range(self.tile_n // self.pass_rows)]

    def copy_pass(self, copy: Copy, i: int, source: Any, size: Any, slot: Any) -> None:
        """Start this thread's ``i``-th copy of a tile."""
        rows = i * self.pass_rows
        cp_async16(copy.to + slot, rows * self.pitch, source + rows * copy.stride, size)

    # Shared memory to registers

    def blocks(self, base: Any, rows: int, trans: bool) -> Callable[[int, int], list[Int32]]:
        """Read the 16 × 16 block at (row, column) of a tile; ``base`` is this lane's place in its first block."""
        bases: dict[int, Any] = {}

        def read(row: int, column: int) -> list[Int32]:
            flips, offset = self.places.split(row, column)
            if flips not in bases:
                bases[flips] = base ^ flips if flips else base
            return ldmatrix_x4(bases[flips], offset, trans)  # type: ignore[no-any-return]

        return read

    def hold(self, work: Work) -> None:
        """Q into registers for all key tiles."""
        read = self.blocks(work.q, self.tile_m, False)
        for k in range(self.dim // 16):
            for m in range(self.atoms):
                for i, word in enumerate(read(16 * m, 16 * k)):
                    work.held[(k * self.atoms + m) * 4 + i] = word

    # The products

    @cute.jit
    def step(self, work, copy_k, copy_v, n, first, stage, masked):
        """One key tile: S, its softmax and PV, with the loads of a tile to come in between; the next tile's stage."""
        config = self.config
        tile_bytes, last = self.tile_n * self.pitch, (config.stages - 1) * self.tile_n * self.pitch
        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()
        ahead = n - (config.stages - 1)
        slot = choose(stage == 0, last, stage - tile_bytes)  # of the tile before, which every warp is done with
        # All of them under S: what is asked for under PV would not be there in time.
        s = self.scores(work, stage, self.loads(copy_k, ahead, first, slot) + self.loads(copy_v, ahead, first, slot))
        cute.arch.cp_async_commit_group()
        if const_expr(config.softcap):
            self.cap(work, s)
        if const_expr(masked):
            self.hide(work, s, n)
        self.rescale(work, self.tops(s))
        self.values(work, s, stage)
        return choose(stage == last, 0, stage + tile_bytes)

    def scores(self, work: Work, stage: Any, loads: list[Callable[[], None]]) -> Any:
        """S = Q Kᵀ as [atom][8 keys] of four values."""
        steps, groups = self.dim // 16, self.tile_n // 16
        read_q = self.blocks(work.q, self.tile_m, False)
        read_k = self.blocks(work.k + stage, self.tile_n, False)
        s: Any = [[[Float32(0.0)] * 4 for _ in range(2 * groups)] for _ in range(self.atoms)]
        order = [(k, g) for k in range(steps) for g in range(groups)]
        a = self.operand_q(work, read_q, 0)
        b = read_k(0, 0)
        batch = BATCH[self.config.softcap]
        spacing = max(1, len(order) * batch // len(loads))
        for at, (k, g) in enumerate(order):
            following = order[at + 1] if at + 1 < len(order) else None
            next_b = read_k(16 * following[1], 16 * following[0]) if following else b
            if g == groups - 1 and following:
                next_a = self.operand_q(work, read_q, k + 1)
            if at % spacing == 0:
                for load in loads[:batch]:
                    load()
                loads = loads[batch:]
            for m in range(self.atoms):
                for half in range(2):
                    s[m][2 * g + half] = mma_m16n8k16(a[m], b[2 * half : 2 * half + 2], s[m][2 * g + half], self.dtype)
            b = next_b
            if g == groups - 1 and following:
                a = next_a
        for load in loads:
            load()
        return s

    def operand_q(self, work: Work, read: Callable[[int, int], list[Int32]], k: int) -> list[list[Int32]]:
        if self.config.q_registers:
            return [[work.held[(k * self.atoms + m) * 4 + i] for i in range(4)] for m in range(self.atoms)]
        return [read(16 * m, 16 * k) for m in range(self.atoms)]

    def tops(self, s: Any) -> list[Any]:
        """The largest of this thread's scores of each of its rows."""
        tops: list[Any] = [None] * self.rows
        for g in range(self.tile_n // 8):
            for m in range(self.atoms):
                for i in range(4):
                    r = 2 * m + i // 2
                    tops[r] = s[m][g][i] if tops[r] is None else cute.arch.fmax(tops[r], s[m][g][i])
        return tops

    def cap(self, work: Work, s: Any) -> None:
        """Scores under the softcap, in log2 units."""
        for values in (x for atom in s for x in atom):
            for i in range(4):
                values[i] = capped(values[i], work.multiplier, work.cap_in)

    @cute.jit
    def hide(self, work, s, n):
        """Hide columns of key tile ``n`` past the keys or outside the band."""
        config = self.config
        for m in cutlass.range_constexpr(self.atoms):
            for r in cutlass.range_constexpr(2):
                down = 16 * m + 8 * r
                hidden = work.end
                if const_expr(config.right):
                    hidden = cutlass.min(hidden, work.hidden + down)
                hidden = hidden - n * self.tile_n
                for g in cutlass.range_constexpr(self.tile_n // 8):
                    for c in cutlass.range_constexpr(2):
                        x = s[m][g][2 * r + c]
                        s[m][g][2 * r + c] = x if 8 * g + c < hidden else -Float32.inf
                if const_expr(config.left):
                    visible = work.visible + down - n * self.tile_n
                    for g in cutlass.range_constexpr(self.tile_n // 8):
                        for c in cutlass.range_constexpr(2):
                            x = s[m][g][2 * r + c]
                            s[m][g][2 * r + c] = x if 8 * g + c >= visible else -Float32.inf

    @cute.jit
    def rescale(self, work, tops):
        """Take over the tile's maxima if that of some row of the warp has grown."""
        grown = False
        for r in cutlass.range_constexpr(self.rows):
            tops[r] = cute.arch.warp_reduction_max(tops[r], threads_in_group=4)
            higher = tops[r] > work.row_max[r]
            grown = higher if const_expr(r == 0) else grown | higher
        # A loop of one round or none: the compiler would execute the body of an if under a predicate, costly and for nothing.
        rounds = choose(cute.arch.vote_any_sync(grown), 1, 0)
        for _ in cutlass.range(hidden(rounds), unroll=1):
            self.take_over(work, tops)

    @cute.jit
    def take_over(self, work, tops):
        """Scale the sums and O to new maxima."""
        scale = Float32(1.0) if const_expr(self.config.softcap) else work.multiplier
        for r in cutlass.range_constexpr(self.rows):
            new = cute.arch.fmax(work.row_max[r], tops[r])
            correction = exp2((work.row_max[r] - finite(new)) * scale)
            work.row_max[r] = new
            work.row_sum[r] = work.row_sum[r] * correction
            for g in cutlass.range_constexpr(self.dim // 8):
                for c in cutlass.range_constexpr(2):
                    at = ((r // 2) * (self.dim // 8) + g) * 4 + r % 2 * 2 + c
                    work.acc[at] = work.acc[at] * correction

    def values(self, work: Work, s: Any, stage: Any) -> None:
        """O += P V, the exponentials of 16 keys between the products of the 16 before."""
        groups, pairs = self.tile_n // 16, self.dim // 16
        read = self.blocks(work.v + stage, self.tile_n, True)
        scale = Float32(1.0) if self.config.softcap else work.multiplier
        offsets = [finite(work.row_max[r]) * scale for r in range(self.rows)]  # of exponents, in log2 units
        sums = [work.row_sum[r] for r in range(self.rows)]
        acc = [work.acc[i] for i in range(self.atoms * self.dim // 2)]

        def exponentials(g: int) -> list[Callable[[], None]]:
            """The steps that turn S of 16 keys into P."""

            def one(m: int, half: int, i: int) -> Callable[[], None]:
                def run() -> None:
                    x = s[m][2 * g + half]
                    r = 2 * m + i // 2
                    for c in (i, i + 1):
                        x[c] = exp2(x[c] * scale - offsets[r])
                        sums[r] = sums[r] + x[c]
                    operands[g][m][2 * half + i // 2] = pack16(x[i], x[i + 1], self.dtype)

                return run

            return [one(m, half, i) for half in range(2) for i in (0, 2) for m in range(self.atoms)]

        operands: Any = [[[None] * 4 for _ in range(self.atoms)] for _ in range(groups)]
        for act in exponentials(0):
            act()
        order = [(g, d) for g in range(groups) for d in range(pairs)]
        b = read(0, 0)
        todo: list[Callable[[], None]] = []
        for at, (g, d) in enumerate(order):
            if d == 0 and g + 1 < groups:
                todo = exponentials(g + 1)
            following = order[at + 1] if at + 1 < len(order) else None
            next_b = read(16 * following[0], 16 * following[1]) if following else b
            for m in range(self.atoms):
                for half in range(2):
                    place = (m * (self.dim // 8) + 2 * d + half) * 4
                    acc[place : place + 4] = mma_m16n8k16(
                        operands[g][m], b[2 * half : 2 * half + 2], acc[place : place + 4], self.dtype
                    )
            share = -(-len(todo) // (pairs - d))
            for act in todo[:share]:
                act()
            todo = todo[share:]
            b = next_b
        for r in range(self.rows):
            work.row_sum[r] = sums[r]
        for i, value in enumerate(acc):
            work.acc[i] = value

    @cute.jit
    def epilogue(self, work, out, lse, logit, lane, row, seqlen_q):
        """Normalise and store: quads transpose their columns, so that each lane writes 16 bytes of a row."""
        word = lane % 4
        scale = Float32(1.0) if const_expr(self.config.softcap) else work.multiplier
        for r in cutlass.range_constexpr(self.rows):
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            top = work.row_max[r] * scale  # log2 units
            shrink = Float32(1.0)
            if const_expr(self.config.sink):
                top, total, shrink = with_sink(top, total, logit)
            inverse = 0.0 if total == 0.0 else shrink * reciprocal(total)
            here = row + 8 * r
            if here < seqlen_q and word == 0:
                lse[here] = log_sum_exp(top, total)
            base = out.iterator + Int64(here) * out.stride[0]
            for chunk in cutlass.range_constexpr(self.dim // 32):
                first = ((r // 2) * (self.dim // 8) + chunk * 4) * 4 + r % 2 * 2
                pairs = [(work.acc[first + 4 * i], work.acc[first + 4 * i + 1]) for i in range(4)]
                words = quad_words(pairs, inverse, self.dtype, lane)
                column = chunk * 32 + word * 8
                if here < seqlen_q and column < out.shape[1]:
                    store_words(base, words, column)
