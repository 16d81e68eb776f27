"""fp32 in global memory by fours, added to where they are, and arithmetic that rounds as those additions do.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.instructions import assembly


@dsl_user_op
def store_four(target: Any, offset: int, four: list[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Four fp32 to global memory at ``target`` + ``offset`` bytes, aligned as one."""
    values = [target.to_llvm_ptr(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in four)]
    text = f"st.global.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
    assembly(None, values, text, "l,f,f,f,f,~{memory}", side_effects=True)


@dsl_user_op
def add_four(target: Any, offset: int, four: list[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Add four fp32 to those in global memory at ``target`` + ``offset`` bytes, aligned as one; nothing comes back.

    Subnormals count as zeros.
    """
    values = [target.to_llvm_ptr(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in four)]
    text = f"red.relaxed.gpu.global.add.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
    assembly(None, values, text, "l,f,f,f,f,~{memory}", side_effects=True)


@dsl_user_op
def load_four(source: Any, offset: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Four fp32 of global memory at ``source`` + ``offset`` bytes, aligned as one, and what this thread has added to them.

    The compiler leaves it where it stands: loads moved ahead of everything would take all registers.
    """
    text = f"ld.volatile.global.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    kind = llvm.StructType.get_literal([T.f32()] * 4)
    struct = assembly(kind, [source.to_llvm_ptr(loc=loc, ip=ip)], text, "=f,=f,=f,=f,l,~{memory}", side_effects=True)
    return [Float32(llvm.extractvalue(T.f32(), struct, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def flushed_product(a: Float32, x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a x rounded, a zero where that is subnormal; computed where it stands, and never part of a fused instruction."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, x)]
    return Float32(assembly(T.f32(), values, "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", side_effects=True))


@dsl_user_op
def flushed_sum(x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x + y as memory adds fp32: subnormals count as zeros."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y)]
    return Float32(assembly(T.f32(), values, "add.rn.ftz.f32 $0, $1, $2;", "=f,f,f"))
