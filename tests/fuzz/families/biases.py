"""Biases of dense and of packed problems: what is added to each score, and the gradient of what it is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.attention.biased import KINDS, distances
from tests.fuzz.draw import Draw
from tests.fuzz.families import softmax as shared
from tests.fuzz.problem import DTYPES, Expected

TAKE_BIASES = ("cpu", "triton", "reference")
DRAWN = tuple(kind for kind in KINDS if not kind.startswith("t5"))  # whose buckets are counted one by one
ENTRIES = ("full", "of batches", "keys", "keys of all heads", "alibi of batches")  # one of each sequence
MATRICES = ("full", "of heads", "of batches", "a matrix")
DENSE = (*MATRICES, "keys", "keys of all heads")  # which may hold -inf
# Whose every element sums few enough terms for the model's own error to say what is expected.
DIRECT = ("full", "of heads", "of batches", "a matrix", "keys", "keys of all heads")


def with_bias(d: Draw, p: Any, begins: str = "") -> Any:
    """The problem with a bias of any dtype and of any kind that so begins."""
    kind = d.pick([kind for kind in DRAWN if kind.startswith(begins)])
    return replace(
        p,
        bias=kind,
        bias_dtype=d.pick(("float32", "float16", "bfloat16", "float64"), (5, 2, 2, 1)),
        bias_gradient=p.backward and d.chance(0.7),
        bias_hides=kind in DENSE and d.chance(0.3),
    )


def leaf_of(p: Any, device: torch.device) -> Tensor:
    """What the bias is made of."""
    shape = KINDS[p.bias].shape(p.bias_shape)
    leaf = shared.values(p.seed, "bias", shape, "float32", "normal")
    if p.bias.startswith("alibi"):
        leaf = leaf.abs() * 0.1
    if p.bias_hides:
        leaf = leaf.masked_fill(shared.values(p.seed, "hides", shape, "float32", "normal") > 1, float("-inf"))
        leaf[..., shape[-1] // 2 :: 7] = float("-inf")  # keys that nobody sees, but of the heads of a group
    return leaf.to(device, DTYPES[p.bias_dtype])


def matrix(p: Any, leaf: Tensor) -> Tensor:
    """What is added, in the leaf's dtype: (batch|1, heads_q|1, rows|1, seqlen_k|1), of chunks (batch, heads_q|1, rows, …).

    Of packed sequences (sequences, heads_q|1, longest rows, longest keys), with anything in places that a sequence lacks.
    """
    if p.sequences is not None:
        return _packed(p, leaf)
    whole = KINDS[p.bias].matrix(leaf, distances(p.seqlen_q, p.seqlen_k).to(leaf.device))
    if not p.offsets:
        return whole
    whole = whole.expand(p.batch, whole.shape[1], p.seqlen_q, whole.shape[3])
    return torch.stack([whole[b, :, first : first + p.rows] for b, first in enumerate(p.offsets)])


def entry(kind: str, leaf: Tensor, at: int, rows: int, keys: int) -> Tensor:
    """What the bias of one batch entry of so many rows and keys is made of."""
    own = leaf[at : at + 1] if kind in ENTRIES else leaf
    if kind in MATRICES:
        return own[..., :rows, :keys]
    if kind == "of rows":
        return own[..., :rows, :]
    return own[..., :keys] if kind.startswith("keys") else own


def _packed(p: Any, leaf: Tensor) -> Tensor:
    rows, cols = max(p.lengths_q, default=0), max(p.keys, default=0)
    found = []
    for n, (queries, keys) in enumerate(p.sequences):
        distance = distances(rows, cols, keys - queries).to(leaf.device)
        found.append(KINDS[p.bias].matrix(entry(p.bias, leaf, n, rows, cols), distance).expand(1, -1, rows, cols))
    return torch.cat(found)


def expected(p: Any, leaf: Tensor, exact: Tensor, lows: list[Tensor]) -> Expected:
    """The gradient, of exact and modelled gradients of biased scores."""
    one = torch.ones_like(leaf, dtype=torch.float64).requires_grad_()
    slope = matrix(p, one)  # of each score by the one element of the leaf that it reads

    def summed(t: Tensor) -> Tensor:
        full = t.double().sum_to_size(slope.shape)
        return torch.autograd.grad(slope, one, full, retain_graph=True)[0] if full.numel() else torch.zeros_like(one)

    ref = summed(exact)
    near = []
    if p.bias not in DIRECT:
        numbers = torch.arange(leaf.numel(), dtype=torch.float64, device=leaf.device).view(leaf.shape)
        read = torch.where(slope == 0.0, 0.0, matrix(p, numbers) / slope.detach()).round().long()
    for low in lows:
        error = low.double() - exact
        if p.bias in DIRECT:
            near.append(summed(low).to(leaf.dtype).double())
            continue
        # Few elements sum many terms: those of a row err together by its out and lse, rows apart, all by the bias's rounding.
        squares = summed(slope.detach() * (2.0**-24 * exact).square()).abs() + summed(error).square()
        squares = squares + _squares_of_rows(error, slope.detach(), read, leaf.numel()).view(leaf.shape)
        near.append(ref + 1.5 * (squares + (torch.finfo(leaf.dtype).eps / 4 * ref).square()).sqrt())
    narrow = leaf.dtype if torch.finfo(leaf.dtype).eps > torch.finfo(DTYPES[p.dtype]).eps else None
    return Expected(ref, tuple(near), dtype=narrow, like=leaf.dtype)


def _squares_of_rows(t: Tensor, slope: Tensor, read: Tensor, elements: int) -> Tensor:
    """Of each of a leaf's elements the sum over rows of the square of what a row of scores t gives it; ``read``: which one."""
    total = torch.zeros(elements, dtype=torch.float64, device=t.device)
    for row in range(t.shape[2]):
        at = slice(0, 1) if slope.shape[2] == 1 else slice(row, row + 1)
        given = t[:, :, row : row + 1].sum_to_size(slope[:, :, at].shape) * slope[:, :, at]
        total += torch.zeros_like(total).scatter_add_(0, read[:, :, at].flatten(), given.flatten()).square()
    return total
