"""Calls that every backend must pass, small enough for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch

from tests.decode.harness import Case

half, bfloat = torch.float16, torch.bfloat16

# A draft tree of seven tokens in breadth-first order, which is no preorder, and one in preorder.
BROAD = [-1, -1, 0, 0, 1, 2, 2]
DEEP = [-1, 0, 1, 1, 0, 4, -1]

# name: everything of a Case but its seed
CASES: dict[str, dict[str, Any]] = {
    "one query": {"lengths": [700, 37]},
    "one head": {"lengths": [70], "heads_q": 1, "heads_kv": 1},
    "group of 7, 5 queries, batch 3": {"lengths": [90, 5, 70], "queries": 5, "heads_q": 7, "heads_kv": 1},
    "multi-query, length % 64 == 1": {"lengths": [65, 129], "heads_q": 6, "heads_kv": 1},
    "16 queries": {"lengths": [90, 16], "queries": 16, "heads_kv": 1, "heads_q": 2},
    "empty sequences": {"lengths": [0, 20, 0], "queries": 2},
    "all empty": {"lengths": [0, 0], "capacity": 24, "sink": True},
    "more queries than keys": {"lengths": [1, 3, 60], "queries": 4},
    "more queries than keys, sink": {"lengths": [1, 0, 60], "queries": 4, "sink": True},
    "window": {"lengths": [300, 90, 3], "queries": 3, "keywords": {"window": (50, 0)}},
    "window that hides the newest": {"lengths": [200, 4], "queries": 2, "keywords": {"window": (80, -5)}},
    "window that hides all": {"lengths": [100, 4], "keywords": {"window": (-1, None)}, "sink": True},
    "window, right unlimited": {"lengths": [100, 300], "keywords": {"window": (180, 9)}, "queries": 2},
    "softcap": {"lengths": [90, 30], "keywords": {"softcap": 2.0}, "spread": 4.0},
    "softcap far from its bend": {"lengths": [90, 200], "keywords": {"softcap": 50.0}},
    "scale and sink": {"lengths": [90, 280], "keywords": {"scale": 0.3}, "sink": True},
    "negative scale": {"lengths": [90], "keywords": {"scale": -0.4}},
    "peaked": {"lengths": [300], "spread": 40.0, "dtype": half},
    "head_dim 40, head_dim_v 72": {"lengths": [90, 40], "head_dim": 40, "head_dim_v": 72, "dtype": half},
    "head_dim 256": {"lengths": [70], "head_dim": 256, "dtype": bfloat},
    "bfloat16": {"lengths": [200, 1, 0], "queries": 2, "head_dim": 64, "dtype": bfloat, "sink": True},
    "float16": {"lengths": [200, 100], "head_dim": 64, "dtype": half},
    "capacity far beyond": {"lengths": [20, 3], "capacity": 1500},
    "pages of 1": {"lengths": [70, 9], "page_size": 1},
    "pages of 16": {"lengths": [300, 1, 0], "page_size": 16, "queries": 3},
    "pages of 64, window": {"lengths": [300, 150], "page_size": 64, "keywords": {"window": (100, 0)}},
    "pages of 256": {"lengths": [300, 256], "page_size": 256},
    "tree": {"lengths": [90, 7, 130], "queries": 7, "tree": [BROAD]},
    "a tree a sequence, group of 7": {"lengths": [90, 37], "queries": 7, "heads_q": 7, "heads_kv": 1, "tree": [BROAD, DEEP]},
    "tree of one": {"lengths": [40], "tree": [[-1]]},
    "tree without enough keys": {"lengths": [3, 0, 20], "queries": 7, "tree": [DEEP], "sink": True},
    "tree, window": {"lengths": [300, 12], "queries": 7, "tree": [DEEP], "keywords": {"window": (50, 0)}},
    "tree, window that hides the newest": {"lengths": [70], "queries": 7, "tree": [DEEP], "keywords": {"window": (4, -1)}},
    "tree, softcap, sink, pages of 16": {
        "lengths": [90, 135],
        "queries": 7,
        "tree": [BROAD],
        "page_size": 16,
        "sink": True,
        "keywords": {"softcap": 2.0},
    },
    "tree, head_dim 40, head_dim_v 72": {
        "lengths": [70],
        "queries": 7,
        "tree": [BROAD],
        "head_dim": 40,
        "head_dim_v": 72,
        "dtype": half,
    },
    "tree of 64": {
        "lengths": [80, 66],
        "queries": 64,
        "heads_q": 1,
        "heads_kv": 1,
        "page_size": 16,
        "tree": [[(t - 1) // 2 for t in range(64)], [t - 1 if t % 5 else -1 for t in range(64)]],
    },
    "alibi": {"lengths": [70, 9, 0], "queries": 3, "bias": "alibi"},
    "alibi of sequences, group of 7": {"lengths": [40, 20], "heads_q": 7, "heads_kv": 1, "bias": "alibi of sequences"},
    "alibi, tree, pages of 16": {"lengths": [40, 5], "queries": 7, "tree": [BROAD, DEEP], "page_size": 16, "bias": "alibi"},
    "relative, 16 queries": {"lengths": [40], "queries": 16, "heads_kv": 1, "heads_q": 2, "bias": "relative"},
    "relative that hides, window": {
        "lengths": [90, 3],
        "queries": 3,
        "bias": "relative, one side, hides",
        "keywords": {"window": (30, 0)},
        "dtype": half,
    },
    "relative buckets, softcap, sink": {
        "lengths": [60, 30],
        "bias": "relative, buckets",
        "keywords": {"softcap": 2.0},
        "spread": 4.0,
        "sink": True,
    },
    "relative, tree, window": {
        "lengths": [60],
        "queries": 7,
        "tree": [DEEP],
        "bias": "relative",
        "keywords": {"window": (30, -1)},
        "dtype": bfloat,
    },
    "t5": {"lengths": [70, 3], "queries": 2, "bias": "t5", "keywords": {"scale": 1.0}, "page_size": 64},
    "key": {"lengths": [20, 70], "queries": 2, "bias": "key", "page_size": 16},
    "key that hides, 5 queries, group of 7": {
        "lengths": [40, 5],
        "queries": 5,
        "heads_q": 7,
        "heads_kv": 1,
        "bias": "key of heads, hides",
        "capacity": 60,
    },
    "key of sequences, pages of 1": {"lengths": [30, 9], "page_size": 1, "bias": "key of sequences, more", "dtype": half},
    "key that hides, sink, head_dim 40, head_dim_v 72": {
        "lengths": [50, 1, 0],
        "head_dim": 40,
        "head_dim_v": 72,
        "bias": "key, hides",
        "sink": True,
    },
    "key, tree without enough keys": {"lengths": [3, 20], "queries": 7, "tree": [DEEP], "bias": "key", "sink": True},
    "latent": {"lengths": [90, 7, 0], "heads_q": 5, "heads_kv": 1, "head_dim": 96, "head_dim_v": 64, "latent": True},
    "latent of 576, 2 queries": {
        "lengths": [40],
        "queries": 2,
        "heads_q": 16,
        "heads_kv": 1,
        "head_dim": 576,
        "head_dim_v": 512,
        "latent": True,
        "dtype": half,
    },
    "latent, odd dims, pages of 16, sink, softcap": {
        "lengths": [70, 33],
        "queries": 3,
        "heads_q": 6,
        "head_dim": 72,
        "head_dim_v": 40,
        "latent": True,
        "page_size": 16,
        "sink": True,
        "keywords": {"softcap": 2.0},
    },
    "latent, keys are values, window, pages of 1": {
        "lengths": [90, 20],
        "head_dim": 32,
        "latent": True,
        "page_size": 1,
        "keywords": {"window": (40, 0)},
    },
    "latent, tree, window": {
        "lengths": [60, 9],
        "queries": 7,
        "tree": [DEEP],
        "heads_kv": 1,
        "head_dim": 40,
        "head_dim_v": 32,
        "latent": True,
        "page_size": 64,
        "keywords": {"window": (30, -1)},
    },
    "latent, key that hides": {
        "lengths": [50, 9],
        "queries": 2,
        "heads_kv": 1,
        "head_dim": 96,
        "head_dim_v": 64,
        "latent": True,
        "bias": "key, hides",
        "dtype": half,
    },
    "one page each, no power of two": {"lengths": [70, 90], "capacity": 90, "page_size": 90},
}


def case(name: str, seed: int) -> Case:
    return Case(seed=seed, **CASES[name])
