"""Calls that every backend must pass, small enough for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch

from tests.linear.harness import Case

half, bfloat, nan = torch.float16, torch.bfloat16, float("nan")

# name: everything of a Case but its seed
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "one token": {"seqlen_q": 1, "state": True},
    "a chunk exactly": {"seqlen_q": 64},
    "a chunk and one": {"seqlen_q": 65, "batch": 1},
    "several blocks, many heads": {"seqlen_q": 150, "heads_q": 8, "batch": 1},
    "not causal": {"keywords": {"causal": False}},
    "more queries than keys": {"seqlen_q": 90, "seqlen_k": 40},
    "more keys than queries": {"seqlen_q": 40, "seqlen_k": 90},
    "not causal, cross": {"seqlen_q": 33, "seqlen_k": 90, "keywords": {"causal": False}},
    "no keys": {"seqlen_q": 20, "seqlen_k": 0},
    "no keys, state": {"seqlen_q": 20, "seqlen_k": 0, "state": True},
    "no queries": {"seqlen_q": 0, "seqlen_k": 20, "state": True},
    "state": {"state": True},
    "state, not causal": {"state": True, "keywords": {"causal": False}},
    "lengths": {"batch": 3, "lengths": [70, 0, 33], "poison": nan},
    "lengths, not causal, state": {"lengths": [7, 70], "poison": float("inf"), "state": True, "keywords": {"causal": False}},
    "lengths, identity": {
        "lengths": [60, 7],
        "poison": nan,
        "keywords": {"feature_map": "identity", "normalize": False},
    },
    "packed": {"batch": 1, "seqlen_q": 150, "starts": [0, 37, 37, 120, 121, 121], "poison": nan},
    "packed, state, group": {"batch": 1, "seqlen_q": 99, "starts": [0, 0, 64, 99], "state": True, "heads_q": 4, "heads_kv": 2},
    "packed, not causal": {"batch": 1, "seqlen_q": 80, "starts": [0, 50, 80], "keywords": {"causal": False}},
    "group of 3": {"heads_q": 6, "heads_kv": 2, "seqlen_q": 45},
    "one key head": {"heads_q": 4, "heads_kv": 1, "state": True, "keywords": {"scale": 0.4}},
    "E 24, M 40": {"dim": 24, "dim_v": 40},
    "E 72, M 16": {"dim": 72, "dim_v": 16, "seqlen_q": 40},
    "no normalizer": {"keywords": {"normalize": False}, "state": True},
    "no normalizer, identity": {"keywords": {"normalize": False, "feature_map": "identity", "scale": 0.25}},
    "relu": {"keywords": {"feature_map": "relu", "eps": 1.0}},
    "a pair of maps": {"keywords": {"feature_map": ("relu", "elu+1"), "eps": 1.0, "scale": 0.5}},
    "scale": {"keywords": {"scale": 0.125, "eps": 1e-3}},
    "negative scale": {"keywords": {"scale": -0.5, "normalize": False}},
    "decay of a head": {"decay": "head", "seqlen_q": 150},
    "decay of a token": {"decay": "token", "seqlen_q": 150, "state": True, "heads_q": 4, "heads_kv": 2},
    "decay that forgets": {"decay": "token that forgets", "state": True},
    "decay, head that forgets": {"decay": "head that forgets", "heads_q": 6},
    "decay, more keys": {"decay": "token", "seqlen_q": 40, "seqlen_k": 150, "state": True},
    "decay, more queries": {"decay": "token", "seqlen_q": 90, "seqlen_k": 40},
    "decay, lengths": {"decay": "token", "batch": 3, "lengths": [70, 0, 33], "poison": nan, "state": True},
    "decay, packed": {"decay": "token", "batch": 1, "seqlen_q": 150, "starts": [0, 37, 37, 120, 121, 121], "poison": nan},
    "decay, no normalizer": {"decay": "token", "state": True, "keywords": {"normalize": False, "feature_map": "identity"}},
    "decay, no keys": {"decay": "token", "seqlen_q": 20, "seqlen_k": 0, "state": True},
    "decay, float16": {"decay": "token", "dtype": half, "state": True},
    "float16": {"dtype": half, "state": True},
    "bfloat16": {"dtype": bfloat, "heads_q": 4, "heads_kv": 2},
    "bfloat16, no normalizer": {"dtype": bfloat, "keywords": {"normalize": False}},
}


def case(name: str, seed: int) -> Case:
    return Case(seed=seed, **CASES[name])
