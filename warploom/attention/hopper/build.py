"""Compile a forward variant into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from warploom.attention.hopper.backward import HopperBackward
from warploom.attention.hopper.backward_pair import PairBackward
from warploom.attention.hopper.backward_roles import RolesBackward
from warploom.attention.hopper.config import BackwardConfig, ForwardConfig
from warploom.attention.hopper.forward import HopperForward
from warploom.kernels.cute.arguments import column_mask, distances, dropout, rows, slopes, stream, table, vector, view
from warploom.kernels.cute.basics import DTYPES
from warploom.runtime.compile import compile_kernel

_BIASES: dict[str, Any] = {"": lambda: None, "alibi": slopes, "distance": distances}


def compile_forward(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes.

    The arguments are described by fakes: every size and stride is its own symbol, so that one module serves every view,
    and only what TMA needs is required, 16-byte alignment and a contiguous last dimension.
    """
    variant = ForwardConfig(**config)
    modes = 2 if variant.varlen else 3  # besides head_dim
    keys = 3 if variant.paged else modes
    tensors = [view(DTYPES[variant.dtype], each) for each in (modes, keys, keys, modes)]
    lse = rows(modes)
    counted = variant.varlen or variant.columns
    starts_k = variant.varlen and not variant.paged
    packed = [vector(Int32, present) for present in (variant.varlen, starts_k, variant.used, counted)]
    parts = rows(3, align=16) if variant.split else None  # in place of it the lse where nothing is split
    mask = column_mask(variant.q_offset) if variant.columns else None
    drop = dropout() if variant.dropout else None
    added = slopes(reaches=True) if variant.reaches else _BIASES[variant.bias]()
    largest = rows(2) if variant.largest else None
    pages = table() if variant.paged else None
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(0), Int32(1)]
    given = [*tensors, lse, vector(Float32, variant.sink), *packed, parts, mask, drop, added, largest, pages]
    arguments = [*given, *scalars, stream()]
    return {**compile_kernel(HopperForward(variant), arguments, name, library), "shared": variant.shared_bytes}


def compile_backward(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """As ``compile_forward``; registers and stack are the largest of the three kernels."""
    variant = BackwardConfig(**config)
    dtype = DTYPES[variant.dtype]
    modes = 2 if variant.varlen else 3  # besides head_dim
    inputs = [view(dtype, modes) for _ in range(5)]
    lse, dlse = rows(modes), rows(modes, last=cute.sym_int64())
    gradients = [view(dtype, modes) for _ in range(3)]
    workspace = make_fake_tensor(Float32, (cute.sym_int64(),), stride=(1,), assumed_align=16)
    scalars = [Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(1), Int32(1), Int32(0), Int32(0), stream()]
    packed = [vector(Int32, present) for present in (variant.varlen, variant.varlen, variant.used)]
    columns: list[Any] = [None] * 7
    if variant.columns:
        columns = [*column_mask(), vector(Int32, variant.q_offset)]
    added = distances(variant.bias_grad) if variant.bias == "distance" else _BIASES[variant.bias]()
    if variant.reaches:
        added = slopes(reaches=True)
    given = [*packed, *columns, dropout() if variant.dropout else None, added]
    arguments = [*inputs, lse, dlse if variant.dlse else None, *gradients, workspace, *given, *scalars]
    kernel = (PairBackward if variant.pair else RolesBackward if variant.roles else HopperBackward)(variant)
    return {**compile_kernel(kernel, arguments, name, library), "shared": variant.shared_bytes}
