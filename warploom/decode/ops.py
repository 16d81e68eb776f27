"""The ops of decode: what compilers see in place of the kernels and of the cache's append."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.decode.append import append
from warploom.decode.backend import DecodeBackend
from warploom.decode.problem import AppendArgs, DecodeArgs
from warploom.runtime import dispatch
from warploom.runtime.flops import lengths_of, nothing
from warploom.runtime.op import Op, schema, settled_dtypes


class DecodeOp(Op):
    """Out (batch, T, heads_q, head_dim_v) and lse, fp32 (batch, heads_q, T), of validated arguments."""

    name, public = "decode", "warploom.decode"
    signature = f"({schema(DecodeArgs)}) -> (Tensor, Tensor)"

    def forward(self, *flat: Any) -> tuple[Tensor, Tensor]:
        args = DecodeArgs(*flat)
        if is_empty(args):
            out, lse = self.fake(*flat)
            lse.fill_(float("-inf"))
            if args.sink is not None:
                lse.copy_(args.sink[:, None].expand_as(lse))
            return out.zero_(), lse
        with settled_dtypes(args.q):
            out, lse = dispatch.find(args.backend, "decode").forward(args)
        return out, lse.float()

    def fake(self, *flat: Any) -> tuple[Tensor, Tensor]:
        args = DecodeArgs(*flat)
        batch, queries, heads_q, _ = args.q.shape
        out = args.q.new_empty((batch, queries, heads_q, args.v.shape[-1]))
        return out, args.q.new_empty((batch, heads_q, queries), dtype=torch.float32)

    def flops(self, *flat: Any) -> Any:
        args = DecodeArgs(*flat)
        batch, queries, heads_q, head_dim = args.q.shape
        keys = sum(lengths_of(args.lengths, batch, args.capacity))
        return 2 * queries * heads_q * keys * (head_dim + args.v.shape[-1])


class AppendOp(Op):
    """Write validated new keys and values behind each sequence's length."""

    name, public = "decode_append", "append() of a cache"
    without = "write keys and values with torch's index_put in its place"
    signature = (
        "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) lengths, Tensor? block_table, Tensor? slot_mapping, "
        "Tensor k, Tensor v, bool advance) -> ()"
    )

    def forward(self, *flat: Any) -> None:
        args = AppendArgs(*flat)
        if args.k.shape[0] == 0 or args.k.shape[1] == 0:
            return
        if args.k.numel():  # of heads or dims there may be none: nothing to launch
            for backend in dispatch.implementations("decode"):
                if isinstance(backend, DecodeBackend) and backend.appends(args.k.device.type) and backend.available() is None:
                    backend.append(args)
                    return
        append(args)

    def fake(self, *flat: Any) -> None:
        pass

    def flops(self, *flat: Any) -> int:
        return nothing()


def is_empty(args: DecodeArgs) -> bool:
    """Whether there is no query or no key: no implementation sees such a call."""
    return args.q.numel() == 0 or args.capacity == 0 or args.k.shape[0] == 0


decode_op, append_op = DecodeOp(), AppendOp()
