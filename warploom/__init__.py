"""Warploom: every attention you train, serve and study, in one package.

- `attention()`, `attention_varlen()` for packed sequences and `scaled_dot_product_attention()`, torch's drop-in, are exact
  softmax attention; `masks`, `bias` and `fp8` hold what they take.
- `decode()` is the same of a few new queries over a `KVCache` or `PagedKVCache`.
- `linear_attention()`, `gated_delta_rule()` and their steps have a state in place of a cache; `nn` has their layers.
- `distributed` deals one sequence to many devices.
- `explain()` says what a call would run and why, `prepare()` makes it ready, `strict()` makes a slower choice an error. The
  command `warploom doctor` says what can run on this machine.
"""

from typing import TYPE_CHECKING, Any

from warploom.deferred import defer, defers

__all__ = [
    "AttentionStats",
    "KVCache",
    "LinearState",
    "PagedKVCache",
    "SharedPrefix",
    "attention",
    "attention_varlen",
    "batch_invariant",
    "bias",
    "decode",
    "distributed",
    "explain",
    "fp8",
    "gated_delta_rule",
    "gated_delta_step",
    "linear_attention",
    "linear_attention_step",
    "masks",
    "prepare",
    "scaled_dot_product_attention",
    "strict",
]

if TYPE_CHECKING or not defers():
    from warploom import bias, masks
    from warploom.attention.api import attention, attention_varlen
    from warploom.attention.explain import explain, prepare
    from warploom.attention.sdpa import scaled_dot_product_attention
    from warploom.attention.stats import AttentionStats
    from warploom.decode.api import decode
    from warploom.decode.cache import KVCache, PagedKVCache
    from warploom.decode.prefix import SharedPrefix
    from warploom.delta.api import gated_delta_rule, gated_delta_step
    from warploom.linear.api import linear_attention, linear_attention_step
    from warploom.linear.state import LinearState
    from warploom.runtime.dispatch import strict
    from warploom.runtime.invariance import batch_invariant
else:  # `warploom --help` needs no torch
    defer()

if TYPE_CHECKING:
    from warploom import distributed, fp8
    from warploom import nn as nn  # not in __all__: `from warploom import *` would hide torch's
else:

    def __getattr__(name: str) -> Any:
        """`distributed`, `fp8` and `nn`, at their first use: modules that most programs never need."""
        if name in ("distributed", "fp8", "nn"):
            from importlib import import_module

            return import_module(f"warploom.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("warploom")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


__version__ = _version()
