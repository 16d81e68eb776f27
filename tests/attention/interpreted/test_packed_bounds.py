"""Bounds of packed column masks, which the Triton kernel makes, in the interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.packed_bounds import packed_bounds
from warploom.attention import bounds
from warploom.attention.arguments import varlen_args
from warploom.attention.bounds import BLOCK, COARSE_BLOCK, packed_bounds_of, with_bounds
from warploom.attention.triton import BACKEND
from warploom.masks import ColumnMask
from warploom.masks.intervals import ResolvedMask

PRESENT = {
    "all": (True, True, True, True),
    "lts": (True, False, False, False),
    "lts, lte": (True, True, False, False),
    "lts, ute": (True, False, False, True),
    "uts, ute": (False, False, True, True),
}
# Queries, keys, keys that count, tokens behind the last sequence.
LENGTHS: dict[str, tuple[list[int], list[int], list[int] | None, int]] = {
    "odd": ([70, 3, 129], [70, 3, 129], None, 0),
    "empty ones": ([0, 70, 5, 0, 3, 0], [0, 70, 0, 0, 130, 64], None, 5),
    "nothing": ([0, 0], [0, 0], None, 7),
    "used": ([40, 7, 64, 5], [100, 65, 64, 9], [70, 0, 64, 1], 3),
    "coarse": ([30, 9, 1], [2049, 4200, 70], [2049, 2100, 70], 2500),
    "many": ([1, 2, 0] * 90, [3, 0, 1] * 90, None, 1),
}


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def drawn(name: str, present: str, heads: int, left: int | None, right: int | None) -> tuple[ResolvedMask, int]:
    queries, keys, _, extra = LENGTHS[name]
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    high, total = max(queries) + 5, sum(keys) + extra
    each = [torch.randint(-5, high, (1, heads, total), generator=generator, dtype=torch.int32) for _ in range(4)]
    vectors = [t if there else None for t, there in zip(each, PRESENT[present], strict=True)]
    return ResolvedMask(left, right, *vectors), sum(queries) + 2


BANDS: list[tuple[int | None, int | None]] = [(None, None), (None, 0), (30, 4), (-3, 20)]
CASES = [
    *(("odd", present, band) for present in PRESENT for band in BANDS),
    *((name, "all", band) for name in LENGTHS for band in BANDS if name not in ("odd", "many")),
    ("many", "all", (30, 4)),
]


@pytest.mark.parametrize(("name", "present", "band"), CASES, ids=str)
def test_bounds_are_those_of_each_sequence_alone(name: str, present: str, band: tuple[int | None, int | None]) -> None:
    queries, keys, used, _ = LENGTHS[name]
    mask, total_q = drawn(name, present, 3 if present == "all" else 1, *band)
    cu_q, cu_k = starts(queries), starts(keys)
    counted = None if used is None else torch.tensor(used, dtype=torch.int32)
    found = packed_bounds_of(mask.vectors, (cu_q, cu_k, counted), *band, total_q)
    want, written = packed_bounds(mask, cu_q.tolist(), cu_k.tolist(), used)
    assert found.shape == want.shape and found.dtype == want.dtype
    assert torch.equal(found[:, :, written], want[:, :, written])


def test_only_blocks_with_keys_that_count_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a sequence stands in another one's blocks, whatever order programs run in."""
    queries, keys, used, _ = LENGTHS["used"]
    mask, total_q = drawn("used", "all", 2, None, 0)
    cu_q, cu_k, counted = starts(queries), starts(keys), torch.tensor(used, dtype=torch.int32)
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda t, *a, **k: empty(t, *a, **k).fill_(-77))
    found = bounds._packed_bounds(*mask.vectors, None, 0, total_q, cu_q, cu_k, counted)
    _, written = packed_bounds(mask, cu_q.tolist(), cu_k.tolist(), used)
    assert bool((found[:, :, ~written] == -77).all()) and not (found[:, :, written] == -77).any()


@pytest.mark.parametrize("contents", [[-5, 40, 10**9, 20], [90, 0, 70, 2**31 - 1], [-(2**31), -1, 5, 5]], ids=str)
def test_starts_that_are_wrong_write_nothing_outside(contents: list[int]) -> None:
    mask, total_q = drawn("odd", "all", 2, 7, 0)
    wrong, counted = torch.tensor(contents, dtype=torch.int32), torch.tensor([2**31 - 1, -7, 30], dtype=torch.int32)
    heads, blocks = 2, 202 // BLOCK + 202 // COARSE_BLOCK + 6
    canary = torch.full((3, heads, blocks, 8), -77, dtype=torch.int32)
    launch = bounds._launch(*[False] * 7, packed=True)
    launch((heads * (202 // COARSE_BLOCK + 3), 1), *mask.vectors, canary[1], wrong, wrong, counted, 3, total_q, 202, 7, 0)
    assert bool((canary[::2] == -77).all())


def test_kept_while_lengths_and_vectors_are_the_same() -> None:
    mask, total_q = drawn("used", "all", 1, None, 0)
    queries, keys, used, _ = LENGTHS["used"]
    given = starts(queries), starts(keys), torch.tensor(used, dtype=torch.int32)

    def found() -> Tensor:
        return packed_bounds_of(mask.vectors, given, None, 0, total_q)

    first = found()
    assert found() is first
    for changed in (*given, mask.lts):
        assert changed is not None
        changed.copy_(changed.clone())
        again = found()
        assert again is not first and found() is again
        first = again
    other = packed_bounds_of(mask.vectors, (given[0].clone(), *given[1:]), None, 0, total_q)
    assert other is not first


def test_only_who_asks_has_them() -> None:
    mask, total_q = drawn("odd", "all", 1, None, None)
    q, (k, v) = torch.randn(total_q, 2, 16), (torch.randn(202, 2, 16) for _ in range(2))
    args = varlen_args(q, k, v, starts([70, 3, 129]), starts([70, 3, 129]), mask=ColumnMask(*mask.vectors), causal=True)
    assert BACKEND.prepare(args).bounds is None and with_bounds(args).bounds is None
    found = with_bounds(args, packed=True).bounds
    assert found is not None
    want, written = packed_bounds(args.mask, [0, 70, 73, 202], [0, 70, 73, 202])
    assert torch.equal(found[:, :, written], want[:, :, written])


@pytest.mark.parametrize("with_used", [False, True])
@pytest.mark.parametrize("with_keys", [False, True])
def test_opcheck(with_used: bool, with_keys: bool) -> None:
    mask, total_q = drawn("used", "lts, ute", 2, None, 0)
    queries, keys, used, _ = LENGTHS["used"]
    others: list[Any] = [starts(queries), starts(keys) if with_keys else None]
    others.append(torch.tensor(used, dtype=torch.int32) if with_used else None)
    torch.library.opcheck(torch.ops.warploom.packed_column_bounds.default, (*mask.vectors, None, 0, total_q, *others))


def test_compiles_whole() -> None:
    mask, total_q = drawn("used", "lts, ute", 2, None, 0)
    queries, keys, _, _ = LENGTHS["used"]
    cu_q, cu_k = starts(queries), starts(keys)

    def run(lts: Tensor, ute: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        made = packed_bounds_of((lts, None, None, ute), (cu_q, cu_k, None), None, 0, total_q)
        return made + packed_bounds_of((lts, None, None, ute), (cu_q, cu_k, None), None, 0, total_q)

    assert mask.lts is not None and mask.ute is not None
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    want, written = packed_bounds(mask, cu_q.tolist(), cu_k.tolist())
    found = compiled(mask.lts, mask.ute, cu_q, cu_k)
    assert torch.equal(found[:, :, written], 2 * want[:, :, written])


def test_triton_reads_none_of_them() -> None:
    """Of a call whose forward another implementation ran, say, also by launchers that are kept."""
    mask, total_q = drawn("odd", "lts, ute", 2, None, None)
    q, (k, v) = torch.randn(total_q, 2, 16), (torch.randn(202, 1, 16) for _ in range(2))
    cu = starts([70, 3, 129])
    args = varlen_args(q, k, v, cu, cu.clone(), mask=ColumnMask(mask.lts, ute=mask.ute), causal=True)
    given = args._replace(bounds=torch.full((1, 2, 9, 8), -1, dtype=torch.int32))
    out, lse = BACKEND.forward(args)
    dout = torch.randn_like(out)
    gradients = BACKEND.backward(args, dout, None, out, lse)
    bound, bound_backward = BACKEND.bind(given), BACKEND.bind_backward(given, dout, None, out, lse)
    assert bound is not None and bound_backward is not None
    for found in (BACKEND.forward(given), bound(*given.tensors()), bound(*args.tensors())):
        for a, b in zip(found, (out, lse), strict=True):
            assert torch.equal(a, b)
    launched = bound_backward(dout, None, out, lse, *given.tensors())
    for found in (BACKEND.backward(given, dout, None, out, lse), launched):
        for a, b in zip(found, gradients, strict=True):
            assert torch.equal(a, b)
