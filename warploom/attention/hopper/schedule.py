"""Which tile a persistent block computes when: integer arithmetic, so that the kernel and the tests run the same lines.

In the kernel the integers are run-time values, which Python cannot branch on: ``choose(condition, a, b)`` is a if condition
else b there as here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

# No tile: the other half of the pair that a head with an odd number of query tiles has in its middle.
NOTHING = -1


def in_order(turn: Any, block: Any, blocks: Any, m_blocks: Any, choose: Any) -> tuple[Any, Any]:
    """(m_block, head) of a block's ``turn``-th tile when all cost the same: heads one after the other.

    Tiles that run at one time share their K and V in L2. The last tile of a head may hold few rows, so heads start at
    another tile each round: blocks that are a multiple of m_blocks would leave all short tiles to the same few. A head past
    the last one ends the block's work.
    """
    index = turn * blocks + block
    head = index // m_blocks
    in_round = blocks // m_blocks  # heads
    return (index + head // choose(in_round < 1, 1, in_round)) % m_blocks, head


def piece(part: Any, block: Any, blocks: Any, tiles: Any, n_blocks: Any, choose: Any) -> tuple[Any, Any, Any]:
    """(tile, first, end) of a block's ``part``-th piece, 0 or 1, of the last ``tiles`` tiles.

    The key tiles of these are dealt out evenly, tile after tile, so that blocks end together. From part 2 on, and where
    there is nothing, first is end.
    """
    begin = block * (tiles * n_blocks) // blocks
    stop = (block + 1) * (tiles * n_blocks) // blocks
    tile = begin // n_blocks + part
    first = choose(part == 0, begin - tile * n_blocks, 0)
    end = stop - tile * n_blocks
    end = choose(end > n_blocks, n_blocks, end)
    return tile, first, choose(end < first, first, end)


def pieces(tile: Any, blocks: Any, tiles: Any, n_blocks: Any) -> tuple[Any, Any, Any]:
    """The first and last block with a piece of a tile, and which part of the first one's it is."""
    total = tiles * n_blocks
    begin = tile * n_blocks
    first = ((begin + 1) * blocks - 1) // total
    last = ((begin + n_blocks) * blocks - 1) // total
    return first, last, tile - first * total // blocks // n_blocks


def tile_heads(group: Any, heads_per_tile: Any) -> Any:
    """How many tiles hold the heads of a group, ``heads_per_tile`` of them in each."""
    return (group + heads_per_tile - 1) // heads_per_tile


def pack_gqa_row(head: Any, local: Any, rows: Any, heads_per_tile: Any, group: Any, past: Any, choose: Any) -> tuple[Any, Any]:
    """(query, head) of row ``local`` of a tile that holds ``rows`` queries of each of ``heads_per_tile`` heads of a group.

    ``head`` counts tiles of groups; the query counts from the tile's first and is ``past`` where the row has no head.
    """
    tiles = tile_heads(group, heads_per_tile)
    kv = head // tiles
    member = (head - kv * tiles) * heads_per_tile + local // rows
    return choose(member < group, local % rows, past), kv * group + member


# Key tiles of a piece at the least, where blocks would rather stay idle than take less.
SMALLEST_PIECE = 2


def tiles_to_split(tiles: int, n_blocks: int, blocks: int, cost: int, alike: bool = True) -> tuple[int, int]:
    """How many tiles at the end of a call to split, and over how many blocks; (0, blocks) where nothing is split.

    Split are the tiles of a last round that would leave blocks idle for longer than ``cost`` key tiles take. What the
    kernel multiplies stays in 32 bits.

    Tiles that are not ``alike`` in their keys are split only where there are fewer of them than blocks.
    """
    rest = tiles % blocks
    users = min(blocks, rest * n_blocks // SMALLEST_PIECE) if rest == tiles else blocks
    if rest < tiles and not alike:
        return 0, blocks
    worth = n_blocks * (users - rest) >= cost * users
    fits = 0 < users <= rest * n_blocks < 2**31 // blocks - 1
    return (rest, users) if worth and fits else (0, min(blocks, tiles))


def share(total: Any, longest: Any, blocks: Any, cost: Any, choose: Any) -> Any:
    """Key tiles of each block where the ``total`` of a call over pages is dealt out evenly; 0 where query tiles go whole.

    They do unless the ``longest`` takes by ``cost`` key tiles longer than a share, or for a ``cost`` of 0.
    """
    even = (total + blocks - 1) // blocks
    even = choose(even < SMALLEST_PIECE, SMALLEST_PIECE, even)
    return choose((cost > 0) & (longest >= even + cost), even, 0)


def share_piece(first: Any, each: Any, rest: Any, block: Any, choose: Any) -> tuple[Any, Any]:
    """(end, slot) of the piece from key tile ``first`` of a tile's ``each`` that a block takes, which has a ``rest`` to take.

    The slot is below 0 for a whole tile, 2 · block + 1 for a tile's first piece, 2 · block for others.
    """
    end = choose(each - first > rest, first + rest, each)
    return end, choose(first > 0, 2 * block, choose(end < each, 2 * block + 1, -1))


def cut_first(first: Any, share: Any) -> Any:
    """Whether a block's piece from ``first`` is the second one of its tile."""
    return (first > 0) & (first <= share)


def cut_last(first: Any, each: Any, share: Any, block: Any) -> Any:
    """The block of a tile's last piece; ``block`` takes its second one, from ``first``."""
    return block + (each - first - 1) // share


def paired(turn: Any, block: Any, blocks: Any, m_blocks: Any, heads: Any, pair_heads: Any, choose: Any) -> tuple[Any, Any]:
    """(m_block, head) of a block's ``turn``-th tile when later rows see more keys (causal).

    The first ``pair_heads`` heads go as pairs of one long and one short tile, all pairs alike, head after head, so that
    K and V stay in L2. The other heads end the call: their tiles go longest first, every other round backwards,
    which evens out what whole pairs cannot. m_block is NOTHING for half a pair; a head past the last one ends the work.
    """
    per_head = (m_blocks + 1) // 2
    pairs = pair_heads * per_head
    rest = pairs % blocks
    extra = choose(block < rest, 1, 0)
    own = 2 * (pairs // blocks + extra)

    # Rounds are turned by one: else a block could always get the same pair of a head, and not all cost quite the same.
    lap = turn // 2
    pair = lap * blocks + choose(lap < pairs // blocks, (block + lap) % blocks, block)
    head = pair // per_head
    short = pair - head * per_head
    other = choose(2 * short == m_blocks - 1, NOTHING, short)
    m_block = choose(turn % 2 == 0, m_blocks - 1 - short, other)

    lap = turn - own + extra  # now lap 0 fills up the last, partial round of pairs
    along = choose(lap % 2 == 1, blocks - 1 - block, block)
    index = choose(lap == 0, block, lap * blocks + along) - rest
    width = heads - pair_heads
    row = index // choose(width < 1, 1, width)
    ends = index >= width * m_blocks
    tail_head = choose(ends, heads, pair_heads + index - row * width)

    in_pairs = turn < own
    return choose(in_pairs, m_block, choose(ends, 0, m_blocks - 1 - row)), choose(in_pairs, head, tail_head)


def heads_in_pairs(m_blocks: int, heads: int, blocks: int, shared: int) -> int:
    """How many heads go as pairs: all but what the last, partial round and one more round of pairs hold.

    Those heads end the call together. Where their keys and values, ``shared`` bytes each, do not fit into L2 and the partial
    round is nearly whole, it alone evens out the blocks as well.
    """
    per_head = (m_blocks + 1) // 2
    pairs = heads * per_head
    partial = pairs % blocks
    tail = min(heads, -(-(partial + blocks) // per_head))
    if tail * shared > L2_BYTES and 4 * partial >= 3 * blocks:
        tail = min(heads, -(-partial // per_head))
    return heads - tail


def sections(index: Any, n_blocks: Any, heads: Any, section: Any, choose: Any) -> tuple[Any, Any]:
    """(n_block, head) of a backward block: ``section`` heads at a time, so that what they share stays in L2.

    Inside of a section key blocks come in order, each for all heads: under a causal mask the longest first.
    """
    size = section * n_blocks
    at = index // size
    inside = index - at * size
    rest = heads - at * section
    width = choose(rest < section, rest, section)
    n_block = inside // width
    return n_block, at * section + inside - n_block * width


def in_waves(index: Any, n_blocks: Any, heads: Any, sections: Any, waves: Any) -> tuple[Any, Any, Any]:
    """(n_block, head, rising) of a causal backward block.

    There are so many ``sections`` of heads, as even as may be, one after another. Inside a section key blocks come in
    order, each for all heads, in so many ``waves``.

    rising: 1 if it walks its query tiles from the diagonal on, 0 if from the last one back. The blocks of a wave, the longest
    first, begin together, and are at one tile at a time if they begin with the last one. Those of the next wave begin when
    these end, the longest after the shortest: they end together, and are at one tile if they end with it.
    """
    at = index // n_blocks * sections // heads
    first = (at * heads + sections - 1) // sections
    width = ((at + 1) * heads + sections - 1) // sections - first
    inside = index - first * n_blocks
    n_block = inside // width
    return n_block, first + inside - n_block * width, (at * waves + inside * waves // (width * n_blocks)) % 2


PROCESSORS = 132  # of a Hopper device; waves of deterministic blocks have as many whatever the device, for the sake of bits


def in_turns(index: Any, n_blocks: Any, heads: Any, section: Any, wave: int, choose: Any) -> tuple[Any, Any, Any]:
    """(n_block, head, rising) of a causal backward block where those of a head add to a query tile in turns.

    ``section`` heads at a time. All but the last section begin with the last key block and rise from the diagonal: then elders
    are ahead from the start. But blocks are as many tiles apart as they have begun at, in each head of their group.

    ``section`` below 0: so many heads at a time in waves of ``wave`` blocks. A block waits for those before it in its head, as
    many turns at the most as a wave has blocks of that head. As in ``in_waves`` the blocks of a wave end with the last tile, or
    begin with it when the wave before has ended there.
    """
    width = choose(section < 0, -section, section)
    n_block, head = sections(index, n_blocks, heads, width, choose)
    at = index // (width * n_blocks)
    rising = choose((at + 1) * width < heads, 1, 0)
    turned = choose(rising == 1, n_blocks - 1 - n_block, n_block)
    by_waves = (index - at * width * n_blocks) // wave % 2
    return choose(section < 0, n_block, turned), head, choose(section < 0, by_waves, rising)


# Of ``in_turns`` at the most, so that four or more of a wave's blocks read the same tiles. 4 × 4096 tokens, 32 heads over 8 of
# 128: 32 heads at a time 2.80 ms, 16 2.85, 8 3.00; 32768 tokens, 64 heads over 8: 8 heads 73.1, 4 72.5, 2 73.4.
MOST_ABREAST = 32


def abreast(heads: int) -> int:
    """How many heads a section in waves has, as even as may be."""
    return -(-heads // -(-heads // MOST_ABREAST))


def stretch(section: Any, n_blocks: Any, processors: Any) -> Any:
    """Key heads whose dQ the blocks of as many before them clear: whole sections, of as many blocks as processors or more.

    A block clears its share before its steps: all of a stretch have, or are about to, when the next one's first block begins.
    A processor holds two blocks at the most, of which one may wait for zeros: four stretches are never under way at once.
    """
    blocks = section * n_blocks
    return (processors + blocks - 1) // blocks * section


BLOCKS_IN_FLIGHT = 120  # about the processors of a device
L2_BYTES = 32 << 20  # of the cache, for what the blocks of a section share


def section(heads: int, n_blocks: int, shared: int) -> int:
    """How many heads a section has: enough to keep the device busy, a divisor of all, so that the last is no smaller.

    Twice as many even out the end of the call better, as long as the ``shared`` bytes of a head still fit into L2.
    """
    enough = min(heads, -(-BLOCKS_IN_FLIGHT // n_blocks))
    width = next(w for w in range(enough, heads + 1) if heads % w == 0)
    width = enough if width >= 4 * enough else width
    while heads % (2 * width) == 0 and 2 * width * shared <= L2_BYTES:
        width *= 2
    return width


WAVE = range(112, 161)  # blocks that are about what processors do at a time
BEST_WAVE = 138  # rather more than processors: 7168 keys, 8 key heads, waves of 149 1.03, of 112 1.00
MOST_WAVES = 6


@lru_cache(maxsize=1024)
def waves(heads: int, n_blocks: int) -> tuple[int, int]:
    """Sections of ``in_waves``, and waves of each; (0, 0) where no waves fit.

    The blocks of a wave are as near as may be to what processors do at a time. The more waves, the fewer of them share a
    head's tiles.
    """
    best, found = float("inf"), (0, 0)
    for count in range(1, MOST_WAVES + 1):
        for width in range(1, min(heads, WAVE[-1] * count // n_blocks) + 1):
            for cuts in (heads // width, -(-heads // width)):
                sizes = [some * n_blocks // count for some in (heads // cuts, -(-heads // cuts))]
                cost = max(abs(size - BEST_WAVE) for size in sizes) / BEST_WAVE + count / n_blocks
                if cost < best and all(size in WAVE for size in sizes) and (heads + 1) * (cuts + 1) < 2**31:
                    best, found = cost, (cuts, count)
    return found


PIECES = 3  # of blocks in a share at the most: it has fewer than two blocks' steps


def handed_out(index: Any, i: Any, whole: Any, split: Any, each: Any, steps: Any, choose: Any) -> tuple[Any, Any, Any]:
    """(slot, first, end) of the i-th of ``PIECES`` parts of what persistent backward blocks get as number ``index``.

    The part is steps [first, end) of key block ``whole`` + slot, if first is less than end; else it is nothing.

    ``whole`` blocks come first, then the steps of the ``split`` others in shares of ``each``: of a share the beginning of a
    block, which waits for no other piece, before the end of another. So a piece comes after all that it waits for.
    """
    share = index - whole
    slot = share * each // steps + (PIECES - 1 - i)
    first = share * each - slot * steps
    end = choose(first + each < steps, first + each, steps)
    all_steps, last = index < whole, choose(i == PIECES - 1, steps, 0)
    end = choose(slot < split, end, 0)
    return choose(all_steps, share, slot), choose(all_steps, 0, choose(first < 0, 0, first)), choose(all_steps, last, end)


# Blocks of about one length walk the same query tiles and find them in L2, which pieces of them do less. So they are cut where
# they are longer than LATE halves of a processor's share in what is left; others, OUTLIER times as long as the mean, where they
# are longer than one share. No piece has fewer queries than handing its sums over is worth. 32768 keys, 8 key heads of 8 query
# heads: bidirectional spans 591 TFLOP/s, all cut at one share 566. By simulation, processors without work at the end for 3 % of
# the time where nothing is hidden, if cut at three shares, 0 at one and a half; block diffusion 5 and 1 %.
LATE, OUTLIER, FEWEST_QUERIES = 3, 3, 1024
MOST_PIECES = 511  # of a block


def guided_pieces(steps: Any, left: Any, mean: Any, processors: Any, tile_m: int, choose: Any) -> Any:
    """In how many pieces to hand out a masked backward block of so many steps, of ``left`` from its first to the call's last.

    Guided self-scheduling: a piece is a processor's share of what is left. ``mean``: steps of a block of the call.
    ``tile_m``: queries of a step.
    """
    part, fewest = left // processors, FEWEST_QUERIES // tile_m
    part = choose(part < fewest, fewest, part)
    most = choose(steps > OUTLIER * mean, part + part // 4, LATE * part // 2)
    pieces = choose(steps > most, (steps + part - 1) // part, 1)
    return choose(pieces > MOST_PIECES, MOST_PIECES, pieces)


# In steps of a backward block: what a piece costs besides its steps, and what handing its sums over does on either side.
PIECE_COST, SUMS_COST = 2.5, 1.0
FEWEST_SAVED = 6.0  # steps, for which sharing out is worth its while: measured, of the last 3 to 5 of 1024 keys nothing is left


@lru_cache(maxsize=1024)
def stream_k(tiles: int, steps: int, blocks: int, most: int) -> tuple[int, int]:
    """Stream-K: how many backward blocks at the end of a call to share out by steps, and how many steps a share has.

    Those, ``most`` or fewer of ``steps`` each, of a last round that would leave processors idle, or of one more. (0, 1): none.
    What the kernel multiplies stays in 32 bits.
    """
    rest = tiles % blocks
    best, found = steps + PIECE_COST - FEWEST_SAVED, (0, 1)
    for split in (rest, rest + blocks) if rest else ():
        if split <= min(tiles, most) and split * steps < 2**31 - 2 * steps:
            counts = {min(n * rest, blocks) for n in range(2, 9)} if split == rest else {blocks}
            for each in {-(-split * steps // count) for count in counts}:
                time = time_of_stream_k(split, steps, each) - split // blocks * (steps + PIECE_COST)
                best, found = min((best, found), (time, (split, each)))
    return found


def time_of_stream_k(split: int, steps: int, each: int) -> float:
    """Steps' worth of time until the last share ends, one a processor, which all begin at once."""
    done = [0.0] * split
    ends = []
    for share in range(-(-split * steps // each)):
        now = 0.0
        for i in range(PIECES):
            slot, first, end = handed_out(share, i, 0, split, each, steps, lambda condition, a, b: a if condition else b)
            if first < end:
                now += end - first + PIECE_COST
                if first > 0:
                    now = max(now, done[slot]) + SUMS_COST
                if end < steps:
                    now += SUMS_COST
                    done[slot] = now
        ends.append(now)
    return max(ends)


def ring(j: Any, stages: int) -> tuple[Any, Any]:
    """Stage of a ring of one or two at step ``j``, and the parity of the phase in which its barrier says that it is full."""
    return (j & 1, j >> 1 & 1) if stages == 2 else (0, j & 1)
