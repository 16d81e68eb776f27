"""Values and gradients of every method under every kind of mask, against one device."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

from tests.distributed.harness import Sharded
from tests.distributed.registry import CASES
from tests.masks import samples
from warploom import masks
from warploom.distributed.choice import METHODS

BY_HEADS = "heads", "gather-heads"  # which ranks must divide


def columns(rng: random.Random, rows: int, keys: int, shape: tuple[int, int], names: str) -> masks.ColumnMask:
    """Vectors of random intervals, some of them empty."""

    def vector() -> torch.Tensor:
        return torch.tensor([rng.randint(-2, rows + 2) for _ in range(shape[0] * shape[1] * keys)]).view(*shape, keys)

    given = {name: vector() for name in names.split()}
    return masks.ColumnMask(given.pop("lts", None), **given, causal=rng.random() < 0.5)


def sampled(builder: Any, rank: int, world: int, seed: int) -> None:
    """A random mask of a builder, by its predicate, for the lengths that it draws, by a random method."""
    rng = random.Random(seed)
    method = rng.choice(METHODS)
    sample = builder(rng)
    while not (sample.seqlen_q and sample.seqlen_k) or (method in BY_HEADS and sample.heads > 1):
        sample = builder(rng)
    heads = sample.heads if sample.heads > 1 else world
    Sharded(
        seed,
        sample.seqlen_q,
        None if sample.seqlen_q == sample.seqlen_k else sample.seqlen_k,
        batch=sample.batch,
        heads_q=2 * heads,
        heads_kv=heads,
        method=method,
        keywords={"mask": sample.mask},
        seen=sample.dense(),
    ).check()


def drawn(make: Any, method: str, rank: int, world: int, seed: int) -> None:
    """A call that a function of a random generator and the number of ranks describes."""
    call = make(random.Random(seed), world)
    Sharded(seed, method=method, **call).check()


def lengths_of(rng: random.Random, total: int) -> list[int]:
    """Of documents, some without a token, that fill a row."""
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(rng.choice([0, 1, rng.randint(1, 30)]), total - sum(lengths)))
    return lengths


def starts_of(rng: random.Random, total: int) -> list[int]:
    """Of packed sequences; a few tokens may be in none."""
    starts = [0]
    for n in lengths_of(rng, total - rng.choice([0, 7])):
        starts.append(starts[-1] + n)
    return starts


CALLS: dict[str, Any] = {
    "no mask": lambda rng, world: {},
    "causal": lambda rng, world: {"keywords": {"causal": True}, "seqlen_q": rng.randint(60, 90)},
    "causal, chunks of 3": lambda rng, world: {"keywords": {"causal": True}, "chunk": 3},
    "window": lambda rng, world: {"keywords": {"window": (rng.randint(3, 20), rng.choice([0, 4]))}, "seqlen_q": 101},
    "window in documents": lambda rng, world: {
        "keywords": {"mask": masks.Document(lengths_of(rng, 77)), "window": (9, 2)},
        "seqlen_q": 77,
        "batch": 2,
    },
    "fewer queries than keys, causal": lambda rng, world: {"keywords": {"causal": True}, "seqlen_q": 40, "seqlen_k": 67},
    "more queries than keys, causal": lambda rng, world: {"keywords": {"causal": True}, "seqlen_q": 67, "seqlen_k": 40},
    "one query": lambda rng, world: {"keywords": {"causal": True}, "seqlen_q": 1, "seqlen_k": 13},
    "one token": lambda rng, world: {"seqlen_q": 1},
    "three tokens": lambda rng, world: {"keywords": {"causal": True}, "seqlen_q": 3},
    "sink": lambda rng, world: {"keywords": {"window": (4, -2)}, "sink": True, "seqlen_q": 50},
    "softcap": lambda rng, world: {"keywords": {"causal": True, "softcap": 1.5}},
    "scale": lambda rng, world: {"keywords": {"causal": True, "scale": -0.7}},
    "other head_dim_v": lambda rng, world: {"head_dim_v": 12, "keywords": {"causal": True}},
    "odd head dims": lambda rng, world: {"head_dim": 5, "head_dim_v": 7, "dtype": torch.bfloat16, "seqlen_q": 150},
    "groups of seven heads": lambda rng, world: {"heads_q": 14 * world, "heads_kv": 2 * world, "keywords": {"causal": True}},
    "four vectors": lambda rng, world: {"keywords": {"mask": columns(rng, 50, 50, (1, 1), "lts lte uts ute")}, "seqlen_q": 50},
    "four vectors of each head of q": lambda rng, world: {
        "keywords": {"mask": columns(rng, 50, 50, (2, 2 * world), "lts lte uts ute"), "causal": True},
        "seqlen_q": 50,
        "batch": 2,
        "heads_q": 2 * world,
        "heads_kv": world,
    },
    "two vectors of each head of k": lambda rng, world: {
        "keywords": {"mask": columns(rng, 50, 50, (1, world), "lts ute")},
        "seqlen_q": 50,
        "heads_q": 3 * world,
        "heads_kv": world,
    },
    "packed, causal": lambda rng, world: {"cu_seqlens": starts_of(rng, 80), "seqlen_q": 80, "keywords": {"causal": True}},
    "packed": lambda rng, world: {"cu_seqlens": starts_of(rng, 80), "seqlen_q": 80},
    "packed, window, sink": lambda rng, world: {
        "cu_seqlens": starts_of(rng, 80),
        "seqlen_q": 80,
        "keywords": {"window": (5, 1)},
        "sink": True,
    },
    "packed, columns": lambda rng, world: {
        "cu_seqlens": starts_of(rng, 60),
        "seqlen_q": 60,
        "keywords": {"mask": columns(rng, 20, 60, (1, 1), "lts ute")},
    },
    "packed, four vectors": lambda rng, world: {
        "cu_seqlens": starts_of(rng, 60),
        "seqlen_q": 60,
        "keywords": {"mask": columns(rng, 20, 60, (1, 1), "lts lte uts ute")},
    },
    "a plan for another mask": lambda rng, world: {"plan_mask": {}, "keywords": {"causal": True}},
    "float32": lambda rng, world: {"dtype": torch.float32, "seqlen_q": 150, "keywords": {"causal": True}, "sink": True},
    "bfloat16": lambda rng, world: {
        "dtype": torch.bfloat16,
        "seqlen_q": 150,
        "keywords": {"mask": masks.Document(lengths_of(rng, 150))},
        "batch": 2,
    },
    "float16, window": lambda rng, world: {"dtype": torch.float16, "seqlen_q": 150, "keywords": {"window": (40, 0)}},
}

DROPOUT: dict[str, Any] = {
    "causal": {"keywords": {"causal": True}},
    "documents": {"keywords": {"mask": masks.Document([30, 25, 15])}, "batch": 2},
    "a window, fewer queries": {"keywords": {"window": (20, 3)}, "seqlen_q": 50, "seqlen_k": 64},
    "on the cpu": {"keywords": {"causal": True}, "dtype": torch.float32},
}


def dropped(name: str, method: str, rank: int, world: int, seed: int) -> None:
    call = dict(DROPOUT[name])
    keywords = call.pop("keywords") | {"dropout_p": 0.3, "dropout_seed": seed}
    heads = {"heads_q": 4 * world, "heads_kv": 2 * world}
    Sharded(seed, method=method, keywords=keywords, **heads, **call).check()


def _whole_heads(make: Any, method: str, rng: random.Random, world: int) -> dict[str, Any]:
    """With heads for every rank, where the method needs that and the call does not say."""
    call: dict[str, Any] = make(rng, world)
    return call if method not in BY_HEADS or "heads_kv" in call else call | {"heads_q": 2 * world, "heads_kv": world}


for _name, _builder in samples.SAMPLERS.items():
    CASES[f"a random {_name}"] = partial(sampled, _builder)
for _method in METHODS:
    for _name, _make in CALLS.items():
        CASES[f"{_method}: {_name}"] = partial(drawn, partial(_whole_heads, _make, _method), _method)
for _name in DROPOUT:
    for _method in ("gather", *BY_HEADS):
        CASES[f"{_method}, dropout: {_name}"] = partial(dropped, _name, _method)
