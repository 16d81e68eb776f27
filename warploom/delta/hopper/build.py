"""Compile a kernel into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from warploom.delta.hopper.back import Back
from warploom.delta.hopper.config import (
    BACK_ITEM,
    COLUMNS,
    ITEM,
    BackConfig,
    ForwardConfig,
    GradientConfig,
    KeepConfig,
    PrepareConfig,
)
from warploom.delta.hopper.forward import Forward
from warploom.delta.hopper.gradients import Gradients
from warploom.delta.hopper.keep import Keep
from warploom.delta.hopper.prepare import Prepare
from warploom.kernels.cute.arguments import rows, stream, vector, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel


def compile_prepare(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack."""
    variant = PrepareConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3), view(DTYPES[variant.dtype], 3), numbers(), numbers()]
    arguments = [*tensors, vector(Int32), vector(Int32), prepared(variant.item)]
    arguments += [Float32(1.0), Float32(1.0), Int32(0), Int32(0), stream()]
    return compile_kernel(Prepare(variant), arguments, name, library)


def compile_forward(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack, the larger ones of two kernels."""
    variant = ForwardConfig(**config)
    tensors = [view(DTYPES[variant.dtype], 3) for _ in range(4)]
    arguments = [*tensors, prepared(), states(), states(), vector(Int32), vector(Int32)]
    for _ in ("beta", "decay"):
        arguments += [Int64(0) for _ in range(4)] + [Int32(0)]
    arguments += [Float32(1.0), Float32(1.0), Int32(0), Int32(0), stream()]
    return compile_kernel(Forward(variant), arguments, name, library)


def states() -> Any:
    """A state for each sequence and value head, contiguous."""
    shape = tuple(cute.sym_int() for _ in range(4))
    return make_fake_tensor(Float32, shape, stride=(*(cute.sym_int64() for _ in range(3)), 1), assumed_align=4)


def numbers() -> Any:
    """An fp32 for each token and head, of any strides."""
    return rows(3, cute.sym_int64())


def prepared(item: int = ITEM) -> Any:
    """What prepare leaves for walks."""
    return make_fake_tensor(Float32, (cute.sym_int(), item), stride=(item, 1), assumed_align=16)


def compile_keep(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack."""
    variant = KeepConfig(**config)
    dtype = DTYPES[variant.dtype]
    arguments = [view(dtype, 3), view(dtype, 3), prepared(BACK_ITEM), states(), states()]
    arguments += [tiles(Float32, variant.width * COLUMNS)]
    arguments += [tiles(dtype, variant.width * COLUMNS), view(dtype, 3), view(dtype, 3), vector(Int32), vector(Int32)]
    arguments += [Int32(0) for _ in range(5)] + [stream()]
    return compile_kernel(Keep(variant), arguments, name, library)


def compile_back(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack."""
    variant = BackConfig(**config)
    dtype = DTYPES[variant.dtype]
    arguments = [*(view(dtype, 3) for _ in range(4)), prepared(BACK_ITEM), states(), states()]
    arguments += [tiles(Float32, variant.width * COLUMNS), tiles(dtype, variant.width * COLUMNS), vector(Int32), vector(Int32)]
    arguments += [Int32(0) for _ in range(3)] + [stream()]
    return compile_kernel(Back(variant), arguments, name, library)


def compile_gradients(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers and stack."""
    variant = GradientConfig(**config)
    dtype = DTYPES[variant.dtype]
    state = tiles(dtype, variant.width * COLUMNS), tiles(dtype, variant.width * COLUMNS)
    arguments = [*(view(dtype, 3) for _ in range(4)), numbers(), prepared(BACK_ITEM), *state]
    arguments += [*(view(dtype, 3) for _ in range(4)), numbers(), numbers(), vector(Int32), vector(Int32)]
    arguments += [Float32(0.0), *(Int32(0) for _ in range(7)), stream()]
    return compile_kernel(Gradients(variant), arguments, name, library)


def tiles(dtype: Any, size: int) -> Any:
    """Tiles of so many elements, one after the other."""
    return make_fake_tensor(dtype, (cute.sym_int(), size), stride=(size, 1), assumed_align=16)
