"""What the forward and the backward kernels share: constants, and what a role works on.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cutlass

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
