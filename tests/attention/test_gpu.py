"""Triton attention on a CUDA device: every case in every dtype, bits, graphs, streams, compile, sizes past 32 bits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from tests.attention.cases import CASES, MASKS, NARROWED, case, masked
from tests.attention.harness import Call, check
from tests.attention.packed import PACKED, Packed
from warploom import masks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu_memory")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
HALVES = DTYPES[:2]
NAN = float("nan")


def seed() -> int:
    return random.randrange(2**31)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype) -> None:
    check(case(name, seed(), dtype=dtype, device="cuda"), "triton")


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    check(masked(name, seed(), "cuda", dtype=torch.bfloat16), "triton")


@pytest.mark.parametrize("name", NARROWED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_mask_narrowed_by_the_call(name: str, head_dim: int) -> None:
    check(masked(name, seed(), "cuda", narrow=True, dtype=torch.bfloat16, head_dim=head_dim), "triton")


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_packed(name: str, dtype: torch.dtype) -> None:
    Packed(**{"seed": seed(), "dtype": dtype, "device": "cuda", **PACKED[name]}).check("triton")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["Document", "GlobalWindow", "four vectors, per head, causal", "PrefixLM"])
def test_many_tiles(name: str, head_dim: int) -> None:
    """The masks of 200 keys in a call of 1111: what they leave out is full or hidden."""
    c = masked(name, seed(), "cuda", dtype=torch.bfloat16, head_dim=head_dim)
    if name.startswith("four"):
        vectors = torch.randint(-20, 1300, (4, 2, 4, 1111), dtype=torch.int32, device="cuda")
        c = replace(c, keywords={"mask": masks.ColumnMask(*vectors.sort(0).values, causal=True)})
    check(replace(c, seqlen_q=1111, seqlen_k=1111), "triton")


@pytest.mark.parametrize("dims", [(16, 16), (24, 24), (88, 88), (104, 40), (136, 136), (192, 128), (248, 248), (64, 256)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = {"seqlen_q": 333, "seqlen_k": 417, "head_dim": dims[0], "head_dim_v": dims[1], "dtype": dtype}
    check(Call(seed(), device="cuda", keywords={"causal": True}, **shape), "triton")


def drawn(batch: int, seqlen: int, heads: int, kv: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = ((seqlen, heads), (seqlen, kv), (seqlen, kv), (seqlen, heads))
    return [torch.randn(batch, s, h, dim, device="cuda", dtype=dtype) for s, h in shapes]


def results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = warploom.attention(*leaves, return_lse=True, backend="triton", **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


REPEATED = {
    "causal": {"causal": True},
    "documents": {"mask": masks.Document([300, 20, 180, 524])},
    "softcap, dropout": {"softcap": 5.0, "dropout_p": 0.2, "dropout_seed": 5, "window": (200, 100)},
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_thousand_repeats(name: str, head_dim: int) -> None:
    inputs = drawn(4, 1024, 8, 2, head_dim)
    options = {n: x.to("cuda") if isinstance(x, masks.Mask) else x for n, x in REPEATED[name].items()}
    first = [t.clone() for t in results(*inputs, **options)]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(results(*inputs, **options), first, strict=True):
            different += (a != b).sum()
    assert int(different) == 0


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_misaligned_pointers_and_odd_strides(offset: int) -> None:
    """Bases off by 2, 4 and 8 bytes, after aligned calls of the same shapes: no binary may be taken for the other."""
    call = Call(seed(), 2, 300, 300, head_dim=64, dtype=torch.bfloat16, device="cuda", keywords={"causal": True})
    check(call, "triton")
    for odd in range(4):
        offsets = tuple(offset if i == odd else 0 for i in range(4))
        check(replace(call, offsets=offsets), "triton")
    check(replace(call, pitch=67), "triton")


@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_hidden_and_blind_may_hold_anything(poison: float) -> None:
    q, k, v, dout = drawn(2, 500, 4, 2, 128)
    visible = torch.ones(2, 500, dtype=torch.bool, device="cuda")
    visible[0, 300:], visible[1, ::7] = False, False
    options = {"mask": masks.Padding(visible), "window": (40, 0)}
    clean = results(q, k, v, dout, **options)
    blind = (clean[1] == float("-inf")).transpose(1, 2)
    assert blind.any()
    k[~visible], v[~visible] = poison, poison
    q[blind], dout[blind] = poison, poison
    for a, b in zip(results(q, k, v, dout, **options), clean, strict=True):
        assert torch.equal(a, b)


def test_more_than_two_to_the_31_elements() -> None:
    """2.3 · 10⁹ elements a tensor: rows of the last batches against a call of their own, forward and backward."""
    batch, seqlen, heads, dim = 34, 16384, 32, 128
    q, k, v, dout = (torch.empty(batch, seqlen, heads, dim, device="cuda", dtype=torch.float16) for _ in range(4))
    for t in (q, k, v, dout):
        for b in range(batch):
            t[b].normal_()
    options = {"window": (100, 0)}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = warploom.attention(*leaves, return_lse=True, backend="triton", **options)
    last = [t.detach()[-1:].clone() for t in (q, k, v, dout)]
    want = results(*last, **options)
    assert torch.equal(out[-1:], want[0]) and torch.equal(lse[-1:], want[1])
    out_last = out.detach()[-1:].clone()
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(out_last, want[0])
    for a, b in zip((dq, dk, dv), want[2:], strict=True):
        assert torch.equal(a[-1:], b)


@pytest.mark.parametrize("batch_stride", [0, 64], ids=["pointers", "descriptors"])
def test_strides_past_31_bits_within_a_tile(batch_stride: int) -> None:
    """Rows 2²⁵ elements apart: 100 of them span 2³¹ and more."""
    shape, stride = (1, 100, 1, 64), 2**25
    storage = torch.empty(shape[1] * stride, device="cuda", dtype=torch.float16)
    far = [storage.as_strided(shape, (batch_stride, stride, 64, 1), 64 * n).normal_() for n in range(4)]
    near = [t.contiguous().as_strided(shape, (batch_stride, 64, 64, 1)) for t in far]
    for a, b in zip(results(*far, causal=True), results(*near, causal=True), strict=True):
        assert torch.equal(a, b)


def test_more_programs_than_a_grid_dimension_holds() -> None:
    """70000 batch entries: beyond the 65535 of a grid's y and z."""
    q, k, v, dout = drawn(70000, 3, 1, 1, 16)
    found = results(q, k, v, dout, causal=True)
    want = results(*(t[-5:].clone() for t in (q, k, v, dout)), causal=True)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a[-5:], b)


def test_long_keys() -> None:
    """2²² keys and a vector for each; the mask shows the last document only."""
    seqlen = 2**22
    k, v = (torch.randn(1, seqlen, 1, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    q = torch.randn(1, 40, 1, 64, device="cuda", dtype=torch.float16)
    starts = torch.zeros(1, 1, seqlen, dtype=torch.int32, device="cuda")
    starts[..., -100:] = 40
    out = warploom.attention(q, k, v, mask=masks.ColumnMask(starts), backend="triton")
    want = warploom.attention(q, k[:, -100:], v[:, -100:], backend="triton")
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3)


def test_graph_prepares_its_mask_anew() -> None:
    """A captured step follows its mask's vectors, and its dropout seed, from replay to replay."""
    q, k, v, dout = drawn(2, 512, 4, 2, 64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    starts = torch.full((2, 1, 512), 512, dtype=torch.int32, device="cuda")
    mask = masks.ColumnMask(starts, causal=True)

    def step() -> list[Tensor]:
        out = warploom.attention(*leaves, mask=mask, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for cut in (100, 300, 512, 7):
        starts[..., :cut] = cut
        starts[..., cut:] = 512
        graph.replay()
        for a, b in zip(found, step(), strict=True):
            assert torch.equal(a, b), cut
        want = warploom.attention(q, k, v, mask=masks.ColumnMask(starts.clone(), causal=True), backend="reference")
        torch.testing.assert_close(found[0], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("band", [masks.Full(), masks.SlidingWindow(90, 0)], ids=["vectors", "vectors and band"])
def test_graph_follows_both_masks_of_an_intersection(band: masks.Mask) -> None:
    """Where two masks meet in a capture, replays see what either says then."""
    q, k, v, _ = drawn(2, 512, 4, 2, 64)
    lengths = torch.tensor([[100, 412], [512, 0]], device="cuda")
    starts = torch.full((2, 1, 512), 512, dtype=torch.int32, device="cuda")
    step = lambda: warploom.attention(  # noqa: E731
        q, k, v, mask=masks.Document(lengths) & masks.ColumnMask(starts, causal=True) & band, backend="triton"
    )
    for _ in range(2):  # compiled in the first round
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for length, cut in ((100, 512), (300, 512), (300, 200), (7, 400)):
        lengths[0, 0], lengths[0, 1] = length, 512 - length
        starts[..., : cut // 2] = cut
        graph.replay()
        assert torch.equal(found, step()), (length, cut)
        both = masks.Document(lengths.cpu()).dense(512, 512) & masks.ColumnMask(starts.cpu(), causal=True).dense(512, 512)
        both &= band.dense(512, 512)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2).float() for t in (q, k, v)), attn_mask=both.cuda(), enable_gqa=True
        )
        torch.testing.assert_close(found.transpose(1, 2).float(), want, rtol=2e-2, atol=2e-2)


def test_streams_do_not_mix() -> None:
    """Each of eight streams fills its inputs late and attends: a launch elsewhere would read them early."""
    streams = [torch.cuda.Stream() for _ in range(8)]
    inputs = [drawn(2, 512, 4, 2, 64) for _ in streams]
    want = [results(*x, causal=True) for x in inputs]
    torch.cuda.synchronize()
    found = []
    for stream, x in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            late = [torch.empty_like(t) for t in x]
            torch.cuda._sleep(2_000_000)
            for a, b in zip(late, x, strict=True):
                a.copy_(b)
            found.append(results(*late, causal=True))
    torch.cuda.synchronize()
    for a, b in zip(found, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_no_synchronisation() -> None:
    q, k, v, dout = drawn(2, 500, 4, 2, 64)
    lengths = torch.tensor([[100, 400], [250, 250]], device="cuda")
    for _ in range(2):  # compiled in the first round
        torch.cuda.set_sync_debug_mode("default" if _ == 0 else "error")
        try:
            results(q, k, v, dout, mask=masks.Document(lengths))
            results(q, k, v, dout, causal=True, dropout_p=0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda q, k, v, starts: warploom.attention(q, k, v, mask=masks.ColumnMask(starts, causal=True), backend="triton"),
        fullgraph=True,
        dynamic=dynamic,
    )
    for seqlen in (130, 257) if dynamic else (130,):
        q, k, v, dout = drawn(2, seqlen, 4, 2, 64)
        starts = torch.full((2, 1, seqlen), seqlen, dtype=torch.int32, device="cuda")
        starts[..., :70] = 70
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = compiled(*leaves, starts)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        want = results(q, k, v, dout, mask=masks.ColumnMask(starts, causal=True))
        for a, b in zip(found, [want[0], *want[2:]], strict=True):
            assert torch.equal(a, b)


def test_autocast_and_default_dispatch() -> None:
    q, k, v, _ = drawn(1, 200, 4, 2, 64, torch.float32)
    assert "triton" in str(warploom.explain(q, k, v, causal=True)).split("runs", 1)[1].splitlines()[0]
    with torch.autocast("cuda", torch.bfloat16):
        out = warploom.attention(q, k, v, causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), warploom.attention(q, k, v, causal=True), rtol=3e-2, atol=3e-2)


def test_intersection_that_needs_values_refuses_in_a_capture() -> None:
    """Of three intervals a column, which may be two once their values are known."""
    vectors = [torch.tensor([[[5, 6, 7]]], dtype=torch.int32, device="cuda") for _ in range(4)]
    both = masks.ColumnMask(*vectors) & masks.ColumnMask(*[v + 20 for v in vectors])
    both.resolve(40, 3)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="captured CUDA graph cannot"), torch.cuda.graph(graph):
        both.resolve(40, 3)
    torch.cuda.synchronize()
