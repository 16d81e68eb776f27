"""GPU instructions that the CuTe DSL does not name, or not in this form. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^x on the special function unit, subnormals flushed: without .ftz each exponential costs two more instructions."""
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


@dsl_user_op
def hidden(x: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``x``, of which the compiler knows nothing."""
    return Int32(assembly(T.i32(), [Int32(x).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r", side_effects=True))


@dsl_user_op
def reciprocal(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """1 / x on the special function unit, to one unit in the last place."""
    return Float32(assembly(T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "rcp.approx.ftz.f32 $0, $1;", "=f,f"))


@dsl_user_op
def pack16(low: Float32, high: Float32, dtype: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two fp32 rounded to nearest even in one 32-bit word of ``dtype``; the DSL's conversion packs only some widths."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    values = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(assembly(T.i32(), values, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f"))


@dsl_user_op
def ldmatrix_x4(address: Int32, offset: int, trans: bool, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """Four 8×8 matrices of 16-bit elements; lane 8·m + r gives row r of matrix m, at ``address`` + ``offset`` bytes."""
    form = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if trans else ''}.shared.b16"
    text = f"{form} {{$0, $1, $2, $3}}, [$4+{offset}];"
    values = [Int32(address).ir_value(loc=loc, ip=ip)]
    struct = assembly(_struct(T.i32(), 4), values, text, "=r,=r,=r,=r,r", side_effects=True)
    return [Int32(llvm.extractvalue(T.i32(), struct, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def mma_m16n8k16(
    a: list[Int32], b: list[Int32], c: list[Float32], dtype: Any, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """a b + c on a warp's tensor core, ``dtype`` operands and fp32 accumulators."""
    kind = "bf16" if dtype is cutlass.BFloat16 else "f16"
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, "
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)] + [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    struct = assembly(_struct(T.f32(), 4), values, text + "{$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return [Float32(llvm.extractvalue(T.f32(), struct, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def cp_async16(to: Int32, offset: int, source: Int64, size: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Copy 16 bytes from global to shared memory at ``to`` + ``offset``; ``size`` 0 reads nothing and writes zeros."""
    values = [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    assembly(None, values, f"cp.async.cg.shared.global.L2::128B [$0+{offset}], [$1], 16, $2;", "r,l,r", side_effects=True)


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


@cute.jit
def transpose_quad(words: list[Int32], lane: Int32) -> list[Int32]:
    """Lane t of each quad holds word t of four chunks; it returns with the four words of chunk t."""
    words = list(words)
    for bit in (1, 2):
        odd = lane // bit % 2 == 1
        for low in [i for i in range(4) if not i & bit]:
            high = low | bit
            given = words[low] if odd else words[high]
            taken = cute.arch.shuffle_sync_bfly(given, offset=bit)
            words[low] = taken if odd else words[low]
            words[high] = words[high] if odd else taken
    return words
