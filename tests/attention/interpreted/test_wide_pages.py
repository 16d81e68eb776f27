"""The kernel that writes FP8 pages in 16 bits, in the interpreter: numbers, tables, lengths, and what it leaves alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.test_fp8 import drawn
from warploom import PagedKVCache
from warploom.attention.caches import cache_args
from warploom.attention.hopper import wide_pages
from warploom.attention.hopper.plan import as_wide
from warploom.attention.packing import _of_pages
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.kernels.e4m3 import E4M3

STARTS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


def call(granularity: str, page_size: int, dims: tuple[int, int], dtype: torch.dtype, **keywords: Any) -> AttentionArgs:
    """Three sequences of 70, 0 and 33 keys in drawn pages of a larger pool; slots and scales that none uses are NaN."""
    drawing, heads, lengths = random.randrange(2**31), 3, (70, 0, 33)
    pages = -(-90 // page_size)
    pool = 3 * pages + 2
    k, v = (drawn(drawing + n, pool, page_size, heads, dim) for n, dim in enumerate(dims))
    scales = [drawn(drawing + 2 + n, pool, page_size, heads).abs() + 0.1 for n in range(2)]
    if granularity != "token":
        scales = [t[0, 0, : heads if granularity == "head" else 1].clone() for t in scales]
    table = torch.randperm(pool, generator=torch.Generator().manual_seed(drawing))[: 3 * pages].view(3, pages).int()
    used = torch.zeros(pool, page_size, dtype=torch.bool)
    for n, length in enumerate(lengths):
        at = torch.arange(length)
        used[table[n, at // page_size].long(), at % page_size] = True
    tensors = []
    for t in (k, v, *scales):
        tensors.append(t if t.ndim < 3 else t.masked_fill(~used.view(*used.shape, *[1] * (t.ndim - 2)), float("nan")))
    numbers = [t.to(E4M3) for t in tensors[:2]]
    cache = PagedKVCache(*numbers, table, torch.tensor(lengths, dtype=torch.int32), *tensors[2:])
    return cache_args(drawn(drawing + 4, 8, 6, dims[0]).to(dtype), cache, None, STARTS, **keywords)


def held(args: AttentionArgs, n: int) -> list[Tensor]:
    """Keys and values of a sequence in the order of its table, as far as its length."""
    assert args.block_table is not None and args.seqused_k is not None
    found = _of_pages(args, args.block_table[n].long(), int(args.seqused_k[n]))
    return [t.to(args.q.dtype) for t in found]


@pytest.mark.parametrize("granularity", ["token", "head", "tensor"])
@pytest.mark.parametrize(("page_size", "dims"), [(1, (64, 64)), (16, (128, 64)), (32, (72, 40)), (100, (8, 256))])
def test_numbers_are_scaled_and_rounded_once(granularity: str, page_size: int, dims: tuple[int, int]) -> None:
    dtype = torch.float16  # the interpreter cuts bfloat16 where a GPU rounds
    args = call(granularity, page_size, dims, dtype, causal=True)
    wide = wide_pages.widen(args)
    assert wide.k.dtype == wide.v.dtype == dtype and wide.k_scale is None and wide.v_scale is None
    assert wide.k.shape[1:] == (wide_pages.PAGE, 3, dims[0]) and wide.v.shape[1:] == (wide_pages.PAGE, 3, dims[1])
    assert wide.seqused_k is not None and wide.seqused_k.tolist() == [70, 0, 33]
    for n in range(3):
        for got, want in zip(held(wide, n), held(args, n), strict=True):
            assert torch.equal(got, want), n


def test_lengths_are_held_to_the_longest_that_the_call_names() -> None:
    """Whoever names one shorter than a sequence reads no page past it."""
    args = call("token", 16, (16, 16), torch.float16, max_seqlen_k=40)
    wide = wide_pages.widen(args)
    assert wide.seqused_k is not None and wide.seqused_k.tolist() == [48, 0, 33]
    assert wide.block_table is not None and wide.block_table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert wide.k.shape[0] == 9 and torch.equal(held(wide, 0)[0], held(args, 0)[0][:48])


@pytest.mark.parametrize(("entry", "stands_for"), [(-1, 0), (-(2**31), 0), (10**6, -1), (2**31 - 1, -1)])
def test_entries_outside_of_the_pool_are_held_to_it(entry: int, stands_for: int) -> None:
    """As those that other kernels read: a wrong one reads a page of the pool, and no other memory."""
    args = call("token", 16, (16, 16), torch.float16)
    assert args.block_table is not None
    wrong, held_to = (args._replace(block_table=args.block_table.clone()) for _ in range(2))
    wrong.block_table[0, 1], held_to.block_table[0, 1] = entry, stands_for % len(args.k)  # type: ignore[index]
    found, want = (held(wide_pages.widen(each), 0) for each in (wrong, held_to))
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def test_a_strided_pool() -> None:
    args = call("token", 16, (16, 16), torch.float16)
    other = args._replace(
        k=args.k.transpose(1, 2).contiguous().transpose(1, 2), v=torch.cat([args.v, args.v], 3)[..., :16]
    )  # fmt: skip
    for n in range(3):
        for got, want in zip(held(wide_pages.widen(other), n), held(args, n), strict=True):
            assert torch.equal(got, want), n


def test_no_sequences_and_no_keys() -> None:
    args = call("token", 16, (16, 16), torch.float16)
    assert args.block_table is not None and args.seqused_k is not None and args.cu_seqlens_q is not None
    none = args._replace(block_table=args.block_table[:0], seqused_k=args.seqused_k[:0], cu_seqlens_q=args.cu_seqlens_q[:1])
    assert wide_pages.widen(none).k.shape[0] == 0
    wide = wide_pages.widen(args._replace(seqused_k=torch.zeros_like(args.seqused_k)))
    assert wide.seqused_k is not None and wide.seqused_k.tolist() == [0, 0, 0]


def test_the_module_is_that_of_pages_of_16_bits() -> None:
    args = call("token", 64, (128, 128), torch.float16, causal=True)
    problem = AttentionProblem.from_args(args, False)
    assert as_wide(problem) == AttentionProblem.from_args(wide_pages.widen(args), False)


def test_as_much_as_is_written_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    args = call("token", 16, (64, 64), torch.float16)
    assert wide_pages.refusal(args) is None
    monkeypatch.setattr(wide_pages, "MOST", 3 * 96 * 3 * 128 * 2 - 1)
    assert "16 bits" in (wide_pages.refusal(args) or "")
