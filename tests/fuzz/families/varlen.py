"""attention_varlen(): packed and paged calls, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import warploom
from tests.fuzz import maskspec
from tests.fuzz.draw import Draw
from tests.fuzz.families import attention as dense
from tests.fuzz.families import biases, invariant, masked
from tests.fuzz.families import softmax as shared
from tests.fuzz.families.softmax import Variant
from tests.fuzz.families.spread import spread
from tests.fuzz.maskspec import MaskSpec
from tests.fuzz.oracle import attention as exact
from tests.fuzz.oracle import masks as dense_masks
from tests.fuzz.oracle.decode import Decode
from tests.fuzz.oracle.mutants import mutants
from tests.fuzz.problem import DTYPES, Expected, spec
from tests.fuzz.views import PLAIN, Placed, View, place

NAME = "varlen"
BACKENDS = ("cpu", "hopper", "triton", "reference")
_STANDARD = exact.functions()
MUTANTS = {f"varlen: {name}": oracle for name, oracle in mutants(_STANDARD, packed=True).items()}
_NO_COLUMNS = "a paged call takes no column mask"
EXCLUSIVE = [
    *dense.ONE_OF,
    ({"packed", "paged"}, "one or the other"),
    ({"paged", "seqused"}, "a paged call always has it, so it is not counted"),
    ({"paged", "own_key_lengths"}, "a paged call has no cu_seqlens_k"),
    ({"paged", "mask"}, _NO_COLUMNS),
    ({"paged", "mask_per_head"}, _NO_COLUMNS),
    *(({"table_a_view", other}, "of pages") for other in ("packed", "seqused", "own_key_lengths", "mask", "mask_per_head")),
    *(({"table_a_view", fp8}, "a cache takes no such table") for fp8 in ("fp8", "fp8_rotated")),
    ({"paged", "stats"}, "stats take no pages"),
    *(
        ({fp8, other}, "FP8 keys lie in pages, and have no gradient")
        for fp8 in ("fp8", "fp8_rotated")
        for other in ("packed", "seqused", "own_key_lengths", "mask", "mask_per_head", "lse_gradient", "bias_gradient", "stats")
    ),
]
# Besides, on a GPU.
EXCLUSIVE_ON_GPU = [({"paged", "lse_gradient"}, "pages have no gradients there")]


@spec
@dataclass(frozen=True)
class Varlen:
    """A call of attention_varlen(). With `page_size` keys lie in pages, and `used` holds their numbers.

    With `fp8` these are of e4m3, in a cache that the call is given: with a scale a "token", "head" or "tensor".
    """

    seed: int
    dtype: str
    lengths_q: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    lengths_k: tuple[int, ...] | None = None  # None: those of the queries, and no cu_seqlens_k
    used: tuple[int, ...] | None = None
    extra_q: int = 0  # tokens past the last sequence
    extra_k: int = 0
    longest: str = ""  # max_seqlen_q and max_seqlen_k: "exact", "bound" (more than that) or "" (not given)
    page_size: int = 0
    pages: int = 0
    table: tuple[tuple[int, ...], ...] = ()
    table_step: int = 1  # elements from one page of a sequence to the next
    fp8: str = ""
    rotation: int | None = None  # seed of the keys' and queries'
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
    sink: str = ""
    sink_step: int = 1  # elements from one logit to the next; 0: one for all heads
    dropout_p: float = 0.0
    dropout_seed: int = 0
    seed_tensor: bool = False
    deterministic: bool | None = None
    backward: bool = True
    lse_gradient: str = ""
    dlse_view: str = ""
    wants: tuple[str, ...] = ("q", "k", "v", "sink")
    invariant: str = ""  # batch_invariant=True, and the form in which one sequence has to have the same bits: "alone", "dense"
    bias: str = ""
    bias_dtype: str = "float32"
    bias_gradient: bool = False
    bias_hides: bool = False
    stats: tuple[str, ...] = ()
    offsets = ()  # of chunks, which only dense calls have

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Queries and keys of each."""
        return list(zip(self.lengths_q, self.keys if self.used is None else self.used, strict=True))

    @property
    def longest_of_call(self) -> tuple[int, int]:
        """What the call knows of the longest sequence's queries and keys."""
        if not self.longest:
            return self.total_q, self.width * self.page_size if self.page_size else self.total_k
        more = 0 if self.longest == "exact" else 17
        queries, keys = max(self.lengths_q, default=0) + more, max(self.keys, default=0) + more
        return queries, min(keys, self.width * self.page_size) if self.page_size else keys

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        return len(self.lengths_q), self.heads_q, *self.longest_of_call

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence before `used` shortens them."""
        if self.page_size:
            assert self.used is not None
            return self.used
        return self.lengths_q if self.lengths_k is None else self.lengths_k

    @property
    def width(self) -> int:
        """Pages of a sequence that the table has room for."""
        return len(self.table[0]) if self.table else 1

    @property
    def total_q(self) -> int:
        return sum(self.lengths_q) + self.extra_q

    @property
    def total_k(self) -> int:
        """Packed tokens, or slots of all pages."""
        if self.page_size:
            return self.pages * self.page_size
        return self.total_q if self.lengths_k is None else sum(self.lengths_k) + self.extra_k

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        keys = (self.pages, self.page_size) if self.page_size else (self.total_k,)
        return {
            "q": (self.total_q, self.heads_q, self.head_dim),
            "k": (*keys, self.heads_kv, self.head_dim),
            "v": (*keys, self.heads_kv, self.head_dim_v),
            "dout": (self.total_q, self.heads_q, self.head_dim_v),
        }

    @property
    def views(self) -> dict[str, View]:
        return {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout}


def variants(d: Draw, backend: str, count: int) -> list[Variant]:
    layouts = ("varlen", "varlen", "varlen", "paged")
    found = spread(lambda: shared.draw_variant(d, backend, layouts), count)
    if backend == "hopper":
        return shared.with_scores(d, found)
    if backend != "triton":
        return found
    return [replace(v, invariant=True) if n % invariant.EVERY == 4 else v for n, v in enumerate(found, 1)]


def draw(d: Draw, variant: Variant | None, backend: str) -> Varlen:
    device = "cuda" if variant is not None else "cpu"
    free = variant is None
    v = variant or shared.draw_variant(d, backend, ("varlen", "varlen", "varlen", "paged"))
    most = 700 if device == "cuda" else 200
    while True:
        count = d.pick((0, 1, 2, 3, 4, 6), (0.4, 3, 4, 3, 2, 1))
        lengths_q = tuple(d.length(most) for _ in range(count))
        keys = lengths_q
        if v.keys != "same":
            keys = tuple(d.pick((n, d.length(most), d.length(most))) for n in lengths_q)
        if v.page_size or d.chance(0.2):
            lengths_q = tuple(min(n, d.integer(1, 8)) if d.chance(0.6) else n for n in lengths_q)
            keys = lengths_q if v.keys == "same" else keys
        heads_q, heads_kv = d.heads()
        cells = heads_q * count * max(lengths_q, default=0) * max(keys, default=0)
        if shared.cells_fit(cells, device, backend):
            break
    if backend == "hopper":
        v = replace(v, **dict(zip(("head_dim", "head_dim_v"), shared.within_tile(d, v.head_dim, v.head_dim_v), strict=True)))
    used = tuple(d.pick((n, d.integer(0, n), d.integer(0, n))) for n in keys) if v.used else None
    extra = d.pick((0, 1, d.integer(1, 40)), (2, 1, 1))
    longest_q, longest_k = max(lengths_q, default=0), max(keys, default=0)
    left, right = shared.draw_band(d, v.left, v.right, longest_q, longest_k)
    mask = None
    total_k = sum(keys) + extra
    if v.vectors and not v.page_size:
        vectors = d.pick(maskspec.VECTORS) if free else v.vectors
        mask = maskspec.columns(d, vectors, v.right and d.chance(0.5), 1, d.pick((1, heads_q, heads_kv)))
    causal, window, mask = dense._band_as(d, left, right, mask)
    found = Varlen(
        seed=d.seed(),
        dtype=v.dtype,
        lengths_q=lengths_q,
        lengths_k=keys if v.keys == "own" else None,
        used=used,
        extra_q=extra,
        extra_k=d.pick((0, extra, d.integer(0, 20))) if v.keys == "own" else 0,
        longest=d.pick(("exact", "bound", "")),
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
    if v.page_size:
        found = _paged(d, found, v.page_size, backend)
    assert found.page_size or found.lengths_k is None or total_k >= 0
    found = replace(found, **shared.draw_views(d, found.shapes, None if free else v))
    if v.dtype == "float64":  # of large scores the oracle is no better than what it judges
        found = replace(found, style="normal", scale=None)
    of_fp8 = found.page_size and not found.page_size & (found.page_size - 1) and shared.LIMITS[backend].paged_alike
    if of_fp8 and d.chance(0.5):
        found = _fp8(d, found)
    if d.chance(0.15):
        found = replace(found, wants=d.pick((("q",), ("k", "v"), ("v",), ("k",), ("q", "sink"))))
    if free and backend in biases.TAKE_BIASES and found.lengths_q and d.chance(1 / dense.BIASES_EVERY):
        found = biases.with_bias(d, found)
        if not found.bias.startswith(("alibi", "relative")):  # which need not know how long the longest sequence is
            found = replace(found, longest=found.longest or "exact")
    if v.bias and found.lengths_q:
        found = biases.with_bias(d, found, v.bias)
    if free and backend in biases.TAKE_BIASES and not found.page_size and d.chance(1 / dense.STATS_EVERY):
        found = replace(found, stats=d.pick(dense.STATS))
    asked = v.invariant or (free and backend in invariant.TAKE_INVARIANT and d.chance(1 / invariant.EVERY))
    if asked and found.lengths_q:
        found = replace(found, invariant=d.pick(("alone", "dense")))
    found = replace(found, sink_step=d.pick((0, 1, 1, 2, 3))) if found.sink else found
    if found.page_size and not found.fp8:  # a cache takes no such table
        found = replace(found, table_step=d.pick((1, 1, 2, 3)))
    return found


def _paged(d: Draw, p: Varlen, page_size: int, backend: str) -> Varlen:
    """Pages in any order, some shared, some of no sequence; entries that none needs hold any number."""
    assert p.used is not None
    needed = [-(-n // page_size) for n in p.used]
    width = max(needed, default=0) + d.integer(0, 2)
    if backend == "hopper":  # which reads a sequence's only page otherwise, by another module
        width = max(width, 2)
    pages = sum(needed) + d.integer(0, 3)
    order = d.shuffled(range(pages))
    table: list[tuple[int, ...]] = []
    for n, count in enumerate(needed):
        row = [order.pop() for _ in range(count)]
        if n and count and needed[n - 1] and d.chance(0.2):
            row[0] = table[n - 1][0]  # a common prefix
        row += [d.pick((-5, -1, 0, pages, pages + 7, 2**31 - 1, -(2**31))) for _ in range(width - count)]
        table.append(tuple(row))
    backward = p.backward and backend in ("cpu", "reference")
    return replace(p, page_size=page_size, pages=pages, table=tuple(table), lengths_k=None, extra_k=0, backward=backward)


def _fp8(d: Draw, p: Varlen) -> Varlen:
    """The same over a cache of e4m3: for inference, and with rows that are as contiguous as a cache's."""
    views = {n: replace(getattr(p, n), kind="contiguous") for n in "qkv" if getattr(p, n).kind == "last_dim_strided"}
    found = replace(p, fp8=d.pick(("token", "head", "tensor"), (2, 1, 1)), backward=False, lse_gradient="", **views)
    return replace(found, rotation=d.pick((None, 0, d.seed64()), (1, 1, 1)))


def features(p: Varlen) -> frozenset[str]:
    found = {p.dtype, shared.reshape_heads(p.heads_q, p.heads_kv), "paged" if p.page_size else "packed"}
    found |= set(shared.dims_features(p.head_dim, p.head_dim_v))
    found |= set(shared.view_features(p.views, p.shapes, p.dtype))
    found |= set(dense.band_features(p.causal, p.window, p.mask))
    pairs = list(zip(p.lengths_q, p.used or p.keys, strict=True))
    flags = {
        "seqused": p.used is not None and not p.page_size,
        "own_key_lengths": p.lengths_k is not None,
        "tokens_past_the_end": p.extra_q or p.extra_k,
        "empty": any(0 in pair for pair in pairs) or not pairs,
        "more_keys": any(a < b for a, b in pairs),
        "more_queries": any(a > b for a, b in pairs),
        "few_queries": any(0 < a <= 8 for a, _ in pairs),
        "fp8": p.fp8,
        "fp8_rotated": p.rotation is not None,
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
        "style_large": p.style == "large",
        "batch_invariant": p.invariant,
        "table_a_view": p.table_step > 1,
        "bias": p.bias,
        "bias_gradient": p.bias_gradient,
        "stats": p.stats,
    }
    return frozenset(found | {name for name, flag in flags.items() if flag})


@dataclass(frozen=True)
class Padded:
    """Where sequences lie: places of their queries and keys, (sequences, longest), and which of these places count."""

    queries: Tensor
    keys: Tensor
    is_query: Tensor
    is_key: Tensor
    length_q: Tensor  # (sequences, 1, 1, 1)
    length_k: Tensor


def padded(p: Varlen, oracle: SimpleNamespace, device: torch.device) -> Padded:
    lengths_q, lengths_k = (torch.tensor(n, dtype=torch.int64, device=device) for n in (p.lengths_q, p.keys))
    used = lengths_k
    if p.used is not None:
        used = oracle.used(torch.tensor(p.used, dtype=torch.int64, device=device), lengths_k)
    i = torch.arange(max(p.lengths_q, default=0), device=device)
    j = torch.arange(max(p.keys, default=0), device=device)
    queries = (lengths_q.cumsum(0) - lengths_q)[:, None] + i
    if p.page_size:
        table = torch.tensor(p.table, dtype=torch.int64, device=device).reshape(len(p.table), p.width)
        keys = table[:, j // p.page_size] * p.page_size + j % p.page_size
    else:
        keys = (lengths_k.cumsum(0) - lengths_k)[:, None] + j
    is_query, is_key = i < lengths_q[:, None], j < used[:, None]
    shape = (-1, 1, 1, 1)
    return Padded(
        torch.where(is_query, queries, 0),
        torch.where(is_key, keys, 0),
        is_query,
        is_key,
        lengths_q.view(shape),
        used.view(shape),
    )


def visible(p: Varlen, oracle: SimpleNamespace, at: Padded) -> Tensor:
    """bool (sequences, heads_q|1, longest q, longest k)."""
    device = at.queries.device
    i, j = (torch.arange(t.shape[1], device=device) for t in (at.queries, at.keys))
    rows = i[:, None]
    g = dense_masks.Grid(rows, oracle.position(rows, at.length_q, at.length_k), j, len(i), len(j))
    left, right = p.window or (None, None)
    seen = oracle.band(g.p, g.j, left, right)
    if p.causal:
        seen = seen & oracle.band(g.p, g.j, None, 0)
    if p.mask is not None and p.mask.kind == "columns":
        found = maskspec.vectors(p.mask, max(p.lengths_q, default=0), p.total_k)
        mine = {name: t[0].to(device)[:, at.keys].transpose(0, 1) for name, t in found.items()}
        seen = seen & oracle.over_heads(dense_masks.by_vectors(oracle, mine, p.mask.causal, g), p.heads_q)
    elif p.mask is not None:
        seen = seen & dense_masks.visible(oracle, p.mask, g)
    seen = seen & at.is_query[:, None, :, None] & at.is_key[:, None, None, :]
    return seen & (biases.matrix(p, biases.leaf_of(p, device)) != float("-inf")) if p.bias_hides else seen


def _scattered(t: Tensor, places: Tensor, counts: Tensor, total: int) -> Tensor:
    """(sequences, longest, …) back to (total, …), added up where places coincide, 0 elsewhere."""
    return t.new_zeros((total, *t.shape[2:])).index_add_(0, places[counts], t[counts])


def inputs(p: Varlen, device: torch.device) -> dict[str, Any]:
    at = padded(p, _STANDARD, device)
    seen = visible(p, _STANDARD, at).expand(-1, p.heads_q, -1, -1)
    # (sequences, longest k, heads_kv) keys that some query sees, and likewise rows.
    keys = seen.any(2).unflatten(1, (p.heads_kv, -1)).any(2).transpose(1, 2)
    rows = seen.any(3).transpose(1, 2)
    shown_k = _scattered(keys.int(), at.keys, at.is_key, p.total_k).cpu() > 0
    shown_q = _scattered(rows.int(), at.queries, at.is_query, p.total_q).cpu() > 0
    hidden_k = ~shown_k[..., None].reshape(*p.shapes["k"][:-1], 1)
    hidden = {"q": ~shown_q[..., None], "k": hidden_k, "v": hidden_k}
    tensors, buffers = shared.laid(p.seed, p.dtype, p.style, p.views, p.shapes, hidden, p.hostile, device)
    scales: dict[str, Tensor] = {}
    if p.fp8:
        for n, name in enumerate(p.shapes):
            if name in ("k", "v"):
                placed, scales[name] = _in_fp8(p, name, shown_k, device)
                tensors[name], buffers[n] = placed.tensor, placed.buffer
        buffers += scales.values()
    observed = set()
    if not bool(shown_q.all()):
        observed.add("row_sees_nothing")
    if not bool(shown_k.all()):
        observed.add("key_seen_by_none")
    more = dense.extras(p, (p.heads_q, p.total_q), device)
    more["bias"] = biases.leaf_of(p, device) if p.bias else None
    return {**tensors, **more, "buffers": buffers, "seen": seen, "at": at, "observed": observed, "scales": scales}


def _in_fp8(p: Varlen, name: str, shown: Tensor, device: torch.device) -> tuple[Placed, Tensor]:
    """Pages of k or v in e4m3, and their scales; those that no query sees, and their scales, hold what is hostile."""
    numbers, exact_fp8 = shared.values(p.seed, name, p.shapes[name], "float32", p.style), Decode()
    if name == "k" and p.rotation is not None:
        numbers = exact_fp8.rotated(numbers.double(), p.rotation).float()
    heads = {"token": 0, "head": p.heads_kv, "tensor": 1}[p.fp8]
    numbers, scale = exact_fp8.quantized(numbers, 0.003 + 0.02 * torch.arange(1, heads + 1) / heads if heads else None)
    hidden = ~shown.reshape(*p.shapes[name][:-1], 1)
    placed = place(numbers, p.views[name], hidden, "nan" if p.hostile else "", device)  # FP8 has no infinity
    buffer, t = placed.buffer.to(torch.float8_e4m3fn), placed.tensor
    if p.fp8 == "token" and p.hostile:
        scale = scale.masked_fill(hidden[..., 0], float("nan"))
    return Placed(buffer.as_strided(t.shape, t.stride(), t.storage_offset()), buffer), scale.to(device)


def run(p: Varlen, given: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
    device = given["dout"].device
    named = dense.keywords(p, given, device)
    if p.mask is not None:
        rows = max(p.lengths_q, default=0) if p.mask.kind == "columns" else p.total_q
        named["mask"] = masked.build(p.mask, rows, p.total_k, device)
    alone = dict(named)

    def numbers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def starts(lengths: tuple[int, ...]) -> Tensor:
        return numbers([sum(lengths[:n]) for n in range(len(lengths) + 1)])

    cu_k = None if p.lengths_k is None else starts(p.lengths_k)
    if p.longest:
        named["max_seqlen_q"], named["max_seqlen_k"] = p.longest_of_call
    if p.used is not None:
        named["seqused_k"] = numbers(p.used)
    if p.page_size:
        apart = numbers(-1).repeat(len(p.table), p.width, p.table_step)
        apart[:, :, 0] = numbers(p.table).reshape(len(p.table), p.width)
        named["block_table"] = apart.flatten(1)[:, :: p.table_step]
    cu_q = starts(p.lengths_q)
    if p.fp8:
        lengths, scales = named.pop("seqused_k"), given["scales"]
        pages = warploom.PagedKVCache(
            given["k"], given["v"], named.pop("block_table"), lengths, scales["k"], scales["v"], p.rotation
        )

        def call_of_cache(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
            return warploom.attention_varlen(q, pages, None, cu_q, backend=backend, **{**named, **more})

        return _with_bits(p, given, dense.differentiate(p, given, call_of_cache), alone, backend)

    def call(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        return warploom.attention_varlen(q, k, v, cu_q, cu_k, backend=backend, **{**named, **more})  # type: ignore[return-value]

    return _with_bits(p, given, dense.differentiate(p, given, call), alone, backend)


def _with_bits(
    p: Varlen, given: dict[str, Any], found: dict[str, Tensor | None], named: dict[str, Any], backend: str
) -> dict[str, Tensor | None]:
    if p.invariant:
        found["one_set_of_bits"] = invariant.of_packed(p, given, named, found, backend)
    return found


def oracle() -> SimpleNamespace:
    return _STANDARD


def expect(p: Varlen, given: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
    device = given["q"].device
    at, seen = given["at"], given["seen"]
    if oracle is not _STANDARD:
        at = padded(p, oracle, device)
        seen = visible(p, oracle, at)
    keep = None
    if p.dropout_p:
        sizes = (len(p.lengths_q), p.heads_q, at.queries.shape[1], at.keys.shape[1])
        keep = oracle.kept(p.dropout_seed, p.dropout_p, *sizes, device).double() * oracle.factor(p.dropout_p)
    pages = {n: given[n] for n in "kv"}
    if p.fp8:
        pages = {n: Decode().widened(pages[n], given["scales"][n]) for n in "kv"}
    slots = {n: pages[n].reshape(-1, *pages[n].shape[-2:]) for n in "kv"}
    # A sequence's place holds another's token where it is too short: nothing there is seen.
    if 0 in (p.total_q, p.total_k):
        slots = {n: torch.zeros((1, *t.shape[1:]), dtype=t.dtype, device=device) if not len(t) else t for n, t in slots.items()}
    some = given["q"] if p.total_q else torch.zeros((1, *given["q"].shape[1:]), dtype=given["q"].dtype, device=device)
    dout = None
    if p.lse_gradient != "only":
        dout = given["dout"][at.queries] if p.total_q else some.new_zeros((*at.queries.shape, p.heads_q, p.head_dim_v))
        dout = torch.where(at.is_query[..., None, None], dout, 0.0).transpose(1, 2)
    dlse = None
    if p.backward and given["dlse"] is not None:
        dlse = given["dlse"].T[at.queries] if p.total_q else torch.zeros((*at.queries.shape, p.heads_q), device=device)
        dlse = torch.where(at.is_query[..., None], dlse, 0.0).transpose(1, 2)
    arguments = {
        "q": some[at.queries].transpose(1, 2),
        "k": slots["k"][at.keys].transpose(1, 2),
        "v": slots["v"][at.keys].transpose(1, 2),
        "dout": dout,
    }
    rounded: dict[str, Tensor] = {}
    if p.fp8:
        # Kernels widen numbers in fp32, scale values no wider than queries, and rotate queries to their dtype.
        rounded = {"k": arguments["k"].float(), "v": arguments["v"].float().to(DTYPES[p.dtype])}
    if p.rotation is not None:
        rounded["q"] = Decode().rotated(arguments["q"].float(), p.rotation).to(DTYPES[p.dtype])
        arguments["q"] = Decode().rotated(arguments["q"].double(), p.rotation)
    found = dense.both(p, oracle, arguments, seen, keep, dlse, given["sink"], again, given["bias"], rounded)
    rows, keys = (at.queries, at.is_query, p.total_q), (at.keys, at.is_key, p.total_k)
    nothing = torch.zeros(p.total_q, dtype=torch.bool, device=device)
    nothing[sum(p.lengths_q) :] = True
    named = {"out": _mapped(found["out"], lambda t: _scattered(t.transpose(1, 2), *rows))}
    named["lse"] = _mapped(
        found["lse"],
        lambda t: torch.where(nothing[:, None], float("-inf"), _placed(t.transpose(1, 2), *rows)).T,
    )
    if p.backward:
        if "q" in p.wants:
            named["dq"] = _mapped(found["dq"], lambda t: _scattered(t.transpose(1, 2), *rows))
        for name in "kv":
            if name in p.wants:
                shape = p.shapes[name]
                true, *lows = (_scattered(t.transpose(1, 2), *keys).reshape(shape) for t in found[f"d{name}"])
                # The sum over sequences that share a page is rounded too.
                named[f"d{name}"] = true, *(low.to(DTYPES[p.dtype]) for low in lows)
        if given["sink"] is not None and "sink" in p.wants:
            named["dsink"] = found["dsink"]
    if "max_logits" in p.stats:
        named["max_logits"] = found["max_logits"]
    if "column_sums" in p.stats:
        named["column_sums"] = _mapped(found["column_sums"], lambda t: _scattered(t.transpose(1, 2), *keys).T)
    of_bias = {}
    if p.bias_gradient:
        ref, *lows = found["dscores"]
        of_bias["dbias"] = biases.expected(p, given["bias"], ref, lows)
    return {**dense.typed(p, named, given), **of_bias, **dense.one_set(p, device)}


def _placed(t: Tensor, places: Tensor, counts: Tensor, total: int) -> Tensor:
    """As `_scattered`, by assignment: infinities do not add up."""
    found = t.new_zeros((total, *t.shape[2:]))
    found[places[counts]] = t[counts]
    return found


def _mapped(several: tuple[Tensor, ...], change: Any) -> tuple[Tensor, ...]:
    return tuple(change(t) for t in several)


def modules(p: Varlen, backend: str) -> list[Any]:
    longest = [p.total_q, p.total_k]
    if p.longest:
        longest = [max(n, default=0) + (17 if p.longest == "bound" else 0) for n in (p.lengths_q, p.keys)]
    empty = 0 in (p.total_q, p.total_k)
    count = 0 if empty else len(p.lengths_q)
    layout, (longest_q, longest_k) = "paged" if p.page_size else "varlen", (max(n, 1) for n in longest)
    return shared.modules(p, backend, layout, count, longest_q, longest_k, dense.band(p), p.used is not None)


def refusal(p: Varlen, given: dict[str, Any], backend: str) -> str | None:
    if backend == "triton" and p.dtype == "bfloat16" and given["q"].device.type == "cpu":
        return "Triton's interpreter multiplies bfloat16 as integers"
    return None


def shrink(p: Varlen) -> Iterator[Varlen]:
    count = len(p.lengths_q)

    def taken(numbers: Any, n: int) -> Any:
        return None if numbers is None else (*numbers[:n], *numbers[n + 1 :])

    if count > 1:
        for n in range(count):
            table = taken(p.table, n) if p.page_size else ()
            yield replace(
                p,
                lengths_q=taken(p.lengths_q, n),
                lengths_k=taken(p.lengths_k, n),
                used=taken(p.used, n),
                table=table,
            )
    plain = {
        "mask": None,
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
        "longest": "",
        "extra_q": 0,
        "extra_k": 0,
        "bias": "",
        "bias_hides": False,
        "bias_gradient": False,
        "bias_dtype": "float32",
        "stats": (),
    }
    if not p.page_size:
        plain["used"] = None
    for name, value in plain.items():
        if getattr(p, name) != value:
            yield replace(p, **{name: value})
    if p.invariant:
        yield replace(p, invariant="")
    if p.table_step > 1:
        yield replace(p, table_step=1)
    if p.fp8:
        yield replace(p, fp8="", rotation=None)
        yield replace(p, rotation=None)
    yield from shared.simpler_views(p.views, p)
    if p.heads_q > p.heads_kv and (p.mask is None or p.mask.heads == 1):
        yield replace(p, heads_q=p.heads_kv)
    if p.heads_kv > 1 and (p.mask is None or p.mask.heads == 1):
        yield replace(p, heads_q=p.heads_q // p.heads_kv, heads_kv=1)
