"""Drawing decode problems: what a compiled kernel depends on first, then everything that only a launch does."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.draw import Draw
from tests.fuzz.problem import spec
from tests.fuzz.views import View

PLAIN = View()
# Head dims, and how often each is drawn.
DIMS = {
    16: 6, 24: 3, 32: 6, 40: 3, 48: 3, 64: 7, 72: 3, 80: 3, 96: 3, 104: 3, 120: 2, 128: 5, 160: 2, 192: 2, 200: 2, 256: 3,
}  # fmt: skip
PAGINGS = ("none", "one", "tile", "scattered")


@spec
@dataclass(frozen=True)
class DecodeVariant:
    """What the Triton kernels of a call are compiled for, roughly: a call of one variant has few binaries."""

    dtype: str = "bfloat16"
    queries: int = 1
    heads_kv: int = 1
    group: int = 1
    dim: int = 64
    dim_v: int = 64
    paging: str = "none"  # no table; a table of one column; whole tiles of keys in a page; keys of a tile in several
    left: bool = False
    softcap: bool = False
    sink: str = ""  # dtype
    parts: int = 1  # 1: one split; 2: several; 3: more than the kernel makes of the usual size
    layout: str = "unit"  # strides in whole 16 bytes and so aligned; else "odd" strides, or pointers "off" 16 bytes
    off: tuple[bool, ...] = (False, False, False)  # which of q, k and v are
    crowd: bool = False  # so many sequences that a program takes a group of splits
    append: bool = False
    slots: str = ""  # dtype of the slot mapping
    bits: str = ""  # the other form of a sequence whose bits are compared: "alone", "pages", "crowd"
    tree: str = ""  # of drafts: "one" for all sequences, "each" its own
    fp8: str = ""  # a cache of it, with scales a "token", "head" or "tensor"
    bias: str = ""  # "alibi", "distance" or "key"
    bias_dtype: str = "float32"
    latent: bool = False  # values are the first columns of keys
    prefix: str = ""  # of pages that all sequences share: "found" in the table, "keys" by their number
    invariant: bool = False  # the call is repeated under warploom.batch_invariant()


@spec
@dataclass(frozen=True)
class DecodeProblem:
    """One call of decode(), after an append where `appended` is given; data come from the seed."""

    seed: int
    dtype: str
    lengths: tuple[int, ...]  # before the append
    queries: int = 1
    heads_kv: int = 1
    group: int = 1
    dim: int = 16
    dim_v: int = 16
    capacity: int = 0  # of a cache without pages
    page_size: int = 0  # 0: no pages
    width: int = 0  # columns of the table
    spare: int = 0  # pages that no sequence has
    shared: bool = False  # sequences have their first whole pages in common
    garbage: bool = False  # unused entries of the table are no pages
    table_gap: int = 0  # entries between rows of the table
    windowed: bool = False
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    sink: str = ""
    sink_step: int = 1
    spread: float = 1.0
    hostile: str = ""
    visible_nan: str = ""  # "k" or "v" holds a NaN that every query of one sequence sees
    appended: int | None = None  # tokens
    slots: str = ""
    dropped: bool = False  # some tokens have negative slots
    bits: str = ""
    tree: str = ""
    shape: str = "any"  # of the tree: also "chain" or "star"
    fp8: str = ""
    rotation: int | None = None  # seed of the keys' rotation
    bias: str = ""  # of oracle.decode.Bias
    bias_dtype: str = "float32"
    bias_each: bool = False  # of slopes and keys: each sequence has its own
    bias_heads: bool = True  # of tables and keys: each head has its own
    bias_hides: bool = False  # some of it is -inf
    bias_reach: int = 0  # a table's largest distance; keys that Key has beyond the capacity
    bias_step: int = 1  # elements from one number to the next
    latent: bool = False
    prefix: str = ""
    invariant: bool = False
    q_view: View = PLAIN
    k_view: View = PLAIN
    v_view: View = PLAIN
    new_k_view: View = PLAIN
    new_v_view: View = PLAIN


def tile(dtype: str, dim: int, dim_v: int) -> int:
    """Keys of a kernel's tile."""
    width = max(1 << (n - 1).bit_length() for n in (dim, dim_v)) * (4 if dtype == "float32" else 2)
    return 64 if width <= 256 else 32 if width <= 512 else 16


def split(queries: int, group: int) -> int:
    """Keys of a split."""
    return 512 if queries * group <= 32 else 1024


def draw_variant(d: Draw, backend: str) -> DecodeVariant:
    """Any variant that the backend serves, and some that it does not."""
    served = backend == "triton"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtype = d.pick(("float16", "bfloat16", "float32"), (3, 0.2 if interpreted else 4, 3))
    if not served and d.chance(0.07):
        dtype = "float64"
    dims = [d.any_of(DIMS) for _ in range(2)]
    if d.chance(0.35):
        dims[1] = dims[0]
    if not served and d.chance(0.1):
        dims = [d.integer(1, 70), d.integer(1, 70)]
    if interpreted:
        # A program takes milliseconds there, whatever it computes, and each key head has its own.
        dims = [d.any_of({n: w for n, w in DIMS.items() if n <= 72}) for _ in range(2)]
    heads_q, heads_kv = d.heads(4 if interpreted else 14 if d.chance(0.3) else 8)
    queries = d.pick((1, 2, 3, 4, 5, 7, 8, 13, 16), (9, 2, 2, 2, 1, 1, 1, 1, 2))
    paging = d.pick(PAGINGS, (5, 1, 2, 3))
    append = d.chance(0.25)
    even = all(n % 8 == 0 for n in dims)
    layout = d.pick(("unit", "odd", "off"), (5, 2, 3)) if even else "odd"
    off = tuple(d.chance(0.6) for _ in range(3)) if layout == "off" else (False, False, False)
    if layout == "off" and not any(off):
        off = (True, False, True)
    parts = d.pick((1, 2, 3), (100, 0, 0) if interpreted else (80, 19, 1) if served else (89, 11, 0))
    if parts == 3:
        heads_kv, heads_q, dims, queries = 16, 16, [16, 16], min(queries, 2)
    crowd = served and parts == 2 and d.chance(0.15)
    if crowd:
        dims, append = [16, 24], False
    tree = d.pick(("", "one", "each"), (9, 2, 3))
    if tree and parts < 3:
        queries = d.pick((queries, d.integer(2, 16), d.integer(17, 32), d.integer(33, 64)), (3, 5, 2, 1))
    if tree and queries * heads_q // heads_kv > 128:
        heads_q = heads_kv
    fp8 = d.pick(("", "token", "head", "tensor"), (12, 3, 1, 1))
    bits = d.pick(("", "alone", "pages", "crowd"), (6, 1, 1, 1))
    bias = d.pick(("", "alibi", "distance", "key"), (9, 1, 1, 1))
    # What is appended, quantised or laid out anew has values of its own.
    latent = not (append or fp8 or bits or crowd) and parts < 3 and d.chance(0.15)
    if latent:
        dims = sorted(dims, reverse=True)
        if max(dims) - min(dims) > 128:
            dims[1] = dims[0]
        if not interpreted and d.chance(0.1):
            dims = [576, 512]
        if layout == "off":
            off = (off[0] or not off[1], off[1], off[1])  # values lie where keys do
    return DecodeVariant(
        dtype=dtype,
        queries=queries,
        heads_kv=heads_kv,
        group=heads_q // heads_kv,
        dim=dims[0],
        dim_v=dims[1],
        paging=paging,
        left=d.chance(0.35),
        softcap=d.chance(0.25),
        sink=d.pick(("", "float32", dtype), (6, 2, 2)),
        parts=parts,
        layout=layout,
        off=off,
        crowd=crowd,
        append=append,
        slots=d.pick(("", "int32", "int64"), (2, 1, 1)) if append and paging != "none" else "",
        # A tree of each sequence's own, and scales, lie apart from the rows that the other form is made of.
        bits=bits if tree != "each" and not fp8 else "",
        tree=tree,
        fp8=fp8,
        bias=bias,
        bias_dtype=d.pick(("float32", "float16", "bfloat16", "float64"), (4, 2, 2, 1)) if bias else "float32",
        latent=latent,
        prefix=d.pick(("", "found", "keys"), (2, 1, 1)) if paging not in ("none", "one") and parts < 3 else "",
        invariant=d.chance(0.15),
    )


def draw_problem(d: Draw, variant: DecodeVariant) -> DecodeProblem:
    """A problem of the variant."""
    w, interpreted = variant, os.environ.get("TRITON_INTERPRET") == "1"
    most = split(w.queries, w.group)
    capacity = d.pick((d.integer(1, 40), d.integer(30, 200), d.integer(100, most)), (2, 4, 1))
    if w.parts == 2:
        capacity = most + d.integer(1, 600)
    elif w.parts == 3:
        capacity = 16 * most + d.integer(1, 500)
    batch = d.pick((0, 1, 2, 3, 4), (1, 4, 4, 3, 2)) if w.parts < 3 else 1
    if w.crowd:
        batch = -(-400 // w.heads_kv) + d.integer(0, 9)
    page_size, width = _pages(d, w, capacity)
    if page_size:
        capacity = page_size * width
    appended = min(d.pick((0, 1, 2, 5, 16, 17, 33), (1, 6, 2, 2, 1, 1, 1)), capacity) if w.append else None
    room = capacity - (appended or 0)
    p = DecodeProblem(
        seed=d.seed(),
        dtype=w.dtype,
        lengths=tuple(_length(d, room, w) for _ in range(batch)),
        queries=w.queries,
        heads_kv=w.heads_kv,
        group=w.group,
        dim=w.dim,
        dim_v=w.dim_v,
        capacity=0 if page_size else capacity,
        page_size=page_size,
        width=width,
        spare=d.integer(1, 3) if page_size else 0,
        shared=page_size > 0 and d.chance(0.3),
        garbage=page_size > 0 and d.chance(0.7),
        table_gap=d.pick((0, 1, 5)) if page_size else 0,
        scale=d.pick((None, d.real(0.2, 3.0) * w.dim**-0.5, -1.3 * w.dim**-0.5), (6, 3, 1)),
        softcap=d.pick((2.0, 15.0, d.real(0.5, 50.0))) if w.softcap else 0.0,
        sink=w.sink,
        sink_step=d.pick((1, 2), (4, 1)) if w.sink else 1,
        # In fp32 scores near 100 have errors of their own that show, and few rows tell little about how large.
        spread=d.pick((1.0, 3.0, 20.0 if w.dtype in ("float16", "bfloat16") else 2.0), (8, 2, 1)),
        hostile=d.hostile(),
        visible_nan="" if w.fp8 and interpreted else d.pick(("", "k", "v"), (11, 1, 1)),  # where e4m3's NaN is 480
        appended=appended,
        slots=w.slots,
        dropped=bool(w.slots) and d.chance(0.5),
        bits=w.bits if batch else "",
        tree=w.tree,
        shape=d.pick(("any", "chain", "star"), (6, 1, 1)) if w.tree else "any",
        fp8=w.fp8,
        # Rotated in another order keys round to other numbers: appending them is no matter of bits.
        rotation=d.pick((None, 0, d.seed64()), (2, 1, 1)) if w.fp8 and appended is None else None,
        latent=w.latent,
        prefix=w.prefix,
        invariant=w.invariant and batch > 0,
    )
    if w.prefix:
        lengths = p.lengths
        if d.chance(0.6):  # all of them hold a split and more, if there is room
            lengths = tuple(d.integer(min(most, room), max(room, 0)) for _ in range(max(batch, 2)))
        p = replace(p, shared=True, lengths=lengths)
    return _with_views(d, _with_bias(d, _with_window(d, p, w, capacity, most), w), w)


def _pages(d: Draw, w: DecodeVariant, capacity: int) -> tuple[int, int]:
    """Page size and columns of the table, (0, 0) without one."""
    n = tile(w.dtype, w.dim, w.dim_v)
    if w.paging == "none":
        return 0, 0
    if w.paging == "one":
        return d.pick((capacity, max(1, capacity // 2) if w.parts == 1 else capacity)), 1
    if w.paging == "tile":
        size = d.pick((n, 2 * n, 128, 256))
    else:
        size = d.pick((1, 2, 4, 8, 16, 32), (3, 2, 2, 4, 4, 2))
        while size >= n:
            size //= 2
    return size, max(2, -(-capacity // size))


def _length(d: Draw, room: int, w: DecodeVariant) -> int:
    """Keys that a sequence holds, at most `room`."""
    kind = d.random.random()
    if kind < 0.1 or room <= 0:
        return 0
    if kind < 0.2:
        return d.integer(0, min(room, w.queries))
    if kind < 0.35:
        return room
    if w.crowd and kind < 0.9:
        return d.integer(0, min(room, 40))
    return d.integer(1, room)


def _with_window(d: Draw, p: DecodeProblem, w: DecodeVariant, capacity: int, most: int) -> DecodeProblem:
    right = d.pick((None, 0, 3, -1, -d.integer(1, 40)), (3, 3, 1, 1, 1))
    if not w.left:
        return replace(p, windowed=right is None or d.chance(0.3), left=None, right=right) if d.chance(0.3) else p
    if w.parts > 1:
        left = most + d.integer(0, capacity)
    else:
        left = d.pick((0, d.integer(0, 20), d.integer(10, 150), -d.integer(1, 10), 2**31 - 1), (2, 4, 5, 1, 1))
        if left == right == -1:
            left = 0  # (-1, -1) is refused
    return replace(p, windowed=True, left=left, right=right)


def _with_bias(d: Draw, p: DecodeProblem, w: DecodeVariant) -> DecodeProblem:
    if not w.bias:
        return p
    hides = w.bias != "alibi" and not p.visible_nan and d.chance(0.4)
    return replace(
        p,
        bias=d.pick(("relative", "one_side")) if w.bias == "distance" else w.bias,
        bias_dtype=w.bias_dtype,
        bias_each=w.bias != "distance" and d.chance(0.5),
        bias_heads=w.bias == "alibi" or d.chance(0.6),
        bias_hides=hides,
        bias_reach=d.pick((0, d.integer(1, 8), d.integer(5, 100))),
        bias_step=d.pick((1, 2, 3), (3, 1, 1)),
    )


def _with_views(d: Draw, p: DecodeProblem, w: DecodeVariant) -> DecodeProblem:
    batch, heads_q = len(p.lengths), p.heads_kv * p.group
    rows = p.page_size or p.capacity
    pool = 3 if p.page_size else max(batch, 1)
    shapes = {
        "q_view": (max(batch, 1), p.queries, heads_q, p.dim),
        "k_view": (pool, rows, p.heads_kv, p.dim),
        "v_view": (pool, rows, p.heads_kv, p.dim_v),
    }
    found: dict[str, Any] = {}
    for (name, shape), off in zip(shapes.items(), w.off, strict=True):
        cache = name != "q_view"
        found[name] = _view(d, shape, w.layout, off, cache, cache and p.appended is not None)
    own = f"{p.visible_nan}_view"
    if p.visible_nan and found[own].aliased:
        found[own] = View(offset=found[own].offset)  # the NaN is to be one
    if p.appended is not None:
        for name, dim in (("new_k_view", p.dim), ("new_v_view", p.dim_v)):
            found[name] = d.view((max(batch, 1), p.appended, p.heads_kv, dim))
    return replace(p, **found)


def _view(d: Draw, shape: tuple[int, ...], layout: str, off: bool, cache: bool, written: bool) -> View:
    """A view of a tensor; a cache's last dimension is contiguous, and what is written shares no memory."""
    if layout == "unit":
        view = d.view(shape, unit=8, aligned=True, aliased=not written)
    else:
        view = d.view(shape, aligned=not off, aliased=not written)
        if off and view.offset == 4:
            view = replace(view, offset=5)  # four elements of fp32 are 16 bytes
    if view.kind == "last_dim_strided" and (cache or layout == "unit"):
        view = replace(view, kind="padded_rows", amount=8 if layout == "unit" else 3)
    return view
