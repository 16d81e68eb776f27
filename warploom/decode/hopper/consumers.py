"""The warps that compute. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.decode.hopper.config import DecodeConfig
from warploom.kernels.cute.basics import WARP, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, hidden, ldmatrix_x4, mma_m16n8k16, pack16, reciprocal
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.softmax import capped, finite

MET = 1  # the barrier of the warps that compute
PAD = 8  # floats after a row of O in shared memory, which keep stores of neighbouring rows apart


class Work(Fields):
    """What a thread works on, and what it keeps."""

    q: Any  # its fragments of Q
    acc: Any  # O: (8 columns, 4)
    row_max: Any  # of its two rows, 8 apart, in log2 units
    row_sum: Any  # of this thread's columns
    k: Any  # where this lane reads its keys' rows of K and V in a stage, in bytes
    v: Any
    past: Any  # keys of a row from here on are hidden, and those from ``first`` on visible, less this thread's first
    first: Any
    multiplier: Any
    cap_in: Any


class Consumers:
    """What the other warps of a block run."""

    config: DecodeConfig
    dtype: Any
    tile_n: int
    dim: int
    stages: int
    groups: int

    @cute.jit
    def consume(
        self, q, out, parts, shared, rows, warp, head, batch, row_block, unit, units, length, begin, end, multiplier, cap_in
    ):  # fmt: skip
        """A warp's rows and keys of the block's."""
        config, n = self.config, self.tile_n
        lane = cute.arch.lane_idx()
        row_group, key_group = warp % (config.rows // 16), warp // (config.rows // 16)
        own = self.tile_n // self.groups  # keys of this warp in a tile
        row = row_group * 16 + lane // 4
        base = row_block * config.rows
        places = [base + row, base + row + 8]
        tokens = [cutlass.min(place // rows.group, rows.queries - 1) for place in places]
        positions = [length - rows.queries + token for token in tokens]
        first_own = key_group * own
        offset = begin + first_own + lane % 4 * 2
        work = Work(
            q=cute.make_rmem_tensor(self.dim // 4, Int32),
            acc=cute.make_rmem_tensor(self.dim // 2, Float32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            k=shared.k_start.toint() + self.lane_place(first_own, lane % 8 + lane // 16 * 8, lane // 8 % 2),
            v=shared.v_start.toint() + self.lane_place(first_own, lane % 16, lane // 16),
            past=[cutlass.min(end, position + rows.right + 1) - offset for position in positions],
            first=[position - rows.left - offset for position in positions],
            multiplier=multiplier,
            cap_in=cap_in,
        )
        work.acc.fill(0.0)
        work.row_max.fill(-Float32.inf)
        work.row_sum.fill(0.0)
        self.load_queries(work, q, batch, head, rows, places, tokens, lane)

        tiles = cute.ceil_div(end - begin, n)
        # Tiles that all rows see whole need no mask.
        whole_first = cutlass.min((cutlass.max(length - 1 - rows.left - begin, 0) + n - 1) // n, tiles)
        whole_end = (cutlass.min(end, length - rows.queries + rows.right + 1) - begin) // n
        whole_end = cutlass.max(whole_end, whole_first)
        live = (end - offset, length - rows.queries - rows.left - offset)
        stage, phase = Int32(0), Int32(0)
        i = Int32(0)
        for _ in cutlass.range(whole_first, unroll=1):
            stage, phase = self.step(work, shared, i, live, stage, phase, True)
            i += 1
        for _ in cutlass.range(whole_end - whole_first, unroll=1):
            stage, phase = self.step(work, shared, i, live, stage, phase, False)
            i += 1
        for _ in cutlass.range(tiles - whole_end, unroll=1):
            stage, phase = self.step(work, shared, i, live, stage, phase, True)
            i += 1
        self.leave(work, out, parts, shared, rows, row, key_group, head, batch, base, unit, units, lane)

    # Shared memory to registers

    def lane_place(self, first: Any, row: Any, chunk: Any) -> Any:
        """Bytes from a stage's start to a lane's row of the 16 keys from ``first`` on, of ``chunk`` 0 or 1 of 8 columns."""
        box = self.config.box
        number = first // box  # of the box, which holds 64 columns of its keys and then the next 64
        return number * (box * self.dim * 2) + (first - number * box + row) * 128 + ((chunk ^ row % 8) << 4)

    def block(self, base: Any, bases: dict[int, Any], sub: int, column: int, trans: bool) -> list[Int32]:
        """The 16 × 16 block of the warp's ``sub``-th 16 keys at a column."""
        box = self.config.box
        number, row = divmod(16 * sub, box)
        flips = column % 64 // 8 << 4
        if flips not in bases:
            bases[flips] = base ^ flips if flips else base
        offset = number * (box * self.dim * 2) + row * 128 + column // 64 * (box * 128)
        return ldmatrix_x4(bases[flips], offset, trans)

    @cute.jit
    def load_queries(self, work, q, batch, head, rows, places, tokens, lane):
        """Q as the left operand: of rows that there are none of, and past head_dim, zeros."""
        start = q.iterator + Int64(batch) * q.stride[0] + Int64(head * rows.group) * q.stride[2]
        for r in cutlass.range_constexpr(2):
            there = places[r] < rows.members
            member = cutlass.min(places[r], rows.members - 1) - tokens[r] * rows.group
            source = start + Int64(tokens[r]) * q.stride[1] + Int64(member) * q.stride[2]
            for j in cutlass.range_constexpr(self.dim // 8):
                column = j * 8 + lane % 4 * 2
                inside = column < q.shape[3]
                pair = cute.make_tensor((source + choose(inside, column, 0)).align(4), cute.make_layout(2))
                word = cute.recast_tensor(pair, Int32)[0]
                work.q[j // 2 * 4 + j % 2 * 2 + r] = choose(inside & there, word, 0)

    # The products

    @cute.jit
    def step(self, work, shared, i, live, stage, phase, masked):
        """One tile: S, its softmax and PV; the next stage and phase."""
        at = stage * (self.tile_n * self.dim * 2)
        cute.arch.mbarrier_wait(shared.k_full + stage, phase)
        s = self.scores(work, at)
        if const_expr(masked):
            self.hide(work, s, i * self.tile_n)
        self.rescale(work, self.tops(s))
        p = self.weights(work, s)
        cute.arch.mbarrier_wait(shared.v_full + stage, phase)
        self.values(work, p, at, i * self.tile_n, live, masked)
        release(shared.empty + stage)
        return advance(stage, phase, self.stages)

    def scores(self, work: Work, at: Any) -> Any:
        """S = Q Kᵀ in log2 units, as [8 keys] of four values."""
        subs = self.tile_n // self.groups // 16
        base, bases = work.k + at, {}
        s: Any = [[Float32(0.0)] * 4 for _ in range(2 * subs)]
        for k in range(self.dim // 16):
            a = [work.q[4 * k + i] for i in range(4)]
            for g in range(subs):
                b = self.block(base, bases, g, 16 * k, False)
                for half in range(2):
                    s[2 * g + half] = mma_m16n8k16(a, b[2 * half : 2 * half + 2], s[2 * g + half], self.dtype)
        for x in s:
            for i in range(4):
                if self.config.softcap:
                    x[i] = capped(x[i], work.multiplier, work.cap_in)
                else:
                    x[i] = x[i] * work.multiplier
        return s

    @cute.jit
    def hide(self, work, s, key):
        """Hide keys past a row's last or before its first; ``key``: how far the tile is from the block's first."""
        for r in cutlass.range_constexpr(2):
            past, first = work.past[r] - key, work.first[r] - key
            for g in cutlass.range_constexpr(len(s)):
                for c in cutlass.range_constexpr(2):
                    x = s[g][2 * r + c]
                    x = x if 8 * g + c < past else -Float32.inf
                    s[g][2 * r + c] = x if 8 * g + c >= first else -Float32.inf

    def tops(self, s: Any) -> list[Any]:
        """The largest of this thread's scores of its rows."""
        tops: list[Any] = [s[0][0], s[0][2]]
        for x in s:
            for i in range(4):
                tops[i // 2] = cute.arch.fmax(tops[i // 2], x[i])
        return tops

    @cute.jit
    def rescale(self, work, tops):
        """Take over the tile's maxima if that of some row of the warp has grown."""
        grown = False
        for r in cutlass.range_constexpr(2):
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
        for r in cutlass.range_constexpr(2):
            new = cute.arch.fmax(work.row_max[r], tops[r])
            correction = exp2(work.row_max[r] - finite(new))
            work.row_max[r] = new
            work.row_sum[r] = work.row_sum[r] * correction
            for g in cutlass.range_constexpr(self.dim // 8):
                for c in cutlass.range_constexpr(2):
                    work.acc[4 * g + 2 * r + c] = work.acc[4 * g + 2 * r + c] * correction

    def weights(self, work: Work, s: Any) -> Any:
        """P as left operands, each of 16 keys; its sums are of what is not rounded yet."""
        offsets = [finite(work.row_max[r]) for r in range(2)]
        sums = [work.row_sum[r] for r in range(2)]
        for x in s:
            for i in range(4):
                x[i] = exp2(x[i] - offsets[i // 2])
                sums[i // 2] = sums[i // 2] + x[i]
        for r in range(2):
            work.row_sum[r] = sums[r]
        return [[pack16(x[i], x[i + 1], self.dtype) for x in s[g : g + 2] for i in (0, 2)] for g in range(0, len(s), 2)]

    def values(self, work: Work, p: Any, at: Any, key: Any, live: Any, masked: bool) -> None:
        """O += P V; values of keys that no row sees count as zeros, whatever they hold."""
        base, bases = work.v + at, {}
        acc = [work.acc[i] for i in range(self.dim // 2)]
        for g, a in enumerate(p):
            masks = self.masks(live, key - 16 * g) if masked else None
            for d in range(self.dim // 16):
                b = self.block(base, bases, g, 16 * d, True)
                if masks is not None:
                    b = [b[i] & masks[i % 2] for i in range(4)]
                for half in range(2):
                    place = 4 * (2 * d + half)
                    acc[place : place + 4] = mma_m16n8k16(a, b[2 * half : 2 * half + 2], acc[place : place + 4], self.dtype)
        for i, value in enumerate(acc):
            work.acc[i] = value

    def masks(self, live: Any, key: Any) -> list[Any]:
        """Words whose halves say of this thread's keys 0 and 1, and 8 and 9, of 16 whether some row sees them."""
        past, first = live[0] - key, live[1] - key
        halves = [[choose((c < past) & (c >= first), full, 0) for c, full in pair] for pair in PAIRS]
        return [low | high for low, high in halves]

    # The end

    @cute.jit
    def leave(self, work, out, parts, shared, rows, row, key_group, head, batch, base, unit, units, lane):
        """Put the warps of the same rows together, in order, and store their part."""
        config, groups, pitch = self.config, self.groups, self.dim + PAD
        threads = WARP * config.warps
        stats = shared.stats  # (row, key group, maximum and sum)
        for r in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(work.row_sum[r], threads_in_group=4)
            if lane % 4 == 0:
                pair = cute.make_tensor(stats + ((row + 8 * r) * groups + key_group) * 2, cute.make_layout(2))
                pair[0], pair[1] = work.row_max[r], total
        cute.arch.barrier(barrier_id=MET, number_of_threads=threads)
        # Every warp has read all of its tiles: their memory is free for O.
        buffer = cute.recast_ptr(shared.k_start, dtype=Float32)
        heads_q, queries = out.shape[2], out.shape[1]
        total_rows = out.shape[0] * heads_q * queries
        for r in cutlass.range_constexpr(2):
            every = [
                cute.make_tensor(stats + ((row + 8 * r) * groups + g) * 2, cute.make_layout(2)) for g in range(groups)
            ]
            top = every[0][0]
            for g in cutlass.range_constexpr(1, groups):
                top = cute.arch.fmax(top, every[g][0])
            safe = finite(top)
            total = every[0][1] * exp2(every[0][0] - safe)
            for g in cutlass.range_constexpr(1, groups):
                total = total + every[g][1] * exp2(every[g][0] - safe)
            factor = exp2(work.row_max[r] - safe) * (0.0 if total == 0.0 else reciprocal(total))
            target = buffer + ((row + 8 * r) * groups + key_group) * pitch + lane % 4 * 2
            for g in cutlass.range_constexpr(self.dim // 8):
                pair = cute.make_tensor((target + 8 * g).align(8), cute.make_layout(2))
                two = cute.make_rmem_tensor(2, Float32)
                two[0], two[1] = work.acc[4 * g + 2 * r] * factor, work.acc[4 * g + 2 * r + 1] * factor
                cute.autovec_copy(two, pair)
            place = base + row + 8 * r
            if place < rows.members and key_group == 0 and lane % 4 == 0:
                at = self.part(batch, head, rows, place, heads_q, queries)
                where = Int64(total_rows) * units * out.shape[3] + Int64(at) * units + unit
                value = -Float32.inf if total == 0.0 else top + cute.math.log2(total)
                cute.make_tensor(parts.iterator + where, cute.make_layout(1))[0] = value
        cute.arch.barrier(barrier_id=MET, number_of_threads=threads)
        # Four columns a thread, the rows of a block side by side.
        thread = cute.arch.thread_idx()[0]
        fours = self.dim // 4
        column = thread % fours * 4
        step = threads // fours
        if column < out.shape[3]:
            present = cutlass.min(rows.members - base, config.rows)
            for here in cutlass.range(thread // fours, present, step, unroll=1):
                four = cute.make_rmem_tensor(4, Float32)
                four.fill(0.0)
                for g in cutlass.range_constexpr(groups):
                    source = cute.make_tensor((buffer + ((here * groups + g) * pitch + column)).align(16), cute.make_layout(4))
                    read = cute.make_rmem_tensor(4, Float32)
                    cute.autovec_copy(source, read)
                    for c in cutlass.range_constexpr(4):
                        four[c] = four[c] + read[c]
                at = self.part(batch, head, rows, base + here, heads_q, queries)
                where = (Int64(at) * units + unit) * out.shape[3] + column
                cute.autovec_copy(four, cute.make_tensor((parts.iterator + where).align(16), cute.make_layout(4)))

    def part(self, batch: Any, head: Any, rows: Any, place: Any, heads_q: Any, queries: Any) -> Any:
        """Number of a row of parts: of (batch, heads_q, queries)."""
        token = place // rows.group
        member = place - token * rows.group
        return (batch * heads_q + head * rows.group + member) * queries + token


# Of 16 keys those of a thread as the right operand's words hold them: which, and the half that is theirs.
PAIRS = (((0, 0xFFFF), (1, -0x10000)), ((8, 0xFFFF), (9, -0x10000)))
