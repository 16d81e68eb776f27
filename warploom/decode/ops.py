"""The ops of decode: what compilers see in place of the kernels and of the cache's append."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.decode.append import append
from warploom.decode.backend import DecodeBackend
from warploom.decode.problem import AppendArgs, AppendFp8Args, DecodeArgs
from warploom.kernels.e4m3 import quantized, rotate, scales_of
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


class AppendFp8Op(Op):
    """Rotate, scale, round and write validated new keys and values behind each sequence's length, and their scales."""

    name, public = "decode_append_fp8", "append() of an FP8 cache"
    without = "write keys, values and scales with torch's index_put in its place"
    signature = (
        "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor(e!) lengths, "
        "Tensor? block_table, Tensor? slot_mapping, Tensor k, Tensor v, int? seed, bool advance) -> ()"
    )

    def forward(self, *flat: Any) -> None:
        args = AppendFp8Args(*flat)
        with settled_dtypes(args.k):
            if args.k.numel() and args.v.numel():
                for backend in dispatch.implementations("decode"):
                    if isinstance(backend, DecodeBackend) and backend.quantizes(args) and backend.available() is None:
                        backend.append_fp8(args)
                        return
            append_quantized(args)

    def fake(self, *flat: Any) -> None:
        pass

    def flops(self, *flat: Any) -> int:
        return nothing()


def append_quantized(a: AppendFp8Args) -> None:
    """An append to an FP8 cache in torch ops: a scale a token is made here, others are taken as they are."""
    k = a.k if a.seed is None else rotate(a.k, a.seed)
    where = a.lengths, a.block_table, a.slot_mapping
    if a.k_scale.ndim > 1:
        new_k, new_v = scales_of(k), scales_of(a.v)
        append_op.forward(a.k_scale[..., None], a.v_scale[..., None], *where, new_k[..., None], new_v[..., None], False)
    else:
        new_k, new_v = a.k_scale, a.v_scale
    # As bytes: they are copied, and not every device knows the type.
    new = quantized(k, new_k).view(torch.uint8), quantized(a.v, new_v).view(torch.uint8)
    append_op.forward(a.k_cache, a.v_cache, *where, *new, a.advance)


def is_empty(args: DecodeArgs) -> bool:
    """Whether there is no query or no key: no implementation sees such a call."""
    return args.q.numel() == 0 or args.capacity == 0 or args.k.shape[0] == 0


decode_op, append_op, append_fp8_op = DecodeOp(), AppendOp(), AppendFp8Op()
