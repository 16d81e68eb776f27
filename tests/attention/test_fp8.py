"""FP8 inputs: their format, what shares a scale, calls over them as over the numbers they stand for, refusals."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import warploom
from warploom import KVCache, attention, attention_varlen, masks
from warploom.attention.fp8 import computed_in
from warploom.fp8 import BLOCK, Fp8Tensor, quantize
from warploom.kernels.e4m3 import E4M3, quantized, rotate
from warploom.kernels.fp8_quantize import keys_last

GRANULARITIES = ["block", "head", "tensor"]
NAN = float("nan")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(seed: int, seqlen_q: int = 30, seqlen_k: int = 140, group: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of two batch entries and two key heads, whose sizes differ from row to row."""
    shapes = (2, seqlen_q, 2 * group, 40), (2, seqlen_k, 2, 40), (2, seqlen_k, 2, 24)
    q, k, v = (drawn(seed + n, *shape) * drawn(seed + n + 9, *shape[:3], 1) for n, shape in enumerate(shapes))
    return q, k, v


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit; e4m3 has no comparison, and NaN none either."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("hadamard", [True, False])
def test_numbers_are_within_half_an_ulp(granularity: Any, hadamard: bool) -> None:
    drawing = random.randrange(2**31)
    given = inputs(drawing)
    for name, x, t in zip("qkv", given, quantize(*given, hadamard=hadamard, seed=4, granularity=granularity), strict=True):
        want = rotate(x, 4) if hadamard and name != "v" else x
        # Three bits of mantissa; below 2^-6 of a scale numbers are 2^-9 of it apart. No scale is larger than the tensor's.
        bound = want.abs() / 16 + t.scale.max() * 2.0**-10
        if hadamard and name != "v":  # a second rounding is of a number that moved by a row of the matrix times an error
            bound = bound + bound.norm(dim=-1, keepdim=True) * rotate(torch.eye(40), 4).abs().max() * 17 / 16
        assert ((t.dequantize() - want).abs() <= bound * 1.0001).all(), (drawing, name)
        near = 1e-6 if name == "v" else 0.07  # 448 may become the number before it
        assert t.dequantize().abs().max() == pytest.approx(want.abs().max().item(), rel=near), (drawing, name)


def test_scales_of_blocks_are_their_largest_numbers() -> None:
    x = drawn(random.randrange(2**31), 2, 2 * BLOCK + 5, 3, 16)
    _, _, v = quantize(x, x, x)
    for b, block, head in ((0, 0, 0), (1, 1, 2), (1, 2, 1)):
        rows = x[b, block * BLOCK : (block + 1) * BLOCK, head]
        assert v.scale[b, block, head] == rows.abs().max() / 448
    assert v.scale.shape == (2, 3, 3) and v.hadamard_seed is None


def test_the_format_is_that_of_caches() -> None:
    """The same bytes by the same seed and scales, of rows without a large channel: caches round once."""
    given = inputs(random.randrange(2**31))
    given = given[0], given[1].sign() * given[1].abs().amax(-1, keepdim=True), given[2]
    _, k, v = quantize(*given, seed=3, granularity="head")
    cache = KVCache.allocate(2, 140, 2, 40, head_dim_v=24, dtype=E4M3, granularity="head", hadamard_seed=3)
    assert cache.k_scale is not None and cache.v_scale is not None
    cache.k_scale.copy_(k.scale)
    cache.v_scale.copy_(v.scale)
    cache.append(given[1], given[2])
    assert same(cache.k, k.data) and same(cache.v, v.data)


def test_strides_are_read() -> None:
    given = inputs(random.randrange(2**31))
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    for a, b in zip(quantize(*strided), quantize(*given), strict=True):
        assert same(a.data, b.data) and same(a.scale, b.scale)
    every_other = given[2].repeat_interleave(2, -1)[..., ::2]
    assert same(quantize(*given[:2], every_other)[2].data, quantize(*given)[2].data)


def test_a_seed_is_a_rotation() -> None:
    given = inputs(random.randrange(2**31))
    first, again, other = (quantize(*given, seed=seed) for seed in (1, 1, 2))
    for a, b, c in zip(first[:2], again[:2], other[:2], strict=True):
        assert same(a.data, b.data) and same(a.scale, b.scale) and not same(a.data, c.data)
    assert same(first[2].data, other[2].data)


def test_packed_sequences_are_quantised_one_by_one() -> None:
    lengths = [0, 1, BLOCK, 0, BLOCK + 1, 3 * BLOCK - 1, 7]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    total = sum(lengths)
    x = drawn(random.randrange(2**31), total + 40, 2, 24) * torch.arange(1, total + 41)[:, None, None]
    packed = quantize(x, x, x, cu_seqlens_q=starts)
    for n, t in enumerate(packed):
        assert (t.data[total:].float() == 0).all()  # they belong to no sequence
        for begin, length in zip(starts.tolist(), lengths, strict=False):
            part = x[None, begin : begin + length]
            alone = quantize(part, part, part)[n]
            assert same(t.data[begin : begin + length], alone.data[0])
            assert same(t.dequantize()[begin : begin + length], alone.dequantize()[0])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
def test_padding_colours_no_scale(granularity: Any, garbage: float) -> None:
    q, k, v = inputs(random.randrange(2**31))
    used_q, used_k = ints(30, 3), ints(130, 0)
    clean = quantize(q, k, v, granularity=granularity, seqused_q=used_q, seqused_k=used_k)
    for t, used in ((q, used_q), (k, used_k), (v, used_k)):
        for b, n in enumerate(used.tolist()):
            t[b, n:] = garbage
    dirty = quantize(q, k, v, granularity=granularity, seqused_q=used_q, seqused_k=used_k)
    starts_q, starts_k = ints(0, 30, 60), ints(0, 140, 280)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    options: dict[str, Any] = {"granularity": granularity, "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    packed = quantize(*flat, seqused_q=used_q, seqused_k=used_k, **options)
    for a, b, c in zip(clean, dirty, packed, strict=True):
        assert same(a.data, b.data) and same(a.scale, b.scale) and same(a.data, c.data.unflatten(0, (2, -1)))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("garbage", [NAN, float("inf")])
def test_a_hidden_nan_changes_nothing_and_a_visible_one_stays(backend: str, garbage: float) -> None:
    given = inputs(random.randrange(2**31))
    for t in given[1:]:
        t[1, 120] = 0.0  # in the block of keys that are seen
    clean = attention(*quantize(*given), mask=masks.Padding([140, 110]), backend=backend)
    for t in given[1:]:
        t[1, 120] = garbage
    assert same(clean, attention(*quantize(*given), mask=masks.Padding([140, 110]), backend=backend))
    seen = attention(*quantize(*given), backend=backend)
    assert seen[1].isnan().all() and seen[0].isfinite().all()


@pytest.mark.parametrize("dim", [24, 72, 128, 256])
def test_a_rotation_holds_all_that_its_page_says(dim: int) -> None:
    """Numbers to 2^127 / head_dim, all of one size; of larger ones fp32's sums may pass its largest number."""
    x = torch.full((1, 3, 2, dim), 2.0**127 / dim) * torch.randn(1, 3, 2, dim).sign()
    for t in quantize(x, x, x):
        assert t.dequantize().isfinite().all() and t.scale.isfinite().all()


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(1, 130, 2, 16)
    for granularity in GRANULARITIES:
        q, k, v = quantize(x, x, x, granularity=granularity)  # type: ignore[arg-type]
        assert (v.scale == 1).all() and (v.dequantize() == 0).all()
        assert (attention(q, k, v) == 0).all()


FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},  # queries before the first key see nothing
    {"window": (50, -3), "softcap": 5.0},
    {"mask": masks.Document([60, 80], causal=False), "sink": drawn(1, 14)},
    {"bias": drawn(2, 1, 14, 1, 140), "scale": 0.3},
    {"dropout_p": 0.2, "dropout_seed": 9},
]


@pytest.mark.parametrize("options", FEATURES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_call_is_that_over_the_numbers(backend: str, options: dict[str, Any]) -> None:
    drawing = random.randrange(2**31)
    seqlen_q = 140 if "mask" in options else 150
    x = quantize(*(t.bfloat16() for t in inputs(drawing, seqlen_q)))
    want = attention(*(t.dequantize() for t in x), return_lse=True, backend=backend, **options)
    out, lse = attention(*x, return_lse=True, backend=backend, **options)
    assert same(out, want[0].bfloat16()) and same(lse, want[1]), drawing
    assert torch.equal(attention(*x, out_dtype=torch.float16, backend=backend, **options), want[0].half()), drawing
    scales = (x[0].scale, x[1].scale, x[2].scale)
    raw = attention(x[0].data, x[1].data, x[2].data, descale=scales, return_lse=True, backend=backend, **options)
    assert same(raw[0], out) and same(raw[1], lse)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_packed_call_is_that_over_the_numbers(backend: str, granularity: Any) -> None:
    drawing = random.randrange(2**31)
    q, k, v = (t.flatten(0, 1).half() for t in inputs(drawing))
    starts_q, starts_k, used = ints(0, 0, 40, 55), ints(0, 30, 200, 270), ints(20, 170, 0)
    x = quantize(q, k, v, granularity=granularity, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, seqused_k=used)
    options: dict[str, Any] = {"seqused_k": used, "causal": True, "backend": backend, "return_lse": True}
    want = attention_varlen(*(t.dequantize() for t in x), starts_q, starts_k, **options)
    got = attention_varlen(*x, starts_q, starts_k, **options)
    assert same(got[0], want[0].half()) and same(got[1], want[1]), drawing
    scales = (x[0].scale, x[1].scale, x[2].scale)
    raw = attention_varlen(*(t.data for t in x), starts_q, starts_k, descale=scales, **options)
    assert raw[0].dtype == torch.bfloat16 and same(raw[0], want[0].bfloat16()) and same(raw[1], got[1]), drawing


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_error_on_normal_numbers(granularity: Any) -> None:
    """Half an ulp of e4m3 is a sixteenth of a number, and errors of many numbers average out."""
    drawing = random.randrange(2**31)
    given = drawn(drawing, 1, 64, 4, 128), drawn(drawing + 1, 1, 1024, 2, 128), drawn(drawing + 2, 1, 1024, 2, 128)
    want = attention(*(t.double() for t in given))
    out = attention(*quantize(*given, granularity=granularity))
    error = (out.double() - want).norm() / want.norm()
    assert 0.01 < error < 1 / 16, (drawing, error)


def test_a_rotation_spreads_a_large_channel() -> None:
    """Else the channel's rounding errors are as large as all the others' products."""
    drawing = random.randrange(2**31)
    q, k, v = (drawn(drawing + n, 1, 512, 2, 128) for n in range(3))
    q[..., 3] *= 30
    k[..., 3] *= 30
    want = torch.einsum("bqhd,bkhd->bhqk", q, k)
    errors = []
    for turned in (True, False):
        q8, k8, _ = quantize(q, k, v, granularity="tensor", hadamard=turned)
        errors.append((torch.einsum("bqhd,bkhd->bhqk", q8.dequantize(), k8.dequantize()) - want).norm().item())
    assert errors[0] < 0.5 * errors[1], (drawing, errors)


def test_a_row_of_one_large_channel_keeps_it() -> None:
    """Rotated back, the channel is half as wrong as by one rounding, and other rows are as they were."""
    drawing = random.randrange(2**31)
    x = drawn(drawing, 1, 512, 2, 128)
    rows, channels = torch.arange(0, 512, 2), torch.randint(128, (256,), generator=torch.Generator().manual_seed(drawing))
    x[0, rows, :, channels] = 20.0
    t = quantize(x, x, x)[1]
    once = quantized(rotate(x, 0), t.scale.repeat_interleave(BLOCK, 1))
    assert same(once[:, 1::2], t.data[:, 1::2])
    back = rotate(torch.eye(128), 0).T
    error = [(data.float() * t.scale.repeat_interleave(BLOCK, 1)[..., None]) @ back - x for data in (once, t.data)]
    channel = [e[0, rows, :, channels].square().mean().sqrt() for e in error]
    assert channel[1] < 0.65 * channel[0], (drawing, channel)
    assert error[1].norm() < 1.05 * error[0].norm(), drawing


@pytest.mark.parametrize("outliers", [False, True])
def test_no_head_dim_has_more_error_along_the_largest_channel(outliers: bool) -> None:
    """Than by one rounding: the mean growth of its square stays within what its draws explain."""
    drawing = random.randrange(2**31)
    for dim in range(1, 129):
        x = drawn(drawing + dim, 1, 512, 1, dim)
        if outliers:
            x[0, torch.arange(512), 0, torch.randint(dim, (512,), generator=torch.Generator().manual_seed(drawing))] = 20.0
        t = quantize(x, x, x)[0]
        scale = t.scale.repeat_interleave(BLOCK, 1)[..., None]
        channel = x.abs().argmax(-1, keepdim=True)
        turned = rotate(x, 0)
        along = rotate(torch.eye(dim), 0)[channel[..., 0]]
        once, twice = (
            ((data.float() * scale - turned) * along).sum(-1).square() for data in (quantized(turned, scale[..., 0]), t.data)
        )
        growth = (twice - once).flatten().double()
        assert growth.mean() <= 5 * growth.std() / 512**0.5, (drawing, dim)


@pytest.mark.parametrize("dim", [64, 136])
def test_rows_are_rounded_by_themselves(dim: int) -> None:
    """But for the scale: rows of large channels and others keep their bytes when their neighbours change."""
    x = drawn(random.randrange(2**31), 1, BLOCK, 1, dim)
    x[0, ::3, 0, 5] = 20.0
    given = quantize(x, x, x)
    changed = x.clone()
    changed[0, 64:] = 0.01 * x[0, :64].flip(0)
    largest = rotate(x, 0).abs().amax(-1)[0, :, 0].argmax()
    changed[0, largest] = x[0, largest]
    rows = torch.cat([torch.arange(64), largest[None]])
    for a, b in zip(given[:2], quantize(changed, changed, changed)[:2], strict=True):
        assert torch.equal(a.scale, b.scale) and same(a.data[:, rows], b.data[:, rows])


def test_a_needle_in_8192_keys_is_found() -> None:
    drawing = random.randrange(2**31)
    q, k = drawn(drawing, 1, 4, 1, 72), drawn(drawing + 1, 1, 8192, 1, 72)
    generator = torch.Generator().manual_seed(drawing)
    places, kinds = torch.randint(8192, (4,), generator=generator), torch.randint(16, (8192,), generator=generator)
    k[0, places, 0] = 2.5 * q[0, :, 0]
    v = torch.nn.functional.one_hot(kinds, 16).float()[None, :, None]
    for granularity in GRANULARITIES:
        out = attention(*quantize(q, k, v, granularity=granularity))[0, :, 0]  # type: ignore[arg-type]
        assert torch.equal(out.argmax(-1), kinds[places]), (drawing, granularity)


def test_nothing_to_do() -> None:
    for batch, seqlen_q, seqlen_k in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        for granularity in GRANULARITIES:
            q, kv = torch.zeros(batch, seqlen_q, 4, 16), torch.zeros(batch, seqlen_k, 2, 16)
            x = quantize(q, kv, kv, granularity=granularity)  # type: ignore[arg-type]
            assert (attention(*x) == 0).all() and attention(*x).shape == q.shape
    nobody = torch.ones(5, 2, 16)
    for dtype in (torch.float32, torch.float64):
        assert attention(*quantize(nobody[None], nobody[None], nobody[None]), out_dtype=dtype).dtype == dtype
    out, lse = attention_varlen(*quantize(nobody, nobody, nobody, cu_seqlens_q=ints(0)), ints(0), return_lse=True)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_an_object_is_a_pytree_that_moves_and_is_saved(tmp_path: Any) -> None:
    x = drawn(1, 300, 2, 16)
    t = quantize(x, x, x, cu_seqlens_q=ints(0, 100, 300))[0]
    torch.save(t, tmp_path / "t")
    copies = copy.copy(t), copy.deepcopy(t), pickle.loads(pickle.dumps(t))
    for other in (_pytree.tree_map(torch.clone, t), t.to("cpu"), torch.load(tmp_path / "t", weights_only=True), *copies):
        assert isinstance(other, Fp8Tensor) and same(other.data, t.data) and same(other.dequantize(), t.dequantize())
        assert (other.hadamard_seed, other.dtype) == (0, torch.float32)


def test_an_object_moves_to_devices_alone() -> None:
    """Its data once became float16, which no call took."""
    numbers = quantize(*torch.randn(3, 1, 5, 2, 16))[0]
    with pytest.raises(TypeError, match=r"moves to a device, got torch.float16; dequantize\(dtype\)"):
        numbers.to(torch.float16)  # type: ignore[arg-type]


def test_a_pickle_keeps_the_strides_of_values() -> None:
    """As they lie on a GPU, key by key, with zeros behind the last."""
    x = drawn(2, 2, 30, 2, 24)
    t = quantize(x, x, x)[2]
    t = Fp8Tensor(keys_last(t.data), t.scale, None, None, t.dtype)
    other = pickle.loads(pickle.dumps(t))
    assert other.data.stride() == t.data.stride() and other.data.stride(1) == 1 and same(other.data, t.data)


def test_compiled() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*quantize(q, k, v), causal=True)

    given = inputs(random.randrange(2**31))
    assert same(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))


def test_autocast_rounds_before_it_quantises() -> None:
    given = inputs(random.randrange(2**31))
    with torch.autocast("cpu", torch.bfloat16):
        x = quantize(*given)
        assert attention(*x).dtype == torch.bfloat16 and attention(*x, out_dtype=torch.float32).dtype == torch.float32
    assert same(x[0].data, quantize(*(t.bfloat16() for t in given))[0].data)


def test_what_a_gpu_computes_in() -> None:
    half, wide = torch.float16, torch.float32
    assert computed_in("cuda", None, half) == computed_in("cuda", None, torch.bfloat16) == torch.bfloat16
    assert computed_in("cuda", None, wide) == computed_in("cuda", "reference", half) == computed_in("cpu", None, half) == wide


def test_plans_say_what_happens() -> None:
    x = quantize(*inputs(1))
    words = "FP8 is dequantised to float32 first, as no kernel multiplies it: scales by"
    assert f"{words} block, q and k rotated by seed 0" in str(warploom.explain(*x, causal=True))
    scales = (torch.ones(1),) * 3
    raw = [t.data for t in x]
    assert str(warploom.explain(*raw, descale=scales)).split("\n")[1].endswith(f"{words} tensor")
    y = [t.flatten(0, 1) for t in inputs(1, 140)]
    starts = ints(0, 140, 280)
    packed = quantize(*y, cu_seqlens_q=starts, granularity="head")
    for plan in (warploom.explain(*packed, starts), warploom.prepare(*packed, cu_seqlens_q=starts)):
        assert plan.call.startswith("varlen") and f"{words} head" in plan.reason


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"granularity": "token"}, ValueError, "granularity must be one of 'block', 'head', 'tensor', got 'token'"),
        ({"seed": 1.5}, TypeError, "seed must be an int, got float 1.5"),
        ({"hadamard": "no"}, TypeError, "hadamard must be True or False, got str 'no'"),
        ({"q": torch.zeros(5, 2, 16)}, ValueError, r"q is packed, with 3 dimensions \(5, 2, 16\): give cu_seqlens_q"),
        ({"q": torch.zeros(1, 5, 2, 16).to(E4M3)}, TypeError, "q has dtype torch.float8_e4m3fn; attention takes float16"),
        ({"k": torch.zeros(1, 4, 2, 16)}, ValueError, "k and v must agree"),
        ({"q": torch.zeros(3, 5, 2, 16)}, ValueError, "q has batch 3 but k has batch 1"),
        ({"cu_seqlens_k": ints(0, 5)}, ValueError, "cu_seqlens_k goes with packed tensors and cu_seqlens_q"),
        ({"seqused_k": ints(6)}, ValueError, r"seqused_k\[0\] is 6, but sequence 0 has 5 rows"),
        ({"seqused_q": ints(1, 2)}, ValueError, "seqused_q has 2 entries but q has 1 sequences"),
        ({"q": torch.zeros(1, 5, 2, 16, requires_grad=True)}, ValueError, "q requires grad, and attention in FP8 has no"),
    ],
)
def test_quantize_refuses(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    x = torch.zeros(1, 5, 2, 16)
    with pytest.raises(error, match=words):
        quantize(**{"q": x, "k": x, "v": x, **changes})


def test_quantize_refuses_packed_sequences() -> None:
    x = torch.zeros(5, 2, 16)
    for changes, words in (
        ({"cu_seqlens_q": ints(0, 9)}, "cu_seqlens_q ends at 9, past the 5 packed tokens"),
        ({"cu_seqlens_k": ints(0, 2, 5)}, "cu_seqlens_k has 3 entries but cu_seqlens_q has 2"),
        ({"k": torch.zeros(6, 2, 16), "v": torch.zeros(6, 2, 16)}, "k has 6 packed tokens but q has 5: give cu_seqlens_k"),
        ({"seqused_k": ints(7)}, r"seqused_k\[0\] is 7, but sequence 0 has 5 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize(**{"q": x, "k": x, "v": x, "cu_seqlens_q": ints(0, 5), **changes})


RAW = torch.zeros(1, 5, 2, 16).to(E4M3)
ONE = torch.ones(1)


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({}, TypeError, "q has dtype torch.float8_e4m3fn: give descale=, the scales of q, k and v, or what quantize"),
        ({"descale": ONE}, TypeError, "descale must be three float32 tensors, the scales of q, k and v, got a torch.float32"),
        ({"descale": (ONE, ONE, 1.0)}, TypeError, "descale of v must be a float32 tensor, got float 1.0"),
        ({"descale": (ONE, torch.ones(3), ONE)}, ValueError, r"descale of k must have .* \(1, 1, 2\), got \(3,\)"),
        ({"descale": (ONE,) * 3, "k": RAW.float()}, TypeError, "descale goes with .*, and k has dtype torch.float32"),
        ({"descale": (ONE,) * 3, "out_dtype": torch.int8}, TypeError, "out_dtype must be torch.float16, .* got dtype"),
        ({"descale": (ONE, ONE.clone().requires_grad_(), ONE)}, ValueError, "the scale of k requires grad, and attention in"),
        ({"descale": (ONE,) * 3, "sink": torch.zeros(2, requires_grad=True)}, ValueError, "sink requires grad"),
        ({"descale": (ONE,) * 3, "bias": warploom.bias.ALiBi(torch.ones(2, requires_grad=True))}, ValueError, "bias requires"),
        ({"out_dtype": torch.float16, **dict.fromkeys("qkv", RAW.float())}, TypeError, "out_dtype=torch.float16 goes with FP8"),
    ],
)
def test_calls_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attention(**{"q": RAW, "k": RAW, "v": RAW, **changes})


def test_calls_of_objects_refused() -> None:
    x = drawn(1, 1, 5, 2, 16)
    q, k, v = quantize(x, x, x)
    with pytest.raises(TypeError, match=r"k must be an Fp8Tensor as the others, got a torch\.float32 tensor"):
        attention(q, x, v)
    with pytest.raises(TypeError, match=r"descale goes with plain .* and q is an Fp8Tensor, which has its scales"):
        attention(q, k, v, descale=(ONE, ONE, ONE))
    with pytest.raises(ValueError, match="q is rotated by seed 7 and k is not rotated, which changes their products"):
        attention(quantize(x, x, x, seed=7)[0], quantize(x, x, x, hadamard=False)[1], v)
    starts = ints(0, 3, 5)
    packed = quantize(x[0], x[0], x[0], cu_seqlens_q=starts)
    with pytest.raises(ValueError, match=r"q must have 4 dimensions \(batch, seqlen, heads, .*, got shape \(5, 2, 16\)"):
        attention(*packed)
    with pytest.raises(ValueError, match="cu_seqlens_q differs from the one that q was quantised with"):
        attention_varlen(*packed, ints(0, 2, 5))
    with pytest.raises(ValueError, match="block_table with FP8 inputs is not supported"):
        attention_varlen(*packed, starts, seqused_k=ints(3, 2), block_table=torch.zeros(2, 1).int())


@pytest.mark.parametrize("options", [{"backend": "flash"}, {"backend": 3}, {"backend": "triton"}])
def test_calls_were_refused_after_they_were_dequantised(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = quantize(*inputs(1))

    def work(*_: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(Fp8Tensor, "dequantize", work)
    with pytest.raises((TypeError, ValueError), match="backend"):
        attention(*x, **options)


def test_transforms_refused() -> None:
    x = drawn(1, 3, 1, 5, 2, 16)
    with pytest.raises(NotImplementedError, match=r"attention in FP8 under a torch\.func transform is not supported"):
        torch.func.vmap(lambda t: quantize(t, t, t)[0].dequantize())(x)
    with pytest.raises(NotImplementedError, match="FP8"):
        torch.func.jvp(lambda t: quantize(t, t, t)[0].dequantize(), (x[0],), (x[0],))
    with torch.no_grad():
        q, k, v = quantize(*[x[0].clone().requires_grad_() for _ in range(3)])
    assert attention(q, k, v).shape == x[0].shape


def test_stats_are_of_what_is_dequantised() -> None:
    call = quantize(*inputs(random.randrange(2**31)))
    out, stats = attention(*call, causal=True, return_stats=["column_sums"])
    assert torch.equal(out, attention(*call, causal=True))
    # Every query sees a key, so that its probabilities add up to 1.
    torch.testing.assert_close(stats.column_sums.sum(-1), torch.full((2, 14), 30.0))
