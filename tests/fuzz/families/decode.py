"""decode() over contiguous and paged caches, after append() at times, against tests/fuzz/oracle/decode.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.fuzz.draw import Draw
from tests.fuzz.families.decode_draw import DecodeProblem, DecodeVariant, draw_problem, draw_variant
from tests.fuzz.families.invariant import differs, either
from tests.fuzz.families.spread import spread
from tests.fuzz.oracle.attention import farthest
from tests.fuzz.oracle.decode import MUTANTS as ORACLES
from tests.fuzz.oracle.decode import Attended, Bias, Decode
from tests.fuzz.problem import DTYPES, OPINIONS, Expected
from tests.fuzz.views import Placed, View, place

NAME = "decode"
BACKENDS = ("triton", "cpu", "reference")
# Oracles that must be caught, by name: a namespace as `oracle` returns.
MUTANTS = {f"decode: {each.__name__}": SimpleNamespace(decode=each()) for each in ORACLES}
_GARBAGE = (-1, -7, 2**31 - 1, -(2**31), 10**6)

# Features that no problem has together, with the reason; dtypes beside.
EXCLUSIVE: list[tuple[set[str], str]] = [
    ({"fp8", "bits"}, "scales lie apart from the rows that the other form is made of"),
    ({"fp8_rotated", "bits"}, "scales lie apart from the rows that the other form is made of"),
    ({"bias_hides", "a_visible_NaN"}, "what is hidden from all queries is drawn, not looked for"),
    *(({"fp8_rotated", other}, "keys rotated in another order round to other bits") for other in ("append", "slot_mapping")),
]


def variants(d: Draw, backend: str, count: int) -> list[DecodeVariant]:
    """Each is two or three binaries."""
    return spread(lambda: draw_variant(d, backend), count)


def draw(d: Draw, variant: DecodeVariant | None, backend: str) -> DecodeProblem:
    return draw_problem(d, draw_variant(d, backend) if variant is None else variant)


def oracle() -> SimpleNamespace:
    return SimpleNamespace(decode=Decode())


def features(p: DecodeProblem) -> frozenset[str]:
    totals = [n + (p.appended or 0) for n in p.lengths]
    flags = {
        p.dtype: p.dtype != "float64",
        "pages": p.page_size > 0,
        "page_shorter_than_a_tile": 0 < p.page_size < 16,
        "shared_pages": p.shared,
        "garbage_in_the_table": p.garbage,
        "several_queries": p.queries > 1,
        "heads_grouped": p.group > 1,
        "dims_differ": p.dim != p.dim_v,
        "dim_no_power_of_two": bool(p.dim & (p.dim - 1) or p.dim_v & (p.dim_v - 1)),
        "dim_past_128": max(p.dim, p.dim_v) > 128,
        "an_empty_sequence": 0 in totals or not totals,
        "fewer_keys_than_queries": any(n < p.queries for n in totals),
        "window": p.windowed,
        "window_hides_the_newest": p.windowed and (p.right or 0) < 0,
        "softcap": p.softcap != 0.0,
        "scale": p.scale is not None,
        "sink": bool(p.sink),
        "several_splits": max(totals, default=0) > 512,
        "hidden_NaN_or_infinity": bool(p.hostile),
        "a_visible_NaN": bool(p.visible_nan),
        "append": p.appended is not None,
        "slot_mapping": bool(p.slots),
        "bits": bool(p.bits),
        "tree": bool(p.tree),
        "tree_and_window": bool(p.tree) and p.windowed,
        "bias": bool(p.bias),
        "bias_hides": p.bias_hides,
        "fp8": bool(p.fp8),
        "fp8_rotated": p.rotation is not None,
        "latent": p.latent,
        "prefix": bool(p.prefix),
        "batch_invariant": p.invariant,
        "q_a_view": p.q_view.kind != "contiguous",
        "cache_a_view": p.k_view.kind != "contiguous" or p.v_view.kind != "contiguous",
        "shared_memory": p.q_view.aliased or p.k_view.aliased or p.v_view.aliased,
        "unaligned": any(view.offset % 8 for view in (p.q_view, p.k_view, p.v_view)),
    }
    return frozenset(name for name, present in flags.items() if present)


def inputs(p: DecodeProblem, device: torch.device) -> dict[str, Any]:
    """Tensors of the cache before the append, of what is appended and of the call; "buffers" is all their memory."""
    generator = torch.Generator().manual_seed(p.seed)
    dtype, batch, heads_q = DTYPES[p.dtype], len(p.lengths), p.heads_kv * p.group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    slots, kept = _slots(p, generator)
    totals = [n + k for n, k in zip(p.lengths, kept, strict=True)]
    table, pool = _table(p, totals, generator)
    if slots is not None:
        slots = _slots_of(p, slots, table)
    tree, bias = _tree(p, generator), _bias(p)
    seen = _seen(p, totals, table, pool, tree, bias)
    held = seen & ~_appended_slots(p, slots, table, pool)
    rows = pool, p.page_size or p.capacity, p.heads_kv
    blind = [[t < p.queries - n for t in range(p.queries)] for n in totals]
    hidden_q = torch.tensor(blind, dtype=torch.bool).view(batch, p.queries, 1, 1)
    hidden_cache = ~held[:, :, None, None]
    hostile = "nan" if p.hostile and p.fp8 else p.hostile  # FP8 has no infinity
    q = place((p.spread * normal(batch, p.queries, heads_q, p.dim)).to(dtype), p.q_view, hidden_q, p.hostile, device)
    keys, values, scales = _numbers(p, normal(*rows, p.dim), normal(*rows, p.dim_v))
    k = place(keys, p.k_view, hidden_cache, hostile, device)
    v = replace(k, tensor=k.tensor[..., : p.dim_v]) if p.latent else place(values, p.v_view, hidden_cache, hostile, device)
    if p.fp8:
        k, v = (_in_fp8(each) for each in (k, v))
    placed = {"q": q, "k": k, "v": v}
    if p.appended is not None:
        left_out = None if slots is None else (slots < 0)[:, :, None, None]
        shape = batch, p.appended, p.heads_kv
        placed["new_k"] = place(normal(*shape, p.dim).to(dtype), p.new_k_view, left_out, p.hostile, device)
        placed["new_v"] = place(normal(*shape, p.dim_v).to(dtype), p.new_v_view, left_out, p.hostile, device)
    found: dict[str, Any] = {name: each.tensor for name, each in placed.items()}
    found["lengths"] = torch.tensor([0, *p.lengths, 0], dtype=torch.int32, device=device)[1 : batch + 1]
    found["table"] = None
    if table is not None:
        wide = torch.full((batch, p.width + p.table_gap), _GARBAGE[0], dtype=torch.int32)
        wide[:, : p.width] = table
        found["table"] = wide.to(device)[:, : p.width]
    found["sink"] = None
    if p.sink:
        found["sink"] = (2.0 * normal(heads_q * p.sink_step)).to(device, DTYPES[p.sink])[:: p.sink_step]
    found["tree"] = None
    if tree is not None:
        wide = torch.full((len(tree), p.queries + p.seed % 3), 2**30, dtype=torch.int32)
        wide[:, : p.queries] = tree
        found["tree"] = wide.to(device)[:, : p.queries]
    found["bias"] = None if bias is None else _strided(bias.leaf.to(DTYPES[p.bias_dtype]).to(device), p.bias_step)
    found["scales"] = None
    if scales is not None:
        if p.fp8 == "token":
            # A scale of no key may be anything too.
            scales = tuple(t.masked_fill(~held[:, :, None], float(hostile or 3.0)) for t in scales)
        found["scales"] = tuple(t.to(device) for t in scales)
    found["slots"] = None if slots is None else slots.to(device, torch.int32 if p.slots == "int32" else torch.int64)
    _put_visible_nan(p, found, totals)
    others = [found[name] for name in ("lengths", "table", "sink", "slots", "tree", "bias") if found[name] is not None]
    others += found["scales"] or ()
    found["buffers"] = [each.buffer for each in placed.values()] + others
    found["caches"] = (k, v)
    return found


def _slots(p: DecodeProblem, generator: torch.Generator) -> tuple[Tensor | None, list[int]]:
    """Positions of appended tokens, -1 of those left out, and how many of each sequence are not."""
    batch, tokens = len(p.lengths), p.appended or 0
    if not p.slots:
        return None, [tokens] * batch
    kept = torch.ones(batch, tokens, dtype=torch.bool)
    if p.dropped:
        kept = torch.rand(batch, tokens, generator=generator) < 0.7
    position = torch.tensor(p.lengths, dtype=torch.int64).view(-1, 1) + kept.cumsum(1) - 1
    return torch.where(kept, position, -1), kept.sum(1).tolist()


def _slots_of(p: DecodeProblem, position: Tensor, table: Tensor | None) -> Tensor:
    """Places in the pool of positions, any negative number where there is none."""
    assert table is not None
    if not position.numel():
        return position
    at = position.clamp(min=0)
    page = table.long().gather(1, (at // p.page_size).clamp(max=p.width - 1))
    return torch.where(position < 0, -1 - (p.seed % 5), page * p.page_size + at % p.page_size)


def _table(p: DecodeProblem, totals: list[int], generator: torch.Generator) -> tuple[Tensor | None, int]:
    """The page table and the number of pages; without pages None and the batch."""
    if not p.page_size:
        return None, len(p.lengths)
    used = [-(-n // p.page_size) for n in totals]
    common = _common(p)
    pool = common + sum(n - common for n in used) + p.spare
    order = torch.randperm(pool, generator=generator).tolist()
    first, table = [order.pop() for _ in range(common)], []
    for n in used:
        own = first + [order.pop() for _ in range(n - common)]
        rest = [_GARBAGE[i % len(_GARBAGE)] if p.garbage else p.seed % pool for i in range(p.width - n)]
        table.append(own + rest)
    return torch.tensor(table, dtype=torch.int32).view(len(totals), p.width), pool


def _common(p: DecodeProblem) -> int:
    """Pages that all sequences share."""
    return min((n // p.page_size for n in p.lengths), default=0) if p.shared else 0


def _tree(p: DecodeProblem, generator: torch.Generator) -> Tensor | None:
    """Parents of the queries' tokens, (trees, T)."""
    if not p.tree:
        return None
    trees, token = 1 if p.tree == "one" else len(p.lengths), torch.arange(p.queries)
    if p.shape == "chain":
        parents = (token - 1).expand(trees, -1)
    elif p.shape == "star":
        parents = torch.where(token == 0, -1, 0).expand(trees, -1)
    else:
        # Of -1 and all tokens before, some trees from the last few alone, which makes them deep.
        near = 1 + torch.randint(0, 6, (trees, 1), generator=generator)
        far = torch.randint(0, 2, (trees, 1), generator=generator).bool()
        choices = torch.where(far, token + 1, torch.minimum(token + 1, near))
        parents = token - 1 - (torch.rand(trees, p.queries, generator=generator) * choices).long()
    return parents.to(torch.int32)


def _bias(p: DecodeProblem) -> Bias | None:
    """Its numbers in fp64, as its dtype has them. Slopes are such that no far key has all of a row."""
    if not p.bias:
        return None
    generator = torch.Generator().manual_seed(p.seed + 1)
    batch = len(p.lengths) if p.bias_each else 1
    heads = p.heads_kv * p.group if p.bias_heads else 1
    capacity = p.capacity or p.page_size * p.width
    shape = {
        "alibi": (batch, heads),
        "relative": (heads, 2 * p.bias_reach + 1),
        "one_side": (heads, p.bias_reach + 1),
        "key": (batch, heads, capacity + p.bias_reach),
    }[p.bias]
    leaf = torch.randn(shape, generator=generator)
    if p.bias == "alibi":
        leaf = 0.1 * leaf.abs()
    if p.bias_hides:
        leaf = leaf.masked_fill(torch.rand(shape, generator=generator) < 0.3, float("-inf"))
    return Bias(p.bias, leaf.to(DTYPES[p.bias_dtype]).double())


def _strided(t: Tensor, step: int) -> Tensor:
    """The same with NaN between its numbers."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] * step), float("nan"))
    wide[..., ::step] = t
    return wide[..., ::step]


def _built(p: DecodeProblem, leaf: Tensor | None) -> Any:
    """The bias as a user makes it."""
    from warploom.bias import ALiBi, Key, Relative

    if leaf is None:
        return None
    if p.bias == "alibi":
        return ALiBi(leaf if p.bias_each else leaf[0])
    return Key(leaf) if p.bias == "key" else Relative(leaf, bidirectional=p.bias == "relative")


def _numbers(p: DecodeProblem, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Keys and values of a cache; of FP8 its numbers in fp32, and their scales."""
    if not p.fp8:
        return keys.to(DTYPES[p.dtype]), values.to(DTYPES[p.dtype]), None
    exact, found = Decode(), []
    if p.rotation is not None:
        keys = exact.rotated(keys.double(), p.rotation).float()
    for n, t in enumerate((keys, values)):
        # Some numbers past the scales of a head saturate.
        heads = {"token": 0, "head": t.shape[2], "tensor": 1}[p.fp8]
        scale = (0.003 + 0.02 * torch.arange(1, heads + 1) / heads + 0.001 * n) if heads else None
        found.append(exact.quantized(t, scale))
    (keys, k_scale), (values, v_scale) = found
    return keys, values, (k_scale, v_scale)


def _in_fp8(placed: Placed) -> Placed:
    """The same place of memory of one byte a number."""
    buffer, t = placed.buffer.to(torch.float8_e4m3fn), placed.tensor
    return Placed(buffer.as_strided(t.shape, t.stride(), t.storage_offset()), buffer)


def _range(p: DecodeProblem, total: int) -> range:
    """Keys of a sequence of `total` keys that some query sees."""
    left = p.left if p.windowed else None
    back = max(0, -(p.right or 0)) if p.windowed else 0
    if total == 0 or (left is not None and left < back):
        return range(0)
    first = 0 if left is None else max(0, max(total - p.queries, 0) - left)
    return range(first, max(first, total - back))


def _place(p: DecodeProblem, table: Tensor | None, b: int, position: Tensor) -> tuple[Tensor, Tensor]:
    """Where positions of sequence b lie in the cache."""
    if table is None:
        return torch.full_like(position, b), position
    return table[b].long()[position // p.page_size], position % p.page_size


def _seen(
    p: DecodeProblem, totals: list[int], table: Tensor | None, pool: int, tree: Tensor | None, bias: Bias | None
) -> Tensor:
    """Slots of the cache, (pool, rows), that some query of some sequence sees."""
    seen = torch.zeros(pool, p.page_size or p.capacity, dtype=torch.bool)
    shown = None
    if tree is not None or bias is not None:
        exact, lengths, longest = Decode(), torch.tensor(totals, dtype=torch.int64), max(totals, default=0)
        kin = None if tree is None else exact.kin(tree)
        each = exact.visible(lengths, p.queries, longest, _keywords(p)["window"], kin)
        if bias is not None:
            places = exact.places(lengths, p.queries, longest, kin)
            added = exact.added(bias, *places, p.heads_kv * p.group, torch.float64)
            each = (each[:, None] & (added != float("-inf"))).any(1)
        shown = each.any(1)
    for b, total in enumerate(totals):
        keys = torch.tensor(list(_range(p, total)), dtype=torch.int64) if shown is None else shown[b].nonzero()[:, 0]
        seen[_place(p, table, b, keys)] = True
    return seen


def _appended_slots(p: DecodeProblem, slots: Tensor | None, table: Tensor | None, pool: int) -> Tensor:
    """Slots that the append will write: until then they hold anything."""
    written = torch.zeros(pool, p.page_size or p.capacity, dtype=torch.bool)
    for b, length in enumerate(p.lengths):
        if slots is not None:
            at = slots[b][slots[b] >= 0]
            written[at // p.page_size, at % p.page_size] = True
        elif p.appended:
            written[_place(p, table, b, torch.arange(length, length + p.appended))] = True
    return written


def _put_visible_nan(p: DecodeProblem, found: dict[str, Any], totals: list[int]) -> None:
    """One NaN in a key or value of the cache that all queries of a sequence see, where one has such a key."""
    if not p.visible_nan or not totals:
        return
    b = p.seed % len(totals)
    left, back = (p.left, max(0, -(p.right or 0))) if p.windowed else (None, 0)
    first = 0 if left is None else max(0, totals[b] - 1 - left)
    if p.tree:
        back = max(back, 1)  # the first draft is not all others' ancestor
    last = min(totals[b] - p.queries - back, p.lengths[b] - 1)
    if first > last:
        return
    table = None if found["table"] is None else found["table"].cpu()
    page, slot = _place(p, table, b, torch.tensor(first + p.seed % (last - first + 1)))
    t = found[p.visible_nan]
    t[int(page), int(slot), p.seed % t.shape[2], p.seed % t.shape[3]] = float("nan")


def _cache(
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    scales: tuple[Tensor, Tensor] | None = None,
    rotation: int | None = None,
) -> Any:
    from warploom import KVCache, PagedKVCache

    fp8 = () if scales is None else (*scales, rotation)
    return KVCache(k, v, lengths, *fp8) if table is None else PagedKVCache(k, v, table, lengths, *fp8)


def _again(placed: Placed) -> tuple[Tensor, Tensor]:
    """A copy of the buffer, and the tensor in it."""
    buffer, t = placed.buffer.clone(), placed.tensor
    return buffer.as_strided(t.shape, t.stride(), t.storage_offset()), buffer


def _keywords(p: DecodeProblem) -> dict[str, Any]:
    return {"scale": p.scale, "softcap": p.softcap, "window": (p.left, p.right) if p.windowed else None}


def run(p: DecodeProblem, given: dict[str, Any], backend: str) -> dict[str, Tensor | None]:
    """Out and lse; of an append also the caches' whole memory and the lengths; whether bits are equal."""
    from warploom import decode

    found: dict[str, Tensor | None] = {}
    k, v, lengths, scales = given["k"], given["v"], given["lengths"], given["scales"]
    if p.appended is not None:
        (k, k_buffer), (v, v_buffer) = (_again(each) for each in given["caches"])
        lengths = lengths.clone()
        scales = None if scales is None else tuple(t.clone() for t in scales)
    cache = _cache(k, v, lengths, given["table"], scales, p.rotation)
    if p.appended is not None:
        more = {"slot_mapping": given["slots"]} if given["slots"] is not None else {}
        cache.append(given["new_k"], given["new_v"], **more)
        found |= {"k_cache": _bytes(k_buffer), "v_cache": _bytes(v_buffer), "lengths": lengths.double()}
        if scales is not None:
            found |= {"k_scale": _bytes(scales[0]), "v_scale": _bytes(scales[1])}
    options = {"sink": given["sink"], "backend": backend, "tree": given["tree"], **_keywords(p)}
    options["bias"] = _built(p, given["bias"])
    found["out"], found["lse"] = decode(given["q"], cache, return_lse=True, **options)
    if p.seed % 4 == 0:
        # Without lse, and by the short way of a second call.
        again = decode(given["q"], cache, **options)
        found["again"] = differs(again, found["out"])
    if p.prefix:
        hint = cache.shared_prefix() if p.prefix == "found" else _common(p) * p.page_size
        # However small the cache is.
        with patch("warploom.decode.triton.launch.worth_sharing", lambda _: True) if backend == "triton" else nullcontext():
            shared = decode(given["q"], cache, return_lse=True, prefix=hint, **options)
        found["prefix"] = either([(shared[0], found["out"]), (shared[1], found["lse"])])
    if p.invariant:
        found |= _switched(p, given, k, v, lengths, scales, options, backend)
    if p.bits:
        options["bias"] = given["bias"]
        found["bits"] = _bits(p, given["q"], k, v, lengths, given["table"], options, found)
    return found


def _switched(
    p: DecodeProblem,
    given: dict[str, Any],
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    options: dict[str, Any],
    backend: str,
) -> dict[str, Tensor]:
    """The call under warploom.batch_invariant(), and whether a sequence has other bits alone, or its queries in a longer chunk.

    That chunk is Triton's promise alone, and no tree's or latent cache's. Its other queries see keys that these do not, which
    hold nothing hostile then.
    """
    import warploom

    q, table, b = given["q"], given["table"], p.seed % len(p.lengths)
    at = slice(b, b + 1)
    one = {"tree": given["tree"] if p.tree != "each" else given["tree"][at], "bias": None}
    if p.bias:
        one["bias"] = _built(p, given["bias"][at] if p.bias_each else given["bias"])
    if table is None:
        own = tuple(t[at] if t.ndim > 1 else t for t in scales or ()) or None
        cache = _cache(k[at], v[at], lengths[at].clone(), None, own, p.rotation)
    else:
        cache = _cache(k, v, lengths[at].clone(), table[at], scales, p.rotation)
    with warploom.batch_invariant():
        out, lse = warploom.decode(q, _cache(k, v, lengths, table, scales, p.rotation), return_lse=True, **options)
        alone = warploom.decode(q[at].clone(), cache, return_lse=True, **{**options, **one})
        pairs = [(alone[0][0], out[b]), (alone[1][0], lse[b])]
        if backend == "triton" and not (p.tree or p.latent or p.hostile or p.visible_nan) and cache.capacity:
            pages = cache
            if table is None:
                first = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
                fp8 = () if own is None else (*own, p.rotation)
                pages = warploom.PagedKVCache(cache.k, cache.v, first, cache.lengths, *fp8)
            before, end = q[b].flip(0), torch.tensor([0, 2 * p.queries], dtype=torch.int32, device=q.device)
            window = (p.left if p.windowed else None, min(p.right or 0, 0) if p.windowed else 0)
            rows, rows_lse = warploom.attention_varlen(
                torch.cat([before, q[b]]), pages, cu_seqlens_q=end, return_lse=True, window=window, bias=one["bias"],
                **{name: options[name] for name in ("scale", "softcap", "sink", "backend")},
            )  # fmt: skip
            pairs += [(rows[p.queries :], out[b]), (rows_lse[:, p.queries :], lse[b])]
    return {"switched": out, "switched_lse": lse, "one_set_of_bits": either(pairs)}


def _bytes(buffer: Tensor) -> Tensor:
    """The memory's bytes as numbers below 1, which the criterion compares exactly."""
    return buffer.view(torch.uint8).double() / 256


def _bits(
    p: DecodeProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    options: dict[str, Any],
    found: dict[str, Any],
) -> Tensor:
    """Whether a sequence has other bits alone, in pages, or in a crowd, than it has in this call."""
    from warploom import decode

    b = p.seed % len(p.lengths)
    length = int(lengths[b])
    keys, values = (_own_rows(p, t, table, b, length) for t in (k, v))
    capacity = max(length, 1) + p.seed % 70
    if p.bits == "pages":
        size = (4, 16, 64)[p.seed % 3]
        count = -(-capacity // size)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(p.seed)).to(q.device)
        pools = []
        for rows in (keys, values):
            room = rows.new_full((count * size, *rows.shape[1:]), float("nan"))
            room[:length] = rows
            pool = torch.empty_like(room).view(count, size, *rows.shape[1:])
            pool[order] = room.view(count, size, *rows.shape[1:])
            pools.append(pool)
        cache = _cache(*pools, lengths[b : b + 1].clone(), order.to(torch.int32)[None])
        queries, place_of = q[b : b + 1].contiguous(), 0
    else:
        others = 0 if p.bits == "alone" else 3
        rooms = []
        for rows in (keys, values):
            room = rows.new_full((1 + others, capacity, *rows.shape[1:]), float("nan"))
            room[:, :length] = rows
            rooms.append(room)
        each = torch.tensor([length // 3, length, length // 2, 0][: 1 + others], dtype=torch.int32, device=q.device)
        place_of = 0 if p.bits == "alone" else 1
        each[place_of] = length
        cache = _cache(*rooms, each, None)
        queries = q[b : b + 1].expand(1 + others, -1, -1, -1).contiguous()
    leaf = options["bias"]
    if leaf is not None:
        leaf = leaf[b : b + 1] if p.bias_each else leaf
        if p.bias == "key":
            leaf = torch.nn.functional.pad(leaf, (0, max(cache.capacity - leaf.shape[2], 0)), value=float("nan"))
        options = {**options, "bias": _built(p, leaf)}
    out, lse = decode(queries, cache, return_lse=True, **options)
    return either([(out[place_of], found["out"][b]), (lse[place_of], found["lse"][b])])


def _own_rows(p: DecodeProblem, t: Tensor, table: Tensor | None, b: int, length: int) -> Tensor:
    """Rows of sequence b, (length, heads, ·)."""
    if table is None:
        return t[b, :length]
    pages = table[b, : -(-length // p.page_size)].long()
    return t[pages].flatten(0, 1)[:length]


def expect(p: DecodeProblem, given: dict[str, Any], oracle: SimpleNamespace, again: bool = False) -> dict[str, Expected]:
    exact: Decode = oracle.decode
    dtype = DTYPES[p.dtype]
    found: dict[str, Expected] = {}
    q, k, v, lengths, scales = (given[name] for name in ("q", "k", "v", "lengths", "scales"))
    bits = torch.float64  # the dtype that grants no rounding
    zero = torch.zeros(1, dtype=torch.float64, device=k.device)
    if p.appended is not None:
        (k, k_buffer), (v, v_buffer) = (_again(each) for each in given["caches"])
        lengths = lengths.clone()
        scales = None if scales is None else tuple(t.clone() for t in scales)
        exact.append(k, v, lengths, given["table"], given["slots"], given["new_k"], given["new_v"], scales)
        wanted = {"k_cache": _bytes(k_buffer), "v_cache": _bytes(v_buffer), "lengths": lengths.double()}
        if scales is not None:
            wanted |= {"k_scale": _bytes(scales[0]), "v_scale": _bytes(scales[1])}
        found |= {name: Expected(t, dtype=bits) for name, t in wanted.items()}
    options = {"sink": given["sink"], "tree": given["tree"], **_keywords(p)}
    options["bias"] = None if given["bias"] is None else Bias(p.bias, given["bias"])
    rest = lengths, given["table"]

    def attended(one: Decode) -> Attended:
        if scales is None:
            return one.attend(q, k, v, *rest, **options)
        rows = q.double() if p.rotation is None else one.rotated(q.double(), p.rotation)
        return one.attend(rows, one.widened(k, scales[0]), one.widened(v, scales[1]), *rest, **options)

    want = attended(exact)
    # The error that is granted is that of the true call, or a wrong oracle would grant itself its own error.
    true = want if type(exact) is Decode else attended(Decode())
    arguments = (q, k, v, *rest)
    if scales is not None:
        # Numbers are widened to fp32, queries rotated in it and values, scaled, no wider than queries.
        rows = q if p.rotation is None else Decode().rotated(q.float(), p.rotation).to(dtype)
        arguments = (rows, k.float() * scales[0][..., None], (v.float() * scales[1][..., None]).to(dtype), *rest)
    # Of few rows one model's error may be small by luck.
    few = want.lse.numel() <= 256
    turns = range(OPINIONS if again else 3 if few else 1)
    models = [Decode().attend(*arguments, **options, low=True, turn=turn) for turn in turns]
    if few:
        models.append(Attended(*(farthest(t, list(m)) for t, m in zip(true, zip(*models, strict=True), strict=True))))
    outs, lses = (tuple(w + (m - t) for m in some) for w, t, some in zip(want, true, zip(*models, strict=True), strict=True))
    loose = bool(p.visible_nan)
    found["out"] = Expected(want.out, outs, loose=loose, like=dtype)
    found["lse"] = Expected(want.lse, lses, dtype=torch.float32, loose=loose, like=torch.float32)
    if p.seed % 4 == 0:
        found["again"] = Expected(zero, dtype=bits)
    if p.bits:
        found["bits"] = Expected(zero, dtype=bits)
    if p.prefix:
        found["prefix"] = Expected(zero, dtype=bits)
    if p.invariant:
        # torch's kernels for half precision on a CPU take a short polynomial for exp.
        short = 1e-4 if dtype.itemsize == 2 and k.device.type == "cpu" else None
        found["switched"], found["switched_lse"] = found["out"], replace(found["lse"], atol=short)
        found["one_set_of_bits"] = Expected(zero, dtype=bits)
    return found


def refusal(p: DecodeProblem, given: dict[str, Any], backend: str) -> str | None:
    on_cpu = given["q"].device.type == "cpu"
    if backend == "cpu":
        if not on_cpu:
            return "runs on CPU tensors"
        return "float64 runs on the reference" if p.dtype == "float64" else None
    if backend == "triton":
        if p.dtype == "float64":
            return "takes float16, bfloat16 or float32"
        if p.dtype == "bfloat16" and on_cpu:
            return "interpreter multiplies bfloat16"
        if any(not 16 <= n <= 256 or n % 8 for n in (p.dim, p.dim_v)) and not p.latent:
            return "from 16 to 256 in steps of 8"
        if p.latent and (p.dim_v < 16 or p.dim_v % 8):
            return "from 16 to 512 in steps of 8"
        if p.latent and p.dim % 8:
            return "at most 128 columns"
    return None


def shrink(p: DecodeProblem) -> Iterator[DecodeProblem]:
    """Simpler problems: one thing less each."""
    plain = {
        "visible_nan": "", "bits": "", "prefix": "", "invariant": False, "softcap": 0.0, "sink": "", "scale": None,
        "spread": 1.0, "garbage": False, "shared": False, "table_gap": 0, "sink_step": 1, "dropped": False, "hostile": "",
        "rotation": None, "shape": "any",
    }  # fmt: skip
    for n in range(len(p.lengths)):
        yield replace(p, lengths=p.lengths[:n] + p.lengths[n + 1 :])
    if p.appended is not None:
        yield replace(p, appended=None, slots="", dropped=False)
    for name, value in plain.items():
        if getattr(p, name) != value:
            yield replace(p, **{name: value})
    if p.tree:
        yield replace(p, tree="", shape="any", queries=min(p.queries, 16))
    if p.tree == "each":
        yield replace(p, tree="one")
    if p.fp8:
        yield replace(p, fp8="", rotation=None)
    if p.windowed:
        yield replace(p, windowed=False, left=None, right=None)
    for name in ("q_view", "k_view", "v_view", "new_k_view", "new_v_view"):
        if getattr(p, name) != View():
            yield replace(p, **{name: View()})
    if p.queries > 1:
        yield replace(p, queries=p.queries // 2)
    if p.group > 1:
        yield replace(p, group=1)
    if p.heads_kv > 1:
        yield replace(p, heads_kv=1)
    if any(n > 1 for n in p.lengths):
        yield replace(p, lengths=tuple(n // 2 for n in p.lengths))
    if p.capacity > max(p.lengths, default=0) + (p.appended or 0) + 1:
        yield replace(p, capacity=max(p.lengths, default=0) + (p.appended or 0) + 1)
    if p.latent:
        yield replace(p, latent=False)
    for name in ("dim_v", "dim"):
        if getattr(p, name) > 16:
            yield replace(p, **{name: 16})
