"""The FP8 format of caches: e4m3 numbers, fp32 scales, and a rotation of queries and keys that spreads outliers.

A number x is kept as e4m3(x / scale) · scale. Queries and keys may first be multiplied by one orthogonal matrix along
head_dim, which leaves their products as they are: random signs, then a Hadamard matrix (FlashAttention-3's "incoherent
processing", arXiv 2407.08608, section 3.3). A head_dim of 2^a · m, m odd, takes the Hadamard matrix of 2^a and the orthonormal
DCT-II of m: a Hadamard matrix of 8 alone would hardly mix 72 numbers.

Everything is computed element by element in one order, so that no number's bits depend on how many stand beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
COLUMNS = 64  # of a slice, which tensor cores multiply by a matrix of 8 KB
# Rotated rows of AGAIN_FROM to AGAIN_TO numbers are rounded again (`rounded_again`): all of q's, and those of k of which a
# number was more than DOMINATES times the scale before the rotation, one and a half times the largest number of its block after
# it. Of normal numbers hardly one block in a thousand has one. Of 12 numbers and fewer a second rounding adds more along the
# channel than it takes away, of 16 to 31 about as much.
AGAIN_FROM, AGAIN_TO, DOMINATES = 32, 128, 1.5 * LARGEST


def signs(head_dim: int, seed: int, device: torch.device | None = None) -> Tensor:
    """int64 1 or -1 of a head's numbers: -1 where the i-th output of SplitMix64, started at ``seed``, has its top bit set."""
    z = torch.arange(1, head_dim + 1, device=device) * _signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    # What SplitMix64 adds in the end leaves the top bit alone.
    return torch.where(z < 0, -1, 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


def as_bytes(t: Tensor) -> Tensor:
    """The memory of e4m3 numbers as uint8, of the same shape and strides: what pickle knows; any other tensor as it is."""
    return t.view(torch.uint8) if t.dtype == E4M3 else t


def rotate(x: Tensor, seed: int) -> Tensor:
    """x (..., head_dim) times the signs and the orthogonal matrix of ``seed``, in fp32."""
    head_dim = x.shape[-1]
    return x.float() if head_dim == 0 else mixed(x, seed) * hadamard_norm(head_dim)


def hadamard_norm(head_dim: int) -> float:
    """What makes the Hadamard matrix in a head's rotation orthogonal."""
    return float((head_dim & -head_dim) ** -0.5)


def mixed(x: Tensor, seed: int) -> Tensor:
    """`rotate` before it is multiplied by `hadamard_norm`: of a power of two, sums and differences only."""
    head_dim = x.shape[-1]
    power = head_dim & -head_dim
    odd = head_dim // power
    y = (x.float() * signs(head_dim, seed, x.device)).unflatten(-1, (power, odd))
    if odd > 1:
        waves = _dct(odd, x.device)
        total = torch.zeros_like(y)
        for j in range(odd):
            total = total + y[..., j : j + 1] * waves[:, j]
        y = total
    step = 1
    while step < power:
        a, b = y.unflatten(-2, (-1, 2, step)).unbind(-3)
        y = torch.stack((a + b, a - b), -3).flatten(-4, -2)
        step *= 2
    return y.flatten(-2)


def slices(head_dim: int) -> int | None:
    """Into how many slices of at most `COLUMNS` columns a kernel cuts rows to rotate them: 1, 2 or 4; None where it cannot."""
    return next((n for n in (1, 2, 4) if head_dim % n == 0 and head_dim // n <= COLUMNS), None)


def slice_matrices(head_dim: int, count: int, seed: int, device: torch.device) -> Tensor:
    """bf16 (parts, count, COLUMNS, COLUMNS): summands of what `mixed` multiplies each slice by, signs included.

    The slices' products are then added and subtracted as the last steps of `mixed` do. Of a power of two one part, ±1, is all;
    three parts hold a cosine's 24 bits.
    """
    width = head_dim // count
    # Of every slice's rows the first columns: Hadamard matrices begin with a column of ones.
    rest = mixed(torch.eye(head_dim, device=device), seed)[:, :width].unflatten(0, (count, width))
    parts = []
    for _ in range(1 if head_dim & (head_dim - 1) == 0 else 3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1]
    missing = COLUMNS - width
    return torch.nn.functional.pad(torch.stack(parts), (0, missing, 0, missing))


def _dct(n: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II of n numbers, a row a wave."""
    k = torch.arange(n, dtype=torch.float64, device=device)[:, None]
    waves = torch.cos(math.pi / (2 * n) * k * (2 * k.T + 1)) * (2 / n) ** 0.5
    return torch.where(k == 0, n**-0.5, waves).float()


def rounded_again(data: Tensor, y: Tensor, scale: Tensor, x: Tensor, seed: int, every: bool) -> Tensor:
    """``data``, which is `quantized` of y, the rotated x, with rows of a large channel, or every row, rounded so that it stays.

    A query scores high with a key that is large where it is large itself, and half of what rounding does to the score of such
    a pair is the error along that channel. It is taken away before a second rounding, which leaves half of it and moves no
    number by more than a small part of a step of the row's largest numbers.
    """
    largest, channel = x.float().abs().max(-1)
    quotient = y / scale[..., None]
    along = rotate(torch.eye(x.shape[-1], device=x.device), seed)[channel]
    error = _total((data.float() - quotient) * along)
    # An infinite number's row stays as it is, and so does one whose numbers are all of a size.
    again = ((largest > scale * DOMINATES) | every) & error.isfinite()
    other = quotient - torch.where(again, error, 0.0)[..., None] * along
    found = quantized(other, torch.ones_like(scale)).view(torch.uint8)
    return torch.where(again[..., None], found, data.view(torch.uint8)).view(E4M3)


def _total(x: Tensor) -> Tensor:
    """Sums of rows, in an order that the number of rows does not change."""
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        x = x[..., :half] + torch.nn.functional.pad(x[..., half:], (0, 2 * half - n))
    return x[..., 0]


def scales_of(x: Tensor) -> Tensor:
    """fp32 scale of each row of x (..., head_dim): its largest number becomes e4m3's. A row of zeros has 1."""
    top = x.float().abs().amax(-1)
    # By a number in place of a tensor CUDA multiplies by the rounded reciprocal: a step off, which numbers at ties show.
    found = top / top.new_full((), LARGEST)
    return torch.where(found == 0, 1.0, found)


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3 of x (..., heads, head_dim) by ``scale``, broadcast over (..., heads): saturated, and NaN where x is not finite."""
    y = x.float() / scale[..., None]
    return torch.where(x.isfinite(), y.clamp(-LARGEST, LARGEST), float("nan")).to(E4M3)
