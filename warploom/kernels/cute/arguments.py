"""Stand-ins of a kernel's arguments, from which a module is compiled without a GPU. Imports the CuTe DSL.

Every size and stride is its own symbol, so that one module serves every view; only what a copy needs is required.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


def view(dtype: Any, modes: int) -> Any:
    """A tensor of any sizes and strides of ``modes`` dimensions and a contiguous last one, of whole 16 bytes and aligned so."""
    strides = [cute.sym_int64(divisibility=8) for _ in range(modes)]
    shape = (*(cute.sym_int() for _ in range(modes)), cute.sym_int(divisibility=8))
    return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=16)


def rows(modes: int, last: Any = 1, align: int = 4) -> Any:
    """An fp32 value for each row: ``modes`` dimensions of any sizes and strides, the last stride ``last``."""
    shape = tuple(cute.sym_int() for _ in range(modes))
    stride = (*(cute.sym_int64() for _ in range(modes - 1)), last)
    return make_fake_tensor(Float32, shape, stride=stride, assumed_align=align)


def numbers() -> Any:
    """An int32 for each column of a mask, (batch|1, heads|1, seqlen_k), contiguous."""
    shape = tuple(cute.sym_int() for _ in range(3))
    return make_fake_tensor(Int32, shape, stride=(cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4)


def vector(dtype: Any, present: bool = True) -> Any:
    """A contiguous vector of any length, or None."""
    return make_fake_tensor(dtype, (cute.sym_int(),), stride=(1,), assumed_align=4) if present else None


def column_mask(offsets: bool = False) -> tuple[Any, ...]:
    """Vectors of a column mask, their bounds (batch|1, heads|1, blocks, 8) and the word that says which vectors there are.

    ``offsets``: and the query offset of each batch entry.
    """
    shape = (*(cute.sym_int() for _ in range(3)), 8)
    bounds = make_fake_tensor(Int32, shape, stride=(cute.sym_int64(), cute.sym_int64(), 8, 1), assumed_align=16)
    return (*(numbers() for _ in range(4)), bounds, Int32(0), *((vector(Int32),) if offsets else ()))


def dropout() -> tuple[Any, ...]:
    """What `warploom.kernels.cute.dropout` takes: the seed's two words, and the numbers that follow them."""
    return vector(Int32), Int32(0), Float32(1.0), Int32(0)


def slopes(reaches: bool = False) -> tuple[Any, ...]:
    """What `warploom.kernels.cute.bias` takes of ALiBi: slopes (batch|1, heads_q), and what is added to distances.

    ``reaches``: and room for norms, a flat fp32 tensor.
    """
    norms = make_fake_tensor(Float32, (cute.sym_int64(),), stride=(1,), assumed_align=16)
    return (rows(2), Int32(0), *((norms,) if reaches else ()))


def distances(gradient: bool = False) -> tuple[Any, ...]:
    """What `warploom.kernels.cute.distances` takes: a table (heads_q, entries), room to spread it out, what distances begin at.

    ``gradient``: and the table's.
    """
    spread = make_fake_tensor(Float32, (cute.sym_int64(),), stride=(1,), assumed_align=16)
    return (rows(2), spread, Int32(0), *((rows(2),) if gradient else ()))


def table() -> Any:
    """Page numbers of sequences, int32 (sequences, pages of one), those of a sequence side by side."""
    return make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1), assumed_align=4)


def stream() -> Any:
    """The stream that torch works on."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
