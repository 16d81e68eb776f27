"""A number for each token and value head, of fp32 or of bfloat16, as a call has it. Imports the CuTe DSL.

One module takes both: such a tensor is one of 16-bit words, of which an fp32 has two.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.instructions import assembly


def words_of(address: Any, shape: Any, strides: Any, words: Any) -> Any:
    """The tensor (batch, seqlen, heads_v, words) at ``address``; strides are in words."""
    layout = cute.make_layout((*shape, words), stride=(*strides, 1))
    return cute.make_tensor(cute.make_ptr(Int16, address, cute.AddressSpace.gmem, assumed_align=2), layout)


@cute.jit
def place(t, batch, row, head):
    """The address of a token's and head's number in a tensor of words."""
    at = Int64(batch) * t.stride[0] + Int64(row) * t.stride[1] + Int64(head) * t.stride[2]
    return t.iterator.toint() + 2 * at


@cute.jit
def number(t, address, both):
    """That number as fp32, by the 32 bits where it lies: all of them, or a half."""
    half = choose((Int32(address) & 2) == 0, 0x1044, 0x3244)
    return by_bytes(both, choose(t.shape[3] == 2, 0x3210, half))


@dsl_user_op
def by_bytes(word: Float32, selector: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The fp32 of four of a word's bytes, or of 0 (digits from 4 on), by the selector's digits."""
    values = [Float32(word).ir_value(loc=loc, ip=ip), *(Int32(v).ir_value(loc=loc, ip=ip) for v in (0, selector))]
    return Float32(assembly(T.f32(), values, "prmt.b32 $0, $1, $2, $3;", "=f,f,r,r"))


@dsl_user_op
def cp_async4(to: Int32, source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """Copy a word from global to shared memory."""
    values = [Int32(to).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip)]
    assembly(None, values, "cp.async.ca.shared.global [$0], [$1], 4;", "r,l", side_effects=True)
