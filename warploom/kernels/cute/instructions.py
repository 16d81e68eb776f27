"""GPU instructions that the CuTe DSL does not name, or not in this form. Imports the CuTe DSL."""

from __future__ import annotations

import struct
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^x on the special function unit, subnormals flushed: without .ftz each exponential costs two more instructions."""
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


@dsl_user_op
def weighted_sum(a: Float32, x: Float32, b: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a x + b y, of which only b y is rounded before: the compiler is not left to choose which product is."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, x, b, y)]
    text = "{ .reg .f32 p; mul.rn.f32 p, $3, $4; fma.rn.f32 $0, $1, $2, p; }"
    return Float32(assembly(T.f32(), values, text, "=f,f,f,f,f"))


@dsl_user_op
def hidden(x: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``x``, of which the compiler knows nothing."""
    return Int32(assembly(T.i32(), [Int32(x).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r", side_effects=True))


@dsl_user_op
def has_come(barrier: Any, phase: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 if a phase of a barrier in shared memory has ended, without a wait."""
    values = [barrier.to_llvm_ptr(loc=loc, ip=ip), Int32(phase).ir_value(loc=loc, ip=ip)]
    text = "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
    return Int32(assembly(T.i32(), values, text, "=r,r,r,~{memory}", side_effects=True))


@dsl_user_op
def shifted(x: Int32, by: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``x`` shifted to the left by so many bits, 0 from 32 on, which LLVM leaves open."""
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (x, by)]
    return Int32(assembly(T.i32(), values, "shl.b32 $0, $1, $2;", "=r,r,r"))


@dsl_user_op
def highest_bit(word: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The number of a word's highest bit; -1 where it has none."""
    return Int32(assembly(T.i32(), [Int32(word).ir_value(loc=loc, ip=ip)], "bfind.u32 $0, $1;", "=r,r"))


@dsl_user_op
def rotated(word: Int32, left: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A word's bits moved left, those that leave it back in on the right."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (word, left)]
    return Int32(assembly(T.i32(), values, "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r"))


@dsl_user_op
def wide_product(x: Int32, factor: int, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """The high and the low word of ``x`` times ``factor``, both unsigned."""
    text = f"{{ .reg .b64 p; mul.wide.u32 p, $2, {factor}; mov.b64 {{$1, $0}}, p; }}"
    parts = assembly(_struct(T.i32(), 2), [Int32(x).ir_value(loc=loc, ip=ip)], text, "=r,=r,r")
    return [Int32(llvm.extractvalue(T.i32(), parts, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def product_by_double(x: Int32, factor: int, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """As ``wide_product``, the high word from fp64.

    (2^52 + x) factor + 2^52 (2^32 - factor) is 2^84 + x factor, of whose 53 bits, rounded towards 0, the last stands for 2^32.
    """
    m, c = (struct.pack(">d", float(n)).hex() for n in (factor, (2**32 - factor) << 52))
    text = (
        f"{{ .reg .f64 d; .reg .b32 h; mov.b64 d, {{$2, 0x43300000}}; fma.rz.f64 d, d, 0d{m}, 0d{c}; "
        f"mov.b64 {{$0, h}}, d; mul.lo.u32 $1, $2, {factor}; }}"
    )
    parts = assembly(_struct(T.i32(), 2), [Int32(x).ir_value(loc=loc, ip=ip)], text, "=&r,=r,r")
    return [Int32(llvm.extractvalue(T.i32(), parts, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def xor3(a: Int32, b: Int32, c: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """a ^ b ^ c in one instruction."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Int32(assembly(T.i32(), values, "lop3.b32 $0, $1, $2, $3, 0x96;", "=r,r,r,r"))


@dsl_user_op
def bytes_of(a: Int32, b: Int32, selector: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Four of the eight bytes of ``a`` and ``b``, by the selector's digits."""
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (a, b, selector)]
    return Int32(assembly(T.i32(), values, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))


def word(number: int) -> Int32:
    """The int32 of a number's lowest 32 bits."""
    return Int32((number + (1 << 31)) % (1 << 32) - (1 << 31))


@dsl_user_op
def reciprocal(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """1 / x on the special function unit, to one unit in the last place."""
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "rcp.approx.ftz.f32 $0, $1;", "=f,f"))


@dsl_user_op
def magnitude(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """|x|, which most instructions take of an operand for nothing."""
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "abs.f32 $0, $1;", "=f,f"))


@dsl_user_op
def pack16(low: Float32, high: Float32, dtype: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two fp32 rounded to nearest even in one 32-bit word of ``dtype``; the DSL's conversion packs only some widths."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    values = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(assembly(T.i32(), values, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f"))


@dsl_user_op
def pack_e4m3(four: list[Float32], *, loc: Any = None, ip: Any = None) -> Int32:
    """Four fp32 rounded to nearest even in one word of e4m3, past 448 to 448; NaN stays."""
    pairs = "cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
    text = f"{{ .reg .b16 l, h; {pairs} mov.b32 $0, {{l, h}}; }}"
    return Int32(assembly(T.i32(), [Float32(x).ir_value(loc=loc, ip=ip) for x in four], text, "=r,f,f,f,f"))


@dsl_user_op
def largest_word(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The largest of three by their words as signed integers, in one instruction: the largest number where one is positive."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    words = "mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3;"
    text = f"{{ .reg .b32 a, b, c; {words} max.s32 a, a, b; max.s32 a, a, c; mov.b32 $0, a; }}"
    return Float32(assembly(T.f32(), values, text, "=f,f,f,f"))


@dsl_user_op
def ldmatrix_x4(address: Int32, offset: int, trans: bool, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """Four 8×8 matrices of 16-bit elements; lane 8·m + r gives row r of matrix m, at ``address`` + ``offset`` bytes."""
    form = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if trans else ''}.shared.b16"
    text = f"{form} {{$0, $1, $2, $3}}, [$4+{offset}];"
    values = [Int32(address).ir_value(loc=loc, ip=ip)]
    parts = assembly(_struct(T.i32(), 4), values, text, "=r,=r,=r,=r,r", side_effects=True)
    return [Int32(llvm.extractvalue(T.i32(), parts, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def mma_m16n8k16(
    a: list[Int32], b: list[Int32], c: list[Float32], dtype: Any, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """a b + c on a warp's tensor core, ``dtype`` operands and fp32 accumulators."""
    kind = "bf16" if dtype is cutlass.BFloat16 else "f16"
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, "
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)] + [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    parts = assembly(_struct(T.f32(), 4), values, text + "{$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return [Float32(llvm.extractvalue(T.f32(), parts, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def load_shared(address: Int32, offset: int, count: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """One, two or four fp32 of shared memory at ``address`` + ``offset`` bytes, by one load."""
    names = ", ".join(f"${i}" for i in range(count))
    source = f"[${count}+{offset}];"
    text = f"ld.shared.v{count}.f32 {{{names}}}, {source}" if count > 1 else f"ld.shared.f32 $0, {source}"
    values, constraints = [Int32(address).ir_value(loc=loc, ip=ip)], "=f," * count + "r,~{memory}"
    if count == 1:
        return [Float32(assembly(T.f32(), values, text, constraints, side_effects=True))]
    struct = assembly(_struct(T.f32(), count), values, text, constraints, side_effects=True)
    return [Float32(llvm.extractvalue(T.f32(), struct, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def store_shared(address: Int32, offset: int, values: list[Float32], *, loc: Any = None, ip: Any = None) -> None:
    """One, two or four fp32 to shared memory at ``address`` + ``offset`` bytes, by one store."""
    count = len(values)
    names = ", ".join(f"${i + 1}" for i in range(count))
    text = f"st.shared.v{count}.f32 [$0+{offset}], {{{names}}};" if count > 1 else f"st.shared.f32 [$0+{offset}], $1;"
    operands = [Int32(address).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)]
    assembly(None, operands, text, "r" + ",f" * count + ",~{memory}", side_effects=True)


@dsl_user_op
def store_pair(address: Int64, low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Two fp32 to global memory by one store."""
    values = [Int64(address).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high))]
    assembly(None, values, "st.global.v2.f32 [$0], {$1, $2};", "l,f,f,~{memory}", side_effects=True)


@dsl_user_op
def bits_of(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The word of an fp32."""
    return Int32(assembly(T.i32(), [Float32(x).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,f"))


@dsl_user_op
def cp_async16(to: Int32, offset: int, source: Int64, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Copy 16 bytes from global to shared memory at ``to`` + ``offset``; ``size`` 0 reads nothing and writes zeros."""
    values = [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    assembly(None, values, f"cp.async.cg.shared.global.L2::128B [$0+{offset}], [$1], 16, $2;", "r,l,r", side_effects=True)


@dsl_user_op
def pin(x: Float32, scratch: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Keep what follows behind the computation of ``x``, which is not negative: a store to shared memory that never happens.

    ptxas moves a wait for wgmma above arithmetic that does not need it, here above the exponentials that are to run
    under that very wgmma; it moves none above a store.
    """
    text = "{ .reg .pred p; setp.lt.f32 p, $0, 0fBF800000; @p st.volatile.shared.f32 [$1], $0; }"
    values = [Float32(x).ir_value(loc=loc, ip=ip), scratch.to_llvm_ptr(loc=loc, ip=ip)]
    assembly(None, values, text, "f,r", side_effects=True)


@dsl_user_op
def hold(values: list[Float32], scratch: Any, *, loc: Any = None, ip: Any = None) -> None:
    """As ``pin``, of four values that lie together."""
    text = "{ .reg .pred p; setp.lt.f32 p, $0, 0fBF800000; @p st.volatile.shared.v4.f32 [$4], {$0, $1, $2, $3}; }"
    operands = [*(Float32(x).ir_value(loc=loc, ip=ip) for x in values), scratch.to_llvm_ptr(loc=loc, ip=ip)]
    assembly(None, operands, text, "f,f,f,f,r", side_effects=True)


@dsl_user_op
def reload(address: Any, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """Two words of shared memory, read where it stands: what comes of them is not computed before."""
    values, text = [address.to_llvm_ptr(loc=loc, ip=ip)], "ld.volatile.shared.v2.b32 {$0, $1}, [$2];"
    parts = assembly(_struct(T.i32(), 2), values, text, "=r,=r,r", side_effects=True)
    return [Int32(llvm.extractvalue(T.i32(), parts, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def negative(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """-x, computed where it stands: into registers of a coming wgmma, which ptxas must not fill behind another one's start."""
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "neg.f32 $0, $1;", "=f,f", side_effects=True))


@dsl_user_op
def times(x: Float32, factor: float, *, loc: Any = None, ip: Any = None) -> Float32:
    """x · factor, computed where it stands, as ``negative``."""
    word = struct.unpack("<I", struct.pack("<f", factor))[0]
    values = [Float32(x).ir_value(loc=loc, ip=ip)]
    return Float32(assembly(T.f32(), values, f"mul.f32 $0, $1, 0f{word:08X};", "=f,f", side_effects=True))


@dsl_user_op
def from_half(word: Int32, which: int, *, loc: Any = None, ip: Any = None) -> Float32:
    """The first or second fp16 of a 32-bit word."""
    text = f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, $1; cvt.f32.f16 $0, {'ab'[which]}; }}"
    return Float32(assembly(T.f32(), [Int32(word).ir_value(loc=loc, ip=ip)], text, "=f,r"))


@dsl_user_op
def from_bfloat16(word: Int32, which: int, *, loc: Any = None, ip: Any = None) -> Float32:
    """The first or second bf16 of a 32-bit word."""
    text = ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xFFFF0000;")[which]
    return Float32(assembly(T.f32(), [Int32(word).ir_value(loc=loc, ip=ip)], text, "=f,r"))


@dsl_user_op
def store_matrices(target: Any, words: list[Int32], transposed: bool = False, *, loc: Any = None, ip: Any = None) -> None:
    """stmatrix of two or four 8 × 8 tiles of 16-bit elements; lane l addresses row l % 8 of tile l // 8."""
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    text = f"stmatrix.sync.aligned.m8n8.x{len(words)}{'.trans' * transposed}.shared.b16 [$0], {{{names}}};"
    values = [target.to_llvm_ptr(loc=loc, ip=ip), *(Int32(word).ir_value(loc=loc, ip=ip) for word in words)]
    assembly(None, values, text, "r," * (1 + len(words)) + "~{memory}", side_effects=True)


def _struct(kind: Any, count: int) -> Any:
    return llvm.StructType.get_literal([kind] * count)


def assembly(result: Any, values: list[Any], text: str, constraints: str, side_effects: bool = False) -> Any:
    """One piece of inline PTX; operands and constraints as in LLVM."""
    return llvm.inline_asm(
        result,
        values,
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
