"""What the families of softmax attention share: head dims, values, GPU variants, features of views and scalars."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import maskspec
from tests.fuzz.draw import Draw
from tests.fuzz.problem import DTYPES
from tests.fuzz.views import EVEN, KINDS, PLAIN, View, place
from warploom.runtime.arguments import keeps_nothing

# Head dims of q and k, and of v, that pad to different powers of two or to the same, and equal ones.
UNEQUAL = (
    *((64, 16), (40, 24), (72, 32), (24, 16), (96, 16), (256, 32), (16, 64), (32, 72), (24, 136), (128, 64), (64, 128)),
    *((192, 128), (80, 48), (48, 104), (16, 256), (160, 64), (104, 200), (128, 256), (56, 40), (120, 72)),
)
EQUAL = (16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128, 136, 160, 192, 256)
# Elements of batch × query heads × queries × keys, which bound the oracle's time and memory.
CELLS = {"cuda": 5_000_000, "cpu": 150_000}


@dataclass(frozen=True)
class Limits:
    """What a backend serves, as its documentation says."""

    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    dims: tuple[int, int, int] = (1, 256, 1)  # from, to, step
    columns: tuple[str, ...] = ("dense", "varlen")  # layouts that it takes column masks of
    dropout: bool = True
    packed: bool = True
    page_sizes: tuple[int, ...] = (1, 8, 16, 40, 64, 128)  # none: it takes no pages
    paged_alike: bool = True  # over pages it takes what it takes of packed sequences


LIMITS = {
    "triton": Limits(dims=(16, 256, 8)),
    "hopper": Limits(dtypes=("float16", "bfloat16"), dims=(8, 256, 8), page_sizes=(16, 48, 64, 256), paged_alike=False),
    "ampere": Limits(dtypes=("float16", "bfloat16"), dims=(8, 128, 8), columns=(), dropout=False, packed=False, page_sizes=()),
    "cpu": Limits(),
    "reference": Limits(dtypes=("float16", "bfloat16", "float32", "float64")),
}


@dataclass(frozen=True)
class Variant:
    """All that the compiled kernels of a call depend on; what a backend takes at run time is left at its default."""

    dtype: str
    head_dim: int
    head_dim_v: int
    vectors: tuple[str, ...] = ()
    left: bool = False
    right: bool = False
    softcap: bool = False
    sink: str = ""
    dropout: bool = False
    descending: bool = False  # scale of 0 or below
    lse_gradient: bool = False
    unit: int | None = None  # 8: strides are multiples of 8 elements; 1: some are not; None: any
    unaligned: tuple[str, ...] | None = None  # tensors whose base is not aligned to 16 bytes; None: any
    boxes: bool = False
    tail: bool = True
    edges: bool = False
    layout: str = "dense"
    keys: str = ""  # of a packed call: "same" (no cu_seqlens_k), "own"; "used" (seqused_k) besides
    used: bool = False
    page_size: int = 0
    deterministic: bool = False
    chunks: bool = False  # queries are chunks of longer sequences
    invariant: bool = False  # batch_invariant=True
    bias: str = ""  # what its kind begins with, "alibi" or "relative"
    largest: bool = False  # the largest logits are returned


def draw_variant(d: Draw, backend: str, layouts: tuple[str, ...] = ("dense",)) -> Variant:
    """One that the backend serves."""
    limits = LIMITS[backend]
    # Ampere's backward pass is Triton's.
    triton = backend in ("triton", "ampere")
    dtype = d.pick(limits.dtypes, (4, 4, 2, 1)[: len(limits.dtypes)])
    head_dim, head_dim_v = draw_dims(d, limits)
    layout = d.pick([one for one in layouts if limits.page_sizes or one != "paged"])
    left, right = d.pick(((False, False), (False, True), (True, True), (True, False)), (4, 4, 3, 1))
    found = Variant(
        dtype,
        head_dim,
        head_dim_v,
        left=left,
        right=right,
        softcap=d.chance(0.25),
        sink=d.any_of({"": 6, "float32": 2, "same": 1}),
        dropout=limits.dropout and d.chance(0.25) and (layout != "paged" or limits.paged_alike),
        lse_gradient=d.chance(0.35),
        deterministic=d.chance(0.2),
        layout=layout,
    )
    if layout in limits.columns and d.chance(0.5):
        vectors, _ = d.pick([one for one in maskspec.classes() if not one[1] or found.right])
        found = replace(found, vectors=vectors)
    if layout != "dense":
        found = replace(
            found,
            keys="" if layout == "paged" else d.pick(("same", "own", "own")),
            used=layout == "paged" or d.chance(0.4),
            page_size=d.pick(limits.page_sizes) if layout == "paged" else 0,
            edges=True,
        )
    if not triton:
        return found
    found = replace(
        found,
        deterministic=False,
        descending=backend == "triton" and d.chance(0.18),
        unit=d.pick((8, 1)),
        unaligned=tuple(n for n in ("q", "k", "v", "dout") if d.chance(0.5)) if d.chance(0.45) else (),
    )
    if layout == "dense":
        banded = found.left or found.right
        found = replace(
            found,
            tail=d.chance(0.8),
            edges=bool(found.vectors) or (banded and d.chance(0.5)),
            boxes=found.unit == 8 and not found.unaligned and dtype != "float32" and d.chance(0.6),
        )
    return found


# Of that many variants of Hopper one has a bias, and one, if it is dense, returns largest logits.
BIASED_EVERY, LARGEST_EVERY = 4, 9


def with_scores(d: Draw, found: list[Variant]) -> list[Variant]:
    """Some of them with a bias or with largest logits, without what Hopper takes neither beside."""
    found = [_biased(d, v) if n % BIASED_EVERY == 0 and v.layout != "paged" else v for n, v in enumerate(found, 1)]
    return [_largest(d, v) if n % LARGEST_EVERY == 0 and v.layout == "dense" else v for n, v in enumerate(found, 1)]


def _biased(d: Draw, v: Variant) -> Variant:
    v = replace(v, dtype="bfloat16", vectors=(), bias=d.pick(("alibi", "relative")))
    if v.bias == "alibi":
        dims = (v.head_dim, v.head_dim_v) if max(v.head_dim, v.head_dim_v) <= 128 else (128, 128)
        return replace(v, head_dim=dims[0], head_dim_v=dims[1], dropout=v.dropout and not v.softcap)
    dim = d.pick((64, 128))
    return replace(v, head_dim=dim, head_dim_v=dim, softcap=False, dropout=False, sink="", used=False)


def _largest(d: Draw, v: Variant) -> Variant:
    dim = d.pick((64, 128))
    kept = {"right": v.right, "lse_gradient": v.lse_gradient, "deterministic": v.deterministic}
    return Variant("bfloat16", dim, dim, **kept, largest=True)


def draw_dims(d: Draw, limits: Limits) -> tuple[int, int]:
    low, high, step = limits.dims
    pairs = [p for p in UNEQUAL if all(low <= n <= high for n in p)]
    equal = [n for n in EQUAL if low <= n <= high]
    if low <= 8:
        equal += [8]
    if step == 1:
        equal += [1, 5, 33]
        pairs += [(7, 12), (33, 64), (100, 30)]
    return d.pick(pairs) if d.chance(0.45) else (d.pick(equal),) * 2


def draw_views(d: Draw, shapes: dict[str, tuple[int, ...]], variant: Variant | None) -> dict[str, View]:
    """A view for each tensor; dout's is an output's gradient, whose elements may share memory too."""
    if variant is None or variant.unit is None:
        if d.chance(0.1):
            return {name: View(offset=8 * d.integer(0, 1)) for name in shapes}
        return {name: d.view(shape) for name, shape in shapes.items()}
    free = variant.boxes or variant.layout != "dense" or variant.dtype == "float32"
    if variant.unit == 8 and not variant.unaligned and free and d.chance(0.6):
        return {name: View(offset=8 * d.integer(0, 1)) for name in shapes}
    kinds = list(EVEN) if variant.unit == 8 else [*KINDS, "last_dim_strided"]
    if variant.boxes:
        kinds = [k for k in kinds if not k.startswith("expanded")]
    found = {}
    for name, shape in shapes.items():
        aligned = name not in (variant.unaligned or ())
        # A tensor that is copied first is aligned, wherever it was.
        fitting = [k for k in kinds if aligned or k != "last_dim_strided"]
        only = ["contiguous"] if d.chance(0.3) else fitting
        found[name] = d.view(shape, kinds=only, unit=variant.unit, aligned=aligned)
        if not aligned and found[name].offset % 8 == 4:
            found[name] = replace(found[name], offset=found[name].offset + 1)  # an address that fp32 would find aligned
    inputs = [n for n in ("q", "k", "v") if n in shapes]
    if variant.unit == 1:
        name = d.pick(inputs)
        found[name] = View("padded_rows", d.pick((1, 2, 3, 4, 5, 7, 12, 20)), found[name].offset)
    elif not variant.boxes and variant.layout == "dense" and not variant.unaligned and variant.dtype != "float32":
        name = d.pick(inputs)  # descriptors take no stride of 0
        found[name] = View(d.pick(("expanded_batch", "expanded_heads")), 0, found[name].offset)
    return found


def is_edge(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> bool:
    """Whether some query of a band may see nothing."""
    all_see = (left is None or left >= 0) and (right is None or seqlen_k - seqlen_q + right >= 0)
    return not (all_see and seqlen_k > 0) or keeps_nothing(left, right)


def is_boxed(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> bool:
    """Whether no key is hidden from every query by the band."""
    if keeps_nothing(left, right):
        return False
    return (left is None or seqlen_k - seqlen_q <= left) and (right is None or right >= 0) and min(seqlen_q, seqlen_k) > 0


def draw_band(d: Draw, left: bool, right: bool, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None]:
    """Values for the sides that there are; right is 0, causal, half of the time."""
    while True:
        found = (
            _side(d, seqlen_q, seqlen_k) if left else None,
            None if not right else 0 if d.chance(0.5) else _side(d, seqlen_q, seqlen_k),
        )
        if found != (-1, -1):
            return found


def _side(d: Draw, seqlen_q: int, seqlen_k: int) -> int:
    while True:
        found = maskspec.limit(d, seqlen_q, seqlen_k)
        if found is not None:
            return found


def draw_scale(d: Draw, descending: bool | None) -> float | None:
    """None: the default. `descending`: 0 or below, or above; None: any."""
    if descending is None:
        descending = d.chance(0.12)
    if descending:
        return d.pick((0.0, -0.3, -1.0))
    return d.pick((None, None, None, 1.0, d.real(0.01, 0.6), 1e-3))


def values(seed: int, name: str, shape: tuple[int, ...], dtype: str, style: str) -> Tensor:
    """Numbers of a tensor, on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if style == "integers":
        return torch.randint(-2, 3, shape, generator=generator).to(DTYPES[dtype])
    drawn = torch.randn(shape, generator=generator)
    if style == "large" and name in ("q", "k"):
        drawn = drawn * (2 if dtype == "float32" else 4)  # of larger scores fp32 itself keeps too few digits
    if style == "small":
        drawn = drawn * 0.02
    if style == "shifted" and name == "k":
        drawn = drawn + 2
    return drawn.to(DTYPES[dtype])


STYLES = ("normal", "large", "small", "integers", "shifted")


def laid(
    seed: int,
    dtype: str,
    style: str,
    views: dict[str, View],
    shapes: dict[str, tuple[int, ...]],
    hidden: dict[str, Tensor],
    hostile: str,
    device: torch.device,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Tensors by name, and the buffers that hold them."""
    tensors, buffers = {}, []
    for name, shape in shapes.items():
        drawn = values(seed, name, shape, dtype, style)
        placed = place(drawn, views[name], hidden.get(name), hostile, device)
        tensors[name] = placed.tensor
        buffers.append(placed.buffer)
    return tensors, buffers


# Head dims that Hopper's kernels are compiled for: smaller ones run in the next larger tile, so that they are run-time numbers.
HOPPER_TILES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def within_tile(d: Draw, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Other head dims that the same Hopper modules serve."""

    def tile(a: int, b: int) -> tuple[int, int]:
        return min(t for t in HOPPER_TILES if t[0] >= a and t[1] >= b)

    while d.chance(0.7):
        pair = 8 * d.integer(1, 32), 8 * d.integer(1, 32)
        if tile(*pair) == tile(head_dim, head_dim_v):
            return pair
    return head_dim, head_dim_v


def modules(
    p: Any, backend: str, layout: str, batch: int, longest_q: int, longest_k: int, band: tuple[Any, Any], used: bool
) -> list[Any]:
    """The compiled modules that a problem takes, by the packages' own names."""
    from warploom.attention.problem import AttentionProblem, largest_box

    if 0 in (batch, longest_q, longest_k):
        return []
    described = AttentionProblem(
        device="cuda",
        dtype=DTYPES[p.dtype],
        layout=layout,
        batch=batch,
        seqlen_q=longest_q,
        seqlen_k=longest_k,
        heads_q=p.heads_q,
        heads_kv=p.heads_kv,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        left=band[0],
        right=band[1],
        softcap=p.softcap != 0.0,
        sink=bool(p.sink),
        dropout=p.dropout_p > 0.0,
        deterministic=p.deterministic is True,
        backward=p.backward,
        seqused=used,
        bias="alibi" if p.bias.startswith("alibi") else "distance" if p.bias.startswith("relative") else "",
        bias_grad=p.bias_gradient,
        page_box=largest_box(p.page_size, p.width) if layout == "paged" else 0,
    )
    if backend == "ampere":
        from warploom.attention.ampere.plan import config_for as ampere

        return [ampere(described, (9, 0)).spec]
    from warploom.attention.features import Features
    from warploom.attention.hopper.plan import (
        LONG,
        backward_config_for,
        bias_backward_refusal,
        bias_refusal,
        config,
        config_for,
        shape,
        takes_columns,
        takes_dropout,
        with_largest,
    )

    assert not p.bias or bias_refusal(described) is None, p
    ways = [described]
    if p.mask is not None and layout != "paged" and not p.bias:  # it may be a band
        ways.append(replace(described, columns=("lts",)))
    found = [config_for(way).spec for way in ways]
    if "max_logits" in p.stats:
        every, long = shape(longest_q, longest_k), longest_k >= LONG
        found.append(with_largest(config(Features.of(described), long, 0, every)).spec)
    for way in ways:
        features = Features.of(way)
        if features.bias and bias_backward_refusal(features) is not None:
            continue
        if p.backward and takes_dropout(features) and (not way.columns or takes_columns(features)):
            found.append(backward_config_for(way, bool(p.lse_gradient)).spec)
    return found


def view_features(views: dict[str, View], shapes: dict[str, tuple[int, ...]], dtype: str) -> Iterator[str]:
    """What coverage counts of views."""
    kinds = {v.kind for v in views.values()}
    groups = {
        "transposed": "view_transposed",
        "packed_qkv": "view_packed",
        "packed_kv": "view_packed",
        "sliced_rows": "view_sliced",
        "sliced_heads": "view_sliced",
        "padded_rows": "view_padded",
        "padded_heads": "view_padded",
        "padded_batch": "view_padded",
        "expanded_batch": "view_expanded",
        "expanded_heads": "view_expanded",
        "expanded_rows": "view_expanded",
        "overlapping_rows": "view_overlapping",
        "overlapping_heads": "view_overlapping",
        "last_dim_strided": "view_last_dim_strided",
    }
    yield from {groups[k] for k in kinds if k in groups}
    if kinds == {"contiguous"}:
        yield "view_all_contiguous"
    odd = False
    for name, view in views.items():
        strides, first = view.strides(shapes[name])
        odd = odd or any(s % 8 for s in strides[:-1])
        if first * DTYPES[dtype].itemsize % 16:
            yield "unaligned"
    if odd:
        yield "strides_odd"


def dims_features(head_dim: int, head_dim_v: int) -> Iterator[str]:
    pads = [max(16, 1 << (n - 1).bit_length()) for n in (head_dim, head_dim_v)]
    if head_dim != head_dim_v:
        yield "dims_unequal"
    if pads[0] != pads[1]:
        yield "dims_pad_differently"
    if (head_dim, head_dim_v) != tuple(pads):
        yield "dims_padded"
    if max(head_dim, head_dim_v) > 128:
        yield "dims_above_128"


def reshape_heads(heads_q: int, heads_kv: int) -> str:
    return "heads_mha" if heads_q == heads_kv else "heads_mqa" if heads_kv == 1 else "heads_gqa"


def cells_fit(cells: int, device: str, backend: str) -> bool:
    return cells <= CELLS[device] // (3 if backend == "reference" else 1)


def simpler_views(views: Iterable[str], problem: Any) -> Iterator[Any]:
    """The problem with one view, or all, contiguous."""
    names = [n for n in views if getattr(problem, n) != PLAIN]
    if len(names) > 1:
        yield replace(problem, **dict.fromkeys(names, PLAIN))
    for name in names:
        view = getattr(problem, name)
        yield replace(problem, **{name: PLAIN})
        if view.offset:
            yield replace(problem, **{name: replace(view, offset=0)})
