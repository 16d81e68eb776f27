"""FP8 caches: the format number by number, decode as over the numbers they stand for, accuracy, refusals."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch

from warploom import KVCache, PagedKVCache, decode
from warploom.kernels.e4m3 import E4M3, quantized, rotate, scales_of, signs

GRANULARITIES = ["tensor", "head", "token"]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(seed: int, *shape: int) -> torch.Tensor:
    """N(0, 1) and, of each thousand numbers, one of N(0, 100) on top."""
    rare = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.001
    return drawn(seed, *shape) + 10 * drawn(seed + 2, *shape) * rare


def filled(k: torch.Tensor, v: torch.Tensor, granularity: Any, seed: int | None, page_size: int | None = None) -> Any:
    """A cache that k and v were appended to, with scales that saturate nothing."""
    options: dict[str, Any] = {"head_dim_v": v.shape[3], "dtype": E4M3, "granularity": granularity, "hadamard_seed": seed}
    sizes = (k.shape[0], k.shape[1] + 9, *k.shape[2:])
    if page_size is None:
        cache: Any = KVCache.allocate(*sizes, **options)
    else:
        cache = PagedKVCache.allocate(*sizes, page_size=page_size, **options)
    if granularity != "token":
        for scale, t in ((cache.k_scale, k if seed is None else rotate(k, seed)), (cache.v_scale, v)):
            scale.copy_((t.abs().amax((0, 1, 3)) if granularity == "head" else t.abs().max()) / 448)
    cache.append(k, v)
    return cache


def plain(cache: Any) -> KVCache | PagedKVCache:
    """The cache of the numbers that an FP8 cache stands for."""
    paged = isinstance(cache, PagedKVCache)
    k, v = (cache.k_pages, cache.v_pages) if paged else (cache.k, cache.v)
    k, v = k.float() * cache.k_scale[..., None], v.float() * cache.v_scale[..., None]
    return PagedKVCache(k, v, cache.block_table, cache.lengths) if paged else KVCache(k, v, cache.lengths)


def test_signs_are_of_the_format() -> None:
    """Caches are read by their seed, with the top bits of SplitMix64, as plain integers compute it."""
    for seed in (0, 5, -1, 2**63 - 1):
        state, found = seed % 2**64, []
        for _ in range(72):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            found.append(-1 if (z ^ (z >> 31)) >> 63 else 1)
            if seed == 0 and len(found) == 1:
                assert z ^ (z >> 31) == 0xE220A8397B1DCDAF
        assert signs(72, seed).tolist() == found


@pytest.mark.parametrize("head_dim", [1, 2, 7, 16, 40, 72, 96, 128, 576])
def test_rotations_are_orthogonal_and_mix(head_dim: int) -> None:
    matrix = rotate(torch.eye(head_dim), 3)
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim), atol=3e-6)
    # The largest share of one number that lands in one place; a Hadamard matrix has 1 / head_dim, a DCT twice that.
    assert (matrix**2).max() <= 2.001 / head_dim


@pytest.mark.parametrize("power,odd", [(16, 1), (8, 3)])
def test_the_matrix_is_of_the_format(power: int, odd: int) -> None:
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(power)] for i in range(power)]) / power**0.5
    waves = [[math.cos(math.pi * k * (2 * j + 1) / (2 * odd)) for j in range(odd)] for k in range(odd)]
    dct = torch.nn.functional.normalize(torch.tensor(waves))
    want = signs(power * odd, 3)[:, None] * torch.kron(hadamard, dct.T.contiguous())
    assert torch.allclose(rotate(torch.eye(power * odd), 3), want, atol=1e-6)


def test_a_rotation_of_many_is_that_of_each() -> None:
    x = drawn(random.randrange(2**31), 5, 3, 72)
    assert torch.equal(rotate(x, 1)[2, 1], rotate(x[2, 1], 1))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seed", [None, 11])
def test_numbers_are_within_half_an_ulp(granularity: str, seed: int | None) -> None:
    drawing = random.randrange(2**31)
    k, v = with_outliers(drawing, 2, 30, 2, 40), with_outliers(drawing + 9, 2, 30, 2, 24)
    cache = filled(k, v, granularity, seed)
    held: Any = plain(cache)
    for got, want, scale in (
        (held.k, k if seed is None else rotate(k, seed), cache.k_scale),
        (held.v, v, cache.v_scale),
    ):
        scale = scale[:, :30, :, None] if scale.ndim > 1 else scale[..., None]
        # Three bits of mantissa; below 2^-6 numbers are 2^-9 apart.
        bound = want.abs() / 16 + scale * 2.0**-10
        assert ((got[:, :30] - want).abs() <= bound * 1.0001).all(), drawing


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_decode_reads_the_numbers_it_stands_for(backend: str, granularity: str, page_size: int | None) -> None:
    drawing = random.randrange(2**31)
    k, v, q = drawn(drawing, 3, 20, 2, 40), drawn(drawing + 1, 3, 20, 2, 24), drawn(drawing + 2, 3, 5, 6, 40)
    cache = filled(k, v, granularity, 7, page_size)
    cache.lengths.copy_(torch.tensor([20, 3, 0]))
    tree = torch.tensor([[-1, 0, 0, 1, 2]])
    for options in ({}, {"tree": tree}, {"window": (4, 0), "softcap": 3.0, "sink": drawn(drawing, 6)}):
        got = decode(q, cache, return_lse=True, backend=backend, **options)
        want = decode(rotate(q, 7), plain(cache), return_lse=True, backend=backend, **options)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), (drawing, options)
    for dtype in (torch.bfloat16, torch.float16):
        out = decode(q.to(dtype), cache, backend=backend)
        want_half = decode(rotate(q.to(dtype), 7).to(dtype).float(), plain(cache), backend=backend)
        assert out.dtype == dtype and torch.equal(out, want_half.to(dtype)), drawing


def test_tokens_are_quantised_one_by_one() -> None:
    """In any portions, at any slots: the same bytes, and so the same bits of decode."""
    drawing = random.randrange(2**31)
    k, v = drawn(drawing, 2, 12, 2, 16).half(), drawn(drawing + 1, 2, 12, 2, 16).half()
    whole = filled(k, v, "token", 0)
    apart, paged = (
        kind.allocate(2, 21, 2, 16, dtype=E4M3, **more) for kind, more in ((KVCache, {}), (PagedKVCache, {"page_size": 4}))
    )
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        apart.append(k[:, begin:end], v[:, begin:end])
        slots = 24 * torch.arange(2)[:, None] + torch.arange(begin, end)
        paged.append(k[:, begin:end], v[:, begin:end], slots)
    q = drawn(drawing + 2, 2, 1, 4, 16)
    for cache in (apart, paged):
        assert torch.equal(decode(q, cache), decode(q, whole)), drawing
        assert torch.equal(decode(q[1:], _row(cache, 1)), decode(q, whole)[1:]), drawing


def _row(cache: Any, b: int) -> Any:
    """Sequence b alone."""
    if isinstance(cache, PagedKVCache):
        rest = (cache.k_scale, cache.v_scale, cache.hadamard_seed)
        return PagedKVCache(cache.k_pages, cache.v_pages, cache.block_table[b : b + 1], cache.lengths[b : b + 1], *rest)
    k, v, lengths, k_scale, v_scale = (t[b : b + 1] for t in (cache.k, cache.v, cache.lengths, cache.k_scale, cache.v_scale))
    return KVCache(k, v, lengths, k_scale, v_scale, cache.hadamard_seed)


def test_what_is_no_number_stays_none_and_zero_stays_zero() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")], [1e30, -1e-30]])
    back = quantized(x, scales_of(x)).float() * scales_of(x)[:, None]
    assert torch.equal(back[0], x[0]) and back[1].isnan().all() and back[2].isnan().any()
    assert torch.allclose(back[3], torch.tensor([1e30, 0.0]), rtol=1e-6)
    # A scale that is given may be too small: then numbers saturate, and infinity is still no number.
    given = quantized(torch.tensor([[900.0, float("-inf"), float("nan")]]), torch.ones(1)).float()
    assert given[0, 0] == 448 and given[0, 1:].isnan().all()


def test_a_nan_reaches_its_own_sequence_and_head() -> None:
    k, v, q = drawn(1, 2, 20, 2, 16), drawn(2, 2, 20, 2, 16), drawn(3, 2, 1, 4, 16)
    k[0, 7, 1, 3] = float("nan")
    for backend in ("reference", "cpu"):
        out = decode(q, filled(k, v, "token", 0), backend=backend)
        assert out[0, :, 2:].isnan().all() and out[0, :, :2].isfinite().all() and out[1].isfinite().all()


def test_accepted_tokens_take_their_scales_along() -> None:
    k, v, q = with_outliers(5, 2, 12, 2, 16), with_outliers(6, 2, 12, 2, 16), drawn(7, 2, 1, 4, 16)
    for page_size in (None, 4):
        cache = filled(k, v, "token", 0, page_size)
        cache.accept(torch.tensor([[0, 3], [2, -1]]), 5)
        for b, kept in enumerate(([*range(7), 7, 10], [*range(7), 9])):
            alone = filled(k[b : b + 1, kept], v[b : b + 1, kept], "token", 0)
            assert torch.equal(decode(q, cache)[b], decode(q[b : b + 1], alone)[0])


def errors(draw: Any, granularity: str, seed: int | None, drawing: int) -> tuple[float, float]:
    """Of an FP8 cache and of one of bf16: the norm of out's error over out's, against fp64."""
    q, k, v = draw(drawing, 4, 1, 8, 128), draw(drawing + 3, 4, 1024, 2, 128), draw(drawing + 6, 4, 1024, 2, 128)
    lengths = torch.full((4,), 1024, dtype=torch.int32)
    want = decode(q.double(), KVCache(k.double(), v.double(), lengths))
    outs = (
        decode(q, filled(k, v, granularity, seed)),
        decode(q.bfloat16(), KVCache(k.bfloat16(), v.bfloat16(), lengths)),
    )
    fp8, bf16 = (((out.double() - want).norm() / want.norm()).item() for out in outs)
    return fp8, bf16


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seed", [None, 0])
def test_error_on_normal_numbers(granularity: str, seed: int | None) -> None:
    """Half an ulp of e4m3 is a sixteenth of a number, and errors of many numbers average out; bf16's is 16 times finer."""
    drawing = random.randrange(2**31)
    fp8, bf16 = errors(drawn, granularity, seed, drawing)
    assert bf16 < fp8 < 1 / 16, (drawing, fp8, bf16)


def test_a_rotation_spreads_outliers_that_share_a_scale() -> None:
    """In the middle of many drawings: one whose outliers share a channel gains less, and some gain nothing."""
    drawing = random.randrange(2**31)
    drawings = range(drawing, drawing + 240, 10)
    turned, straight = ([errors(with_outliers, "tensor", seed, n)[0] for n in drawings] for seed in (0, None))
    gains = [after / before for after, before in zip(turned, straight, strict=True)]
    assert statistics.median(gains) < 0.9, (drawing, gains)


@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_a_needle_in_65536_keys_is_found(granularity: str) -> None:
    drawing = random.randrange(2**31)
    length, needles = 65536, 2
    q, k = drawn(drawing, needles, 1, 1, 64), drawn(drawing + 1, needles, length, 1, 64)
    places = torch.randint(length, (needles,), generator=torch.Generator().manual_seed(drawing))
    kinds = torch.randint(16, (needles, length), generator=torch.Generator().manual_seed(drawing + 2))
    k[torch.arange(needles), places] = 2.5 * q[:, 0]
    v = torch.nn.functional.one_hot(kinds, 16).float()[:, :, None]
    out = decode(q, filled(k, v, granularity, 0))[:, 0, 0]
    assert torch.equal(out.argmax(-1), kinds[torch.arange(needles), places]), drawing


def pages(**changes: Any) -> dict[str, Any]:
    given = {
        "k_pages": torch.zeros(6, 8, 2, 16).to(E4M3),
        "k_scale": torch.ones(2),
        "v_scale": torch.ones(2),
        "hadamard_seed": 0,
    }
    given |= changes
    return {"v_pages": given["k_pages"], "block_table": torch.zeros(2, 3).int(), "lengths": torch.zeros(2).int(), **given}


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"k_scale": None}, TypeError, "k_scale must be a float32 tensor for a cache of torch.float8_e4m3fn, got None"),
        ({"v_scale": torch.ones(2).half()}, TypeError, "v_scale must be a float32 tensor"),
        ({"v_scale": torch.ones(3)}, ValueError, r"v_scale must have shape \(1,\), \(heads_kv,\) = \(2,\) or .* \(6, 8, 2\)"),
        ({"k_scale": torch.ones(6, 8, 2)}, ValueError, "both have a scale a token or neither"),
        ({"hadamard_seed": 1.5}, TypeError, "hadamard_seed must be an int or None"),
        ({"k_pages": torch.zeros(6, 8, 2, 16)}, TypeError, "k_scale goes with a cache of torch.float8_e4m3fn, and k_pages"),
        ({"k_pages": torch.zeros(6, 8, 2, 16).to(torch.float8_e5m2)}, TypeError, "k_pages has dtype torch.float8_e5m2"),
    ],
)
def test_caches_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKVCache(**pages(**changes))


def test_calls_refused() -> None:
    cache = PagedKVCache(**pages())
    k = torch.zeros(2, 1, 2, 16)
    with pytest.raises(TypeError, match=r"k has dtype torch.int32; a cache of torch.float8_e4m3fn quantises"):
        cache.append(k.int(), k)
    with pytest.raises(TypeError, match=r"q has dtype torch.float8_e4m3fn; over a cache of torch.float8_e4m3fn it takes"):
        decode(k.to(E4M3), cache)
    with pytest.raises(ValueError, match="granularity must be one of 'tensor', 'head', 'token', got 'block'"):
        KVCache.allocate(1, 8, 1, 16, dtype=E4M3, granularity="block")  # type: ignore[arg-type]


def test_compiled_steps() -> None:
    caches = [KVCache.allocate(2, 20, 2, 16, dtype=E4M3) for _ in range(2)]

    def step(q: torch.Tensor, k: torch.Tensor, cache: KVCache) -> torch.Tensor:
        cache.append(k, 2 * k)
        return decode(q, cache)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in range(2):
        q, k = drawn(n, 2, 1, 4, 16), drawn(n + 5, 2, 1, 2, 16)
        assert torch.equal(compiled(q, k, caches[0]), step(q, k, caches[1]))
