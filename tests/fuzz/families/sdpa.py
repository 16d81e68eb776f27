"""scaled_dot_product_attention(): torch's signature, layout and top-left causal mask; dispatch chooses the backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.fuzz import maskspec
from tests.fuzz.coverage import COMMON
from tests.fuzz.draw import Draw
from tests.fuzz.families import attention as dense
from tests.fuzz.families import biases, masked
from tests.fuzz.families import softmax as shared
from tests.fuzz.families.softmax import Variant
from tests.fuzz.families.spread import spread
from tests.fuzz.maskspec import MaskSpec
from tests.fuzz.oracle import attention as exact
from tests.fuzz.oracle import masks as dense_masks
from tests.fuzz.problem import Expected, spec
from tests.fuzz.views import PLAIN, View

NAME = "sdpa"
FLOATS = ("full", "of heads", "of batches", "a matrix", "of rows")  # biases that are tensors
BACKENDS = ("cpu", "triton")  # names of what dispatch is expected to choose; the function takes none


@spec
@dataclass(frozen=True)
class Sdpa:
    """A call of the drop-in. `lead` are the dimensions before the heads: none, a batch or two."""

    seed: int
    dtype: str
    lead: tuple[int, ...]
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    q: View = PLAIN
    k: View = PLAIN
    v: View = PLAIN
    dout: View = PLAIN
    style: str = "normal"
    hostile: str = ""
    is_causal: bool = False
    key_mask: tuple[int, ...] = ()  # the boolean mask's shape, over keys alone
    mask: MaskSpec | None = None
    scale: float | None = None
    backward: bool = True
    wants: tuple[str, ...] = ("q", "k", "v")
    bias: str = ""  # attn_mask is a floating point tensor, of this kind
    bias_dtype: str = "float32"
    bias_gradient: bool = False
    bias_hides: bool = False
    # What the shared oracle asks of a call, and this one never has.
    softcap: float = 0.0
    sink: str = ""
    offsets = ()
    sequences = None

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    @property
    def batch(self) -> int:
        count = 1
        for n in self.lead:
            count *= n
        return count

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "q": (*self.lead, self.heads_q, self.seqlen_q, self.head_dim),
            "k": (*self.lead, self.heads_kv, self.seqlen_k, self.head_dim),
            "v": (*self.lead, self.heads_kv, self.seqlen_k, self.head_dim_v),
            "dout": (*self.lead, self.heads_q, self.seqlen_q, self.head_dim_v),
        }

    @property
    def views(self) -> dict[str, View]:
        return {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout}


def variants(d: Draw, backend: str, count: int) -> list[Variant]:
    def make() -> Variant:
        drawn = shared.draw_variant(d, backend)
        keys = d.chance(0.4)
        dims = drawn.head_dim, drawn.head_dim_v
        return Variant(drawn.dtype, *dims, vectors=("lts",) if keys else (), unit=8, unaligned=(), layout="sdpa")

    def dims(v: Variant) -> tuple[bool, ...]:
        found = set(shared.dims_features(v.head_dim, v.head_dim_v))
        return 3 * tuple(name in found for name in ("dims_unequal", "dims_pad_differently", "dims_above_128"))

    return spread(make, count, dims)


def draw(d: Draw, variant: Variant | None, backend: str) -> Sdpa:
    device = "cuda" if variant is not None else "cpu"
    v = variant or shared.draw_variant(d, backend)
    while True:
        heads_q, heads_kv = d.heads()
        lead = d.pick(((), (1,), (2,), (3,), (0,), (2, 2), (1, 3)), (5, 6, 8, 4, 2.5, 4, 3))
        seqlen_q, seqlen_k = d.lengths(700 if device == "cuda" else 300)
        found = Sdpa(
            seed=d.seed(),
            dtype=v.dtype,
            lead=lead,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=v.head_dim,
            head_dim_v=v.head_dim_v,
            style=d.pick(shared.STYLES, (6, 2, 1, 1, 1)),
            hostile=d.hostile(),
            scale=shared.draw_scale(d, v.descending if variant is not None else None),
            backward=d.chance(0.8),
        )
        if shared.cells_fit(found.batch * heads_q * seqlen_q * seqlen_k, device, backend):
            break
    kind = d.pick(("", "causal", "keys", "mask", "bias"))
    if variant is not None:
        kind = "keys" if v.vectors else d.pick(("", "causal"))
    if kind == "causal":
        found = replace(found, is_causal=True)
    elif kind == "keys" and len(lead) == 1:
        shape = d.pick(((lead[0], 1, 1, seqlen_k), (1, 1, 1, seqlen_k), (1, 1, seqlen_k), (1, seqlen_k), (seqlen_k,)))
        found = replace(found, key_mask=shape)
    elif kind == "mask" and seqlen_k % 2 == 0:
        mask = maskspec.draw_mask(d, d.pick(maskspec.KINDS), max(found.batch, 1), heads_q, heads_kv, seqlen_q, seqlen_k)
        found = replace(found, mask=mask)
    elif kind == "bias" and variant is None and len(lead) == 1 and backend in biases.TAKE_BIASES:
        found = replace(biases.with_bias(d, found), bias=d.pick(FLOATS), bias_hides=False)
        found = replace(found, bias_hides=found.bias in biases.DENSE and d.chance(0.3))
    views = shared.draw_views(d, found.shapes, variant)
    return replace(found, **views)


def features(p: Sdpa) -> frozenset[str]:
    found = {p.dtype, shared.reshape_heads(p.heads_q, p.heads_kv), f"rank_{len(p.lead) + 3}"}
    found |= set(shared.dims_features(p.head_dim, p.head_dim_v))
    found |= set(shared.view_features(p.views, p.shapes, p.dtype))
    found |= {f for f in dense.band_features(False, None, p.mask) if f.startswith("mask_") and f not in COMMON}
    flags = {
        "top_left_causal": p.is_causal,
        "key_mask": p.key_mask,
        "mask": p.mask is not None,
        "bias": p.bias,
        "bias_gradient": p.bias_gradient,
        "more_keys": p.seqlen_q < p.seqlen_k,
        "more_queries": p.seqlen_q > p.seqlen_k,
        "empty": 0 in (p.batch, p.seqlen_q, p.seqlen_k),
        "scale_not_positive": p.scale is not None and p.scale <= 0,
        "hostile_nan": p.hostile in ("nan", "mixed"),
        "hostile_inf": p.hostile in ("inf", "-inf", "mixed"),
        "forward_only": not p.backward,
    }
    return frozenset(found | {name for name, flag in flags.items() if flag})


def key_mask(p: Sdpa, device: torch.device) -> Tensor:
    """bool of the shape that `key_mask` says, three of four keys true."""
    generator = torch.Generator().manual_seed(p.seed + 1)
    return (torch.rand(p.key_mask, generator=generator) < 0.75).to(device)


def visible(p: Sdpa, oracle: SimpleNamespace, device: torch.device) -> Tensor:
    """bool (batch|1, heads_q|1, seqlen_q, seqlen_k)."""
    g = dense_masks.grid(oracle, p.seqlen_q, p.seqlen_k, device)
    seen = oracle.over_heads(dense_masks.visible(oracle, p.mask, g), p.heads_q)
    if p.is_causal:
        seen = seen & oracle.top_left(g.i, g.j)
    if p.key_mask:
        seen = seen & key_mask(p, device).expand(p.key_mask[0] if len(p.key_mask) == 4 else 1, 1, 1, p.seqlen_k)
    return seen & (biases.matrix(p, biases.leaf_of(p, device)) != float("-inf")) if p.bias_hides else seen


def inputs(p: Sdpa, device: torch.device) -> dict[str, Any]:
    seen = visible(p, _ORACLE, device)
    hidden_k = dense.hidden_keys(seen, p.batch, p.heads_q, p.heads_kv).transpose(1, 2)
    hidden_q = ~seen.any(3).expand(p.batch, p.heads_q, p.seqlen_q)[..., None]
    shapes = p.shapes
    hidden = {
        "q": hidden_q.reshape(*shapes["q"][:-1], 1).cpu(),
        "k": hidden_k.reshape(*shapes["k"][:-1], 1).cpu(),
        "v": hidden_k.reshape(*shapes["v"][:-1], 1).cpu(),
    }
    tensors, buffers = shared.laid(p.seed, p.dtype, p.style, p.views, shapes, hidden, p.hostile, device)
    bias = biases.leaf_of(p, device) if p.bias else None
    return {**tensors, "bias": bias, "buffers": buffers, "seen": seen}


def run(p: Sdpa, given: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
    device = given["q"].device
    named: dict[str, Any] = {"is_causal": p.is_causal, "enable_gqa": p.heads_q != p.heads_kv}
    if p.key_mask:
        named["attn_mask"] = key_mask(p, device)
    if p.mask is not None:
        named["attn_mask"] = masked.build(p.mask, p.seqlen_q, p.seqlen_k, device)
    if p.scale is not None:
        named["scale"] = p.scale
    leaves = [given[n].detach() for n in "qkv"]
    if p.bias:
        named["attn_mask"] = given["bias"].detach()
    if not p.backward:
        return {"out": warploom.scaled_dot_product_attention(*leaves, **named)}
    leaves = [t.requires_grad_() for t in leaves]
    sources = [*leaves, named["attn_mask"].requires_grad_()] if p.bias_gradient else leaves
    out = warploom.scaled_dot_product_attention(*leaves, **named)
    gradients = torch.autograd.grad(out, sources, given["dout"])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))}


def top_left(i: Tensor, j: Tensor) -> Tensor:
    """torch's causal mask."""
    return j <= i


_ORACLE = SimpleNamespace(**vars(exact.functions()), top_left=top_left)
MUTANTS = {
    "sdpa: is_causal aligned bottom-right": SimpleNamespace(
        **{**vars(_ORACLE), "top_left": lambda i, j: j - (j.shape[-1] - i.shape[0]) <= i}
    )
}
EXCLUSIVE = [
    *dense.ONE_OF,
    ({"more_keys", "more_queries"}, "one or the other"),
    ({"rank_3", "rank_4", "rank_5"}, "a tensor has one rank"),
    ({"top_left_causal", "key_mask", "mask", "bias"}, "attn_mask and is_causal exclude each other"),
    *(({"bias_gradient", other}, "attn_mask is the bias") for other in ("top_left_causal", "key_mask", "mask")),
    *(({"bias", rank}, "a bias goes with four dimensions here") for rank in ("rank_3", "rank_5")),
    *(({"bias_gradient", rank}, "a bias goes with four dimensions here") for rank in ("rank_3", "rank_5")),
    ({"key_mask", "rank_3"}, "a mask over keys needs the batch dimension"),
    ({"key_mask", "rank_5"}, "a mask over keys goes with four dimensions here"),
]


def oracle() -> SimpleNamespace:
    return _ORACLE


def expect(p: Sdpa, given: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
    seen = given["seen"] if oracle is _ORACLE else visible(p, oracle, given["q"].device)
    flat = {n: given[n].reshape(p.batch, *given[n].shape[-3:]) for n in ("q", "k", "v", "dout")}
    found = dense.both(p, oracle, flat, seen, None, None, None, again, given["bias"])
    names = ("out", "dq", "dk", "dv") if p.backward else ("out",)
    named = {n: tuple(t.reshape(shape) for t in found[n]) for n, shape in _shapes(p, names).items()}
    of_bias = {}
    if p.bias_gradient:
        ref, *lows = found["dscores"]
        of_bias["dbias"] = biases.expected(p, given["bias"], ref, lows)
    return {**dense.typed(p, named, given), **of_bias}


def _shapes(p: Sdpa, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {n: p.shapes["dout" if n == "out" else n[1:]] for n in names}


def refusal(p: Sdpa, given: dict[str, Any], backend: str) -> str | None:
    return None


def shrink(p: Sdpa) -> Iterator[Sdpa]:
    plain = {"mask": None, "key_mask": (), "is_causal": False, "scale": None, "hostile": "", "style": "normal"}
    plain |= {"bias": "", "bias_gradient": False, "bias_hides": False, "bias_dtype": "float32"} if p.bias else {}
    for name, value in plain.items():
        if getattr(p, name) != value:
            yield replace(p, **{name: value})
    yield from shared.simpler_views(p.views, p)
    if len(p.lead) == 2:
        yield replace(p, lead=(p.lead[0],))
    if p.lead and p.lead[0] > 1 and not p.key_mask and (p.mask is None or p.mask.batch == 1):
        yield replace(p, lead=(1,))
    if p.mask is None and not p.key_mask:
        for name in ("seqlen_q", "seqlen_k"):
            length = getattr(p, name)
            if length > 1:
                yield replace(p, **{name: length // 2})
