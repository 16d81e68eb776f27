"""decode() against torch's kernels and FlashInfer's, each call in a CUDA graph of its own.

Contiguous caches and pages, ragged lengths, FP8 and latent caches, shared prefixes, chunks of prompts over pages, and a step of
many layers; and what `warploom.bench.prefill` compares of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom import KVCache, PagedKVCache
from warploom.bench import flashinfer_peer, peers
from warploom.bench.captured import captured
from warploom.bench.decode_prefix import APART, SHARED, build_prefix, prefix_name
from warploom.bench.decode_shapes import (
    FP8_SHAPES,
    FURTHEST_FP8,
    LATENT,
    LATENT_SCALE,
    LATENT_SHAPES,
    PREFILL_SHAPES,
    ROTATED,
    SHAPES,
    Shape,
    check,
    in_pages,
    latent_inputs,
)
from warploom.bench.harness import Call, Case, Comparison, Own, host, in_a_row, wall
from warploom.bench.prefill import prefill_cases
from warploom.bench.reference import one_head
from warploom.masks import Causal

LAYERS = 32
PAGE = 16
EAGER = (8192, 65536)  # keys of one sequence of 32 heads over 8, whose calls are also queued by the host
LATENCY = 3.5e-6  # seconds of a replayed graph with an empty kernel (docs/lab-notes/decode.md)
# What a case takes, for --list: a comparison with its inputs and checks; the first of a kind of kernels compiles them; and
# seconds a byte of keys and values to draw them, put them in pages and check some.
COMPARING, COMPILES, MAKING = 1.0, 4.0, 1e-10


def decode_cases(quick: bool) -> list[Case]:
    if quick:
        return _quick_cases()
    found = []
    for shape in SHAPES:
        pages = (PAGE, 64) if shape == Shape(1, 8192, 32, 8) else (PAGE,)
        found.append(_case(shape.name, shape, partial(_build, shape, pages)))
    ragged = Shape(16, 16384, 32, 8)
    found.append(_case("B16 of 512 to 16k, ragged", ragged, partial(_build_ragged, ragged)))
    found += [_case(f"FP8 cache, {shape.name}", shape, partial(_build_fp8, shape)) for shape in FP8_SHAPES]
    for batch, keys, heads in LATENT_SHAPES:
        shape = Shape(batch, keys, heads, 1, LATENT + ROTATED)
        found.append(_case(_latent_name(shape), shape, partial(_build_latent, shape, LATENT, 64)))
    for batch, queries, keys in PREFILL_SHAPES:
        shape = Shape(batch, keys, 32, 8, queries=queries)
        found.append(_case(_prefill_name(shape), shape, partial(_build_prefill, shape)))
    for sizes, shares in ((SHARED, True), (APART, False)):
        for batch, shared, own in sizes:
            found.append(_prefix_case(Shape(batch, shared + own, 32, 8), shared if shares else 0, PAGE))
    found += prefill_cases("decode", quick)
    layer = Shape(1, 8192, 32, 8)
    found.append(_case(f"{LAYERS} layers of B1 KV8k", replace(layer, batch=LAYERS), partial(_build_layers, layer), layer))
    seen: set[Any] = set()
    for at, case in enumerate(found):  # the first of a kind compiles
        kind = case.name.split(",")[0] if "," in case.name else tuple(case.shape[n] for n in ("heads", "heads_kv", "head_dim"))
        found[at] = replace(case, seconds=(case.seconds or 0) + (0 if kind in seen else COMPILES))
        seen.add(kind)
    return found


def _quick_cases() -> list[Case]:
    shape, prefill = Shape(2, 64, 4, 2, 16), Shape(2, 64, 4, 2, 16, queries=20)
    latent = Shape(2, 64, 4, 1, 24)
    return [
        _case("B2 KV64 4/2", shape, partial(_build, shape, (16,))),
        _case("B2 of 16 to 64, ragged", shape, partial(_build_ragged, shape)),
        _case(f"FP8 cache, {shape.name}", shape, partial(_build_fp8, shape)),
        _case(_latent_name(latent), latent, partial(_build_latent, latent, 16, 16)),
        _case(_prefill_name(prefill), prefill, partial(_build_prefill, prefill)),
        _prefix_case(shape, 32, 16),
        _prefix_case(shape, 0, 16),
        *prefill_cases("decode", True),
    ]


def _case(name: str, shape: Shape, build: Callable[..., Any], shown: Shape | None = None) -> Case:
    return Case("decode", name, dict((shown or shape).__dict__), build, COMPARING + MAKING * 2 * shape.numbers)


def _prefix_case(shape: Shape, shared: int, page_size: int) -> Case:
    build = partial(build_prefix, shape, shared, page_size, LATENCY, _add_flashinfer)
    return _case(prefix_name(shape, shared), shape, build)


def _latent_name(shape: Shape) -> str:
    return f"latent, {shape.name.split(' D')[0]}"


def _prefill_name(shape: Shape) -> str:
    return f"prefill, {replace(shape, queries=1).name}, the last {shape.queries} queries"


def _build(shape: Shape, page_sizes: tuple[int, ...], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    q, cache = shape.draw(device)
    paged = {size: in_pages(cache, size) for size in page_sizes}
    calls: dict[str, Call] = {"warploom": lambda: warploom.decode(q, cache)}
    if device.type == "cuda":
        calls["warploom, hopper"] = lambda: warploom.decode(q, cache, backend="hopper")
    for size, pages in paged.items():
        calls[f"warploom, pages of {size}"] = partial(warploom.decode, q, pages)
    refused: dict[str, str] = {}
    if device.type == "cuda":
        calls |= _torchs(q, cache)
        _add_flashinfer(calls, refused, q, paged[page_sizes[0]])
    amount = float(shape.numbers * cache.k.element_size())
    with torch.no_grad():
        yield "graph", captured(calls, partial(check, q, cache), device, refused, bytes=amount, latency=LATENCY)
        one = Shape(1, shape.keys, 32, 8)
        if device.type == "cuda" and shape == one and shape.keys in EAGER:
            # A plan of FlashInfer's serves all layers of a step: its share of one call is nobody's.
            queued = {name: call for name, call in calls.items() if not name.startswith("FlashInfer")}
            yield "eager", Comparison(queued, partial(check, q, cache), clock=wall)
            yield "host in a row", host(queued, partial(check, q, cache), {}, clock=in_a_row)


def _torchs(q: Tensor, cache: KVCache) -> dict[str, Call]:
    """torch's kernels; several queries need a mask that begins at the lower right, which cuDNN takes written out."""
    if q.shape[1] == 1:
        return {name: partial(peers.sdpa(name, False), q, cache.k, cache.v) for name in ("cuDNN", "FA2")}
    from torch.nn.attention.bias import causal_lower_right

    queries, keys = q.shape[1], cache.k.shape[1]
    written = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return {
        "cuDNN, masked": partial(peers.sdpa("cuDNN", False, written), q, cache.k, cache.v),
        "FA2": partial(peers.sdpa("FA2", False, causal_lower_right(queries, keys)), q, cache.k, cache.v),
    }


def _add_flashinfer(calls: dict[str, Call], refused: dict[str, str], q: Tensor, pages: PagedKVCache) -> None:
    """Both of its kernels for one query a sequence, where several heads share a key: it recommends neither for all."""
    makers: dict[str, Callable[[], Call]] = {}
    if q.shape[1] > 1:
        makers["FlashInfer"] = lambda: flashinfer_peer.paged_prefill(q, pages)
    else:
        makers["FlashInfer"] = lambda: flashinfer_peer.batch_decode(q, pages, False)
        makers["FlashInfer, tensor cores"] = lambda: flashinfer_peer.batch_decode(q, pages, True)
    for name, make in makers.items():
        peers.add_peer(calls, refused, name, make)


def _build_ragged(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """Lengths from a thirty-second of all keys, or a quarter of few, to all; torch's kernels take them as a mask."""
    q, cache = shape.draw(device)
    generator = torch.Generator().manual_seed(4)
    shortest = max(shape.keys // 32, 16)
    lengths = torch.logspace(0, 1, shape.batch, base=shape.keys / shortest).mul(shortest).round().int()
    lengths = lengths[torch.randperm(shape.batch, generator=generator)]
    cache.lengths.copy_(lengths)
    pages = in_pages(cache, PAGE)
    total = int(lengths.sum())
    uniform = KVCache(cache.k, cache.v, torch.full_like(cache.lengths, total // shape.batch))
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.decode(q, cache),
        f"warploom, pages of {PAGE}": lambda: warploom.decode(q, pages),
        "warploom, uniform": lambda: warploom.decode(q, uniform),
    }
    refused: dict[str, str] = {}
    if device.type == "cuda":
        calls["warploom, hopper"] = lambda: warploom.decode(q, cache, backend="hopper")
        mask = (torch.arange(shape.keys, device=q.device) < cache.lengths[:, None])[:, None, None]
        for name in ("cuDNN", "efficient"):
            calls[f"{name}, masked"] = partial(peers.sdpa(name, False, mask), q, cache.k, cache.v)
        _add_flashinfer(calls, refused, q, pages)
    amount = float(2 * total * shape.heads_kv * shape.head_dim * cache.k.element_size())
    own = {"warploom, uniform": Own(partial(check, q, uniform))}
    with torch.no_grad():
        yield "graph", captured(calls, partial(check, q, cache), device, refused, bytes=amount, latency=LATENCY, own=own)


def _build_fp8(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A cache of e4m3 with a scale a token and head, and the same in bf16."""
    q, cache = shape.draw(device)
    sizes = shape.batch, shape.keys, shape.heads_kv, shape.head_dim
    fp8 = KVCache.allocate(*sizes, dtype=torch.float8_e4m3fn, device=q.device)
    fp8.append(cache.k, cache.v)
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.decode(q, fp8),
        "warploom, bf16": lambda: warploom.decode(q, cache),
    }
    if device.type == "cuda":
        calls |= _torchs(q, cache)
    amount = float(shape.numbers + 2 * 4 * shape.batch * shape.keys * shape.heads_kv)  # and scales of four bytes
    half = float(shape.numbers * cache.k.element_size())
    own = {name: Own(partial(check, q, cache), bytes=half) for name in calls if name != "warploom"}
    judge = partial(check, q, cache, furthest=FURTHEST_FP8)
    with torch.no_grad():
        yield "graph, FP8 cache", captured(calls, judge, device, bytes=amount, latency=LATENCY, own=own)


def _build_latent(shape: Shape, latent: int, page_size: int, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """Latent caches, whose columns are read once for both products."""
    q, cache = latent_inputs(shape.batch, shape.keys, shape.heads, latent, shape.head_dim - latent, device)
    pages = in_pages(cache, page_size)
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.decode(q, cache, scale=LATENT_SCALE),
        f"warploom, pages of {page_size}": lambda: warploom.decode(q, pages, scale=LATENT_SCALE),
    }
    refused: dict[str, str] = {}
    if device.type == "cuda":
        peers.add_peer(calls, refused, "FlashInfer", lambda: flashinfer_peer.latent_decode(q, pages, LATENT_SCALE))
    amount = float(cache.k.numel() * cache.k.element_size())
    flops = 2.0 * shape.batch * shape.heads * shape.keys * (shape.head_dim + latent)
    judge = partial(check, q, cache, scale=LATENT_SCALE)
    with torch.no_grad():
        yield "graph, latent", captured(calls, judge, device, refused, bytes=amount, flops=flops, latency=LATENCY)


def _build_prefill(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """The last queries of each sequence over its pages; torch's kernels and FA4 read keys that lie one after the other."""
    q, cache = shape.draw(device)
    pages = in_pages(cache, PAGE)
    fp8 = PagedKVCache.allocate(
        shape.batch, shape.keys, shape.heads_kv, shape.head_dim, page_size=PAGE, dtype=torch.float8_e4m3fn, device=q.device
    )
    fp8.append(cache.k, cache.v)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * shape.queries
    rows = q.flatten(0, 1)

    def ours() -> Tensor:
        out = warploom.attention_varlen(
            rows,
            pages.k_pages,
            pages.v_pages,
            starts,
            max_seqlen_q=shape.queries,
            max_seqlen_k=shape.keys,
            seqused_k=pages.lengths,
            block_table=pages.block_table,
            causal=True,
        )
        return out.view(q.shape)

    calls: dict[str, Call] = {
        "warploom": ours,
        "warploom, contiguous": lambda: warploom.attention(q, cache.k, cache.v, causal=True),
        "warploom, FP8 pages": lambda: warploom.attention_varlen(
            rows, fp8, cu_seqlens_q=starts, max_seqlen_q=shape.queries, causal=True
        ).view(q.shape),
    }
    refused: dict[str, str] = {}
    if device.type == "cuda":
        calls |= _torchs(q, cache)
        peers.add_peer(calls, refused, "FA4", lambda: partial(peers.flash_attention_4(True), q, cache.k, cache.v))
        peers.add_peer(calls, refused, "FlashInfer", lambda: flashinfer_peer.paged_prefill(q, pages))
    mask = Causal()
    want = one_head(q, cache.k, cache.v, mask.resolve(shape.queries, shape.keys, q.device), None)
    visible = shape.queries * (shape.keys - (shape.queries - 1) / 2)
    flops = 4.0 * shape.batch * shape.heads * shape.head_dim * visible
    with torch.no_grad():
        own = {"warploom, FP8 pages": Own(partial(check, q, cache, furthest=FURTHEST_FP8), flops)}
        yield "graph, prefill over pages", captured(calls, want.check_out, device, refused, flops=flops, own=own)


def _build_layers(shape: Shape, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A step of 32 layers in one graph, append included."""
    layers = [shape.draw(device) for _ in range(LAYERS)]
    token = torch.randn(1, 1, shape.heads_kv, shape.head_dim, device=device, dtype=layers[0][0].dtype)
    last = torch.tensor([shape.keys - 1], device=device)

    def ours() -> Tensor:
        for q, cache in layers:
            cache.lengths.fill_(shape.keys - 1)
            cache.append(token, token)
            out = warploom.decode(q, cache)
        return out

    def torchs(attend: peers.Attention) -> Tensor:
        for q, cache in layers:
            cache.k.index_copy_(1, last, token)
            cache.v.index_copy_(1, last, token)
            cache.lengths.fill_(shape.keys)
            out = attend(q, cache.k, cache.v)
        return out

    calls: dict[str, Call] = {"warploom": ours}
    calls |= {name: partial(torchs, peers.sdpa(name, False)) for name in ("cuDNN", "FA2")}
    q, cache = layers[-1]
    with torch.no_grad():
        yield "graph, a layer", captured(calls, partial(check, q, cache), device, divide=LAYERS)
