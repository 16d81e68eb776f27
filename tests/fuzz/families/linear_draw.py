"""Drawing linear attention: what a compiled kernel depends on first, then everything that only a launch does."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.draw import Draw
from tests.fuzz.problem import spec
from tests.fuzz.views import View

PLAIN = View()


@dataclass(frozen=True)
class Size:
    """How large problems are where they run.

    scores: of all heads and sequences, of which the oracle holds a few matrices in fp64.
    products: scores times dims.
    dims: the usual ones, and how often each is drawn.
    states: elements of all states.
    long: how often a sequence is longer than a segment.
    """

    scores: int
    products: int
    dims: tuple[tuple[int, int], ...]
    states: int
    long: float


_DIMS = ((8, 2), (16, 6), (24, 3), (32, 5), (40, 3), (64, 8), (72, 3), (96, 2), (128, 4), (136, 1), (192, 1), (256, 2))
GPU = Size(3 * 10**6, 10**9, _DIMS, 10**7, 0.12)
CPU = Size(2 * 10**5, 8 * 10**6, tuple((n, w if n <= 64 else 1) for n, w in _DIMS), 3 * 10**5, 0.004)
# A program of Triton's interpreter takes milliseconds, whatever it computes; most of those of a state have 64 columns.
INTERPRETER = Size(10**4, 10**6, ((8, 1), (16, 3), (24, 1), (40, 1), (64, 1), (72, 1)), 10**5, 0.0)


def size(backend: str) -> Size:
    """Of problems for the backend here."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    return GPU if backend in ("triton", "hopper") else CPU


@spec
@dataclass(frozen=True)
class LinearVariant:
    """What the kernels of a call are compiled for, roughly: a call of one variant has few binaries."""

    dtype: str = "bfloat16"
    e: int = 64
    m: int = 64
    group: int = 1
    map_q: str = "elu+1"
    map_k: str = "elu+1"
    causal: bool = True
    normalize: bool = True
    place: str = "dense"
    state: bool = False
    return_state: bool = False
    upstream: str = "out"  # results with a gradient: "" none, "out", "state" or "both"
    same: bool = True  # as many keys as queries
    long: bool = False  # longer than a segment
    layout: str = "unit"
    off: tuple[bool, ...] = (False, False, False, False)  # which of q, k, v and dout are off 16 bytes
    steps: bool = False  # tokens one after another, by linear_attention_step
    walks: bool = False  # what the Hopper walks take
    decay: str = ""  # "head" or "token"


@spec
@dataclass(frozen=True)
class LinearProblem:
    """One call, or a chain of steps; data come from the seed."""

    seed: int
    dtype: str
    batch: int = 1
    seqlen_q: int = 8
    seqlen_k: int = 8
    heads_kv: int = 1
    group: int = 1
    e: int = 16
    m: int = 16
    map_q: str = "elu+1"
    map_k: str = "elu+1"
    causal: bool = True
    normalize: bool = True
    eps: float = 1e-6
    scale: float = 1.0
    lengths: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None  # packed, in seqlen_q tokens, some of which may be no sequence's
    four: bool = False  # a packed call with a batch dimension of 1
    state: bool = False
    return_state: bool = False
    upstream: str = "out"
    mean: float = 0.0  # of the values: sums then grow with the length
    zeros: bool = False  # some of q and k are exactly 0
    hostile: str = ""
    visible_nan: str = ""  # "k" or "v" of one sequence's first key
    index_step: int = 1  # lengths or cu_seqlens are every second number of a tensor
    state_gap: int = 0  # numbers between the rows of the given s; its base is off 16 bytes by as many
    steps: bool = False
    decay: str = ""  # "head" or "token"
    forgets: bool = False  # some logs are -inf
    grad: bool = False  # of steps: they are recorded, and differentiated where `upstream` says so
    q_view: View = PLAIN
    k_view: View = PLAIN
    v_view: View = PLAIN
    dout_view: View = PLAIN


def draw_variant(d: Draw, backend: str) -> LinearVariant:
    """Any variant that the backend serves, and some that it does not."""
    if backend == "hopper":
        return _walks(d)
    served = backend == "triton"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtype = d.pick(("float16", "bfloat16", "float32"), (3, 0.2 if interpreted else 4, 3))
    if not served and d.chance(0.07):
        dtype = "float64"
    limits = size(backend)
    e, m = (d.any_of(dict(limits.dims)) for _ in range(2))
    if d.chance(0.35):
        m = e
    if d.chance(0.12):
        e, m = d.integer(1, 70), d.integer(1, 70)
    even = e % 8 == 0 and m % 8 == 0
    layout = d.pick(("unit", "odd", "off"), (5, 2, 3)) if even else "odd"
    off = tuple(d.chance(0.5) for _ in range(4)) if layout == "off" else (False,) * 4
    if layout == "off" and not any(off):
        off = (True, False, True, False)
    steps = d.chance(0.17)
    normalize = d.chance(0.65)
    maps = ("elu+1", "relu", "identity")
    map_q = d.pick(maps, (5, 2, 3))
    map_k = map_q if d.chance(0.7) else d.pick(maps)
    place = "dense" if steps else d.pick(("dense", "lengths", "packed"), (4, 3, 3))
    return_state = d.chance(0.5)
    upstream = d.pick(("", "out", "state", "both"), (2, 5, 1, 3)) if return_state else d.pick(("", "out"), (1, 3))
    long = not steps and d.chance(limits.long)
    w = LinearVariant(
        dtype=dtype,
        e=e,
        m=m,
        group=1 if long else d.pick((1, 2, 3, 4, 7), (6, 3, 2, 1, 1)),
        map_q=map_q,
        map_k=map_k,
        causal=steps or d.chance(0.7),
        normalize=normalize,
        place=place,
        state=steps or d.chance(0.5),
        return_state=steps or return_state,
        upstream=upstream,
        same=steps or place == "packed" or d.chance(0.4),
        long=long,
        layout=layout,
        off=off,
        steps=steps,
    )
    return replace(w, decay=d.pick(("", "head", "token"), (5, 2, 3))) if w.causal else w


def _walks(d: Draw) -> LinearVariant:
    """What the Hopper walks serve: bf16, wide heads, narrower ones without a denominator, causal, nothing given but a decay."""
    e, m = d.pick((136, 192, 200, 256)), d.pick((64, 72, 128, 192, 256))
    normalize = d.chance(0.5)
    decay = "" if normalize else d.pick(("", "head", "token"), (2, 1, 1))
    if not normalize and d.chance(0.6):
        e, m = d.pick((72, 96, 128), (1, 1, 3)), d.pick((64, 72, 128), (1, 1, 3))
        if decay and d.chance(0.3):
            e = m = 64
    if d.chance(0.4):
        e, m = m, e
    maps = ("elu+1", "relu", "identity") if normalize else ("identity",)
    layout = d.pick(("unit", "odd", "off"), (3, 1, 1))
    off = tuple(d.chance(0.5) for _ in range(4)) if layout == "off" else (False,) * 4
    return LinearVariant(
        e=e, m=m, map_q=d.pick(maps), map_k=d.pick(maps), normalize=normalize, upstream=d.pick(("", "out"), (1, 4)),
        layout=layout, off=off, walks=True, decay=decay,
    )  # fmt: skip


def draw_problem(d: Draw, variant: LinearVariant, backend: str) -> LinearProblem:
    """A problem of the variant."""
    w = variant
    limits = size(backend)
    heads_kv = d.pick((1, 2, 3, 4), (5, 4, 1, 1)) if w.group < 4 else d.pick((1, 2))
    batch = 1 if w.place == "packed" else d.pick((0, 1, 2, 3, 4), (1, 8, 8, 5, 3))
    if w.walks:
        # Enough blocks to fill the device, of which a head has one for 64 columns, one to 128 dims.
        blocks = 1 if max(w.e, w.m) <= 128 else -(-min(w.e, w.m) // 64)
        heads_kv = d.pick((2, 4, 8))
        batch = -(-32 // (blocks * heads_kv)) + d.integer(0, 2)
    seqlen_q = d.integer(1025, 2300) if w.long else d.length(300 if w.walks else 1500)
    if w.long:
        batch, heads_kv = 1, 1
    while batch > 1 and batch * heads_kv * w.e * w.m > limits.states and not w.walks:
        batch -= 1
    seqlen_k = seqlen_q if w.same else d.length(1500)
    if w.steps:
        seqlen_q = seqlen_k = d.pick((1, 1, 2, 5))
    heads = max(batch, 1) * heads_kv * w.group
    most = min(limits.scores, limits.products // (w.e + w.m)) / heads
    while seqlen_q * seqlen_k > most and not w.long and not w.walks:
        seqlen_q = d.integer(1, seqlen_q)
        seqlen_k = seqlen_q if w.same else d.integer(1, seqlen_k)
    lengths = sequences = None
    if w.place == "lengths":
        lengths = tuple(d.pick((0, seqlen_k, d.integer(0, seqlen_k))) for _ in range(batch))
    elif w.place == "packed":
        sequences = d.split(seqlen_q)
    nan = d.pick(("", "k", "v"), (11, 1, 1))
    # A visible NaN is in all gradients, or not, by the order of operations.
    upstream = "" if nan else w.upstream
    p = LinearProblem(
        seed=d.seed(),
        dtype=w.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_kv=heads_kv,
        group=w.group,
        e=w.e,
        m=w.m,
        map_q=w.map_q,
        map_k=w.map_k,
        causal=w.causal,
        normalize=w.normalize,
        eps=d.pick((1e-6, 1e-3, 0.1, 2.0), (3, 2, 2, 1)),
        scale=_scale(d, w),
        lengths=lengths,
        sequences=sequences,
        four=w.place == "packed" and d.chance(0.3),
        state=w.state,
        return_state=w.return_state,
        upstream=upstream,
        mean=d.pick((0.0, 1.0), (4, 1)),
        zeros=d.chance(0.2),
        hostile=d.hostile(),
        visible_nan=nan,
        index_step=d.pick((1, 2), (3, 1)) if w.place != "dense" else 1,
        state_gap=d.pick((0, 1, 3), (3, 1, 1)) if w.state else 0,
        steps=w.steps,
        grad=w.steps and upstream != "" and d.chance(0.5),
    )
    if w.decay:
        p = replace(p, decay=w.decay, forgets=d.chance(0.35))
    return _with_views(d, p, w)


def _scale(d: Draw, w: LinearVariant) -> float:
    choices = (1.0, d.real(0.05, 0.9), w.e**-0.5, d.real(1.1, 3.0))
    # Of another sign the denominator may vanish.
    return d.pick(choices if w.normalize else (*choices, d.real(-1.0, -0.1)))


def _with_views(d: Draw, p: LinearProblem, w: LinearVariant) -> LinearProblem:
    heads_q = p.heads_kv * p.group
    shapes = {
        "q_view": (max(p.batch, 1), p.seqlen_q, heads_q, p.e),
        "k_view": (max(p.batch, 1), p.seqlen_k, p.heads_kv, p.e),
        "v_view": (max(p.batch, 1), p.seqlen_k, p.heads_kv, p.m),
        "dout_view": (max(p.batch, 1), p.seqlen_q, heads_q, p.m),
    }
    found: dict[str, Any] = {**d.places(shapes, w.off, w.layout == "unit")}
    own = f"{p.visible_nan}_view"
    if p.visible_nan and found[own].aliased:
        found[own] = View(offset=found[own].offset)  # the NaN is to be one
    return replace(p, **found)
