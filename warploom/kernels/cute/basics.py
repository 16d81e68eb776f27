"""What Hopper kernels of every family share: constants, what a role works on, helpers of every role.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARPGROUP = 128
LOG2_E = math.log2(math.e)
DTYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
# A packed sequence is read by TMA as the end of a dimension of so many rows, past which TMA fills in zeros.
RAGGED = 1 << 24


class Names:
    """What a role of the kernel works on. A plain class: the DSL would carry the fields of a namespace through every loop."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def but(self, **values: Any) -> Names:
        """The same with other values."""
        return Names(**{**self.__dict__, **values})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class KernelBase:
    """Helpers of every role."""

    @cute.jit
    def bounds(self, cu, sequence, total):
        """Start and length of a sequence, inside of the packed tokens whatever the contents say."""
        start = cutlass.min(cutlass.max(cu[sequence], 0), total)
        return start, cutlass.max(cutlass.min(cu[sequence + 1], total) - start, 0)

    @cute.jit
    def choose(self, condition, a, b):
        """a if condition else b, of run-time values."""
        return Int32(a) if condition else Int32(b)

    @cute.jit
    def release(self, barrier):
        """This warp has read what the barrier guards."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)
