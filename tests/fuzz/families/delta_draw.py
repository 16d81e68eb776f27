"""Drawing the gated delta rule: what a compiled kernel depends on first, then everything that only a launch does."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.draw import Draw
from tests.fuzz.problem import spec
from tests.fuzz.views import View

PLAIN = View()
_DIMS = {8: 2, 16: 6, 24: 3, 32: 5, 40: 3, 64: 6, 72: 2, 96: 1, 128: 2, 136: 1, 256: 1}
_SMALL = {8: 1, 16: 3, 24: 1, 40: 1, 64: 1}
# Longest sequences, and elements of all states times tokens of one, that the oracle walks in a moment.
_MOST = {"gpu": (700, 4 * 10**8), "cpu": (220, 4 * 10**6), "interpreter": (140, 5 * 10**5)}


@spec
@dataclass(frozen=True)
class DeltaVariant:
    """What the kernels of a call are compiled for, roughly: a call of one variant has few binaries."""

    dtype: str = "bfloat16"
    beta_dtype: str = "float32"
    e: int = 64
    m: int = 64
    group: int = 1
    decay: str = "mild"
    normalize: bool = True
    place: str = "dense"  # or "lengths", "packed"
    state: bool = False
    return_state: bool = False
    upstream: str = "out"  # results with a gradient: "" none, "out", "state" or "both"
    layout: str = "unit"  # strides in whole 16 bytes and so aligned; else "odd" strides, or pointers "off" 16 bytes
    off: tuple[bool, ...] = (False, False, False, False)  # which of q, k, v and dout are
    steps: bool = False  # tokens one after another, by gated_delta_step
    inplace: bool = False


@spec
@dataclass(frozen=True)
class DeltaProblem:
    """One call, or a chain of steps; data come from the seed."""

    seed: int
    dtype: str
    beta_dtype: str = "float32"  # of beta and decay
    batch: int = 1
    seqlen: int = 8
    heads: int = 1  # of q and k
    group: int = 1  # value heads to each
    e: int = 16
    m: int = 16
    decay: str = ""  # none, or "mild", "strong", "forgets": some logs are -inf or as good as that
    beta: float = 1.0  # the largest
    keys: str = "drawn"  # or "equal": all of a head
    normalize: bool = True
    eps: float = 1e-6
    scale: float | None = None
    zeros: bool = False  # some queries and keys are 0
    lengths: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None  # packed, in seqlen tokens, some of which may be no sequence's
    four: bool = False  # a packed call with a batch dimension of 1
    state: bool = False
    return_state: bool = False
    upstream: str = ""
    hostile: str = ""
    visible_nan: str = ""  # "k" or "v" of one sequence's first token
    index_step: int = 1  # lengths or cu_seqlens are every second number of a tensor
    steps: bool = False
    inplace: bool = False
    grad: bool = False  # of steps: they are recorded, and differentiated where `upstream` says so
    q_view: View = PLAIN
    k_view: View = PLAIN
    v_view: View = PLAIN
    dout_view: View = PLAIN
    beta_view: View = PLAIN  # of a last dimension of 1
    decay_view: View = PLAIN
    state_view: View = PLAIN  # of (sequences, heads_v, E, M)


def draw_variant(d: Draw, backend: str) -> DeltaVariant:
    """Any variant that the backend serves, and some that it does not."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtype = d.pick(("float16", "bfloat16", "float32"), (3, 0.2 if interpreted else 4, 3))
    if backend not in ("triton", "hopper") and d.chance(0.07):
        dtype = "float64"
    if backend == "hopper" and d.chance(0.85):
        dtype = "bfloat16"
    e, m = (d.any_of(_SMALL if interpreted else _DIMS) for _ in range(2))
    if d.chance(0.3):
        m = e
    if d.chance(0.04 if backend == "hopper" else 0.12):
        e, m = d.integer(1, 70), d.integer(1, 70)
    even = e % 8 == 0 and m % 8 == 0
    layout = d.pick(("unit", "odd", "off"), (5, 2, 3)) if even else "odd"
    off = tuple(d.chance(0.5) for _ in range(4)) if layout == "off" else (False,) * 4
    if layout == "off" and not any(off):
        off = (True, False, True, False)
    steps, return_state = d.chance(0.03 if backend == "hopper" else 0.2), d.chance(0.5)
    upstream = d.pick(("", "out", "state", "both"), (2, 5, 1, 3)) if return_state else d.pick(("", "out"), (1, 3))
    inplace = steps and d.chance(0.35)
    return DeltaVariant(
        dtype=dtype,
        beta_dtype=d.pick(("float64" if dtype == "float64" else "float32", dtype), (3, 1)),
        e=e,
        m=m,
        group=d.pick((1, 2, 3, 4, 7), (6, 4, 2, 1, 1)),
        decay=d.pick(("", "mild", "strong", "forgets"), (3, 4, 2, 3)),
        normalize=d.chance(0.65),
        place="dense" if steps else d.pick(("dense", "lengths", "packed"), (4, 3, 3)),
        state=steps or d.chance(0.5),
        return_state=steps or return_state,
        upstream="" if inplace else upstream,
        layout=layout,
        off=off,
        steps=steps,
        inplace=inplace,
    )


def draw_problem(d: Draw, variant: DeltaVariant, backend: str) -> DeltaProblem:
    """A problem of the variant."""
    w = variant
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    longest, most = _MOST["interpreter" if interpreted else "gpu" if backend in ("triton", "hopper") else "cpu"]
    heads = d.pick((1, 2, 3), (5, 3, 1)) if w.group < 4 else 1
    batch = 1 if w.place == "packed" else d.pick((0, 1, 2, 3), (1, 8, 8, 4))
    if interpreted:
        heads, batch = 1, min(batch, 2)
    seqlen = d.pick((1, 1, 2, 5)) if w.steps else d.length(longest)
    room = most // (max(batch, 1) * heads * w.group * w.e * w.m)
    if seqlen > room:
        seqlen = d.integer(1, max(room, 1))
    lengths = sequences = None
    if w.place == "lengths":
        lengths = tuple(d.pick((0, seqlen, d.integer(0, seqlen))) for _ in range(batch))
    elif w.place == "packed":
        sequences = d.split(seqlen)
    # What a NaN in a state comes to once all is forgotten is not said, and in gradients the order of operations decides.
    nan = d.pick(("", "k", "v"), (14, 1, 1)) if w.decay != "forgets" else ""
    upstream = "" if nan else w.upstream
    p = DeltaProblem(
        seed=d.seed(),
        dtype=w.dtype,
        beta_dtype=w.beta_dtype,
        batch=batch,
        seqlen=seqlen,
        heads=heads,
        group=w.group,
        e=w.e,
        m=w.m,
        decay=w.decay,
        beta=d.pick((1.0, 2.0, 0.3), (4, 3, 1)),
        keys=d.pick(("drawn", "equal"), (6, 1)),
        normalize=w.normalize,
        eps=d.pick((1e-6, 1e-3, 0.5), (3, 1, 1)),
        scale=d.pick((None, d.real(0.05, 1.5), d.real(-1.0, -0.1)), (3, 2, 1)),
        zeros=d.chance(0.15),
        lengths=lengths,
        sequences=sequences,
        four=w.place == "packed" and d.chance(0.3),
        state=w.state,
        return_state=w.return_state,
        upstream=upstream,
        hostile=d.hostile(),
        visible_nan=nan,
        index_step=d.pick((1, 2), (3, 1)) if w.place != "dense" else 1,
        steps=w.steps,
        inplace=w.inplace,
        grad=w.steps and upstream != "" and d.chance(0.5),
    )
    return _with_views(d, p, w)


def _with_views(d: Draw, p: DeltaProblem, w: DeltaVariant) -> DeltaProblem:
    heads_v, batch = p.heads * p.group, max(p.batch, 1)
    count = batch if p.sequences is None else max(len(p.sequences), 1)
    shapes = {
        "q_view": (batch, p.seqlen, p.heads, p.e),
        "k_view": (batch, p.seqlen, p.heads, p.e),
        "v_view": (batch, p.seqlen, heads_v, p.m),
        "dout_view": (batch, p.seqlen, heads_v, p.m),
    }
    found: dict[str, Any] = {**d.places(shapes, w.off, w.layout == "unit")}
    own = f"{p.visible_nan}_view"
    if p.visible_nan and found[own].aliased:
        found[own] = View(offset=found[own].offset)  # the NaN is to be one
    for name in ("beta_view", "decay_view"):
        found[name] = d.view((batch, p.seqlen, heads_v, 1))
    if p.state:
        state = d.view((count, heads_v, p.e, p.m), aliased=not p.inplace)
        if p.inplace and state.kind == "last_dim_strided":
            state = View("padded_rows", 3, state.offset)
        found["state_view"] = state
    return replace(p, **found)
