"""decode() against torch's kernels, each call in a CUDA graph of its own: contiguous and paged caches, ragged lengths."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import warploom
from warploom import KVCache, PagedKVCache
from warploom.bench import peers
from warploom.bench.harness import Call, Case, Comparison, WrongResult, wall

# batch, keys, query heads, key heads
SHAPES = ((1, 8192, 32, 8), (1, 65536, 32, 8), (16, 8192, 32, 8), (64, 4096, 32, 8), (8, 32768, 64, 8))
HEAD_DIM, LAYERS = 128, 32
FURTHEST = 1e-2


def decode_cases(quick: bool) -> list[Case]:
    if quick:
        shape = {"batch": 2, "keys": 64, "heads": 4, "heads_kv": 2, "head_dim": 16}
        return [Case("decode", "B2 KV64 4/2", shape, partial(_build, shape, (16,)))]
    found = []
    for batch, keys, heads, heads_kv in SHAPES:
        shape = {"batch": batch, "keys": keys, "heads": heads, "heads_kv": heads_kv, "head_dim": HEAD_DIM}
        name = f"B{batch} KV{keys // 1024}k {heads}/{heads_kv}"
        found.append(Case("decode", name, shape, partial(_build, shape, (16, 64))))
    ragged = {"batch": 16, "keys": 16384, "heads": 32, "heads_kv": 8, "head_dim": HEAD_DIM}
    found.append(Case("decode", "B16 of 512 to 16k, ragged", ragged, partial(_build_ragged, ragged)))
    one = {"batch": 1, "keys": 8192, "heads": 32, "heads_kv": 8, "head_dim": HEAD_DIM}
    found.append(Case("decode", f"{LAYERS} layers of B1 KV8k", one, partial(_build_layers, one)))
    return found


def draw(shape: dict[str, int], device: torch.device) -> tuple[Tensor, KVCache]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(shape["batch"], 1, shape["heads"], shape["head_dim"], device=device, dtype=dtype)
    held = (shape["batch"], shape["keys"], shape["heads_kv"], shape["head_dim"])
    k, v = (torch.randn(held, device=device, dtype=dtype) for _ in range(2))
    return q, KVCache(k, v, torch.full((shape["batch"],), shape["keys"], dtype=torch.int32, device=device))


def in_pages(cache: KVCache, page_size: int) -> PagedKVCache:
    """The same keys in pages of random order."""
    batch, keys, heads, dim = cache.k.shape
    order = torch.randperm(batch * keys // page_size, device=cache.k.device)
    k_pages, v_pages = (
        torch.empty((len(order), page_size, heads, dim), device=t.device, dtype=t.dtype) for t in (cache.k, cache.v)
    )
    k_pages[order] = cache.k.view(-1, page_size, heads, dim)
    v_pages[order] = cache.v.view(-1, page_size, heads, dim)
    return PagedKVCache(k_pages, v_pages, order.view(batch, -1).int(), cache.lengths)


def _build(shape: dict[str, int], page_sizes: tuple[int, ...], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    q, cache = draw(shape, device)
    calls: dict[str, Call] = {"warploom": lambda: warploom.decode(q, cache)}
    for size in page_sizes:
        pages = in_pages(cache, size)
        calls[f"warploom, pages of {size}"] = partial(warploom.decode, q, pages)
    if device.type == "cuda":
        calls |= {name: partial(peers.sdpa(name, False), q, cache.k, cache.v) for name in ("cuDNN", "FA2")}
    bytes_read = float(2 * cache.k.numel() * cache.k.element_size())
    with torch.no_grad():
        yield "graph", _captured(calls, partial(check, q, cache), bytes_read, device)
        if device.type == "cuda" and shape["batch"] == 1:
            yield "eager", Comparison(calls, partial(check, q, cache), clock=wall)


def _build_ragged(shape: dict[str, int], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """Lengths from 512 to 16384; torch's kernels take them as a mask over all 16384 keys."""
    q, cache = draw(shape, device)
    generator = torch.Generator().manual_seed(4)
    lengths = torch.logspace(9, 14, shape["batch"], base=2.0).int()[torch.randperm(shape["batch"], generator=generator)]
    cache.lengths.copy_(lengths)
    mask = (torch.arange(shape["keys"], device=device) < cache.lengths[:, None])[:, None, None]
    pages = in_pages(cache, 16)

    def masked(backend: Any) -> Tensor:
        from torch.nn.attention import sdpa_kernel

        a, b, c = peers.heads_first(q, cache.k, cache.v)
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    from torch.nn.attention import SDPBackend

    calls: dict[str, Call] = {
        "warploom": lambda: warploom.decode(q, cache),
        "warploom, pages of 16": lambda: warploom.decode(q, pages),
        "cuDNN, masked": partial(masked, SDPBackend.CUDNN_ATTENTION),
        "efficient, masked": partial(masked, SDPBackend.EFFICIENT_ATTENTION),
    }
    bytes_read = float(2 * int(lengths.sum()) * shape["heads_kv"] * shape["head_dim"] * cache.k.element_size())
    with torch.no_grad():
        yield "graph", _captured(calls, partial(check, q, cache), bytes_read, device)


def _build_layers(shape: dict[str, int], device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """A step of 32 layers in one graph, append included."""
    layers = [draw(shape, device) for _ in range(LAYERS)]
    token = torch.randn(1, 1, shape["heads_kv"], shape["head_dim"], device=device, dtype=layers[0][0].dtype)
    last = torch.tensor([shape["keys"] - 1], device=device)

    def ours() -> Tensor:
        for q, cache in layers:
            cache.lengths.fill_(shape["keys"] - 1)
            cache.append(token, token)
            out = warploom.decode(q, cache)
        return out

    def torchs(attend: peers.Attention) -> Tensor:
        for q, cache in layers:
            cache.k.index_copy_(1, last, token)
            cache.v.index_copy_(1, last, token)
            cache.lengths.fill_(shape["keys"])
            out = attend(q, cache.k, cache.v)
        return out

    calls: dict[str, Call] = {"warploom": ours}
    calls |= {name: partial(torchs, peers.sdpa(name, False)) for name in ("cuDNN", "FA2")}
    q, cache = layers[-1]
    with torch.no_grad():
        comparison = _captured(calls, partial(check, q, cache), None, device)
        comparison.divide = LAYERS
        yield "graph, a layer", comparison


def _captured(calls: dict[str, Call], check: Any, bytes_read: float | None, device: torch.device) -> Comparison:
    if device.type != "cuda":
        return Comparison(calls, check, bytes=bytes_read)
    graphs: dict[str, Call] = {}
    refused = {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call)
        except Exception as error:  # a peer may fail in any way
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    return Comparison(graphs, check, bytes=bytes_read, refused=refused)


def capture(call: Call) -> Call:
    """The call as a graph; running it replays and gives the graph's output."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def check(q: Tensor, cache: KVCache, out: Tensor) -> float:
    """The largest error over some sequences, against fp32 arithmetic."""
    worst = 0.0
    for b in sorted({0, q.shape[0] // 2, q.shape[0] - 1}):
        length = int(cache.lengths[b])
        k, v = (t[b, :length].float() for t in (cache.k, cache.v))
        rows = q[b, 0].float().view(k.shape[1], -1, q.shape[3])
        weights = (torch.einsum("hgd,nhd->hgn", rows, k) * q.shape[3] ** -0.5).softmax(-1)
        want = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        worst = max(worst, float((out[b, 0].float() - want).norm() / want.norm()))
    if not worst <= FURTHEST:
        raise WrongResult(f"out is {worst:.2g} of its norm away from fp32 arithmetic, more than {FURTHEST:g}")
    return worst
