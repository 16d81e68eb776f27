"""Warploom: every attention you train, serve and study, in one package."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from warploom.deferred import Deferred, defers

__all__ = [
    "KVCache",
    "LinearState",
    "PagedKVCache",
    "attention",
    "attention_varlen",
    "decode",
    "explain",
    "linear_attention",
    "linear_attention_step",
    "masks",
    "prepare",
    "scaled_dot_product_attention",
    "strict",
]

try:
    __version__ = version("warploom")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

if TYPE_CHECKING or not defers():
    from warploom import masks
    from warploom.attention.api import attention, attention_varlen, explain, prepare, scaled_dot_product_attention
    from warploom.decode.api import decode
    from warploom.decode.cache import KVCache, PagedKVCache
    from warploom.linear.api import linear_attention, linear_attention_step
    from warploom.linear.state import LinearState
    from warploom.runtime.dispatch import strict
else:  # `warploom --help` needs no torch
    sys.modules[__name__].__class__ = Deferred
