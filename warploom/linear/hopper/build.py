"""Compile a walk into a shared library, without a GPU. Imports the CuTe DSL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from warploom.kernels.cute.arguments import rows, stream, view
from warploom.kernels.cute.basics import DTYPES
from warploom.linear.hopper.config import WalkConfig
from warploom.linear.hopper.walk import Walk
from warploom.linear.hopper.walk_pair import Pair
from warploom.runtime.compile import compile_kernel


def compile_walk(config: dict[str, Any], name: str, library: Path) -> dict[str, Any]:
    """Write ``library``, which exports ``name``; returns registers, stack and shared bytes."""
    variant = WalkConfig(**config)
    weights = variant.weighted or (variant.fading and not variant.sums_logs)
    factors = [rows(3) if present else None for present in (weights, variant.biased)]
    if variant.a_head:
        factors[0] = rows(1, cute.sym_int64())
    logs = rows(3, cute.sym_int64()) if variant.sums_logs or variant.finds else None
    if variant.paired:
        tensors = [view(DTYPES[variant.dtype], 3) for _ in range(6)]
        arguments = [*tensors, factors[0], logs, rows(4), rows(4), Float32(1.0), stream()]
        return {**compile_kernel(Pair(variant), arguments, name, library), "shared": variant.shared_bytes}
    tensors = [view(DTYPES[variant.dtype], 3) for _ in range(3)]
    tensors.append(view(Float32 if variant.wide else DTYPES[variant.dtype], 3))
    before = [rows(5), rows(3)] if variant.cut else [None, None]
    terms = [view(DTYPES[variant.dtype], 3), rows(4), rows(4)] if variant.terms else [None] * 3
    if variant.finds:
        terms = [None, rows(4), rows(4)]
    others = [rows(4), rows(4), rows(3)] if variant.finds else [None] * 3
    arguments = [*tensors, *factors, *before, logs, *terms, *others, Float32(1.0), stream()]
    return {**compile_kernel(Walk(variant), arguments, name, library), "shared": variant.shared_bytes}
