"""The warps that compute. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from warploom.decode.hopper.results import Results
from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import exp2, hidden, ldmatrix_x4, mma_m16n8k16, pack16
from warploom.kernels.cute.rings import advance, release
from warploom.kernels.cute.softmax import capped, finite

# Of 16 keys those of a thread as the right operand's words hold them: which, and the half that is theirs.
PAIRS = (((0, 0xFFFF), (1, -0x10000)), ((8, 0xFFFF), (9, -0x10000)))


class Work(Fields):
    """What a thread works on, and what it keeps."""

    q: Any  # its fragments of Q
    acc: Any  # O: (8 columns, 4)
    row_max: Any  # of its two rows, 8 apart, in log2 units
    row_sum: Any  # of this thread's columns
    keys: Any  # where this lane reads its rows of K in a slot, in bytes
    values: Any  # and of V
    past: Any  # keys of a row from here on are hidden, and those from ``first`` on visible, less this thread's first in a tile
    first: Any
    live: Any  # the same of all rows together
    multiplier: Any
    cap_in: Any


class Consumers(Results):
    """What the other warps of a block run."""

    @cute.jit
    def consume(self, call, place, shared, warp, slot, phase):
        """A warp's rows and keys of the block's splits."""
        n = self.tile_n
        lane = cute.arch.lane_idx()
        row_group, key_group = warp % self.row_groups, warp // self.row_groups
        length, start, last, tiles, splits = self.cut(call, place.batch)
        places = [place.base + row_group * 16 + lane // 4 + 8 * r for r in range(2)]
        tokens = [cutlass.min(at // call.group, call.queries - 1) for at in places]
        positions = [length - call.queries + token for token in tokens]
        first_own = key_group * (n // self.key_groups)  # key of this warp in a tile
        offset = first_own + lane % 4 * 2
        work = Work(
            q=cute.make_rmem_tensor(self.dim // 4, Int32),
            acc=cute.make_rmem_tensor(self.dim // 2, Float32),
            row_max=cute.make_rmem_tensor(2, Float32),
            row_sum=cute.make_rmem_tensor(2, Float32),
            keys=shared.start.toint() + self.lane_place(first_own + lane % 8 + lane // 16 * 8, lane // 8 % 2),
            values=shared.start.toint() + self.lane_place(first_own + lane % 16, lane // 16),
            past=[cutlass.min(last, position + call.right + 1) - offset for position in positions],
            first=[position - call.left - offset for position in positions],
            live=(last - offset, length - call.queries - call.left - offset),
            multiplier=call.multiplier,
            cap_in=call.cap_in,
        )
        split, end = self.own_splits(call, place, splits)
        if split < end:
            self.load_queries(work, call, place, places, tokens, lane)
        # Tiles that all rows see whole need no mask.
        whole_first = cute.ceil_div(cutlass.max(length - 1 - call.left, 0), n)
        whole_end = cutlass.min(last, length - call.queries + call.right + 1) // n
        done = Int32(0)
        while split < end:
            self.clear(work)
            for tile in cutlass.range(start + split, start + tiles, splits, unroll=1):
                k_slot, k_phase = slot, phase
                slot, phase = advance(slot, phase, call.slots)
                if (tile >= whole_first) & (tile < whole_end):
                    self.step(work, shared, tile * n, k_slot, k_phase, slot, phase, False)
                else:
                    self.step(work, shared, tile * n, k_slot, k_phase, slot, phase, True)
                slot, phase = advance(slot, phase, call.slots)
            # Addresses that depend on these are found out at the end: registers are worth more all through the loop.
            at, of_rows, of_keys = hidden(lane), hidden(row_group), hidden(key_group)
            self.merge_warps(work, shared, of_rows, of_keys, at)
            if const_expr(call.cluster > 1):
                self.leave_part(work, shared, of_rows, of_keys, at, done)
            else:
                self.add_split(work, shared, of_rows, of_keys, at, done)
            done += 1
            split += 1
        if const_expr(call.cluster == 1):
            self.finish_alone(work, call, place, hidden(row_group), hidden(key_group), hidden(lane), done)
        return slot, phase

    # Shared memory to registers

    # A tile lies in boxes of ``box`` keys, each with 64 columns of its keys and then the next 64. Rows are of 128 bytes; which
    # of eight rows an address lies in says which of a row's 16 bytes change places.

    def lane_place(self, key: Any, chunk: Any) -> Any:
        """Bytes from a slot's start to a lane's key, of ``chunk`` 0 or 1 of 8 columns."""
        box = self.config.box
        row = key // box * (box * self.dim // 64) + key % box
        return row * 128 + ((chunk ^ row % 8) << 4)

    def block(self, base: Any, bases: dict[int, Any], sub: int, column: int, trans: bool) -> list[Int32]:
        """The 16 × 16 block of the warp's ``sub``-th 16 keys at a column."""
        box = self.config.box
        row = 16 * sub // box * (box * self.dim // 64) + 16 * sub % box + column // 64 * box
        flips = (column % 64 // 8 ^ column // 64 * box % 8) << 4
        if flips not in bases:
            bases[flips] = base ^ flips if flips else base
        return ldmatrix_x4(bases[flips], row * 128, trans)

    @cute.jit
    def load_queries(self, work, call, place, places, tokens, lane):
        """Q as the left operand: of rows that there are none of, and past head_dim, zeros."""
        q = call.q
        start = q.iterator + Int64(place.batch) * q.stride[0] + Int64(place.head * call.group) * q.stride[2]
        for r in cutlass.range_constexpr(2):
            there = places[r] < call.members
            member = cutlass.min(places[r], call.members - 1) - tokens[r] * call.group
            source = start + Int64(tokens[r]) * q.stride[1] + Int64(member) * q.stride[2]
            for j in cutlass.range_constexpr(self.dim // 8):
                column = j * 8 + lane % 4 * 2
                inside = column < q.shape[3]
                pair = cute.make_tensor((source + choose(inside, column, 0)).align(4), cute.make_layout(2))
                word = cute.recast_tensor(pair, Int32)[0]
                work.q[j // 2 * 4 + j % 2 * 2 + r] = choose(inside & there, word, 0)

    # The products

    @cute.jit
    def step(self, work, shared, key, k_slot, k_phase, v_slot, v_phase, masked):
        """One tile: S, its softmax and PV."""
        cute.arch.mbarrier_wait(shared.full + k_slot, k_phase)
        s = self.scores(work, k_slot * self.config.slot_bytes)
        release(shared.empty + k_slot)
        if const_expr(masked):
            self.hide(work, s, key)
        self.rescale(work, self.tops(s))
        p = self.weights(work, s)
        cute.arch.mbarrier_wait(shared.full + v_slot, v_phase)
        self.add_values(work, p, v_slot * self.config.slot_bytes, key, masked)
        release(shared.empty + v_slot)

    def scores(self, work: Work, at: Any) -> Any:
        """S = Q Kᵀ in log2 units, as [8 keys] of four values."""
        subs = self.tile_n // self.key_groups // 16
        chains = 2 if subs < 2 else 1  # of products that wait for one another
        base = work.keys + at
        bases: dict[int, Any] = {}
        s: Any = [[[Float32(0.0)] * 4 for _ in range(2 * subs)] for _ in range(chains)]
        for k in range(self.dim // 16):
            a = [work.q[4 * k + i] for i in range(4)]
            sums = s[k % chains]
            for g in range(subs):
                b = self.block(base, bases, g, 16 * k, False)
                for half in range(2):
                    sums[2 * g + half] = mma_m16n8k16(a, b[2 * half : 2 * half + 2], sums[2 * g + half], self.dtype)
        for n, x in enumerate(s[0]):
            for i in range(4):
                raw = x[i] if chains == 1 else x[i] + s[1][n][i]
                x[i] = capped(raw, work.multiplier, work.cap_in) if self.config.softcap else raw * work.multiplier
        return s[0]

    @cute.jit
    def hide(self, work, s, key):
        """Hide keys past a row's last or before its first, of the tile that starts at ``key``."""
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

    def add_values(self, work: Work, p: Any, at: Any, key: Any, masked: bool) -> None:
        """O += P V; values of keys that no row sees count as zeros, whatever they hold."""
        base = work.values + at
        bases: dict[int, Any] = {}
        acc = [work.acc[i] for i in range(self.dim // 2)]
        for g, a in enumerate(p):
            masks = self.masks(work.live, key + 16 * g) if masked else None
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
        """Words whose halves say of this thread's keys 0 and 1, and 8 and 9, from ``key`` on whether some row sees them."""
        past, first = live[0] - key, live[1] - key
        halves = [[choose((c < past) & (c >= first), full, 0) for c, full in pair] for pair in PAIRS]
        return [low | high for low, high in halves]
