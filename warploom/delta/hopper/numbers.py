"""A number for each token and value head, of fp32 or of bfloat16, as a call has it. Imports the CuTe DSL.

One module takes both: such a tensor is one of 16-bit words, of which an fp32 has two.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.basics import choose
from warploom.kernels.cute.instructions import assembly


def words_of(address: Any, shape: Any, strides: Any, words: Any) -> Any:
    """The tensor (batch, seqlen, heads_v, words) at ``address``; strides are in words."""
    layout = cute.make_layout((*shape, words), stride=(*strides, 1))
    return cute.make_tensor(cute.make_ptr(Int16, address, cute.AddressSpace.gmem, assumed_align=2), layout)


@cute.jit
def number(t, batch, row, head):
    """That of a token and head, as fp32; of one of words without a branch: the 32 bits where it lies, and its half of them."""
    found = Float32(0.0)
    if const_expr(t.element_type is Float32):
        found = t[batch, row, head]
    else:
        at = Int64(batch) * t.stride[0] + Int64(row) * t.stride[1] + Int64(head) * t.stride[2]
        address = t.iterator.toint() + 2 * at
        both = cute.make_ptr(Int32, address & -4, cute.AddressSpace.gmem, assumed_align=4).load()
        half = choose((Int32(address) & 2) == 0, 0x1044, 0x3244)
        found = by_bytes(both, choose(t.shape[3] == 2, 0x3210, half))
    return found


@dsl_user_op
def by_bytes(word: Int32, selector: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The fp32 of four of a word's bytes, or of 0 (digits from 4 on), by the selector's digits."""
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in (word, 0, selector)]
    return Float32(assembly(T.f32(), values, "prmt.b32 $0, $1, $2, $3;", "=f,r,r,r"))
