"""Dropout: which elements of an accumulator `warploom.attention.philox` keeps, as bits. Imports the CuTe DSL.

Philox makes four words of a counter (key // 4, query, head, batch), one for each of four neighbouring keys, but no thread holds
four. So threads that share counters each compute some of them, compare all four words, and exchange bits, not words.

Much of the first three rounds depends on the query or on the keys alone: a counter costs 15 wide products and 17 times an
exclusive or, once its ``query_part`` and its ``keys_part`` are there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import bytes_of, wide_product, with_bit, word, xor3

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


class Dropout(Fields):
    """What a call says of dropout."""

    seed: Any  # its two words
    least: Any  # words below it, unsigned, drop their element
    scale: Any  # of what is kept: 1 / (1 - p)
    first: Any  # the first key's number by four


def dropout_of(given: Any) -> Dropout | None:
    """From a kernel's arguments: the seed's two words in memory, and the numbers that follow; None without dropout."""
    if given is None:
        return None
    seed, least, scale, first = given
    return Dropout(seed=(seed[0], seed[1]), least=least, scale=scale, first=first)


# The generator


def round_key(seed: Any, i: int, n: int) -> Any:
    """Word ``n`` of the key of round ``i``."""
    return seed[n] + word(i * WEYL[n])


def head_part(head: Any) -> list[Any]:
    """What the first round makes of a head: high and low word."""
    return wide_product(head, MULTIPLIERS[1])


def query_part(seed: Any, head_high: Any, query: Any) -> list[Any]:
    """What the first two rounds make of a query."""
    high, low = wide_product(xor3(head_high, query, round_key(seed, 0, 0)), MULTIPLIERS[0])
    return [high ^ round_key(seed, 1, 1), low ^ round_key(seed, 2, 1)]


def keys_part(seed: Any, head_low: Any, batch: Any, four: Any) -> list[Any]:
    """What the first three rounds make of four keys."""
    high, first = wide_product(four, MULTIPLIERS[0])
    high, second = wide_product(xor3(high, batch, round_key(seed, 0, 1)), MULTIPLIERS[1])
    high, low = wide_product(xor3(high, head_low, round_key(seed, 1, 0)), MULTIPLIERS[0])
    return [first, second ^ round_key(seed, 2, 0), high, low]


def four_words(seed: Any, query: list[Any], keys: list[Any]) -> list[Any]:
    """The words of four neighbouring keys, from the parts of their counter."""
    first, second, high, low = keys
    high_1, low_1 = wide_product(query[0] ^ first, MULTIPLIERS[1])
    c = [high_1 ^ second, low_1, high ^ query[1], low]
    for i in range(3, ROUNDS):
        (high_0, low_0), (high_1, low_1) = wide_product(c[0], MULTIPLIERS[0]), wide_product(c[2], MULTIPLIERS[1])
        c = [xor3(high_1, c[1], round_key(seed, i, 0)), low_1, xor3(high_0, c[3], round_key(seed, i, 1)), low_0]
    return c


# Accumulators whose rows are queries: a quad's lanes hold two neighbouring keys of every eight in rows r and r + 8


@cute.jit
def bits_of_rows(dropout, head, batch, query, four, columns):
    """Bit c of word i: whether element (i, c) of this thread is kept, of ``columns`` keys from the ``four``-th four on.

    ``query``: that of row r. Lanes 2n and 2n + 1 share the first or the second four of every eight keys. The even lane computes
    row r of both, the odd one row r + 8.
    """
    seed, least, lane = dropout.seed, dropout.least, cute.arch.lane_idx()
    odd = lane % 2
    head_high, head_low = head_part(head)
    row = query_part(seed, head_high, query + 8 * odd)
    four = four + dropout.first + lane % 4 // 2
    lower, upper = Int32(0), Int32(0)  # of the first two and the last two keys of four
    for i in cutlass.range_constexpr(columns // 8):
        words = four_words(seed, row, keys_part(seed, head_low, batch, four + 2 * i))
        for n in cutlass.range_constexpr(2):
            lower = with_bit(lower, 2 * i + n, words[n], least)
            upper = with_bit(upper, 2 * i + n, words[2 + n], least)
    own, others = choose(odd == 1, upper, lower), choose(odd == 1, lower, upper)
    found = cute.arch.shuffle_sync_bfly(others, 1)
    return choose(odd == 1, found, own), choose(odd == 1, own, found)


# Accumulators whose rows are keys: lanes l, l + 4, l + 8 and l + 12 hold four neighbouring keys of the same queries in rows r,
# four others in rows r + 8


@cute.jit
def bits_of_columns(dropout, read_seed, head, batch, key, query):
    """Bit 16 i + c: whether element (i, c) of this thread is kept, of 64 queries from ``query`` on; ``key``: its first.

    Of the four lanes with the same keys the first computes rows r of even columns, the second rows r + 8, the other two the
    same of odd columns. ``read_seed`` gives the seed's two words; it is called twice, so that registers hold half of the
    counters at a time.
    """
    lane, least, seed = cute.arch.lane_idx(), dropout.least, read_seed()
    head_high, head_low = head_part(head)
    keys = keys_part(seed, head_low, batch, key // 4 + dropout.first + lane // 4 % 2 * 2)
    fourth = lane // 4 % 4
    query = query + lane % 4 * 2 + fourth // 2
    fields = [Int32(0), Int32(0)]  # half words of the first and second key, of the third and fourth
    for g in cutlass.range_constexpr(8):
        if const_expr(g == 4):
            seed = read_seed()
        words = four_words(seed, query_part(seed, head_high, query + 8 * g), keys)
        for n in cutlass.range_constexpr(4):
            fields[n // 2] = with_bit(fields[n // 2], n % 2 * 16 + 2 * g, words[n], least)
    # Half words by the lane that they are for become half words by the lane that they are from.
    late, odd = fourth // 2 == 1, fourth % 2 == 1
    own, others = choose(late, fields[1], fields[0]), choose(late, fields[0], fields[1])
    found = cute.arch.shuffle_sync_bfly(others, 8)
    early_two, late_two = choose(late, found, own), choose(late, own, found)
    found = cute.arch.shuffle_sync_bfly(bytes_of(early_two, late_two, choose(odd, 0x5410, 0x7632)), 4)
    even_columns = bytes_of(early_two, found, choose(odd, 0x3254, 0x5410))
    odd_columns = bytes_of(late_two, found, choose(odd, 0x3276, 0x7610))
    return even_columns + 2 * odd_columns


@cute.jit
def kept(bits, position, x, other=0.0):
    """``x`` where that bit is set, else ``other``."""
    return x if cutlass.Boolean(bits & (1 << position)) else Float32(other)
