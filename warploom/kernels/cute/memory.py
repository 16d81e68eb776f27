"""Bulk copies of Hopper, and counters in global memory by which blocks wait for each other. Imports the CuTe DSL."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.instructions import assembly


@dsl_user_op
def bulk_load(target: Any, source: Any, size: int, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """One thread copies ``size`` bytes from global to shared memory; the barrier counts them as they land."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    pointers = [p.to_llvm_ptr(loc=loc, ip=ip) for p in (target, source)]
    values = [*pointers, Int32(size).ir_value(loc=loc, ip=ip), barrier.to_llvm_ptr(loc=loc, ip=ip)]
    assembly(None, values, text, "r,l,r,r,~{memory}", side_effects=True)


@dsl_user_op
def bulk_send(target: Any, source: Any, size: int, barrier: Any, block: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """One thread copies ``size`` bytes to another block of its cluster, whose barrier counts them as they land.

    ``target`` and ``barrier`` are where they would be in its own shared memory.
    """
    text = (
        "{ .reg .b32 t, b; mapa.shared::cluster.u32 t, $0, $4; mapa.shared::cluster.u32 b, $3, $4; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [t], [$1], $2, [b]; }"
    )
    pointers = [p.to_llvm_ptr(loc=loc, ip=ip) for p in (target, source)]
    values = [*pointers, Int32(size).ir_value(loc=loc, ip=ip), barrier.to_llvm_ptr(loc=loc, ip=ip)]
    assembly(None, [*values, Int32(block).ir_value(loc=loc, ip=ip)], text, "r,r,r,r,r,~{memory}", side_effects=True)


@dsl_user_op
def load_floats(source: Any, count: int, block: Int32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Two or four fp32, aligned as one, of another block's shared memory; ``source`` is where they would be in its own."""
    outputs = ", ".join(f"${i}" for i in range(count))
    text = (
        f"{{ .reg .b32 s; mapa.shared::cluster.u32 s, ${count}, ${count + 1}; "
        f"ld.shared::cluster.v{count}.f32 {{{outputs}}}, [s]; }}"
    )
    values = [source.to_llvm_ptr(loc=loc, ip=ip), Int32(block).ir_value(loc=loc, ip=ip)]
    kind = llvm.StructType.get_literal([T.f32()] * count)
    struct = assembly(kind, values, text, ",".join(["=f"] * count) + ",r,r,~{memory}", side_effects=True)
    return [Float32(llvm.extractvalue(T.f32(), struct, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def bulk_add(target: Any, source: Any, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """One thread adds ``size`` bytes of fp32 in shared memory to those in global memory, as part of its bulk group."""
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    pointers = [p.to_llvm_ptr(loc=loc, ip=ip) for p in (target, source)]
    assembly(None, [*pointers, Int32(size).ir_value(loc=loc, ip=ip)], text, "l,r,r,~{memory}", side_effects=True)


@dsl_user_op
def bulk_store(target: Any, source: Any, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """One thread copies ``size`` bytes from shared to global memory, as part of its bulk group."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    pointers = [p.to_llvm_ptr(loc=loc, ip=ip) for p in (target, source)]
    assembly(None, [*pointers, Int32(size).ir_value(loc=loc, ip=ip)], text, "l,r,r,~{memory}", side_effects=True)


@dsl_user_op
def raise_to(target: Any, x: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Raise an fp32 in global memory to ``x`` if that is larger, or NaN: one word, 7fffffff, stands for all NaN.

    As words, numbers of 0 and more rise as signed ones, and those below fall as unsigned ones.
    """
    text = (
        "{ .reg .pred n, p; .reg .b32 b; mov.b32 b, $1; setp.nan.f32 n, $1, $1; @n mov.b32 b, 0x7fffffff; "
        "setp.lt.s32 p, b, 0; @!p red.relaxed.gpu.global.max.s32 [$0], b; @p red.relaxed.gpu.global.min.u32 [$0], b; }"
    )
    values = [target.to_llvm_ptr(loc=loc, ip=ip), Float32(x).ir_value(loc=loc, ip=ip)]
    assembly(None, values, text, "l,f,~{memory}", side_effects=True)


@dsl_user_op
def load_acquire(address: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    text = "ld.acquire.gpu.global.b32 $0, [$1];"
    return Int32(assembly(T.i32(), [address.to_llvm_ptr(loc=loc, ip=ip)], text, "=r,l,~{memory}", side_effects=True))


@cute.jit
def wait_until(counter, value):
    """A thread waits until a counter in global memory has a value; what was written before it got there is visible."""
    found = load_acquire(counter)
    while found != value:
        found = load_acquire(counter)


@cute.jit
def wait_for(counter, value):
    """As ``wait_until``, before bulk copies."""
    wait_until(counter, value)
    cute.arch.fence_proxy("async.global")


@cute.jit
def wait_for_least(counter, value):
    """As ``wait_for``, until the counter has the value or more."""
    found = load_acquire(counter)
    while found < value:
        found = load_acquire(counter)
    cute.arch.fence_proxy("async.global")


# What a state says of memory that the first thread to come is to fill.
NOT_THERE, ON_ITS_WAY, THERE = 0, 1, 2


@cute.jit
def claim(state, found):
    """1 if this thread is to fill the memory, and to count the state up when it has; else 0, once what fills it is visible.

    ``found`` is the state that it read before.
    """
    first = Int32(0)
    if found != THERE:
        found = cute.arch.atomic_cas(state, cmp=Int32(NOT_THERE), val=Int32(ON_ITS_WAY), sem="acquire", scope="gpu")
        if found == NOT_THERE:
            first, found = Int32(1), Int32(THERE)
        while found != THERE:
            found = load_acquire(state)
    cute.arch.fence_proxy("async.global")
    return first


@dsl_user_op
def pass_on(counter: Any, *, loc: Any = None, ip: Any = None) -> None:
    """One thread counts up, after all that it wrote or had written by bulk copies it waited for."""
    text = "fence.proxy.async.global; fence.acq_rel.gpu; red.release.gpu.global.add.s32 [$0], 1;"
    assembly(None, [counter.to_llvm_ptr(loc=loc, ip=ip)], text, "l,~{memory}", side_effects=True)


@dsl_user_op
def count_up(counter: Any, amount: Any, *, loc: Any = None, ip: Any = None) -> None:
    """One thread counts up after all that it, and those it has synchronised with, wrote."""
    text = "red.release.gpu.global.add.s32 [$0], $1;"
    values = [counter.to_llvm_ptr(loc=loc, ip=ip), Int32(amount).ir_value(loc=loc, ip=ip)]
    assembly(None, values, text, "l,r,~{memory}", side_effects=True)
