"""Warploom: every attention you train, serve and study, in one package."""

from typing import TYPE_CHECKING

from warploom.deferred import defer, defers

__all__ = [
    "KVCache",
    "LinearState",
    "PagedKVCache",
    "attention",
    "attention_varlen",
    "bias",
    "decode",
    "distributed",
    "explain",
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
    from warploom import bias, distributed, masks
    from warploom.attention.api import attention, attention_varlen, explain, prepare, scaled_dot_product_attention
    from warploom.decode.api import decode
    from warploom.decode.cache import KVCache, PagedKVCache
    from warploom.delta.api import gated_delta_rule, gated_delta_step
    from warploom.linear.api import linear_attention, linear_attention_step
    from warploom.linear.state import LinearState
    from warploom.runtime.dispatch import strict
else:  # `warploom --help` needs no torch
    defer()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("warploom")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


__version__ = _version()
