"""Quantising on a CUDA device: as on a CPU, the layout of values, bits, graphs, compile, sizes past 32 bits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.fp8_case import QuantizeCase, bits, by_kernel, check, numbers
from warploom.fp8 import Fp8Tensor, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_gpu_memory"),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no e4m3 in hardware"),
]

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Slices of every number and width, whole and padded; parts of a number and of a cosine.
DIMS = [
    *((dim, dim, BF16) for dim in (64, 128, 256)),
    *((96, 72, BF16), (192, 128, BF16), (16, 8, BF16), (1, 3, BF16)),
    *((66, 250, BF16), (128, 64, HALF), (160, 256, HALF)),
    *((64, 128, FP32), (256, 40, FP32), (72, 96, FP32)),
]
LENGTHS = (0, 100, 255, 335, 10), (130, 1, 469, 300, 0)
USED = (0, 70, 255, 0, 9), (100, 0, 400, 300, 0)


def drawing() -> int:
    return random.randrange(2**31)


def on_gpu(**changes: Any) -> QuantizeCase:
    return replace(QuantizeCase(drawing(), heads=(6, 2), rows=(300, 513), device="cuda"), **changes)


@pytest.mark.parametrize("head_dim,head_dim_v,dtype", DIMS)
def test_head_dims(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    for large in (False, True):
        check(on_gpu(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, large=large))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_tiles_than_programs(head_dim: int, large: bool) -> None:
    options: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim, "dtype": BF16, "large": large}
    check(on_gpu(rows=(2100, 2300), heads=(8, 4), bad=True, **options))


@pytest.mark.parametrize("granularity,rotation", [("block", 2**40), ("block", None), ("head", -3), ("tensor", None)])
@pytest.mark.parametrize(
    "form",
    [
        {"head_dim": 128, "used": ((0, 250), (513, 3))},
        {"packed": LENGTHS, "behind": 37},
        {"head_dim": 40, "packed": LENGTHS, "used": USED},
    ],
    ids=["padded", "packed", "packed and padded"],
)
def test_sequences_and_padding(form: dict[str, Any], granularity: str, rotation: int | None) -> None:
    check(on_gpu(granularity=granularity, rotation=rotation, bad=True, dtype=BF16, **form))


@pytest.mark.parametrize("strides", ["odd", "heads first", "every other"])
def test_strides(strides: str) -> None:
    check(on_gpu(head_dim=128, strides=strides, dtype=BF16))


def test_calls_give_the_same_bits() -> None:
    for granularity in ("block", "tensor"):
        case = on_gpu(granularity=granularity)
        given = case.drawn()
        for a, b in zip(by_kernel(case, given), by_kernel(case, given), strict=True):
            assert torch.equal(bits(a.data), bits(b.data)) and torch.equal(a.scale, b.scale)


def public(*given: Tensor, **options: Any) -> tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]:
    """quantize() on the device, whose results are close to the CPU's."""
    found = quantize(*given, **options)
    on_cpu = {name: t.cpu() if isinstance(t, Tensor) else t for name, t in options.items()}
    for a, b in zip(found, quantize(*(t.cpu() for t in given), **on_cpu), strict=True):
        assert a.dtype == b.dtype and a.hadamard_seed == b.hadamard_seed
        assert (a.cu_seqlens is None) == (b.cu_seqlens is None)
        torch.testing.assert_close(a.scale.cpu(), b.scale, rtol=4e-6, atol=0.0)
        assert (numbers(a.data.cpu()) != numbers(b.data)).sum() <= 1e-4 * a.data.numel() + 2
    return found


@pytest.mark.parametrize("head_dim", [64, 72, 130, 260])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_values_lie_key_by_key(head_dim: int, dtype: torch.dtype) -> None:
    """130 and 260 numbers are no kernel's: torch makes the same."""
    given = [t.to(dtype) for t in on_gpu(head_dim=head_dim, head_dim_v=head_dim).drawn()]
    v = public(*given)[2].data
    assert v.shape == given[2].shape and v.stride() == (2 * head_dim * 528, 1, head_dim * 528, 528)
    room = v.as_strided((2, 2, head_dim, 528), (2 * head_dim * 528, head_dim * 528, 528, 1))
    assert (room[..., 513:].float() == 0).all()
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    v = public(given[0][0], given[1][0, :300], given[2][0, :300], cu_seqlens_q=starts)[2].data
    assert v.stride() == (1, head_dim * 304, 304)


def test_lengths_from_any_address() -> None:
    given = [t[0] for t in on_gpu(rows=(513, 513)).drawn()]
    starts = torch.tensor([7, 0, 100, 513], dtype=torch.int32, device="cuda")[1:]
    for options in ({}, {"seqused_k": starts.diff()}):
        public(*given, cu_seqlens_q=starts, **options)


def test_nothing_to_quantise() -> None:
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, kv = torch.zeros(batch, seqlen_q, 4, 16).cuda(), torch.zeros(batch, seqlen_k, 2, 16).cuda()
        public(q, kv, kv)


@pytest.mark.parametrize("granularity", ["block", "head"])
def test_captured(granularity: Any) -> None:
    """By a stream that has seen no call with this seed."""
    given = on_gpu(dtype=BF16).drawn()
    want = quantize(*given, granularity=granularity, seed=drawing())
    seed = drawing()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        found = quantize(*given, granularity=granularity, seed=seed)
    given[0].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    want = quantize(*given, granularity=granularity, seed=seed)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(bits(a.data), bits(b.data)) and torch.equal(a.scale, b.scale)


def test_compiled() -> None:
    given = on_gpu(dtype=BF16).drawn()

    def call(*given: Tensor) -> list[Tensor]:
        return [x for t in quantize(*given) for x in (t.data, t.scale)]

    for a, b in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given), strict=True):
        assert torch.equal(bits(a), bits(b)) and a.stride() == b.stride()


def test_more_than_2_to_the_31_numbers() -> None:
    """The last blocks of 131,200 rows and 128 heads are those that they are alone."""
    if torch.cuda.mem_get_info()[0] < 2**34:
        pytest.skip("needs 16 GiB")
    rows, last = 131_200, 384
    x = torch.empty(1, rows, 128, 128, dtype=torch.bfloat16, device="cuda").normal_()
    whole = quantize(x[:, -last:], x, x)
    alone = quantize(*(x[:, -last:] for _ in range(3)))
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(bits(a.data[:, -last:]), bits(b.data)) and torch.equal(a.scale[:, -3:], b.scale)
