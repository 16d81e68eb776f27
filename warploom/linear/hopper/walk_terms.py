"""What the gradient of a decay's logs is made of, where walks of queries' and of keys' gradients leave it.

A log fades every pair of a query at or after its token and a key before it. Of pairs with one of the two in a chunk,
x_i . out_i has what token i takes of chunks before, in reverse behind: x is what out is the gradient of, and out lacks the
chunk's own product then. Of pairs within a chunk each token has its sum as a query less that as a key. Those that pass a chunk
meet in the inner product of the state before it and the state's gradient behind it: a sum of the former over all later chunks,
less one of the same of keys, as ``walk_logs`` and, behind walks side by side, ``log_gradients`` find it.

Such a sum forgets nothing, so what one walk rounds must be rounded alike in the other: states are multiplied in two numbers,
and x is weighed and rounded as the other walk does before it adds it to its state.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warploom.kernels.cute.instructions import from_bfloat16, ldmatrix_x4, load_shared, pack16, store_shared
from warploom.linear.hopper.config import COLUMNS
from warploom.linear.hopper.walk_sums import Sums, pick

STORER = 1  # the warp of a warpgroup that leaves sums
OWN = 4 * 2 * 32  # bytes of a warp's sums of a chunk


class Terms(Sums):
    """What consumers do beside the walk."""

    def folded(self, values: Any, lane: Any, bits: tuple[int, ...] = (16, 8, 4)) -> Any:
        """Of the 16 columns of this thread, sums over the eight lanes with the same ones: of columns 2 * lane and the next."""
        for bit in bits:
            upper, half = (lane & bit) != 0, len(values) // 2
            pairs = list(zip(values[:half], values[half:], strict=True))
            given = [cute.arch.shuffle_sync_bfly(pick(upper, low, high), bit) for low, high in pairs]
            values = [pick(upper, high, low) + other for (low, high), other in zip(pairs, given, strict=True)]
        return values

    # The state

    @cute.jit
    def weigh_x(self, given, factors, place, lane):
        """This warp's columns of x, times the factors of the chunk's tokens, while the product with the state is under way."""
        shared = given.shared
        tile, stage, phase = place
        cute.arch.mbarrier_wait(shared.x_full + stage, phase)
        address = shared.x_start.toint() + 2 * tile
        words = []
        for i in cutlass.range_constexpr(self.config.chunk // 16):
            four = ldmatrix_x4(address, i * (2 * 16 * COLUMNS), True)
            for n in cutlass.range_constexpr(4):
                tokens = factors[4 * i + n // 2 * 2 : 4 * i + n // 2 * 2 + 2]
                words.append(pack16(*[from_bfloat16(four[n], e) * tokens[e] for e in range(2)], self.dtype))
        return words

    def dots(self, acc: Any, words: Any, lane: Any) -> Any:
        """x . out of the chunk's tokens over the two columns of this thread and of the one 16 lanes apart, half each."""
        found = []
        for i in range(self.config.chunk // 4):  # this thread's tokens
            at = i // 2 * 4 + i % 2
            low, high = [acc[at + 2 * r] * from_bfloat16(words[i // 2 * 2 + r], i % 2) for r in range(2)]
            found.append(low + high)
        return self.folded(found, lane, (16,))

    @cute.jit
    def leave_dots(self, given, found, group, lane, warp):
        """Their sums over this warp's columns, to shared memory."""
        store_shared(given.shared.sums + OWN * (4 * group + warp) + 8 * lane, 0, self.folded(found, lane, (8, 4)))

    @cute.jit
    def sum_dots(self, given, group, warp):
        """Sums over a warpgroup's four warps, which have all come here, of two tokens a lane; by one without a TMA store."""
        found = cute.make_rmem_tensor(2, Float32)
        if warp == STORER:
            address = given.shared.sums + OWN * 4 * group + 8 * cute.arch.lane_idx()
            four = [load_shared(address, OWN * w, 2) for w in range(4)]
            for e in cutlass.range_constexpr(2):
                found[e] = (four[0][e] + four[1][e]) + (four[2][e] + four[3][e])
        return found

    @cute.jit
    def store_dots(self, given, terms, found, group, warp, n):
        """Leave them behind the fence of out's tile, which waits for all that was stored before it, to global memory too."""
        if warp == STORER:
            dots, totals = terms
            lane = cute.arch.lane_idx()
            for e in cutlass.range_constexpr(2):
                token = n * self.config.chunk + 2 * lane + e
                if token < dots.shape[3]:
                    dots[given.block + group, given.batch, given.head, token] = found[e]
            total = cute.arch.warp_reduction_sum(found[0] + found[1])
            if lane == 0:
                totals[given.block + group, given.batch, given.head, n] = total

    # Scores

    def of_pairs(self, given: Any, t: Any) -> Any:
        """Where sums of pairs of step ``t`` lie: of keys, by warps, then of queries. Two steps' in turn."""
        return given.shared.sums + OWN * (4 * self.config.groups + 5 * (t % 2))

    @cute.jit
    def leave_pairs(self, given, met, t, lane, warp):
        """Sums of the chunk's pairs by key and by query, of this warp's queries, to shared memory."""
        address = self.of_pairs(given, t)
        keys = [met[i // 2 * 4 + i % 2] + met[i // 2 * 4 + 2 + i % 2] for i in range(self.config.chunk // 4)]
        store_shared(address + OWN * warp + 8 * lane, 0, self.folded(keys, lane))
        for r in cutlass.range_constexpr(2):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.config.chunk // 4):
                total = total + met[i // 2 * 4 + r * 2 + i % 2]
            total = cute.arch.warp_reduction_sum(total, threads_in_group=4)
            if lane % 4 == 0:
                store_shared(address + OWN * 4 + 4 * (warp * 16 + lane // 4 + r * 8), 0, [total])

    @cute.jit
    def store_pairs(self, given, dots, t, lane, warp):
        """Of each token its sum as a query less that as a key, once all warps have come past a barrier."""
        if lane < 16:
            row = warp * 16 + lane
            address = self.of_pairs(given, t) + 4 * row
            keys = [load_shared(address, OWN * w, 1)[0] for w in range(4)]
            (own,) = load_shared(address, OWN * 4, 1)
            token = self.chunk_at(t, given) * self.config.chunk + row
            if token < dots.shape[3]:
                part = self.config.parts + given.block // self.config.groups
                dots[part, given.batch, given.head, token] = own - ((keys[0] + keys[1]) + (keys[2] + keys[3]))
