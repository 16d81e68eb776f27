"""The inverse of a unit lower triangular matrix by blocks, in fp32.

A power series of the whole would take the 63rd power of products of keys; here only inverses of blocks are multiplied, whose
elements stay small wherever the delta rule does: of [[P, 0], [R, Q]] the inverse is [[P', 0], [-Q' R P', Q']].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_inverse(a, C: tl.constexpr):
    """(I + a)^-1 - I of a strictly lower triangular (C, C) matrix; C is 16, 32 or 64."""
    x = _of_sixteen(_diagonal(a, 16, C))
    if C >= 32:
        x = _merged(x, a, 16, C)
    if C >= 64:
        x = _merged(x, a, 32, C)
    return tl.reshape(x, (C, C))


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _diagonal(a, B: tl.constexpr, C: tl.constexpr):
    """The (C / B, B, B) blocks of B on the diagonal."""
    N: tl.constexpr = C // B
    if N == 1:
        return tl.reshape(a, (1, B, B))
    else:
        i = tl.arange(0, N)
        same = i[:, None, None, None] == i[None, None, :, None]
        return tl.sum(tl.where(same, tl.reshape(a, (N, B, N, B)), 0.0), 2)


@triton.jit
def _of_sixteen(a):
    """(I + a)^-1 - I of (N, 16, 16) matrices, from blocks of 1 to blocks of 2, 4, 8 and 16."""
    x = _doubled(tl.zeros_like(a), a, 1)
    x = _doubled(x, a, 2)
    x = _doubled(x, a, 4)
    return _doubled(x, a, 8)


@triton.jit
def _doubled(x, a, B: tl.constexpr):
    """From the inverses of blocks of B on the diagonal, less I, those of blocks of 2B; other elements are 0."""
    i = tl.arange(0, 16)
    row, column = i[None, :, None], i[None, None, :]
    below = (row // (2 * B) == column // (2 * B)) & (row // B > column // B)
    y = tl.where(below, a, 0.0)
    if B > 1:
        y += _product(x, y)
        y += _product(y, x)
    return x - y


@triton.jit
def _merged(x, a, B: tl.constexpr, C: tl.constexpr):
    """From the (C / B, B, B) inverses of blocks, less I, those of blocks of 2B."""
    N: tl.constexpr = C // (2 * B)
    i = tl.arange(0, 2)
    whole = tl.reshape(_diagonal(a, 2 * B, C), (N, 2, B, 2, B))
    below = (i[None, :, None, None, None] == 1) & (i[None, None, None, :, None] == 0)
    corner = tl.sum(tl.sum(tl.where(below, whole, 0.0), 3), 1)
    pairs = tl.reshape(x, (N, 2, B, B))
    upper = tl.sum(tl.where(i[None, :, None, None] == 0, pairs, 0.0), 1)
    lower = tl.sum(tl.where(i[None, :, None, None] == 1, pairs, 0.0), 1)
    corner += _product(lower, corner)
    corner += _product(corner, upper)
    same = i[None, :, None, None, None] == i[None, None, None, :, None]
    found = tl.where(below, tl.reshape(corner * -1.0, (N, 1, B, 1, B)), 0.0)
    found = tl.where(same, tl.reshape(pairs, (N, 2, B, 1, B)), found)
    return tl.reshape(found, (N, 2 * B, 2 * B))
