"""Steps of sequences that begin alike, with what they share said to decode(), beside the same table read plainly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import warploom
from warploom import KVCache
from warploom.bench.captured import captured
from warploom.bench.decode_shapes import Shape, check, in_pages
from warploom.bench.harness import Call, Comparison, Own

# Sequences, keys that they share and keys of their own: where the bars are, and from 64 MB of keys and values on.
SHARED = ((64, 8192, 512),)
APART = ((16, 512, 512), (64, 4096, 512), (64, 8192, 512))

AddPeers = Callable[..., None]


def prefix_name(shape: Shape, shared: int) -> str:
    """Of ``shared`` keys in common, none of them in the table's pages where that is 0."""
    return f"prefix, {shape.name}, {shared or 'nothing'} shared"


def build_prefix(
    shape: Shape, shared: int, page_size: int, latency: float, add_peers: AddPeers, device: torch.device
) -> Iterator[tuple[str, Comparison]]:
    """What is shared is found once, outside of the calls, as a step of many layers has it; in "found in the call" for each."""
    q, cache = shape.draw(device)
    for t in (cache.k, cache.v):
        t[:, :shared] = t[:1, :shared]
    pages = in_pages(cache, page_size)
    pages.block_table[:, : shared // page_size] = pages.block_table[:1, : shared // page_size].clone()
    found = pages.shared_prefix()
    calls: dict[str, Call] = {
        "warploom": lambda: warploom.decode(q, pages, prefix=found),
        "warploom, plain": lambda: warploom.decode(q, pages),
        "warploom, found in the call": lambda: warploom.decode(q, pages, prefix=pages.shared_prefix()),
    }
    refused: dict[str, str] = {}
    if device.type == "cuda":
        add_peers(calls, refused, q, pages)
    judge = partial(check, q, KVCache(cache.k, cache.v, cache.lengths))
    number = 2.0 * shape.heads_kv * shape.head_dim * cache.k.element_size()  # bytes of a key and its value
    whole, once = number * shape.batch * shape.keys, number * (shared + shape.batch * (shape.keys - shared))
    own = {name: Own(judge, bytes=whole) for name in calls if not name.startswith("warploom") or name.endswith("plain")}
    measure = "graph, shared prefix" if shared else "graph, nothing shared"
    with torch.no_grad():
        yield measure, captured(calls, judge, device, refused, bytes=once, latency=latency, own=own)
