"""The FP8 forward on a GPU, against the specification over the numbers that its inputs stand for.

Rounding moves a weight by a sixteenth at most, and one below e4m3's smallest by 2^-16 of the largest: so far out may be off, of
the attention over |v|. Tensor cores cut FP8 sums of scores to 13 bits behind their largest term, once in 32 dims, which moves
weights too. Rounding errors of many weights average out: in the root of the mean square a thirtieth is left.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import warploom
from benchmarks import fp8_error
from warploom import attention, attention_varlen, masks
from warploom.attention import fp8
from warploom.fp8 import Fp8Tensor, quantize

pytestmark = pytest.mark.gpu

Inputs = tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]
NAN = float("nan")


@pytest.fixture(autouse=True)
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is dequantised, but those of the specification."""

    def dequantised(*_: object) -> None:
        raise AssertionError("was dequantised")

    monkeypatch.setattr(fp8.Fp8Call, "as_numbers", dequantised)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def dense(
    seed: int, batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int, dim: int, dim_v: int, **options: Any
) -> Inputs:
    """Quantised normal numbers, whose rows differ in size."""
    shapes = (batch, seqlen_q, heads, dim), (batch, seqlen_k, heads_kv, dim), (batch, seqlen_k, heads_kv, dim_v)
    q, k, v = (drawn(seed + n, *shape) * (drawn(seed + n + 9, *shape[:2], 1, 1).abs() + 0.5) for n, shape in enumerate(shapes))
    return quantize(q, k, v, **options)


def check(
    x: Inputs, starts: tuple[Tensor, ...] = (), drawing: int = 0, loss: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """Out and lse of the kernel, within what rounding may do to the specification's; ``loss``: of |v|, by sums of one level."""
    call: Any = attention_varlen if starts else attention
    out, lse = call(*x, *starts, return_lse=True, **options)
    q, k, v = (t.dequantize() for t in x)
    options.pop("out_dtype", None)
    want, want_lse = call(q, k, v, *starts, return_lse=True, backend="reference", **options)
    room = call(q, k, v.abs(), *starts, backend="reference", **options)
    keys, dim = x[1].data.shape[-3], q.shape[-1]
    k, v = k.nan_to_num(), v.nan_to_num()  # which no query sees
    scores = q.norm(dim=-1).max() * k.norm(dim=-1).max() * options.get("scale", dim**-0.5)
    moved = dim / 32 * 2.0**-13 * scores.item()
    bound = room * (1 / 16 + 2 * moved + loss) + keys * 2.0**-16 * v.abs().max() + want.abs() / 128 + 1e-6
    error = (out.float() - want).abs()
    assert (error <= bound).all(), (drawing, (error / bound).max(), error.isnan().sum())
    if out.numel() > 4096:
        assert error.square().mean().sqrt() <= room.square().mean().sqrt() / 30, drawing
    torch.testing.assert_close(lse, want_lse, atol=moved + 1e-4, rtol=1e-5)
    return out, lse


DIMS = [(64, 64), (128, 128), (256, 256)]
BANDS: list[dict[str, Any]] = [{}, {"causal": True}]


@pytest.mark.parametrize("options", BANDS, ids=["full", "causal"])
@pytest.mark.parametrize("dims", [*DIMS, (16, 64), (96, 80), (192, 160)], ids=str)
def test_lengths(dims: tuple[int, int], options: dict[str, Any]) -> None:
    drawing = random.randrange(2**31)
    for batch, seqlen_q, seqlen_k, heads, heads_kv in (
        (1, 128, 128, 1, 1), (2, 300, 1000, 6, 2), (1, 1, 517, 7, 1), (3, 333, 61, 4, 4), (2, 64, 4099, 2, 1), (1, 1, 1, 1, 1),
        (1, 1500, 1500, 3, 3),
    ):  # fmt: skip
        check(dense(drawing, batch, seqlen_q, seqlen_k, heads, heads_kv, *dims), drawing=drawing, **options)


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
@pytest.mark.parametrize("hadamard", [True, False])
def test_granularities(granularity: str, hadamard: bool) -> None:
    drawing = random.randrange(2**31)
    x = dense(drawing, 2, 260, 700, 4, 2, 128, 128, granularity=granularity, hadamard=hadamard)
    out, lse = check(x, causal=True, drawing=drawing)
    scales = (x[0].scale, x[1].scale, x[2].scale)
    plain = attention(*(t.data for t in x), descale=scales, causal=True, return_lse=True)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    scattered = [t.data.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    assert torch.equal(out, attention(*scattered, descale=scales, causal=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": (200, 0)}, {"window": (100, 70)}, {"window": (None, -40)}, {"softcap": 8.0, "scale": 0.2}, {"sink": 1.0},
        {"sink": -2.0, "causal": True, "softcap": 20.0}, {"out_dtype": torch.float16},
    ],
    ids=str,
)  # fmt: skip
def test_features(dims: tuple[int, int], options: dict[str, Any]) -> None:
    drawing = random.randrange(2**31)
    options = {**options, **({"sink": drawn(1, 4) + options["sink"]} if "sink" in options else {})}
    check(dense(drawing, 2, 700, 600, 4, 2, *dims), drawing=drawing, **options)


def test_a_row_that_sees_nothing() -> None:
    x = dense(3, 1, 400, 100, 2, 2, 128, 128)
    out, lse = check(x, causal=True)
    assert (out[:, :300] == 0).all() and (lse[:, :, :300] == -float("inf")).all()


@pytest.mark.parametrize("dim", [128, 256])
def test_maxima_that_grow_and_fall(dim: int) -> None:
    """Each key tile's scores are far beyond those before, or far below; all are negative, or hardly any."""
    drawing = random.randrange(2**31)
    q, k, v = (drawn(drawing + n, 1, 1100, 2, dim) for n in range(3))
    q[..., 0] = 8.0
    for sign in (1, -1):
        k[..., 0] = sign * torch.arange(1100, device="cuda").bfloat16()[:, None] / 10
        check(quantize(q, k, v, hadamard=False), drawing=drawing)
        check(quantize(q, k, v, hadamard=False), drawing=drawing, causal=True)


def test_values_of_one_give_one() -> None:
    x = dense(5, 1, 300, 5000, 2, 2, 128, 128)
    ones = quantize(*(torch.ones(1, 5000, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3)))[2]
    assert ((attention(x[0], x[1], ones, scale=0.02).float() - 1).abs() < 2.0**-7).all()


@pytest.mark.parametrize("dims", [*DIMS, (96, 80), (64, 192)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_packed(dims: tuple[int, int], causal: bool) -> None:
    """Lengths of every kind; NaN in a sequence, and behind the last, stays there."""
    drawing = random.randrange(2**31)
    lengths = [5, 0, 1, 128, 300, 129, 31, 640]
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    total = sum(lengths) + 9  # of no sequence
    q, k, v = (
        drawn(drawing + n, total, heads, dim) for n, (heads, dim) in enumerate(((6, dims[0]), (2, dims[0]), (2, dims[1])))
    )
    v[6 + 3] = NAN  # in tiles of the sequences before
    v[434 + 128] = NAN  # the last of a sequence, and the first of a tile
    k[total - 3], v[total - 3] = NAN, NAN
    x = quantize(q, k, v, cu_seqlens_q=starts)
    clean = quantize(q, k, v.nan_to_num(1.0), cu_seqlens_q=starts)
    out, lse = attention_varlen(*x, starts, causal=causal, return_lse=True)
    other, _ = check(clean, (starts,), causal=causal, drawing=drawing)
    assert (out[-9:] == 0).all() and (lse[:, -9:] == -float("inf")).all()
    for n, (begin, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        if not v[begin : begin + length].isnan().any():
            assert torch.equal(out[begin : begin + length], other[begin : begin + length]), (drawing, n)


@pytest.mark.parametrize("granularity", ["block", "head"])
def test_packed_keys_of_their_own(granularity: Any) -> None:
    drawing = random.randrange(2**31)
    starts_q = torch.tensor([0, 200, 200, 500, 517]).int().cuda()
    starts_k = torch.tensor([0, 333, 500, 1203, 1300]).int().cuda()
    q, k, v = drawn(drawing, 517, 4, 128), drawn(drawing + 1, 1300, 4, 128), drawn(drawing + 2, 1300, 4, 128)
    x = quantize(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, granularity=granularity)
    used = torch.tensor([333, 0, 501, 96]).int().cuda()
    for more in ({"causal": True}, {"causal": True, "seqused_k": used}, {"window": (70, 30), "seqused_k": used}):
        check(x, (starts_q, starts_k), drawing=drawing, **more)
    scales = (x[0].scale, x[1].scale, x[2].scale)
    rows = [t.data.contiguous() for t in x]
    plain = attention_varlen(*rows, starts_q, starts_k, descale=scales, causal=True)
    assert torch.equal(plain, attention_varlen(*x, starts_q, starts_k, causal=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("options", [{"window": (150, 0)}, {"softcap": 8.0, "sink": 1.0}], ids=str)
def test_packed_features(dims: tuple[int, int], options: dict[str, Any]) -> None:
    drawing = random.randrange(2**31)
    options = {**options, **({"sink": drawn(1, 4) + options["sink"]} if "sink" in options else {})}
    starts = torch.tensor([0, 200, 900, 1000]).int().cuda()
    q, k, v = (
        drawn(drawing + n, 1000, heads, dim) for n, (heads, dim) in enumerate(((4, dims[0]), (2, dims[0]), (2, dims[1])))
    )
    check(quantize(q, k, v, cu_seqlens_q=starts), (starts,), drawing=drawing, **options)


MASKS: dict[str, Any] = {
    "documents": masks.Document([100, 1, 250, 349], causal=False),
    "causal documents": masks.Document([100, 1, 250, 340]),  # and padding, which nothing sees
    "global window": masks.GlobalWindow(20, 100),
    "dropped keys": masks.RandomEviction(torch.arange(700)[torch.randperm(700)].clamp(min=30)),
}


@pytest.mark.parametrize("dims", [*DIMS, (96, 80)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_column_masks(dims: tuple[int, int], name: str) -> None:
    """Keys that no query sees hold NaN."""
    drawing = random.randrange(2**31)
    mask = MASKS[name].to("cuda") if hasattr(MASKS[name], "to") else MASKS[name]
    q, k, v = (
        drawn(drawing + n, 2, 700, heads, dim) for n, (heads, dim) in enumerate(((4, dims[0]), (2, dims[0]), (2, dims[1])))
    )
    if name == "causal documents":
        k[:, 691:], v[:, 691:] = NAN, NAN
    out, _ = check(quantize(q, k, v), drawing=drawing, mask=mask)
    assert not out.isnan().any()


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (90, 30)}, {"softcap": 8.0, "sink": 1.0}], ids=str)
def test_column_masks_and_other_features(options: dict[str, Any]) -> None:
    drawing = random.randrange(2**31)
    options = {**options, **({"sink": drawn(1, 4) + options["sink"]} if "sink" in options else {})}
    lts = torch.randint(0, 900, (2, 4, 5000), generator=torch.Generator().manual_seed(drawing), dtype=torch.int32).cuda()
    mask = masks.ColumnMask(lts, lts + 300)
    x = dense(drawing, 2, 900, 5000, 4, 2, 128, 128)
    check(x, drawing=drawing, mask=mask, **options)
    out = attention(*x, mask=mask, **options)
    for _ in range(20):
        assert torch.equal(out, attention(*x, mask=mask, **options))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("options", [*BANDS, {"window": (200, 0)}, {"sink": 1.0}], ids=str)
def test_fast_sums(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """Of values that cancel; blocks of values of very different scales."""
    drawing = random.randrange(2**31)
    options = {**options, **({"sink": drawn(1, 4) + options["sink"]} if "sink" in options else {})}
    shapes = (2, 700, 4, dims[0]), (2, 700, 2, dims[0]), (2, 700, 2, dims[1])
    q, k, v = (drawn(drawing + n, *shape) for n, shape in enumerate(shapes))
    v *= (torch.arange(700, device="cuda") // 128 * 3 - 8.0).exp2().bfloat16()[:, None, None]
    x = quantize(q, k, v, accumulate="fast")
    check(x, drawing=drawing, loss=2.0**-10, **options)
    assert "(fast)" in warploom.explain(*x, **options).reason


def test_scales_whose_product_is_nothing() -> None:
    """A product of scales that fp32 does not hold leaves scores of 0, and hidden ones hidden."""
    x = list(dense(4, 1, 200, 300, 2, 2, 128, 128))
    x[:2] = [Fp8Tensor(t.data, torch.full_like(t.scale, 1e-30), None, t.hadamard_seed) for t in x[:2]]
    out, _ = check((x[0], x[1], x[2]), causal=True)
    assert not out.isnan().any()


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_bits_are_equal_and_graphs_replay(dims: tuple[int, int]) -> None:
    x = dense(7, 1, 640, 3000, 4, 2, *dims)
    out = attention(*x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = attention(*x)
    for _ in range(3):
        held.zero_()
        graph.replay()
        assert torch.equal(held, out) and torch.equal(attention(*x), out)


def test_long_sums_are_kept() -> None:
    """Values of mean 1: one sum of 131072 keys on the tensor cores would lose most of it."""
    drawing = random.randrange(2**31)
    errors = []
    for keys in (4096, 131072):
        q, k, v = drawn(drawing, 1, 64, 1, 128), drawn(drawing + 1, 1, keys, 1, 128), drawn(drawing + 2, 1, keys, 1, 128) + 1
        x = quantize(q, k, v)
        want = attention(*(t.dequantize() for t in x), backend="reference")
        errors.append(float((attention(*x).float() - want).norm() / want.norm()))
    assert errors[1] <= errors[0] < 0.004, (drawing, errors)


def test_outliers_are_within_the_bar() -> None:
    """FlashAttention-3's numbers, eight heads of fixed seeds, all queries: its paper's error, and what a rotation is for."""
    squares: dict[bool, list[float]] = {True: [], False: []}
    for head in range(8):
        generator = torch.Generator().manual_seed(head)
        given = [fp8_error.outliers(generator, 16384)[None, :, None].cuda() for _ in range(3)]
        want = torch.cat(
            [fp8_error.exact(rows, *(t[0, :, 0] for t in given[1:]), len(rows)) for rows in given[0][0, :, 0].split(2048)]
        )
        for hadamard, found in squares.items():
            out = attention(*quantize(*given, hadamard=hadamard), out_dtype=torch.bfloat16)[0, :, 0]
            found.append(float((out.double() - want).square().mean()))
    rotated, plain = (sum(found) ** 0.5 / 8**0.5 for found in squares.values())
    assert rotated <= 9.1e-3 and rotated <= 0.4 * plain, (rotated, plain)


def test_plans() -> None:
    x = dense(1, 1, 300, 300, 2, 2, 128, 128)
    plan = warploom.explain(*x, causal=True)
    assert plan.implementation == "hopper" and plan.tile is not None and plan.tile[1] == 128
    assert "attn_fwd_fp8_sm90" in plan.reason and "FP8 as it is" in plan.reason and "scales by block" in plan.reason
    assert warploom.prepare(*x, causal=True) == plan
