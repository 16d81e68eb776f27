"""A decode call after validation: the op's arguments and the description dispatch decides on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_BIASES = {"alibi": "ALiBi", "distance": "Relative", "key": "Key"}


class DecodeArgs(NamedTuple):
    """The arguments of the decode op, in schema order; every implementation receives one of these.

    ``k`` and ``v`` are (batch, capacity, heads_kv, ·), or pages (pages, page_size, heads_kv, ·) with ``block_table``
    int32 (batch, pages_per_sequence). Query t of T sits at p = length - T + t and sees key j when
    -right <= p - j <= left; left None is unlimited, right is never positive (decode is causal). ``tree``, int32 (batch|1, T),
    hides of the last T keys what is no ancestor of the query's, and puts queries and keys of the T tokens at
    length - T + depth, the number of their ancestors. ``k`` and ``v`` of float8_e4m3fn have scales, float32 (1,),
    (heads_kv,) or a token and head as k; q is rotated as they are.

    ``bias`` is added to scores behind the softcap, in fp32 (fp64 for fp64 inputs), where masks show them; -inf hides. By
    ``bias_kind``, with p of the query and j the place of the key, which is p of a tree's own keys:

    - "alibi": slopes, contiguous fp32 (batch|1, heads_q): -slope · |p - j|.
    - "distance": a table, contiguous fp32 (heads_q, entries): the entry p - j + ``bias_origin``, clamped to the first and last.
    - "key": values of any float dtype and strides, (batch|1, heads_q|1, capacity or more): that of max(j, 0).

    For fp64 inputs slopes and tables are fp64.

    ``latent``: v is the first columns of k, in the same memory.

    A hint, which changes no result: ``prefix``, int32 (batch + 1,), as `SharedPrefix` has it, or without it ``prefix_keys``
    of all sequences, 0 for none: so many leading keys of b are those of b - 1 too, as far as both reach.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor | None
    sink: Tensor | None
    tree: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    left: int | None
    right: int
    scale: float
    softcap: float
    backend: str
    bias: Tensor | None = None
    bias_kind: str = ""
    bias_origin: int = 0
    latent: bool = False
    prefix: Tensor | None = None
    prefix_keys: int = 0

    @property
    def capacity(self) -> int:
        """Keys a sequence can hold."""
        if self.block_table is None:
            return self.k.shape[1]
        return self.block_table.shape[1] * self.k.shape[1]

    @property
    def windowed(self) -> bool:
        """Whether distances decide which keys before its own a query sees."""
        return self.left is not None or self.right < 0

    @property
    def measures_paths(self) -> bool:
        """Whether it matters how deep in a tree its tokens are."""
        return self.tree is not None and (self.windowed or self.bias is not None)


class AppendArgs(NamedTuple):
    """New keys and values (batch, T, heads_kv, ·) for a cache; ``advance`` adds them to the lengths."""

    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    block_table: Tensor | None
    slot_mapping: Tensor | None
    k: Tensor
    v: Tensor
    advance: bool = True


class AppendFp8Args(NamedTuple):
    """New keys and values (batch, T, heads_kv, ·) for an FP8 cache, given as bytes, and its scales; ``seed`` rotates keys."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor
    v_scale: Tensor
    lengths: Tensor
    block_table: Tensor | None
    slot_mapping: Tensor | None
    k: Tensor
    v: Tensor
    seed: int | None
    advance: bool = True


@dataclass(frozen=True)
class DecodeProblem:
    """Everything dispatch may look at: shapes, dtypes and features, never tensor contents."""

    device: str
    dtype: torch.dtype
    batch: int
    queries: int
    capacity: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    page_size: int | None = None
    left: int | None = None
    right: int = 0
    softcap: bool = False
    sink: bool = False
    tree: bool = False
    fp8: bool = False
    bias: str = ""  # its kind
    latent: bool = False  # values are the first columns of keys
    prefix: bool = False  # the caller says which sequences begin alike

    @classmethod
    def from_args(cls, args: DecodeArgs) -> DecodeProblem:
        return cls(
            device=args.q.device.type,
            dtype=args.q.dtype,
            batch=args.q.shape[0],
            queries=args.q.shape[1],
            capacity=args.capacity,
            heads_q=args.q.shape[2],
            heads_kv=args.k.shape[2],
            head_dim=args.k.shape[3],
            head_dim_v=args.v.shape[3],
            page_size=None if args.block_table is None else args.k.shape[1],
            left=args.left,
            right=args.right,
            softcap=args.softcap != 0.0,
            sink=args.sink is not None,
            tree=args.tree is not None,
            fp8=args.k_scale is not None,
            bias=args.bias_kind,
            latent=args.latent,
            prefix=args.prefix is not None or args.prefix_keys > 0,
        )

    def describe(self) -> str:
        """One line in the words of a user."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        where = "a contiguous cache" if self.page_size is None else f"pages of {self.page_size}"
        parts = [
            f"decode {str(self.dtype).removeprefix('torch.')} on {self.device}",
            f"batch {self.batch}, {self.queries} {'query' if self.queries == 1 else 'queries'} over {self.capacity} keys, "
            f"heads {self.heads_q}/{self.heads_kv}, head_dim {dims}",
            f"{where}{' in FP8' if self.fp8 else ''}{', latent' if self.latent else ''}",
        ]
        if self.left is not None or self.right:
            parts.append(f"window (left {'∞' if self.left is None else self.left}, right {self.right})")
        parts += [name for name in ("softcap", "sink", "tree") if getattr(self, name)]
        if self.bias:
            parts.append(f"bias ({_BIASES[self.bias]})")
        if self.prefix:
            parts.append("shared prefix")
        return "; ".join(parts)
