"""Dropout: which elements of an accumulator `warploom.attention.philox` keeps. Imports the CuTe DSL.

Philox makes eight halves of a counter (key // 16, query, head, batch), each for two keys that are eight apart. No thread holds
all of them, so each lane of a warp computes counters and leaves their 16 bytes in shared memory, from where ``ldmatrix`` gives
every lane those of its own elements: the halves of two neighbours in a register, in the order in which they are packed. With
their bytes exchanged they are those of the elements eight keys further on.

Much of the first three rounds depends on the query or on the keys alone: a counter costs 15 wide products and 17 times an
exclusive or, once its ``query_part`` and its ``keys_part`` are there. Halves are compared by pairs as the fp16 that they look
like: of numbers that are not negative the order is that of their bits, and what looks like NaN is past every bound.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.fields import Fields
from warploom.kernels.cute.instructions import assembly, bytes_of, product_by_double, wide_product, word, xor3

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
COUNTED = 16  # keys that share a counter
EXCHANGED = 0x2301  # the bytes of both halves


class Dropout(Fields):
    """What a call says of dropout."""

    seed: Any  # its two words
    bound: Any  # as `philox.kernel_bound` has it
    scale: Any  # of what is kept
    first: Any  # the first key's number by COUNTED


def dropout_of(given: Any) -> Dropout | None:
    """From a kernel's arguments: the seed's two words in memory, and the numbers that follow; None without dropout."""
    if given is None:
        return None
    seed, bound, scale, first = given
    return Dropout(seed=(seed[0], seed[1]), bound=bound, scale=scale, first=first)


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


def keys_part(seed: Any, head_low: Any, batch: Any, counter: Any) -> list[Any]:
    """What the first three rounds make of sixteen keys."""
    high, first = wide_product(counter, MULTIPLIERS[0])
    high, second = wide_product(xor3(high, batch, round_key(seed, 0, 1)), MULTIPLIERS[1])
    high, low = wide_product(xor3(high, head_low, round_key(seed, 1, 0)), MULTIPLIERS[0])
    return [first, second ^ round_key(seed, 2, 0), high, low]


def words_of(seed: Any, query: list[Any], keys: list[Any], by_double: bool = False) -> list[Any]:
    """The four words of a counter, from its parts; high words of products from fp64 if so asked."""
    product = product_by_double if by_double else wide_product
    first, second, high, low = keys
    high_1, low_1 = product(query[0] ^ first, MULTIPLIERS[1])
    c = [high_1 ^ second, low_1, high ^ query[1], low]
    for i in range(3, ROUNDS):
        (high_0, low_0), (high_1, low_1) = product(c[0], MULTIPLIERS[0]), product(c[2], MULTIPLIERS[1])
        c = [xor3(high_1, c[1], round_key(seed, i, 0)), low_1, xor3(high_0, c[3], round_key(seed, i, 1)), low_0]
    return c


@dsl_user_op
def store_words(target: Any, words: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """A counter's words to shared memory."""
    values = [target.to_llvm_ptr(loc=loc, ip=ip), *(Int32(word).ir_value(loc=loc, ip=ip) for word in words)]
    assembly(None, values, "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r,~{memory}", side_effects=True)


@dsl_user_op
def load_matrices(source: Any, count: int, turned: bool, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """ldmatrix of two or four 8 × 8 tiles of halves; lane l addresses row l % 8 of tile l // 8."""
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * turned}.shared.b16 {{{names}}}, [${count}];"
    struct = llvm.StructType.get_literal([T.i32()] * count)
    values = [source.to_llvm_ptr(loc=loc, ip=ip)]
    parts = assembly(struct, values, text, "=r," * count + "r,~{memory}", side_effects=True)
    return [Int32(llvm.extractvalue(T.i32(), parts, [i], loc=loc, ip=ip)) for i in range(count)]


# A warp's exchange. ``target`` is the address of 16 bytes, which no other lane has; a round is 32 counters.


def rounds_of(rows: int, keys: int) -> int:
    """How many rounds serve a warp's rows and keys, of which one number is 16."""
    return -(-rows * keys // (16 * 32))


@cute.jit
def draw_for_rows(dropout, head, batch, query, counter, columns, targets, by_double=False):
    """Leave the words of a warp's 16 rows and of ``columns`` keys from the ``counter``-th 16 on.

    ``query``: of the row of the lane's number modulo 16. ``targets``: a round's. A round has two counters of each row, in
    lanes 0 to 15 and 16 to 31.
    """
    seed, lane = dropout.seed, cute.arch.lane_idx()
    head_high, head_low = head_part(head)
    row = query_part(seed, head_high, query)
    counter = counter + dropout.first + lane // 16
    for i in cutlass.range_constexpr(rounds_of(16, columns)):
        keys = keys_part(seed, head_low, batch, counter + 2 * i)
        store_words(targets[i], words_of(seed, row, keys, by_double))


@cute.jit
def draw_for_columns(dropout, read_seed, head, batch, query, counter, columns, targets):
    """As ``draw_for_rows``, of the ``counter``-th 16 keys, which are rows, and ``columns`` queries: a round has 32 of them.

    ``read_seed`` gives the seed's two words; of long steps it is called for every round: one is not begun before the last ends.
    """
    seed, lane = read_seed(), cute.arch.lane_idx()
    head_high, head_low = head_part(head)
    keys = keys_part(seed, head_low, batch, counter + dropout.first)
    for i in cutlass.range_constexpr(rounds_of(columns, 16)):
        if const_expr(i > 0 and columns > 64):
            seed = read_seed()
        store_words(targets[i], words_of(seed, query_part(seed, head_high, query + lane + 32 * i), keys))


@cute.jit
def drawn_for_rows(target, i, columns):
    """Of round ``i`` this lane's pairs (row r, row r + 8) of each of its 16 keys, once all lanes have left their words.

    A pair is of two neighbouring columns; those of columns eight further on are ``exchanged``.
    """
    return load_matrices(target, 4 if const_expr(32 * i + 16 < columns) else 2, False)


@cute.jit
def drawn_for_columns(target, i, columns):
    """Of round ``i`` this lane's pairs of each 8 of its queries, in row r; those of row r + 8 are ``exchanged``."""
    return load_matrices(target, 4 if const_expr(32 * i + 16 < columns) else 2, True)


def exchanged(pair: Any) -> Any:
    """The pair of the elements whose keys are eight further on."""
    return bytes_of(pair, pair, Int32(EXCHANGED))


@dsl_user_op
def kept_halves(packed: Int32, pair: Int32, bound: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two 16-bit elements, of which what is dropped becomes 0."""
    text = (
        "{ .reg .b32 x, b, m, f; abs.f16x2 x, $2; abs.f16x2 b, $3; set.geu.u32.f16x2 m, x, b; shr.s32 f, $3, 31; "
        "xor.b32 m, m, f; and.b32 $0, $1, m; }"
    )
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (packed, pair, bound)]
    return Int32(assembly(T.i32(), values, text, "=r,r,r,r"))


@dsl_user_op
def kept(
    pair: Int32, bound: Int32, x: list[Float32], others: list[Float32], *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """Two fp32, of which each that is dropped gives way to the other one."""
    text = (
        "{ .reg .b32 x, b; .reg .pred p, q, f; abs.f16x2 x, $2; abs.f16x2 b, $3; setp.lt.s32 f, $3, 0; "
        "setp.geu.xor.f16x2 p|q, x, b, f; selp.f32 $0, $4, $6, p; selp.f32 $1, $5, $7, q; }"
    )
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (pair, bound)]
    values += [Float32(v).ir_value(loc=loc, ip=ip) for v in (*x, *others)]
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    parts = assembly(struct, values, text, "=f,=f,r,r,f,f,f,f")
    return [Float32(llvm.extractvalue(T.f32(), parts, [i], loc=loc, ip=ip)) for i in range(2)]
