"""Scores that a column mask hides. Imports the CuTe DSL; only what compiles kernels imports this module."""

from __future__ import annotations

import struct
from typing import Any

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from warploom.kernels.cute.instructions import assembly


@dsl_user_op
def if_shown(
    x: Float32, word: Int32, bit: int, finite: Int32, number: int, *, loc: Any = None, ip: Any = None
) -> Float32:  # fmt: skip
    """``x`` where that bit of ``word`` is set, else -inf, whatever ``x`` is.

    By a predicated multiply-add: a selection waits for the units that make maxima, of which there are half as many. What each
    element added to -inf alike ptxas would compute before and select; so each takes another ``number``, times the ``finite``
    float whose bits these are.
    """
    factor = struct.unpack("<I", struct.pack("<f", 1.0))[0] + number
    text = (
        f"{{ .reg .pred p; .reg .b32 t; .reg .f32 f; and.b32 t, $2, {1 << bit:#x}; setp.ne.s32 p, t, 0; "
        f"mov.b32 f, $3; @!p fma.rn.f32 $0, f, 0f{factor:08X}, 0fFF800000; }}"
    )
    values = [v.ir_value(loc=loc, ip=ip) for v in (Float32(x), Int32(word), Int32(finite))]
    return Float32(assembly(T.f32(), values, text, "=f,0,r,r"))
