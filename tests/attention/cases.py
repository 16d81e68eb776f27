"""Dense calls that the kernels must pass, small enough for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.attention.harness import Call
from warploom import masks
from warploom.masks import Mask

# Lengths around the kernels' tiles of 32, 64 and 128 rows and keys.
SQUARE = {"seqlen_q": 200, "seqlen_k": 200, "batch": 1, "heads_q": 2, "heads_kv": 1}
WIDE = {"seqlen_q": 70, "seqlen_k": 200, "batch": 1, "heads_q": 2, "heads_kv": 1}
TALL = {"seqlen_q": 200, "seqlen_k": 70, "batch": 1, "heads_q": 2, "heads_kv": 1}

# name: everything of a Call but its seed
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {**SQUARE, "keywords": {"causal": True}},
    "causal, more keys": {**WIDE, "keywords": {"causal": True}},
    "causal, queries that see nothing": {**TALL, "keywords": {"causal": True}},
    "whole tiles": {**WIDE, "seqlen_q": 128, "seqlen_k": 192, "keywords": {"causal": True}},
    "one row past whole tiles": {**WIDE, "seqlen_q": 129, "seqlen_k": 129},
    "one query": {**WIDE, "seqlen_q": 1, "seqlen_k": 130, "keywords": {"causal": True}},
    "one key": {**WIDE, "seqlen_q": 130, "seqlen_k": 1},
    "window": {**SQUARE, "seqlen_k": 300, "keywords": {"window": (50, 20)}},
    "window behind": {**SQUARE, "keywords": {"window": (90, -5)}},
    "window ahead": {**SQUARE, "keywords": {"window": (-3, 40)}},
    "window to the left": {**TALL, "keywords": {"window": (30, 0)}},
    "window without a left limit": {**WIDE, "keywords": {"window": (None, 7)}},
    "window of nothing": {**SQUARE, "keywords": {"window": (-5, 3)}},
    "head_dim 40 and 72": {"head_dim": 40, "head_dim_v": 72, "keywords": {"causal": True}},
    "head_dim 72": {"head_dim": 72, "keywords": {"causal": True}},
    "head_dim 104": {"head_dim": 104, "keywords": {"causal": True}},
    "head_dim 128": {**WIDE, "head_dim": 128, "keywords": {"causal": True}},
    "head_dim 192 and 128": {**WIDE, "head_dim": 192, "head_dim_v": 128, "keywords": {"causal": True}},
    "head_dim 256": {**WIDE, "head_dim": 256, "keywords": {"causal": True}},
    "group of 3": {"heads_q": 6, "heads_kv": 2, "keywords": {"causal": True}},
    "group of 7": {"heads_q": 7, "heads_kv": 1, "keywords": {"causal": True}},
    "group of 8": {"heads_q": 8, "heads_kv": 1, "seqlen_q": 65, "seqlen_k": 65},
    "no group": {"heads_q": 3, "heads_kv": 3, "batch": 3},
    "softcap, sink and lse": {**SQUARE, "sink": True, "lse_gradient": True, "keywords": {"softcap": 3.0, "causal": True}},
    "sink of queries that see nothing": {**TALL, "sink": True, "keywords": {"causal": True}},
    "softcap far from its bend": {"keywords": {"softcap": 50.0}},
    "gradient through lse": {**TALL, "lse_gradient": True, "keywords": {"causal": True}},
    "negative scale": {"keywords": {"scale": -0.3, "causal": True}},
    "scale 0": {"keywords": {"scale": 0.0, "causal": True}},
    "strided": {"strided": True, "keywords": {"causal": True}},
    "expanded": {"expanded": True, "keywords": {"causal": True}},
    "dropout": {**SQUARE, "keywords": {"dropout_p": 0.3, "dropout_seed": 12345678901234, "window": (None, 3)}},
    "dropout and softcap": {"lse_gradient": True, "keywords": {"dropout_p": 0.5, "dropout_seed": -7, "softcap": 2.0}},
}


def _tree(nodes: int) -> torch.Tensor:
    """Branches of 16 nodes that leave a trunk of 64 at every fourth node."""
    parents = [i - 1 for i in range(64)]
    while len(parents) < nodes:
        root = 63 - (len(parents) - 64) // 16 * 4
        parents += [root, *range(len(parents), min(len(parents) + 15, nodes - 1))]
    return torch.tensor(parents[:nodes])


def _vectors(heads: int, queries: int, keys: int, count: int) -> list[torch.Tensor]:
    """Drawn vectors out of range at both ends, whatever they hide."""
    generator = torch.Generator().manual_seed(heads * 7 + count)
    return [torch.randint(-20, queries + 20, (2, heads, keys), generator=generator, dtype=torch.int32) for _ in range(count)]


# name: a mask, and what its call changes of SQUARE
MASKS: dict[str, tuple[Callable[[], Mask], dict[str, Any]]] = {
    "Full": (masks.Full, {}),
    "Causal": (masks.Causal, {}),
    "SlidingWindow": (lambda: masks.SlidingWindow(40, 10), {}),
    "Chunked": (lambda: masks.Chunked(70), {}),
    "Padding of lengths": (lambda: masks.Padding(torch.tensor([150, 30])), {"batch": 2}),
    "Padding anywhere": (lambda: masks.Padding(torch.arange(400).view(2, 200) % 7 != 0), {"batch": 2}),
    "Document": (lambda: masks.Document([[100, 37, 63], [1, 198, 1]]), {"batch": 2}),
    "Document that ends early": (lambda: masks.Document([100, 20]), {}),
    "Document, both ways": (lambda: masks.Document([100, 37, 63], causal=False), {}),
    "PrefixLM": (lambda: masks.PrefixLM([120, 0]), {"batch": 2}),
    "PrefixDocument": (lambda: masks.PrefixDocument([100, 100], [20, 70]), {}),
    "SharedQuestion": (lambda: masks.SharedQuestion(60, [50, 20, 70]), {}),
    "GlobalWindow": (lambda: masks.GlobalWindow(5, 40, 30), {}),
    "GlobalWindow, causal": (lambda: masks.GlobalWindow(70, 40), {}),
    "CausalBlockwise": (lambda: masks.CausalBlockwise([64, 70, 66]), {}),
    "Tree": (lambda: masks.Tree(_tree(200)), {}),
    "BidirectionalSpans": (lambda: masks.BidirectionalSpans([10, 100], [20, 90]), {}),
    "QKSparse": (lambda: masks.QKSparse([3, 4, 5, 90, 91, 150]), {}),
    "RandomEviction": (lambda: masks.RandomEviction(torch.arange(200).add(41).clamp(max=200).int()), {}),
    "BlockDiffusion": (lambda: masks.BlockDiffusion(100, 16), {}),
    "documents and a window": (lambda: masks.Document([100, 100]) & masks.SlidingWindow(30), {}),
    "lts": (lambda: masks.ColumnMask(*_vectors(1, 200, 200, 1), causal=True), {"batch": 2}),
    "lts and lte, per head": (lambda: masks.ColumnMask(*_vectors(2, 200, 200, 2)), {"batch": 2}),
    "ute, per kv head": (
        lambda: masks.ColumnMask(None, ute=_vectors(2, 70, 130, 1)[0]),
        {"batch": 2, "seqlen_q": 70, "seqlen_k": 130},
    ),
    "four vectors": (lambda: masks.ColumnMask(*_vectors(1, 200, 300, 4)), {"batch": 2, "seqlen_k": 300}),
    "four vectors, per head, causal": (
        lambda: masks.ColumnMask(*_vectors(4, 300, 150, 4), causal=True),
        {"batch": 2, "seqlen_q": 300},
    ),
    "hides all": (lambda: masks.ColumnMask(torch.zeros(1, 1, 200, dtype=torch.int32)), {}),
}
_CHANGES: dict[str, dict[str, Any]] = {
    "lts and lte, per head": {"heads_kv": 2},
    "ute, per kv head": {"heads_q": 6, "heads_kv": 2},
    "four vectors, per head, causal": {"heads_q": 4, "heads_kv": 2, "seqlen_k": 150},
}
# Masks that a call narrows further.
NARROWED: dict[str, dict[str, Any]] = {
    "Document, both ways": {"causal": True},
    "four vectors": {"window": (100, 30)},
    "GlobalWindow": {"window": (60, None)},
}


def case(name: str, seed: int, **changes: Any) -> Call:
    return Call(seed=seed, **{**CASES[name], **changes})


def masked(name: str, seed: int, device: str = "cpu", narrow: bool = False, **changes: Any) -> Call:
    build, shape = MASKS[name]
    keywords = {"mask": build().to(device), **(NARROWED[name] if narrow else {})}
    return Call(seed=seed, device=device, keywords=keywords, **{**SQUARE, **shape, **_CHANGES.get(name, {}), **changes})
