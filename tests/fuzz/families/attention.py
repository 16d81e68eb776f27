"""attention(): dense calls, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.attention.biased import KINDS
from tests.fuzz import maskspec
from tests.fuzz.draw import Draw
from tests.fuzz.families import biases, invariant, masked
from tests.fuzz.families import softmax as shared
from tests.fuzz.families.softmax import Variant
from tests.fuzz.families.spread import spread
from tests.fuzz.maskspec import MaskSpec
from tests.fuzz.oracle import attention as exact
from tests.fuzz.oracle import masks as dense_masks
from tests.fuzz.oracle.mutants import mutants
from tests.fuzz.problem import DTYPES, OPINIONS, Expected, spec
from tests.fuzz.views import PLAIN, View
from warploom.attention.chunks import attention_chunks

NAME = "attention"
BACKENDS = ("cpu", "hopper", "ampere", "triton", "reference")
MASK_KINDS = tuple(k for k in maskspec.KINDS if k not in ("full", "causal"))
_STANDARD = exact.functions()
MUTANTS = {f"attention: {name}": oracle for name, oracle in mutants(_STANDARD, packed=False).items()}
FEW_ROWS = 256
# Of that many Triton variants one, and of so many freely drawn problems, has chunks.
CHUNKS_EVERY = 8
TAKE_CHUNKS = ("cpu", "triton", "reference")
BIASES_EVERY = 4  # likewise
STATS_EVERY = 6
STATS = (("max_logits",), ("column_sums",), ("column_sums", "max_logits"))
# Sets of features of which no problem has two, with the reason.
ONE_OF: list[tuple[set[str], str]] = [
    ({"float16", "bfloat16", "float32", "float64"}, "a call has one dtype"),
    ({"heads_mha", "heads_gqa", "heads_mqa"}, "a call has one grouping"),
    *(
        ({"view_all_contiguous", f"view_{kind}"}, "no tensor is a view")
        for kind in ("transposed", "packed", "sliced", "padded", "expanded", "overlapping", "last_dim_strided")
    ),
    ({"forward_only", "lse_gradient"}, "no gradient arrives"),
    ({"forward_only", "bias_gradient"}, "no gradient arrives"),
    ({"visible_nan", "bias_gradient"}, "a visible NaN is drawn without a backward pass"),
    ({"visible_nan", "stats"}, "a visible NaN may reach any sum"),
    ({"chunks", "stats"}, "chunks have none"),
    ({"view_all_contiguous", "strides_odd"}, "head dims that GPUs take are multiples of 8"),
]
EXCLUSIVE = [
    *ONE_OF,
    ({"more_keys", "more_queries"}, "one or the other"),
    ({"chunks", "batch_invariant"}, "calls of chunks have no such keyword"),
    *(
        ({"visible_nan", other}, "a visible NaN is drawn alone, and without a backward pass")
        for other in ("hostile_nan", "hostile_inf", "lse_gradient", "dropout")
    ),
]


@spec
@dataclass(frozen=True)
class Attention:
    """A call of attention()."""

    seed: int
    dtype: str
    batch: int
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
    mask: MaskSpec | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    sink: str = ""  # its dtype; "same" is the inputs'
    sink_step: int = 1  # elements from one logit to the next; 0: one for all heads
    dropout_p: float = 0.0
    dropout_seed: int = 0
    seed_tensor: bool = False  # the dropout's seed is given as a tensor
    deterministic: bool | None = None
    backward: bool = True
    lse_gradient: str = ""  # "both": gradients arrive through out and lse; "only": through lse alone
    dlse_view: str = ""  # "expanded": one number for all, by strides of 0; "transposed"
    wants: tuple[str, ...] = ("q", "k", "v", "sink")  # what requires a gradient
    visible_nan: str = ""  # "k" or "v": one of its visible elements is NaN
    # Where chunks of so many rows begin in sequences of seqlen_q; none: the call has the whole sequences.
    offsets: tuple[int, ...] = ()
    chunk: int = 0
    chunks: int = 1  # in a row of one sequence, as dropout counts
    bias: str = ""  # its kind
    bias_dtype: str = "float32"
    bias_gradient: bool = False
    bias_hides: bool = False  # some of it is -inf
    invariant: str = ""  # batch_invariant=True, and the form in which one sequence has to have the same bits: "alone", "packed"
    stats: tuple[str, ...] = ()  # that the call returns
    sequences = None  # of a packed call

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q, self.seqlen_k

    @property
    def rows(self) -> int:
        """Of q."""
        return self.chunk if self.offsets else self.seqlen_q

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        q, k = (self.batch, self.rows), (self.batch, self.seqlen_k)
        return {
            "q": (*q, self.heads_q, self.head_dim),
            "k": (*k, self.heads_kv, self.head_dim),
            "v": (*k, self.heads_kv, self.head_dim_v),
            "dout": (*q, self.heads_q, self.head_dim_v),
        }

    @property
    def views(self) -> dict[str, View]:
        return {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout}


def variants(d: Draw, backend: str, count: int) -> list[Variant]:
    found = spread(lambda: shared.draw_variant(d, backend), count)
    if backend == "hopper":
        return shared.with_scores(d, found)
    if backend != "triton":
        return found
    found = [replace(v, chunks=True) if n % CHUNKS_EVERY == 0 else v for n, v in enumerate(found, 1)]
    return [replace(v, invariant=True) if n % invariant.EVERY == 4 else v for n, v in enumerate(found, 1)]


def draw(d: Draw, variant: Variant | None, backend: str) -> Attention:
    device = "cuda" if variant is not None else "cpu"
    free = variant is None
    v = shared.draw_variant(d, backend) if variant is None else variant
    for _ in range(400):
        heads_q, heads_kv = d.heads()
        batch = d.pick((0, 1, 2, 3, 4), (1, 10, 8, 4, 2))
        seqlen_q, seqlen_k = d.lengths(1500 if device == "cuda" else 400)
        seqlen_q = _tailed(seqlen_q, v) if not free else seqlen_q
        kind = _mask_kind(d, v, free)
        if kind == "block_diffusion":
            seqlen_k += seqlen_k % 2
        if not shared.cells_fit(batch * heads_q * seqlen_q * seqlen_k, device, backend):
            continue
        right = v.right and not (kind in maskspec.SHAPES and maskspec.SHAPES[kind][2] and d.chance(0.7))
        left_by_window, right_by_window = shared.draw_band(d, v.left, right, seqlen_q, seqlen_k)
        if free or v.vectors or v.chunks:
            break
        sizes = (seqlen_q, seqlen_k, left_by_window, right_by_window)
        if seqlen_k == 0 or (shared.is_edge(*sizes) == v.edges and (not v.boxes or shared.is_boxed(*sizes))):
            break
    if backend == "hopper":
        v = replace(v, **dict(zip(("head_dim", "head_dim_v"), shared.within_tile(d, v.head_dim, v.head_dim_v), strict=True)))
    mask = _mask(d, v, kind, free, batch, heads_q, heads_kv, seqlen_q, seqlen_k)
    causal, window, mask = _band_as(d, left_by_window, right_by_window, mask)
    found = Attention(
        seed=d.seed(),
        dtype=v.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=v.head_dim,
        head_dim_v=v.head_dim_v,
        style=d.pick(shared.STYLES, (6, 2, 1, 1, 1)),
        hostile=d.hostile(),
        mask=mask,
        causal=causal,
        window=window,
        scale=shared.draw_scale(d, None if free else v.descending),
        softcap=d.pick((0.5, 3.0, 30.0, d.real(0.2, 60))) if v.softcap else 0.0,
        sink=v.sink,
        dropout_p=d.pick((0.1, 0.5, 0.9, d.real(0.01, 0.99))) if v.dropout else 0.0,
        dropout_seed=d.seed64() if v.dropout else 0,
        seed_tensor=v.dropout and d.chance(0.5),
        deterministic=True if v.deterministic else d.pick((None, False, True), (6, 1, 1)) if backend != "hopper" else None,
        backward=d.chance(0.9),
        lse_gradient=d.pick(("both", "both", "only")) if v.lse_gradient else "",
        dlse_view=d.pick(("", "", "expanded", "transposed")),
    )
    found = replace(found, **shared.draw_views(d, found.shapes, None if free else v))
    if v.dtype == "float64":  # of large scores the oracle is no better than what it judges
        found = replace(found, style="normal", scale=None)
    if d.chance(0.15):
        found = replace(found, wants=d.pick((("q",), ("k", "v"), ("v",), ("k",), ("q", "sink"))))
    if d.chance(0.13) and not v.dropout and backend != "ampere":
        found = replace(found, visible_nan=d.pick(("k", "v")), backward=False, hostile="")
    if "sink" in found.wants and len(found.wants) == 1 and not found.sink:
        found = replace(found, wants=("q", "k", "v", "sink"))
    if v.chunks or (free and backend in TAKE_CHUNKS and d.chance(1 / CHUNKS_EVERY)):
        found = _chunked(d, found, v, free)
    if free and backend in biases.TAKE_BIASES and d.chance(1 / BIASES_EVERY):
        found = biases.with_bias(d, found)
    if v.bias:
        found = biases.with_bias(d, found, v.bias)
    if v.largest:
        found = replace(found, stats=d.pick((("max_logits",), ("column_sums", "max_logits"))), visible_nan="")
    if free and backend in biases.TAKE_BIASES and not (found.visible_nan or found.offsets) and d.chance(1 / STATS_EVERY):
        found = replace(found, stats=d.pick(STATS))
    asked = v.invariant or (free and backend in invariant.TAKE_INVARIANT and d.chance(1 / invariant.EVERY))
    if asked and found.batch and not found.offsets:
        found = replace(found, invariant=d.pick(("alone", "packed")))
    return replace(found, sink_step=d.pick((0, 1, 1, 2, 3))) if found.sink else found


def _chunked(d: Draw, p: Attention, v: Variant, free: bool) -> Attention:
    """Chunks of the problem's sequences, if it has any, in place of these: one for each batch entry."""
    if 0 in (p.batch, p.seqlen_q):
        return p
    if free or v.unit is None:
        rows = d.integer(1, p.seqlen_q)
    elif not v.tail:
        rows = 128 * d.integer(1, p.seqlen_q // 128)
    else:
        rows = max(1, d.integer(1, p.seqlen_q) // 16 * 16 - 1)
    last = p.seqlen_q - rows
    offsets = tuple(d.pick((0, last, d.integer(0, last), last // 64 * 64)) for _ in range(p.batch))
    chunks = d.pick([n for n in range(1, p.batch + 1) if p.batch % n == 0])
    return replace(p, offsets=offsets, chunk=rows, chunks=chunks)


def _tailed(seqlen_q: int, v: Variant) -> int:
    """Whole tiles of queries, or none."""
    if v.layout != "dense" or v.unit is None:
        return seqlen_q
    if not v.tail:
        return -(-seqlen_q // 128) * 128
    return seqlen_q + 1 if seqlen_q % 16 == 0 and seqlen_q else seqlen_q


def _mask_kind(d: Draw, v: Variant, free: bool) -> str:
    """A kind that has the variant's vectors; freely drawn, any kind where there is to be a mask."""
    if not v.vectors:
        return ""
    if free:
        return d.pick(MASK_KINDS if d.chance(0.7) else ("columns", "columns", "eviction"))
    fitting = [kinds for (vectors, right), kinds in maskspec.classes().items() if vectors == v.vectors and right <= v.right]
    return d.pick([kind for kinds in fitting for kind in kinds])


def _mask(
    d: Draw, v: Variant, kind: str, free: bool, batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_k: int
) -> MaskSpec | None:
    sizes = (max(batch, 1), heads_q, heads_kv, seqlen_q, seqlen_k)
    if not kind:
        return None
    if kind == "columns" and not free:
        count = sizes[0] if d.chance(0.6) else 1
        heads = d.pick((1, heads_q, heads_kv))
        mask = maskspec.columns(d, v.vectors, v.right and d.chance(0.5), count, heads)
        if v.vectors in (("lts",), ("ute",), ("lts", "ute")) and d.chance(0.3):  # whose union has the same vectors
            other = maskspec.columns(d, v.vectors, False, d.pick((1, count)), d.pick((1, heads)))
            return MaskSpec("and", parts=tuple(d.shuffled((mask, other))))
        return mask
    mask = maskspec.draw_mask(d, kind, *sizes)
    if free and d.chance(0.3):
        other = d.pick(("padding_bits", "padding_lengths", "window", "causal", "full", "document", d.pick(MASK_KINDS)))
        if other != "block_diffusion":
            parts = d.shuffled((mask, maskspec.draw_mask(d, other, *sizes)))
            mask = MaskSpec("and", parts=tuple(parts))
    elif not free and d.chance(0.45):
        # Intersections that keep the variant's vectors.
        other = "full" if d.chance(0.2) else "padding_bits" if v.vectors in (("lts",), ("lts", "ute")) else "full"
        parts = d.shuffled((mask, maskspec.draw_mask(d, other, *sizes)))
        mask = MaskSpec("and", parts=tuple(parts))
    return mask


def _band_as(
    d: Draw, left: int | None, right: int | None, mask: MaskSpec | None
) -> tuple[bool, tuple[int | None, int | None] | None, MaskSpec | None]:
    """The same band as causal=, window= or a builder."""
    if left is None and right is None:
        return False, (None, None) if d.chance(0.1) else None, mask
    way = d.pick(("keyword", "keyword", "both", "builder"))
    if way == "builder" and mask is None:
        band = MaskSpec("causal") if (left, right) == (None, 0) else MaskSpec("window", left=left, right=right)
        return False, None, band
    if (left, right) == (None, 0):
        return (True, None, mask) if d.chance(0.7) else (False, (None, 0), mask)
    if right == 0 and way == "both":
        return True, (left, d.pick((None, 0, 5))), mask
    return False, (left, right), mask


def features(p: Attention) -> frozenset[str]:
    found = {p.dtype, shared.reshape_heads(p.heads_q, p.heads_kv)}
    found |= set(shared.dims_features(p.head_dim, p.head_dim_v))
    found |= set(shared.view_features(p.views, p.shapes, p.dtype))
    if p.seqlen_q < p.seqlen_k:
        found.add("more_keys")
    elif p.seqlen_q > p.seqlen_k:
        found.add("more_queries")
    if 0 in (p.batch, p.seqlen_q, p.seqlen_k):
        found.add("empty")
    if max(p.seqlen_q, p.seqlen_k) > 256:
        found.add("long")
    if 0 < p.seqlen_q <= 8:
        found.add("few_queries")
    found |= set(band_features(p.causal, p.window, p.mask))
    flags = {
        "softcap": p.softcap,
        "sink": p.sink,
        "sink_a_view": p.sink and p.sink_step != 1,
        "dropout": p.dropout_p,
        "lse_gradient": p.lse_gradient and p.backward,
        "deterministic": p.deterministic,
        "scale_not_positive": p.scale is not None and p.scale <= 0,
        "hostile_nan": p.hostile in ("nan", "mixed"),
        "hostile_inf": p.hostile in ("inf", "-inf", "mixed"),
        "forward_only": not p.backward,
        "visible_nan": p.visible_nan,
        "style_large": p.style == "large",
        "chunks": p.offsets,
        "bias": p.bias,
        "bias_gradient": p.bias_gradient,
        "batch_invariant": p.invariant,
        "stats": p.stats,
    }
    return frozenset(found | {name for name, flag in flags.items() if flag})


def band_features(causal: bool, window: tuple[int | None, int | None] | None, mask: MaskSpec | None) -> Iterator[str]:
    parts = [] if mask is None else [mask] if mask.kind != "and" else list(mask.parts)
    bands = [window] if window is not None else []
    bands += [(p.left, p.right) for p in parts if p.kind == "window"]
    if causal or any(p.kind == "causal" for p in parts) or (None, 0) in bands:
        yield "causal"
    bands = [b for b in bands if b not in ((None, None), (None, 0))]
    if bands:
        yield "window"
    if any(side is not None and side < 0 for b in bands for side in b):
        yield "window_negative"
    columns = [p for p in parts if p.kind not in ("full", "causal", "window")]
    if columns:
        yield "mask"
    yield from {f"mask_{p.kind}" for p in columns}
    if any(p.batch > 1 or len(p.a) > 1 for p in columns):
        yield "mask_per_batch"
    if any(p.heads > 1 for p in columns):
        yield "mask_per_head"
    if mask is not None and mask.kind == "and":
        yield "mask_intersection"


def visible(p: Attention, oracle: SimpleNamespace, device: torch.device) -> Tensor:
    """bool (batch|1, heads_q|1, rows, seqlen_k)."""
    g = dense_masks.grid(oracle, p.seqlen_q, p.seqlen_k, device)
    seen = oracle.over_heads(dense_masks.visible(oracle, p.mask, g), p.heads_q)
    left, right = p.window or (None, None)
    seen = seen & oracle.band(g.p, g.j, left, right)
    seen = seen & oracle.band(g.p, g.j, None, 0) if p.causal else seen
    seen = oracle.seen_of_chunks(seen, list(range(p.batch)), p.offsets, p.rows) if p.offsets else seen
    return seen & (biases.matrix(p, biases.leaf_of(p, device)) != float("-inf")) if p.bias_hides else seen


def hidden_keys(seen: Tensor, batch: int, heads_q: int, heads_kv: int) -> Tensor:
    """bool (batch, seqlen_k, heads_kv, 1): keys that no query sees."""
    shown = seen.any(2).expand(batch, heads_q, seen.shape[-1])
    return ~shown.unflatten(1, (heads_kv, -1)).any(2).transpose(1, 2)[..., None]


def inputs(p: Attention, device: torch.device) -> dict[str, Any]:
    seen = visible(p, _STANDARD, device)
    # No query: every key is hidden. Rows that see nothing: their queries may hold anything.
    hidden_k = hidden_keys(seen, p.batch, p.heads_q, p.heads_kv).cpu()
    hidden_q = ~seen.any(3).expand(p.batch, p.heads_q, p.rows).transpose(1, 2)[..., None].cpu()
    hidden = {"q": hidden_q, "k": hidden_k, "v": hidden_k}
    tensors, buffers = shared.laid(p.seed, p.dtype, p.style, p.views, p.shapes, hidden, p.hostile, device)
    if p.visible_nan and tensors[p.visible_nan].numel() and not bool(hidden_k.all()):
        shown = (~hidden_k[..., 0]).nonzero()
        b, j, h = shown[p.seed % shown.shape[0]].tolist()
        tensors[p.visible_nan][b, j, h, p.seed % tensors[p.visible_nan].shape[-1]] = float("nan")
    observed = set()
    if bool(hidden_q.any()):
        observed.add("row_sees_nothing")
    if bool(hidden_k.any()):
        observed.add("key_seen_by_none")
    more = extras(p, (p.batch, p.heads_q, p.rows), device)
    more["bias"] = biases.leaf_of(p, device) if p.bias else None
    return {**tensors, **more, "buffers": buffers, "seen": seen, "observed": observed}


def extras(p: Any, lse_shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor | None]:
    """The sink and the gradient of lse."""
    sink = None
    if p.sink:
        dtype = p.dtype if p.sink == "same" else p.sink
        sink = shared.values(p.seed, "sink", (p.heads_q,), dtype, "normal").to(device)
        if p.sink_step == 0:
            sink = sink[:1].expand(p.heads_q)
        elif p.sink_step > 1:
            apart = torch.full((p.heads_q, p.sink_step), float("nan"), dtype=sink.dtype, device=device)
            apart[:, 0] = sink
            sink = apart[:, 0]
    dlse = None
    if p.lse_gradient:
        if p.dlse_view == "expanded":
            dlse = shared.values(p.seed, "dlse", (1,) * len(lse_shape), "float32", "normal").to(device).expand(lse_shape)
        elif p.dlse_view == "transposed":
            shape = (*lse_shape[:-2], lse_shape[-1], lse_shape[-2])
            dlse = shared.values(p.seed, "dlse", shape, "float32", "normal").to(device).transpose(-1, -2)
        else:
            dlse = shared.values(p.seed, "dlse", lse_shape, "float32", "normal").to(device)
    return {"sink": sink, "dlse": dlse}


def keywords(p: Any, given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The keywords that all softmax families take."""
    found: dict[str, Any] = {"return_lse": True}
    if p.causal:
        found["causal"] = True
    if p.window is not None:
        found["window"] = p.window
    if p.scale is not None:
        found["scale"] = p.scale
    if p.softcap:
        found["softcap"] = p.softcap
    if p.dropout_p:
        seed = p.dropout_seed
        found["dropout_p"] = p.dropout_p
        found["dropout_seed"] = torch.tensor([seed], dtype=torch.int64, device=device) if p.seed_tensor else seed
    if p.deterministic is not None:
        found["deterministic"] = p.deterministic
    if p.invariant:
        found["batch_invariant"] = True
    if given["sink"] is not None:
        found["sink"] = given["sink"]
    if p.stats:
        found["return_stats"] = p.stats
    return found | given.get("options", {})


def run(p: Attention, given: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
    device = given["dout"].device
    named = keywords(p, given, device)
    if p.mask is not None:
        named["mask"] = masked.build(p.mask, p.seqlen_q, p.seqlen_k, device)

    def call(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        if p.offsets:
            offsets = torch.tensor(p.offsets, dtype=torch.int32, device=device)
            others = {n: x for n, x in {**named, **more}.items() if n != "return_lse"}
            return attention_chunks(q, k, v, offsets, seqlen_q=p.seqlen_q, chunks=p.chunks, backend=backend, **others)
        return warploom.attention(q, k, v, backend=backend, **{**named, **more})  # type: ignore[return-value]

    found = differentiate(p, given, call)
    if p.invariant:
        found["one_set_of_bits"] = invariant.of_dense(p, given, named, found, backend)
    return found


def differentiate(p: Any, given: dict[str, Any], call: Any) -> dict[str, Tensor | None]:
    """out, lse, stats and gradients of call(q, k, v, sink=…)."""
    leaf = given.get("bias")
    if not p.backward:
        more = {} if given["sink"] is None else {"sink": given["sink"]}
        if leaf is not None:
            more["bias"] = KINDS[p.bias].build(leaf)
        for _ in range(3):  # the second call of a kind keeps its launcher, the third takes it
            out, lse, *stats = call(given["q"], given["k"], given["v"], **more)
        return {"out": out, "lse": lse, **_named(stats)}
    leaves = {n: given[n].detach() for n in ("q", "k", "v")}
    if given["sink"] is not None:
        leaves["sink"] = given["sink"].detach()
    wanted = [n for n in leaves if n in p.wants]
    if leaf is not None:
        leaves["bias"] = leaf.detach()
        wanted += ["bias"] * p.bias_gradient
    for name in wanted:
        leaves[name].requires_grad_()
    more = {n: leaves[n] for n in leaves if n == "sink"}
    if leaf is not None:
        more["bias"] = KINDS[p.bias].build(leaves["bias"])
    out, lse, *stats = call(leaves["q"], leaves["k"], leaves["v"], **more)
    results, gradients = [], []
    if p.lse_gradient != "only":
        results, gradients = [out], [given["dout"]]
    if p.lse_gradient:
        results, gradients = [*results, lse], [*gradients, given["dlse"]]
    # The reference differentiates op by op: values do not reach lse, nor does a sole gradient of theirs.
    pairs = [(r, g) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
    sources = [leaves[n] for n in wanted]
    found: Any = [None] * len(sources)
    if pairs:
        found = torch.autograd.grad([r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
    found = [torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(wanted, found, strict=True)]
    named = {"out": out.detach(), "lse": lse.detach(), **_named(stats)}
    return named | {f"d{n}": g for n, g in zip(wanted, found, strict=True)}


def _named(stats: list[Any]) -> dict[str, Tensor | None]:
    """The stats of a call that returned any, None for what it did not compute."""
    return stats[0]._asdict() if stats else {}


def oracle() -> SimpleNamespace:
    return _STANDARD


def expect(p: Attention, given: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
    device = given["q"].device
    seen = given["seen"] if oracle is _STANDARD else visible(p, oracle, device)
    keep = None
    if p.dropout_p:
        kept = oracle.kept(p.dropout_seed, p.dropout_p, p.batch, p.heads_q, p.seqlen_q, p.seqlen_k, device)
        if p.offsets:
            kept = oracle.kept_of_chunks(kept, [b // p.chunks for b in range(p.batch)], p.offsets, p.rows)
        keep = kept.double() * oracle.factor(p.dropout_p)
    dlse = given["dlse"] if p.backward else None
    dout = None if p.lse_gradient == "only" else given["dout"]
    tensors = {"q": given["q"], "k": given["k"], "v": given["v"], "dout": dout}
    arguments = {name: None if t is None else t.transpose(1, 2) for name, t in tensors.items()}
    found = both(p, oracle, arguments, seen, keep, dlse, given["sink"], again, given["bias"])
    named = {"out": _back(found["out"]), "lse": found["lse"], **{n: found[n] for n in p.stats}}
    if p.backward:
        named |= {f"d{n}": _back(found[f"d{n}"]) for n in "qkv" if n in p.wants}
        if given["sink"] is not None and "sink" in p.wants:
            named["dsink"] = found["dsink"]
    of_bias = {}
    if p.bias_gradient:
        ref, *lows = found["dscores"]
        of_bias["dbias"] = biases.expected(p, given["bias"], ref, lows)
    return {**typed(p, named, given), **of_bias, **one_set(p, device)}


def one_set(p: Any, device: torch.device) -> dict[str, Expected]:
    """What ``invariant`` finds of a batch-invariant call: no bit that differs."""
    none = torch.zeros(1, dtype=torch.float64, device=device)
    return {"one_set_of_bits": Expected(none, dtype=torch.float64)} if p.invariant else {}


def both(
    p: Any,
    oracle: SimpleNamespace,
    arguments: dict[str, Tensor | None],
    seen: Tensor,
    keep: Tensor | None,
    dlse: Tensor | None,
    sink: Tensor | None,
    again: bool,
    bias: Tensor | None = None,
    rounded: dict[str, Tensor] | None = None,
) -> dict[str, tuple[Tensor, ...]]:
    """Each result exactly and by models, for which ``rounded`` replaces some of the arguments."""
    scale = p.head_dim**-0.5 if p.scale is None else p.scale
    options = {"scale": scale, "softcap": p.softcap, "backward": p.backward, "stats": bool(getattr(p, "stats", ()))}

    def cast(arguments: Any, wide: torch.dtype) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        added = None if bias is None else biases.matrix(p, bias.to(wide))
        given = (("sink", sink), ("keep", keep), ("dlse", dlse), ("bias", added))
        return tuple({n: None if t is None else t.to(wide) for n, t in some} for some in (arguments.items(), given))

    dtype = DTYPES[p.dtype]
    tensors, more = cast(arguments, torch.float64)
    true = exact.attend(oracle, **tensors, seen=seen, **more, **options)
    tensors, more = cast(arguments | (rounded or {}), torch.promote_types(dtype, torch.float32))
    q, k = arguments["q"], arguments["k"]
    # Of few rows the model's error may be small by luck.
    rows = min(t.shape[0] * t.shape[1] * t.shape[2] for t in (q, k) if t is not None)
    several = 12 if rows < FEW_ROWS // 8 else 4 if rows < FEW_ROWS else 1
    # The first model of float64 errs by nothing: the others by another order of sums.
    first = int(dtype == torch.float64)
    turns = range(first, first + (OPINIONS if again else max(several, 3 * first)))
    lows = [exact.model(oracle, tensors, dtype, turn, seen=seen, **more, **options) for turn in turns]
    if several > 1:
        lows.append({n: exact.farthest(true[n], [m[n] for m in lows]) for n in true})
    if "dsink" in true:
        lows = [{**low, "dsink": exact.dsink_model(true, low)} for low in lows]
    return {name: (true[name], *(low[name] for low in lows)) for name in true if name != "terms"}


def _back(several: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in several)


def typed(p: Any, named: dict[str, tuple[Tensor, ...]], given: dict[str, Any]) -> dict[str, Expected]:
    found = {}
    dtype = DTYPES[p.dtype]
    for name, (ref, *lows) in named.items():
        like = torch.float32 if name in ("lse", "max_logits", "column_sums") else dtype
        if name == "dsink":
            like = given["sink"].dtype
        narrow = like if torch.finfo(like).eps > torch.finfo(dtype).eps else None
        near = tuple(low if narrow is None else low.to(narrow) for low in lows)
        # torch's kernels for half precision on a CPU take a short polynomial for exp, and their lse errs by up to 8e-5.
        atol = 1e-4 if name == "lse" and dtype.itemsize == 2 and ref.device.type == "cpu" else None
        found[name] = Expected(ref, near, dtype=narrow, loose=bool(getattr(p, "visible_nan", "")), like=like, atol=atol)
    return found


def band(p: Any) -> tuple[int | None, int | None]:
    """Of all that brings one."""
    sides = [(None, 0)] if p.causal else []
    sides += [p.window] if p.window is not None else []
    if p.mask is not None and p.mask.kind in ("causal", "window"):
        sides.append((None, 0) if p.mask.kind == "causal" else (p.mask.left, p.mask.right))
    left = [a for a, _ in sides if a is not None]
    right = [b for _, b in sides if b is not None]
    return min(left, default=None), min(right, default=None)


def modules(p: Attention, backend: str) -> list[Any]:
    return shared.modules(p, backend, "dense", p.batch, p.seqlen_q, p.seqlen_k, band(p), False)


def refusal(p: Attention, given: dict[str, Any], backend: str) -> str | None:
    if backend == "triton" and p.dtype == "bfloat16" and given["q"].device.type == "cpu":
        return "Triton's interpreter multiplies bfloat16 as integers"
    return None


def excuse(p: Attention, given: dict[str, Any], error: Exception) -> str | None:
    """Why an error is right: the intersection is of more than two runs of rows in some column, which is documented."""
    if p.mask is None or p.mask.kind != "and" or not isinstance(error, ValueError):
        return None
    g = dense_masks.grid(_STANDARD, p.seqlen_q, p.seqlen_k, given["q"].device)
    seen = dense_masks.visible(_STANDARD, p.mask, g)
    edges = torch.nn.functional.pad(~seen, (0, 0, 1, 0)).to(torch.int8).diff(dim=2) > 0
    runs = int(edges.sum(2).max()) if edges.numel() else 0
    return f"intersection of {runs} runs in a column" if runs > 2 and "separate runs" in str(error) else None


def shrink(p: Attention) -> Iterator[Attention]:
    if p.offsets:
        yield replace(p, offsets=(), chunk=0, chunks=1)
        if any(p.offsets):
            yield replace(p, offsets=(0,) * p.batch)
        if p.chunks > 1:
            yield replace(p, chunks=1)
    if p.invariant:
        yield replace(p, invariant="")
        yield replace(p, invariant="alone")
    if p.bias:
        yield replace(p, bias="", bias_dtype="float32", bias_gradient=False, bias_hides=False)
    if p.stats:
        yield replace(p, stats=())
    if p.mask is not None:
        yield replace(p, mask=None)
        if p.mask.kind == "and":
            yield from (replace(p, mask=part) for part in p.mask.parts)
    plain = {
        "dropout_p": 0.0,
        "softcap": 0.0,
        "sink_step": 1,
        "sink": "",
        "lse_gradient": "",
        "scale": None,
        "window": None,
        "causal": False,
        "hostile": "",
        "style": "normal",
        "deterministic": None,
        "dlse_view": "",
        "visible_nan": "",
        "bias_hides": False,
        "bias_gradient": False,
        "bias_dtype": "float32",
        "wants": ("q", "k", "v", "sink"),
    }
    for name, value in plain.items():
        if getattr(p, name) != value:
            yield replace(p, **{name: value})
    yield from shared.simpler_views(p.views, p)
    if p.batch > 1 and (p.mask is None or p.mask.batch == 1):
        yield replace(p, batch=1, offsets=p.offsets[:1], chunks=1)
    if p.heads_q > p.heads_kv and (p.mask is None or p.mask.heads == 1):
        yield replace(p, heads_q=p.heads_kv)
    if p.heads_kv > 1 and (p.mask is None or p.mask.heads == 1):
        yield replace(p, heads_q=p.heads_q // p.heads_kv, heads_kv=1)
    if p.offsets:
        yield from (replace(p, chunk=n) for n in {p.chunk // 2, p.chunk - 1} if n > 0)
    elif p.mask is None:
        for name in ("seqlen_q", "seqlen_k"):
            length = getattr(p, name)
            for shorter in {length // 2, length * 3 // 4, length - 1}:
                if 0 < shorter < length:
                    yield replace(p, **{name: shorter})
        if p.seqlen_q == p.seqlen_k > 1:
            yield replace(p, seqlen_q=p.seqlen_q // 2, seqlen_k=p.seqlen_k // 2)
