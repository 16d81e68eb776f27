"""One value head of a chunk, by a warp: decays, the weights within the chunk, the inverse. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.delta.hopper.config import (
    BETA,
    BOX,
    BOX_ROWS,
    CHUNK,
    COARSE,
    FINE,
    MATRIX,
    OF_K,
    OF_Q,
    QUERIES,
    READS,
    WHOLE,
    WRITES,
    PrepareConfig,
)
from warploom.delta.hopper.inverse import (
    BLOCK_BYTES,
    Split,
    carry,
    get,
    get_transposed,
    inverses,
    put_transposed,
    split,
    times,
)
from warploom.delta.hopper.numbers import cp_async4, number, place
from warploom.kernels.cute.basics import DTYPES, LOG2_E, choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import (
    exp2,
    from_bfloat16,
    load_shared,
    pack16,
    store_matrices,
    store_pair,
    store_shared,
)
from warploom.kernels.cute.memory import bulk_store

FRAGMENT_BYTES = 1024  # of a block of 16 × 16: first what its left half has, 16 bytes a lane
# Below it e^x is 0 in fp32: what a decay is raised to, -inf too, so that no difference of sums is inf - inf.
LEAST = -128.0


class Room(Fields):
    """Shared memory of a warp; addresses, but for ``staging``, a pointer."""

    staging: Any  # 5 KB: a matrix, as `config` has it
    keys: Any  # fragments of k kᵀ, and of q kᵀ
    queries: Any
    blocks: Any  # two of `inverse`
    numbers: Any  # coarse sums of decays, fine ones in log2 units, beta: CHUNK each
    norms: Any  # of keys, of queries: CHUNK each


def below(i: int, j: int) -> int:
    """The number of block (i, j) among those on and below the diagonal."""
    return i * (i + 1) // 2 + j


@cute.jit
def at_least(x, least):
    """``x``, NaN too, or ``least`` where it is less."""
    return least if x < least else x


@cute.jit
def where(condition, x):
    return x if condition else Float32(0.0)


class PrepareHead:
    """What a warp does for a value head."""

    def __init__(self, config: PrepareConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def load_numbers(self, at, beta, decay, head, lane, loaded):
        """Two tokens' beta and decay, which `put_numbers` looks at; where tokens do not count, those of the last that does."""
        for e in cutlass.range_constexpr(2):
            row = self.row(at, lane, e)
            loaded[e] = beta[at.batch, row, head]
            loaded[2 + e] = decay[at.batch, row, head]

    @cute.jit
    def ask_numbers(self, at, beta, decay, head, lane, words):
        """As ``load_numbers``, of tensors of words: into 16 bytes a lane of shared memory at ``words``, with queries and keys.

        ptxas moves plain loads, of which more is left to do, behind the wait for those.
        """
        for e in cutlass.range_constexpr(2):
            for n, t in enumerate((beta, decay)):
                cp_async4(words + lane * 16 + (2 * n + e) * 4, place(t, at.batch, self.row(at, lane, e), head) & -4)

    @cute.jit
    def take_numbers(self, at, beta, decay, head, lane, words, loaded):
        """What ``ask_numbers`` asked for, once it is there; then all lanes' words may be written over."""
        found = load_shared(words + lane * 16, 0, 4)
        for e in cutlass.range_constexpr(2):
            for n, t in enumerate((beta, decay)):
                loaded[2 * n + e] = number(t, place(t, at.batch, self.row(at, lane, e), head), found[2 * n + e])
        cute.arch.sync_warp()

    def row(self, at: Any, lane: Any, e: int) -> Any:
        """A lane's token."""
        return at.start + cutlass.min(at.first + 2 * lane + e, at.live - 1)

    @cute.jit
    def play_head(self, room, at, prepared, item, decays, lane, loaded):
        """(I + A)⁻¹ - I, P and the rows of numbers of a value head.

        Of [[U, 0], [R, L]] the inverse is [[U', 0], [-L' R U', L']]: blocks of 16 make blocks of 32, and those the whole.
        Blocks of A below the diagonal come with their signs turned.
        """
        target = prepared.iterator + item * self.config.item
        self.put_numbers(room, at, target, decays, lane, loaded)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        words: dict[Any, Any] = {}  # of the inverse
        left: dict[int, Any] = {j: [Float32(0.0)] * 4 for j in range(3)}
        (turned_0, _, words[0, 0]), (turned_1, straight_1, words[1, 1]) = self.diagonal(room, 0, lane)
        w = split(times(turned_0, split(self.block(room, 1, 0, lane))))
        words[1, 0] = self.rounded(room, 1, times(straight_1, w), left[0], lane)
        upper = split(times(w, straight_1))  # block (1, 0) of the inverse, transposed
        (turned_2, straight_2, words[2, 2]), (_, straight_3, words[3, 3]) = self.diagonal(room, 2, lane)
        x = times(straight_3, split(times(turned_2, split(self.block(room, 3, 2, lane)))))
        words[3, 2], lower = self.rounded(room, 3, x, left[2], lane), split(x)
        between = []  # -R U', transposed: rows 2 and 3, of each both columns
        for i in cutlass.range_constexpr(2, 4):
            first, second = (split(self.block(room, i, j, lane)) for j in range(2))
            between.append((split(times(upper, second, times(turned_0, first))), split(times(turned_1, second))))
        self.send(room, target + MATRIX, lane)
        for j in cutlass.range_constexpr(2):
            words[2, j] = self.rounded(room, 2, times(straight_2, between[0][j]), left[j], lane)
            x = times(straight_3, between[1][j], times(lower, between[0][j]))
            words[3, j] = self.rounded(room, 3, x, left[j], lane)
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(i + 1):
                self.put_words(room, i, j, words[i, j], lane)
        self.send(room, target, lane)

    def diagonal(self, room: Any, pair: int, lane: Any) -> list[tuple[Split, Split, list[Any]]]:
        """The inverses of two neighbouring blocks on the diagonal, transposed and not, and their words; P's are staged.

        For gradients rounded as ``carry`` has it: of equal keys most of all errors were these blocks'. A forward pass takes 6 %
        more by it.
        """
        for i in range(2):
            put_transposed(room.blocks + i * BLOCK_BYTES, self.block(room, pair + i, pair + i, lane), lane)
        cute.arch.sync_warp()
        inverses(room.blocks, lane)
        found = []
        for i in range(2):
            address = room.blocks + i * BLOCK_BYTES
            found.append((split(get(address, lane)), split(get_transposed(address, lane))))
        cute.arch.sync_warp()
        if not self.config.gradients:
            return [(*each, self.less_one(each[1][0], lane)) for each in found]
        carry(room.blocks, self.step(room, 16 * pair + lane), lane)
        fragments = [get_transposed(room.blocks + i * BLOCK_BYTES, lane) for i in range(2)]
        cute.arch.sync_warp()
        return [(*each, self.less_one(self.packed(x), lane)) for each, x in zip(found, fragments, strict=True)]

    @cute.jit
    def put_numbers(self, room, at, target, decays, lane, loaded):
        """Sums of decays and beta into shared memory; what the walk multiplies by into global memory."""
        betas, coarse, fine = [], [], []
        for e in cutlass.range_constexpr(2):
            counts = at.first + 2 * lane + e < at.live
            betas.append(where(counts, loaded[e]))
            d = where(counts and decays != 0, at_least(loaded[2 + e], Float32(LEAST)))
            # Multiples of 2^-10 are added without an error: a small decay behind large ones keeps its bits in what is left.
            rounded = cute.math.floor(d * 1024.0 + 0.5) * (1.0 / 1024.0)
            coarse.append(rounded)
            fine.append(d - rounded)
        coarse, fine = summed(coarse, lane), summed(fine, lane)
        fine = [x * LOG2_E for x in fine]
        to = room.numbers + lane * 8
        for i, pair in enumerate((coarse, fine, betas)):
            store_shared(to, i * CHUNK * 4, pair)
        last = [cute.arch.shuffle_sync(pair[1], 31) for pair in (coarse, fine)]
        of_k, of_q = (load_shared(room.norms + lane * 8, i * CHUNK * 4, 2) for i in range(2))
        address = target.toint() + (2 * MATRIX * 4 + lane * 8)
        since = [exp2(coarse[e] * LOG2_E + fine[e]) for e in range(2)]
        until = [exp2((last[0] - coarse[e]) * LOG2_E + (last[1] - fine[e])) for e in range(2)]
        whole = exp2(last[0] * LOG2_E + last[1])
        store_pair(address + READS * CHUNK * 4, since[0] * of_k[0], since[1] * of_k[1])
        store_pair(address + QUERIES * CHUNK * 4, since[0] * of_q[0], since[1] * of_q[1])
        store_pair(address + BETA * CHUNK * 4, betas[0], betas[1])
        store_pair(address + WRITES * CHUNK * 4, until[0] * of_k[0], until[1] * of_k[1])
        store_pair(address + WHOLE * CHUNK * 4, whole, whole)
        if const_expr(self.config.gradients):
            for row, pair in ((COARSE, coarse), (FINE, fine), (OF_K, of_k), (OF_Q, of_q)):
                store_pair(address + row * CHUNK * 4, pair[0], pair[1])
        cute.arch.sync_warp()

    def block(self, room: Any, i: int, j: int, lane: Any) -> list[Any]:
        """The fragment of a block of A, 0 above the diagonal; P's is staged."""
        at_row, at_column = room.numbers + lane // 4 * 4, room.numbers + lane % 4 * 8
        rows = [[load_shared(at_row, (n * CHUNK + 16 * i + 8 * r) * 4, 1)[0] for r in range(2)] for n in range(2)]
        across = [[x for h in range(2) for x in load_shared(at_column, (n * CHUNK + 16 * j + 8 * h) * 4, 2)] for n in range(3)]
        start = below(i, j) * FRAGMENT_BYTES
        kk, qk = (
            [x for n in range(2) for x in load_shared(of + lane * 16, start + 512 * n, 4)] for of in (room.keys, room.queries)
        )
        keys, weights = [], []
        for at in range(8):
            r, column = at // 2 % 2, at // 4 * 2 + at % 2
            pair = exp2((rows[0][r] - across[0][column]) * LOG2_E + (rows[1][r] - across[1][column]))
            keys.append(kk[at] * (pair * across[2][column]))
            weights.append(qk[at] * pair)
        if i == j:
            keys, weights = self.lower(keys, lane, 1), self.lower(weights, lane, 0)
        self.put_words(room, i, j, self.packed(weights), lane)
        return keys

    def lower(self, fragment: list[Any], lane: Any, diagonal: int) -> list[Any]:
        """The elements of a block below its diagonal, and on it unless ``diagonal`` is 1; else 0."""
        row, column = lane // 4, lane % 4 * 2
        return [where(row + 8 * (at // 2 % 2) >= column + 8 * (at // 4) + at % 2 + diagonal, fragment[at]) for at in range(8)]

    def less_one(self, words: list[Any], lane: Any) -> list[Any]:
        """Words of a unit lower triangular block less the unit matrix."""
        row, column = lane // 4, lane % 4 * 2
        ends = [choose(row > column + 1, word, choose(row > column, word & 0xFFFF, 0)) for word in (words[0], words[3])]
        return [ends[0], words[1], Int32(0), ends[1]]

    def rounded(self, room: Any, i: int, fragment: list[Any], left: list[Any], lane: Any) -> list[Any]:
        """The words of a block in row ``i``.

        For gradients, what a lane's earlier numbers of a column have ``left`` is added to its next one. The walks sum over a
        column's rows what writes to the state, and what the state's gradient gives: of equal keys rows differ by their decays,
        and so weighed the errors of a column cancel.
        """
        if not self.config.gradients:
            return self.packed(fragment)
        words: list[Any] = [None] * 4
        fades = [self.fade(room, 16 * i + 8 * (r - 1), 16 * i + 8 * r, lane) for r in range(2)]
        for n in range(2):
            for r in range(2):
                x, come = fragment[4 * n + 2 * r :][:2], [left[2 * n + e] * fades[r] for e in range(2)]
                word = words[2 * n + r] = pack16(x[0] + come[0], x[1] + come[1], self.dtype)
                left[2 * n : 2 * n + 2] = [come[e] + (x[e] - from_bfloat16(word, e)) for e in range(2)]
        return words

    def fade(self, room: Any, start: int, stop: int, lane: Any) -> Any:
        """The decay between a lane's rows in the eight from ``start`` and from ``stop`` on."""
        own = room.numbers + lane // 4 * 4
        coarse, fine = ([load_shared(own, (n * CHUNK + at) * 4, 1)[0] for at in (start, stop)] for n in range(2))
        return exp2((coarse[1] - coarse[0]) * LOG2_E + (fine[1] - fine[0]))

    def step(self, room: Any, row: Any) -> Any:
        """The decay from the row before to ``row``, of which there is none before the first."""
        ends = room.numbers + cutlass.max(row - 1, 0) * 4, room.numbers + row * 4
        coarse, fine = ([load_shared(end, n * CHUNK * 4, 1)[0] for end in ends] for n in range(2))
        return exp2((coarse[1] - coarse[0]) * LOG2_E + (fine[1] - fine[0]))

    def packed(self, fragment: list[Any]) -> list[Any]:
        """A fragment's words in the inputs' dtype."""
        return [pack16(fragment[2 * n], fragment[2 * n + 1], self.dtype) for n in range(4)]

    def put_words(self, room: Any, i: int, j: int, words: list[Any], lane: Any) -> None:
        """A block into the staged matrix."""
        matrix, row = lane // 8, lane % 8
        first = sum(BOX_ROWS[:j]) + 16 * (i - j)
        place = (matrix % 2 * 8 + row) * BOX + (matrix // 2 ^ row // 4) * 8
        store_matrices(room.staging + (place + first * BOX), words)

    @cute.jit
    def send(self, room, target, lane):
        """The staged matrix, all of it, into global memory."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            bulk_store(target, room.staging, MATRIX * 4)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def summed(pair, lane):
    """Of two numbers a lane, the sums up to each."""
    total = pair[0] + pair[1]
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << i, mask_and_clamp=0)
        total = total + where(lane >= (1 << i), below)
    before = cute.arch.shuffle_sync_up(total, 1, mask_and_clamp=0)
    before = where(lane >= 1, before)
    return [before + pair[0], before + pair[0] + pair[1]]
