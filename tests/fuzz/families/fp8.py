"""attention() and attention_varlen() over `warploom.fp8` inputs: the numbers of quantize(), and calls over them.

A number has to be within half a step of e4m3 of what it stands for, rotated where it is, and less the row's error along its
largest channel where it is rounded twice, by a scale that the largest of its block, head or tensor makes; that is the stated
bound. A call is that of the other families over the numbers as they are.

On a GPU all problems are such that Hopper's kernel multiplies the numbers as they are. What is right is what the other families
call so, of models that round P to e4m3 and cut scores as tensor cores do.

Inputs are made and results judged on the CPU: whenever one of a dozen processes reads from the GPU that they share, it waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.draw import Draw
from tests.fuzz.families import attention as dense
from tests.fuzz.families import softmax as shared
from tests.fuzz.families import varlen as packed
from tests.fuzz.families.softmax import Variant
from tests.fuzz.families.spread import spread
from tests.fuzz.oracle.decode import Decode
from tests.fuzz.problem import DTYPES, Expected, spec
from tests.fuzz.views import View
from warploom.attention.fp8 import Fp8Call
from warploom.fp8 import quantize
from warploom.runtime.arguments import keeps_nothing

NAME = "fp8"
BACKENDS = ("cpu", "hopper", "reference")
BLOCK, STEP = 128, 16
LARGEST = 448.0  # of e4m3
ROUNDED_TWICE, DOMINATES = range(32, 129), 1.5  # head dims, and how much larger than its block a row's channel is
HALVES = ("bfloat16", "float16")
GRANULARITIES = ("block", "head", "tensor")
WAYS = 3  # of quantising for each module of Hopper's kernel
# Of an lse, of one and in norm: its logarithm to base 2, of a sum with P's headroom, is rounded some four times at 8 to 16.
LSE_SLACK, LSE_EPS = 1e-4, 4 * 2.0**-20
SUMMED = 32  # products of an instruction
LEAST = -1000  # below every exponent
EXCLUSIVE = [
    *[({a, b}, reason) for group, reason in dense.ONE_OF for a in group for b in group if a < b],
    ({"packed", "dense"}, "one or the other"),
    ({"by_block", "by_head", "by_tensor"}, "a call has one granularity"),
    ({"descale", "rotated"}, "plain tensors do not say that they are rotated, and a call need not know"),
]


@spec
@dataclass(frozen=True)
class Fp8:
    """A problem of another family, whose q, k and v are quantised first."""

    base: Any  # dense.Attention or packed.Varlen, without a backward pass
    granularity: str = "block"
    rotation: int | None = None
    out_dtype: str = ""  # none: what q had, bfloat16 of plain tensors
    plain: bool = False  # float8_e4m3fn tensors with descale=
    padding: bool = False  # rows of each sequence are left out by seqused_q and seqused_k

    @property
    def dtype(self) -> str:
        """What a CPU computes in."""
        return "float32"

    @property
    def seed(self) -> int:
        return int(self.base.seed)

    @property
    def deterministic(self) -> bool | None:
        found: bool | None = self.base.deterministic
        return found

    @property
    def of_call(self) -> torch.dtype:
        """The result's dtype."""
        return DTYPES[self.out_dtype or ("bfloat16" if self.plain else self.base.dtype)]


def _family(p: Fp8) -> Any:
    return packed if isinstance(p.base, packed.Varlen) else dense


@dataclass(frozen=True)
class Way:
    """What else the kernels that quantise depend on. When all of it was drawn anew for each problem, each compiled its own."""

    granularity: str
    rotated: bool
    padding: bool
    unit: int  # 8: strides are multiples of 8 elements
    unaligned: tuple[str, ...]  # tensors whose base is not aligned to 16 bytes


PLAINEST = Way("block", rotated=False, padding=False, unit=8, unaligned=())


@dataclass(frozen=True)
class OnHopper:
    """What a module of Hopper's kernel depends on, and how its inputs are quantised."""

    base: Variant
    out_dtype: str
    way: Way = PLAINEST


def variants(d: Draw, backend: str, count: int) -> list[OnHopper]:
    """Modules, and each again with other ways of quantising."""
    modules = spread(lambda: _module(d, backend), -(-count // WAYS), lambda one: astuple(one.base))
    return [replace(modules[n % len(modules)], way=way) for n, way in enumerate(spread(lambda: _way(d), count))]


def _module(d: Draw, backend: str) -> OnHopper:
    base = shared.draw_variant(d, backend, ("dense", "dense", "varlen"))
    dims = {n: -(-getattr(base, n) // STEP) * STEP for n in ("head_dim", "head_dim_v")}
    base = replace(base, **dims, vectors=(), dropout=False, lse_gradient=False, deterministic=False)
    return OnHopper(base, d.pick(HALVES, (2, 1)))


def _way(d: Draw) -> Way:
    unaligned = tuple(n for n in "qkv" if d.chance(0.5)) if d.chance(0.4) else ()
    return Way(d.pick(GRANULARITIES, (2, 1, 1)), d.chance(2 / 3), d.chance(0.4), d.pick((8, 1)), unaligned)


def draw(d: Draw, variant: OnHopper | None, backend: str) -> Fp8:
    family = packed if d.chance(0.4) else dense
    if variant is not None:
        family = packed if variant.base.layout == "varlen" else dense
    while True:
        base = family.draw(d, None if variant is None else variant.base, backend)
        if base.offsets or getattr(base, "page_size", 0) or getattr(base, "visible_nan", ""):
            continue
        base = replace(base, backward=False, lse_gradient="", bias_gradient=False, invariant="")
        if variant is None or _served(base):
            break
    if variant is not None:
        way = variant.way
        base = replace(base, **_views(d, base.shapes, way))
        rotation = d.pick((0, d.seed64())) if way.rotated else None
        return Fp8(base, way.granularity, rotation, variant.out_dtype, d.chance(0.3), way.padding)
    return Fp8(
        base=base,
        granularity=d.pick(GRANULARITIES, (2, 1, 1)),
        rotation=d.pick((None, 0, d.seed64())),
        out_dtype=d.pick(("", "", "float16", "bfloat16", "float32", "float64")),
        plain=d.chance(0.3),
        padding=d.chance(0.4),
    )


def _views(d: Draw, shapes: dict[str, tuple[int, ...]], way: Way) -> dict[str, View]:
    found = {name: d.view(shape, unit=way.unit, aligned=name not in way.unaligned) for name, shape in shapes.items()}
    for name in way.unaligned:
        if found[name].kind == "last_dim_strided":  # a tensor that is copied first is aligned, wherever it was
            found[name] = replace(found[name], kind="contiguous", amount=0)
    if way.unit == 1:
        name = d.pick("qkv")
        found[name] = View("padded_rows", d.pick((1, 2, 3, 4, 5, 7, 12, 20)), found[name].offset)
    return found


def _served(base: Any) -> bool:
    """Whether Hopper's kernel takes the call, as its documentation says."""
    if base.head_dim % STEP or base.head_dim_v % STEP or (base.scale is not None and base.scale <= 0) or base.stats:
        return False
    left, right = dense.band(base)
    if keeps_nothing(left, right):
        return False
    if isinstance(base, packed.Varlen):
        return base.total_q > 0 and base.total_k >= BLOCK * max(len(base.lengths_q), 1)
    if 0 in (base.batch, base.seqlen_q, base.seqlen_k):
        return False
    shift = base.seqlen_k - base.seqlen_q
    hides_first = left is not None and shift > left
    return not hides_first and (right is None or base.seqlen_k + right > 0)


def modules(p: Fp8, backend: str) -> list[Any]:
    """The one that the problem takes."""
    from warploom.attention.features import Features
    from warploom.attention.hopper.fp8_plan import fp8_config

    base, (left, right) = p.base, dense.band(p.base)
    features = Features(
        torch.float8_e4m3fn, base.head_dim, base.head_dim_v, right=right is not None, left=left is not None,
        softcap=base.softcap != 0.0, sink=bool(base.sink), varlen=_family(p) is packed,
        used=getattr(base, "used", None) is not None,
    )  # fmt: skip
    return [fp8_config(features, p.of_call).spec]


def features(p: Fp8) -> frozenset[str]:
    dropped = {"lse_gradient", "forward_only", "bias_gradient", "batch_invariant", "packed", "paged", "fp8", "fp8_rotated"}
    found = _family(p).features(p.base) - dropped
    flags = {
        "packed": _family(p) is packed,
        "dense": _family(p) is dense,
        f"by_{p.granularity}": True,
        "rotated": p.rotation is not None,
        "descale": p.plain,
        "padding": p.padding,
        "out_dtype": p.out_dtype,
    }
    return frozenset(found | {name for name, flag in flags.items() if flag})


def sequences(p: Fp8, name: str) -> list[tuple[int, int, int]]:
    """Of each sequence of a tensor its first row, its rows, and those that are no padding."""
    base = p.base
    if _family(p) is dense:
        rows = base.seqlen_q if name == "q" else base.seqlen_k
        lengths: tuple[int, ...] = (rows,) * base.batch
    else:
        lengths = base.lengths_q if name == "q" or base.lengths_k is None else base.lengths_k
    found = []
    for n, length in enumerate(lengths):
        used = length
        if p.padding:
            used = length - (p.seed + 5 * n) % (length + 1) // 2
            if _family(p) is packed and name != "q" and base.used is not None:
                used = max(used, base.used[n])  # which the call reads
        found.append((sum(lengths[:n]), length, used))
    return found


def inputs(p: Fp8, device: torch.device) -> dict[str, Any]:
    """Of the CPU; "there" are those of the call, in buffers of the device that are like them."""
    given: dict[str, Any] = _family(p).inputs(p.base, torch.device("cpu"))
    there = {name: _moved(t, device) if isinstance(t, Tensor) else t for name, t in given.items()}
    buffers = [_whole(there[name]) for name in ("q", "k", "v")]
    return {**given, "there": there, "buffers": buffers}


def _whole(t: Tensor) -> Tensor:
    """All memory that a tensor lies in."""
    return t.new_empty(0).set_(t.untyped_storage())  # type: ignore[call-overload]


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the device that lies as this one does, in a copy of all that lies around it."""
    return _whole(t).to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def run(p: Fp8, given: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
    """What the call returns, the numbers that it is of, and the scale of each of their rows and heads."""
    there, base = given["there"], p.base
    device = there["q"].device
    options: dict[str, Any] = {"granularity": p.granularity, "hadamard": p.rotation is not None, "seed": p.rotation or 0}

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if _family(p) is packed:
        for name, lengths in (("q", base.lengths_q), ("k", base.lengths_k)):
            if lengths is not None:
                options[f"cu_seqlens_{name}"] = ints([sum(lengths[:n]) for n in range(len(lengths) + 1)])
    if p.padding:
        for name in "qk":
            options[f"seqused_{name}"] = ints([used for _, _, used in sequences(p, name)])
    quantised = dict(zip("qkv", quantize(*(there[n] for n in "qkv"), **options), strict=True))
    call: dict[str, Any] = {"out_dtype": DTYPES[p.out_dtype]} if p.out_dtype else {}
    if p.plain:
        call["descale"] = tuple(t.scale for t in quantised.values())
    tensors = {n: t.data if p.plain else t for n, t in quantised.items()}
    given["kernel"] = backend == "hopper"
    if given["kernel"]:
        refuse_numbers()
    results: dict[str, Tensor | None] = _family(p).run(base, {**there, **tensors, "options": call}, backend)
    found = {name: None if t is None else t.cpu() for name, t in results.items()}
    given["numbers"] = {}
    for name, one in quantised.items():
        t = one.to("cpu")
        scales = _of_rows(p, name, t)
        given["numbers"][name] = found[f"numbers of {name}"] = t.data.float() * scales[..., None]
        found[f"scales of {name}"] = scales
    return found


def _of_rows(p: Fp8, name: str, t: Any) -> Tensor:
    """The scale of each row and head, (…, rows, heads)."""
    shape = t.data.shape[:-1]
    if t.scale.ndim == 1:
        found: Tensor = t.scale.expand(shape)
        return found
    block = _blocks(p, name, t.data.flatten(0, -3).shape[0])
    return t.scale.flatten(0, -2)[block].reshape(shape)


def _blocks(p: Fp8, name: str, rows: int) -> Tensor:
    """The block of each row; 0 of tokens past the last sequence."""
    found = torch.zeros(rows, dtype=torch.int64)
    for n, (first, length, _) in enumerate(sequences(p, name)):
        found[first : first + length] = _block(first, n, torch.arange(length), _family(p) is packed, length)
    return found


def _block(first: int, n: int, own: Tensor, is_packed: bool, length: int) -> Tensor:
    """Of row ``own`` of sequence n, which begins at row ``first``: blocks begin anew with each."""
    return (first // BLOCK + n if is_packed else n * -(-length // BLOCK)) + own // BLOCK


def _rounded(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows (count, heads, head_dim) as e4m3 numbers of a scale (count, heads)."""
    numbers = (rows / scale[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers.double() * scale[..., None]


def _error_along(rows: Tensor, scale: Tensor, along: Tensor) -> Tensor:
    """What rounding rows adds along unit vectors, (count, heads)."""
    return ((_rounded(rows, scale) - rows) * along).sum(-1)


_ORACLE = SimpleNamespace(  # of the format; calls have the other families'
    turned=lambda x, seed: Decode().rotated(x, seed),
    taken_away=_error_along,
    counted=lambda used, length: used,
    divisor=lambda top: torch.where(top == 0, 1.0, top / LARGEST),
)


def _changed(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(_ORACLE), **functions})


MUTANTS = {
    "fp8: signs of another seed": _changed(turned=lambda x, seed: Decode().rotated(x, seed + 1)),
    "fp8: padding has a part in scales": _changed(counted=lambda used, length: length),
    "fp8: rows are rounded once": _changed(taken_away=lambda rows, scale, along: torch.zeros_like(scale)),
    "fp8: the largest number becomes 240": _changed(divisor=lambda top: torch.where(top == 0, 1.0, top / 240)),
}


def oracle() -> SimpleNamespace:
    return _ORACLE


def expect(p: Fp8, given: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
    numbers = given["numbers"]
    known = _family(p).oracle()
    arguments: Any = replace(p.base, dtype="float32"), {**given, **numbers}
    found: dict[str, Expected] = _family(p).expect(*arguments, known, again)
    if given["kernel"]:
        products = _summed_products if again else _cut_products
        low = SimpleNamespace(**{**vars(known), "products": products, "rounded_weights": _weights_in_e4m3})
        models: dict[str, Expected] = _family(p).expect(*arguments, low, again)
        found |= {n: replace(found[n], lows=models[n].lows) for n in ("out", "lse")}
        found["lse"] = replace(found["lse"], atol=LSE_SLACK, eps=LSE_EPS)
    kind = p.of_call
    narrow = kind if torch.finfo(kind).eps > torch.finfo(torch.float32).eps else None
    lows = tuple(low if narrow is None else low.to(narrow) for low in found["out"].lows)
    found["out"] = replace(found["out"], lows=lows, dtype=narrow, like=kind)
    for name, t in numbers.items():
        ref, scales = _within(p, name, given[name], t, oracle)
        found[f"numbers of {name}"], found[f"scales of {name}"] = Expected(ref), Expected(scales)
    return found


def refuse_numbers() -> None:
    """From now on no call may be dequantised in this process."""

    def dequantised(*_: object) -> None:
        raise AssertionError("was dequantised")

    Fp8Call.as_numbers = dequantised  # type: ignore[assignment, method-assign]


def _cut_products(q: Tensor, k: Tensor, rounded: torch.dtype | None) -> Tensor:
    """q kᵀ; of a model as tensor cores sum e4m3 products: 32 at a time, cut 13 bits behind the leading bit of the largest."""
    exact: Tensor = q @ k.transpose(-1, -2)
    if rounded is None:
        return exact
    dim = q.shape[-1]
    largest = exact.abs() + 8 / dim * q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]
    noise = torch.frac(torch.sin(torch.arange(exact.numel(), device=exact.device) * 12.9898) * 43758.5453).view(exact.shape)
    return exact + 2.0**-13 * -(-dim // SUMMED) * largest * noise


def _summed_products(q: Tensor, k: Tensor, rounded: torch.dtype | None) -> Tensor:
    """As ``_cut_products``, by products themselves: where keys are alike their scores err alike, and an lse errs with them."""
    if rounded is None:
        return q @ k.transpose(-1, -2)
    (a, of_a), (b, of_b) = _unscaled(q), _unscaled(k)
    found = [_summed(rows, b) for rows in a.split(max(2**23 // max(b[..., 0].numel() * SUMMED, 1), 1), -2)]
    return (torch.cat(found, -2) * of_a * of_b.transpose(-1, -2)).to(q.dtype)


def _unscaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as multiples of four bits, as their e4m3 numbers were, and what they were multiplied by (…, 1)."""
    x = x.double()
    largest = x.abs().amax(-1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0) / torch.arange(8, 16, device=x.device).view(8, *[1] * x.ndim)
    bits = torch.frexp(x / unit)[0] * 16
    best = (bits - bits.round()).abs().amax(-1, keepdim=True).argmin(0, keepdim=True)  # of what the largest may have been
    unit = unit.gather(0, best)[0]
    fraction, exponent = torch.frexp(x / unit)
    return torch.ldexp((fraction * 16).round() / 16, exponent), unit


def _summed(q: Tensor, k: Tensor) -> Tensor:
    """Products of 32 numbers and the sum so far, as Hopper's tensor cores add them.

    Each is cut 13 bits behind the largest exponent, of a product the sum of its numbers' exponents; what they add up to is cut
    13 bits behind its own leading bit. So it was with all of 2,048 scores of an H200, of 16 products each.
    """
    sums = torch.zeros((), dtype=torch.float64, device=q.device).expand(*q.shape[:-1], k.shape[-2])
    for a, b in zip(q.split(SUMMED, -1), k.split(SUMMED, -1), strict=True):
        terms = torch.cat([a[..., :, None, :] * b[..., None, :, :], sums[..., None]], -1)
        exponents = _exponents(a)[..., :, None, :] + _exponents(b)[..., None, :, :]
        exponents = torch.cat([exponents, _exponents(sums)[..., None]], -1)
        largest = torch.where(terms != 0, exponents, LEAST).amax(-1, keepdim=True)
        sums = _cut(terms, largest).sum(-1)
        sums = _cut(sums, _exponents(sums))
    return sums


def _exponents(x: Tensor) -> Tensor:
    """Of the leading bit; nothing of a zero."""
    return torch.frexp(x)[1] - 1


def _cut(x: Tensor, exponents: Tensor) -> Tensor:
    """Without what lies more than 13 bits behind these exponents."""
    unit = torch.exp2(exponents.double() - 13)
    return torch.trunc(x / unit) * unit


def _weights_in_e4m3(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """P in e4m3, a row's largest between 2^6 and 2^8.75."""
    top = weights.amax(-1, keepdim=True) if weights.shape[-1] else weights.new_ones(*weights.shape[:-1], 1)
    top = torch.where(top > 0, top, 1.0)
    scale = torch.exp2(6.0 + torch.remainder(-torch.log2(top), 2.75)) / top
    return (weights * scale).to(torch.float8_e4m3fn).to(weights.dtype) / scale


def _within(p: Fp8, name: str, x: Tensor, numbers: Tensor, oracle: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """The numbers where they are within their bound, and what they stand for elsewhere; the scales that they have to have."""
    device, x, numbers = x.device, x.cpu(), numbers.cpu()
    rows = x.float().flatten(0, -3).double()
    if name != "v" and p.rotation is not None:
        rows = oracle.turned(rows, p.rotation)
    count, heads = rows.shape[:2]
    kept = torch.zeros(count, dtype=torch.bool)
    for first, length, used in sequences(p, name):
        kept[first : first + oracle.counted(used, length)] = True
    rows = torch.where(kept[:, None, None], rows, 0.0)
    clean = torch.where(rows.isfinite(), rows, 0.0)
    top = clean.abs().amax(-1) if rows.shape[-1] else clean.new_zeros(count, heads)
    if not count:
        return numbers.to(device), top.reshape(x.shape[:-1]).to(device)
    if p.granularity == "block":
        block = _blocks(p, name, count)
        tops = top.new_zeros(int(block.max()) + 1, heads).scatter_reduce(0, block[:, None].expand(-1, heads), top, "amax")
        top = tops[block]
    else:
        top = (top.amax(0) if p.granularity == "head" else top.amax()).expand(count, heads)
    scale = oracle.divisor(top)
    # A rotation's sums are of fp32.
    slack = 1e-5 * clean.square().sum(-1, keepdim=True).sqrt()
    if name != "v" and p.rotation is not None and rows.shape[-1] in ROUNDED_TWICE:
        given = torch.where(kept[:, None, None], x.float().flatten(0, -3).double(), 0.0)
        largest, channel = given.abs().max(-1)
        along = oracle.turned(torch.eye(rows.shape[-1], dtype=torch.float64), p.rotation)[channel]
        error = oracle.taken_away(clean, scale, along)
        moved = error * ((largest > DOMINATES * top) | (name == "q"))
        rows = rows - moved[..., None] * along
        # Numbers at a tie may have been rounded either way first.
        either = _rounded(clean + slack, scale) - _rounded(clean - slack, scale)
        slack = slack + (either * along.abs()).sum(-1, keepdim=True) * along.abs()
        clean = torch.where(rows.isfinite(), rows, 0.0)
    # Half a step: e4m3 has three bits behind the leading one, and below 2^-6 steps of 2^-9.
    bound = ((clean.abs() + slack) / 16 + scale[..., None] / 1024) * 1.0001 + slack
    flat = numbers.flatten(0, -3).double()
    near = (flat - rows).abs() <= bound
    ref = torch.where(rows.isfinite(), torch.where(near, flat, rows), torch.nan)
    return ref.reshape(numbers.shape).to(device), scale.reshape(x.shape[:-1]).to(device)


def refusal(p: Fp8, given: dict[str, Any], backend: str) -> str | None:
    return None


def excuse(p: Fp8, given: dict[str, Any], error: Exception) -> str | None:
    found: str | None = dense.excuse(p.base, given, error) if _family(p) is dense else None
    return found


def shrink(p: Fp8) -> Iterator[Fp8]:
    for name, value in (("padding", False), ("plain", False), ("out_dtype", ""), ("rotation", None), ("granularity", "tensor")):
        if getattr(p, name) != value:
            yield replace(p, **{name: value})
    for simpler in _family(p).shrink(p.base):
        yield replace(p, base=simpler)
