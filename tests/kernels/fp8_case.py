"""Calls of the kernel that quantises q, k and v, judged against fp64 and against torch's implementation on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom import fp8
from warploom.fp8 import Fp8Tensor
from warploom.kernels.e4m3 import AGAIN_FROM, AGAIN_TO, DOMINATES, E4M3, hadamard_norm, mixed
from warploom.kernels.fp8_quantize import BLOCK, of_storage, quantize_op

# Of a rotated number's error, in units of the largest of its block: sums of products in fp32, cut rather than rounded.
ROTATION = 2.0**-18


@dataclass(frozen=True)
class QuantizeCase:
    """q (batch, rows, heads, head_dim), k and v; or packed, with lengths of sequences and tokens behind the last one."""

    seed: int
    head_dim: int = 64
    head_dim_v: int = 64
    heads: tuple[int, int] = (2, 1)
    batch: int = 2
    rows: tuple[int, int] = (100, BLOCK + 5)
    packed: tuple[Sequence[int], Sequence[int]] | None = None
    behind: int = 0
    used: tuple[Sequence[int], Sequence[int]] | None = None
    granularity: str = "block"
    rotation: int | None = 0
    dtype: torch.dtype = torch.float32
    strides: str = "contiguous"
    scale: float = 1.0
    bad: bool = False  # NaN and infinities
    large: bool = False  # a number in fifty is thirty times as large, which is more than its block's rotated ones
    device: str = "cpu"

    def drawn(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for at, dim in ((0, self.head_dim), (1, self.head_dim), (1, self.head_dim_v)):
            lead = (self.batch, self.rows[at]) if self.packed is None else (sum(self.packed[at]) + self.behind,)
            x = torch.randn(*lead, self.heads[at], dim, generator=generator)
            x = x * torch.randn(*lead, self.heads[at], 1, generator=generator) * self.scale
            if self.large:
                x = x * torch.where(torch.rand(x.shape, generator=generator) < 0.02, 30, 1)
            if self.bad:
                for every, value in ((977, "nan"), (1033, "inf"), (1511, "-inf")):
                    x.view(-1)[at::every] = float(value)
            found.append(self._laid(x.to(self.dtype)))
        return found

    def _laid(self, x: Tensor) -> Tensor:
        """The same numbers by the case's strides, on its device."""
        x = x.to(self.device)
        if self.strides == "heads first":
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        if self.strides == "odd":  # rows an odd number of elements apart, from an odd address on
            room = x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))[..., 1 : x.shape[-1] + 1]
            return room.copy_(x)
        if self.strides == "every other":
            return x.repeat_interleave(2, -1)[..., ::2]
        return x

    def lengths(self) -> list[Tensor | None]:
        """cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k."""
        packed: list[Any] = [None, None]
        if self.packed is not None:
            packed = [torch.tensor([0, *each]).cumsum(0).int() for each in self.packed]
        used = [None, None] if self.used is None else [torch.tensor(each, dtype=torch.int32) for each in self.used]
        return [None if t is None else t.to(self.device) for t in (*packed, *used)]


def by_kernel(case: QuantizeCase, given: list[Tensor]) -> list[Fp8Tensor]:
    """The kernel's numbers and scales; what it leaves unwritten is 0x55."""
    from warploom.kernels.triton import fp8_launch

    lengths = case.lengths()
    found = list(quantize_op.fake(*given, case.rotation, case.granularity, *lengths))
    for t in found:
        t.view(torch.uint8).fill_(0x55)
    fp8_launch.quantize(found, *given, case.rotation, case.granularity, *lengths)
    rows = given[2].shape[-3]
    assert (found[4].view(torch.uint8)[..., rows:] == 0).all()
    data = found[0], found[2], of_storage(found[4], rows)
    rotations = (case.rotation, case.rotation, None)
    cu = [t if case.granularity == "block" else None for t in lengths[:2]]
    return [Fp8Tensor(*each) for each in zip(data, found[1::2], (cu[0], cu[1], cu[1]), rotations, strict=True)]


def check(case: QuantizeCase) -> None:
    given, lengths = case.drawn(), case.lengths()
    found = by_kernel(case, given)
    for name, x, t in zip("qkv", given, found, strict=True):
        at = int(name != "q")
        cu, used = (None if n is None else n.cpu() for n in (lengths[at], lengths[2 + at]))
        want = fp8._quantize(x.cpu(), t.hadamard_seed, case.granularity, cu, used, queries=name == "q")
        got = t.to("cpu")
        assert got.scale.shape == want.scale.shape, (case, name)
        if t.hadamard_seed is None:
            assert torch.equal(numbers(got.data), numbers(want.data)) and torch.equal(got.scale, want.scale), (case, name)
            continue
        torch.testing.assert_close(got.scale, want.scale, rtol=ROTATION, atol=0.0)
        differs = numbers(got.data) != numbers(want.data)
        tied = nearest(case, x.cpu(), got, differs, every=name == "q")
        assert (differs & ~tied).sum() <= 1e-4 * x.numel() + 2, (case, name)


def nearest(case: QuantizeCase, x: Tensor, t: Fp8Tensor, differs: Tensor, every: bool) -> Tensor:
    """Each number is the e4m3 number next to the rotated one over its scale, but for the rotation's own rounding.

    Of a row with a large channel, or of ``every`` row, what the first rounding added along that channel was taken away before.
    A number at a tie may have been rounded either way first, which moves the others of its row: rows with one are returned.
    Numbers that are 0 or NaN are looked at where they are not torch's.
    """
    data = t.data.double()
    counted = ((data != 0) & data.isfinite()) | differs
    scale = t.scale.double()
    if scale.ndim > 1:
        scale = scale.flatten(0, -2)[fp8._Rows.of(t.data, t.cu_seqlens).block].unflatten(0, t.data.shape[:-2])
    matrix = mixed(torch.eye(x.shape[-1]), t.hadamard_seed).double() * hadamard_norm(x.shape[-1])  # type: ignore[arg-type]
    once = (x.double() @ matrix) / scale[..., None]
    slack = torch.full_like(once, 448 * ROTATION)
    away = _away(data, once, slack)
    tied = torch.zeros_like(differs)
    if AGAIN_FROM <= x.shape[-1] <= AGAIN_TO:
        largest, channel = x.double().abs().max(-1)
        along = matrix[channel]
        error = ((_rounded(once) - once) * along).sum(-1, keepdim=True)
        either = _rounded(once + slack) - _rounded(once - slack)
        sums = ((either + slack) * along.abs()).sum(-1, keepdim=True)
        again = _away(data, once - error * along, slack + sums * along.abs())
        least = scale * DOMINATES
        may, must = ((largest > least * (1 + side * ROTATION)) | every for side in (-1, 1))
        away = torch.where(must[..., None], again, torch.where(may[..., None], away.minimum(again), away))
        tied = ((either > 0).any(-1) & may)[..., None].expand_as(differs)
    assert (away[counted] <= 0).all(), (case, float(away[counted].max()))
    return tied


def _rounded(quotient: Tensor) -> Tensor:
    return quotient.clamp(-448, 448).to(E4M3).double()


def _away(data: Tensor, quotient: Tensor, slack: Tensor) -> Tensor:
    """By how much numbers are farther than half a step from a quotient that is known but for ``slack``."""
    unit = torch.exp2((quotient.abs() + slack).log2().floor().clamp(-6, 8) - 3)
    return (data - quotient).abs() - unit / 2 - slack


def numbers(t: Tensor) -> Tensor:
    """fp32, with 1000 for NaN: a zero's sign, which a corrected quotient loses, is not looked at."""
    return t.float().nan_to_num(1000.0)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)
