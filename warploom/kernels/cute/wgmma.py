"""Products of warpgroups, and how their operands and accumulators lie in registers.

Imports the CuTe DSL; only what compiles kernels imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from warploom.kernels.cute.instructions import pack16

IN_SHARED, IN_REGISTERS = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM  # where the left operand lies
BY_K, BY_MN = OperandMajorMode.K, OperandMajorMode.MN  # what an operand's neighbours in memory share


def product(dtype: Any, shape: tuple[int, int, int], source: Any, major_a: Any, major_b: Any) -> Any:
    """A warpgroup's product of 16-bit operands into fp32."""
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, major_a, major_b))


def product_e4m3(shape: tuple[int, int, int], source: Any) -> Any:
    """A warpgroup's product of e4m3 operands, each with its neighbours along k in memory, into fp32."""
    e4m3 = cutlass.Float8E4M3FN
    return cute.make_tiled_mma(warpgroup.MmaF8Op(e4m3, e4m3, Float32, shape, source, BY_K, BY_K))


@cute.jit
def gemm(mma, acc, a, b, accumulate, stage=None):
    """Issue acc = a b, or acc += a b, as one group; ``stage`` is b's, where it has several."""
    atom = cute.make_mma_atom(mma.op)
    warpgroup.fence()
    for i in cutlass.range_constexpr(cute.size(b, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or i > 0)
        left = a[None, None, i]
        right = b[None, None, i] if const_expr(stage is None) else b[None, None, i, stage]
        cute.gemm(atom, acc, left, right, acc)
    warpgroup.commit_group()


def accumulator_rows(acc: Any, columns: int) -> Any:
    """An accumulator as (row, (column pair, group of 8 columns)): rows 0 and 1 are 8 apart."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4))))


def part_of(operand: Any, index: Any) -> Any:
    """One of an operand's tiles of rows (A) or columns (B): (element, 1, step, stage)."""
    own = operand[None, index, None, None]
    shape, stride = own.shape, own.stride
    layout = cute.make_layout((shape[0], 1, *shape[1:]), stride=(stride[0], 0, *stride[1:]))
    return cute.make_tensor(own.iterator, layout)


def words(operand: Any) -> Any:
    """The 32-bit registers of an operand."""
    return cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(cute.size(operand))), Int32)


@cute.jit
def pack(acc, operand, dtype):
    """An accumulator in a 16-bit dtype: as an A operand it has the same elements in the same order."""
    packed = words(operand)
    for i in cutlass.range_constexpr(cute.size(packed)):
        packed[i] = pack16(acc[2 * i], acc[2 * i + 1], dtype)
