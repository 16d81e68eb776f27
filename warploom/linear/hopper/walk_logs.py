"""The gradient of a decay's logs, found under the last walk of a backward pass by warps that else have nothing to do.

The walks of queries' and of keys' gradients before it left terms (``walk_terms``). A log is the factor of every pair of a query
at or after its token and a key before it: of all that pass the chunk, of queries from there on with keys before the chunk, of
keys up to there with queries behind it, and of pairs in the chunk.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.kernels.cute.basics import WARP
from warploom.linear.hopper.walk_base import WalkBase
from warploom.linear.hopper.walk_sums import pick

# Warps of the loader's warpgroup, the first one's number; each has every second chunk, which waits for memory about as long as
# a step takes.
FINDER, FINDERS = 2, 2
FORGETS = -87.33654  # of a log, below it what it leaves is subnormal, which counts as nothing


class Logs(WalkBase):
    """What the loader's neighbours do."""

    @cute.jit
    def find_logs(self, given, warp, logs, queries, keys, found, scale):
        """Gradients of the logs of every FINDERS-th chunk from the end, of one head.

        ``queries`` and ``keys``: dots and totals of the walks of their gradients.
        """
        config = self.config
        if const_expr(config.early):
            cute.arch.griddepcontrol_wait()
        lane = cute.arch.lane_idx()
        dots_q, totals_q, dots_k, totals_k = [t[None, given.batch, given.head, None] for t in (*queries, *keys)]
        seqlen = dots_q.shape[1]
        after, counted = Float32(0.0), Int32(totals_q.shape[1])
        for t in cutlass.range(warp, given.chunks, FINDERS, unroll=1):
            n = self.chunk_at(t, given)
            # All is asked for at once: each answer takes memory a good part of a step.
            own = self.sum_of_groups(totals_k, n, config.groups)
            asked, written, fades = [], [], []
            for half in cutlass.range_constexpr(2):
                token = n * config.chunk + lane + half * WARP
                at = cutlass.min(token, seqlen - 1)
                # Of queries the sum of pairs in the chunk too.
                both = [self.sum_of_groups(dots_q, at, config.groups + 1), self.sum_of_groups(dots_k, at, config.groups)]
                log = logs[given.batch, at, given.head]
                asked.append(pick(token < seqlen, both[0], 0.0))
                written.append(pick(token < seqlen, both[1], 0.0))
                # Nothing comes before the first token, nor from before where all is forgotten, whatever rounding left.
                fades.append(pick(log < FORGETS, 0.0, pick(token > 0, 1.0, 0.0)))
            # Pairs that pass the end of the chunk.
            passing = Float32(0.0)
            for m in cutlass.range(n + 1 + lane, counted, WARP, unroll=1):
                for g in cutlass.range_constexpr(config.groups):
                    passing = passing + (totals_q[g, m] - totals_k[g, m])
            after = after + cute.arch.warp_reduction_sum(passing)
            counted = n + 1
            since = [self.summed(x, lane, True) for x in asked]
            until = [self.summed(x, lane, False) for x in written]
            since[0] = since[0] + cute.arch.shuffle_sync(since[1], 0)
            until[1] = until[1] + cute.arch.shuffle_sync(until[0], WARP - 1)
            for half in cutlass.range_constexpr(2):
                token = n * config.chunk + lane + half * WARP
                value = (since[half] + (until[half] - written[half]) + (after - own)) * scale
                if token < seqlen:
                    found[given.batch, token, given.head] = pick(fades[half] > 0.0, value, 0.0)

    def sum_of_groups(self, parts: Any, at: Any, count: int) -> Any:
        """What all warpgroups left at one place."""
        total = parts[0, at]
        for g in range(1, count):
            total = total + parts[g, at]
        return total

    def summed(self, x: Any, lane: Any, reverse: bool) -> Any:
        """Of each lane the sum up to its own, in reverse from its own on."""
        for by in (1, 2, 4, 8, 16):
            source = lane + by if reverse else lane - by
            other = cute.arch.shuffle_sync(x, source % WARP)
            inside = source < WARP if reverse else source >= 0
            x = x + pick(inside, other, 0.0)
        return x
