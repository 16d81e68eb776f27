"""What kernels of every family share: constants, and a choice between run-time values.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARP = 32  # threads
WARPGROUP = 128
LOG2_E = math.log2(math.e)
DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


@cute.jit
def choose(condition, a, b):
    """a if condition else b, of run-time values."""
    return Int32(a) if condition else Int32(b)
