"""Autograd around the methods: local q, k, v and sink to local out and lse, with collectives in both passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.distributed import by_heads, gather, heads, local, ring
from warploom.distributed.call import Call


class Sharded(torch.autograd.Function):
    """out, lse = Sharded.apply(q, k, v, sink, call, method), of (batch, rows, heads, ·) tensors of this rank.

    Gradients are those of the sum of all ranks' losses. The sink's is the part that this rank computed, as every other
    parameter's: data-parallel averaging or summing over the same ranks makes it whole.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, method: str
    ) -> tuple[Tensor, Tensor]:
        kept: tuple[Tensor, ...]
        if method == "heads":
            out, lse, all_heads = heads.forward(call, q, k, v, sink)
            kept = tuple(all_heads)
        else:
            keys: tuple[Tensor, ...] = (k, v)
            if method == "ring":
                out, lse = ring.forward(call, q, k, v, sink)
            else:
                out, lse, gathered = gather.forward(call, q, k, v, sink, keeps=method == "gather")
                keys, ctx.keys = gathered.tensors, gathered._replace(tensors=())
            if call.tail:
                lse[:, :, -call.tail :] = float("-inf")
            kept = q, out, lse, *keys
        ctx.save_for_backward(sink, *kept)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.method, ctx.dtypes = call, method, (q.dtype, k.dtype, v.dtype)
        return out, lse.float()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; what follows would be constants to it
            raise RuntimeError("warploom.distributed.attention has no second derivatives: leave create_graph=True out")
        call, (sink, *kept) = ctx.call, ctx.saved_tensors
        if dlse is None and call.group is not None and ctx.method in ("heads", "gather-heads"):
            # Another rank may have one, and what is sent is of one size.
            assert dout is not None
            dlse = dout.new_zeros((dout.shape[0], dout.shape[2], dout.shape[1]), dtype=torch.float32)
        if ctx.method == "heads":
            every = heads.Kept(*kept)
            dlse = None if dlse is None else dlse.to(every.lse.dtype)
            if dout is None:
                assert dlse is not None
                batch, _, rows = dlse.shape
                dout = every.out.new_zeros((batch, rows, dlse.shape[1], every.out.shape[3]))
            dq, dk, dv, dsink = heads.backward(call, every, sink, dout, dlse)
        else:
            q, out, lse, *keys = kept
            dlse = None if dlse is None else dlse.to(lse.dtype)
            dout = torch.zeros_like(out) if dout is None else dout
            if ctx.method == "ring":
                k, v = keys
                dq, dk, dv = ring.backward(call, q, k, v, dout, dlse, out, lse)
            elif ctx.method == "gather-heads" and call.group is not None:
                assert dlse is not None
                k, v = keys
                dq, dk, dv = by_heads.backward(call, q, k, v, dout, dlse, out, lse)
            else:
                dq, dk, dv = gather.backward(call, q, ctx.keys._replace(tensors=tuple(keys)), dout, dlse, out, lse)
            dsink = None if sink is None else local.sink_gradient(sink, dout, dlse, out, lse)
        found = [t.to(dtype) for t, dtype in zip((dq, dk, dv), ctx.dtypes, strict=True)]
        return *found, None if dsink is None else dsink.to(sink.dtype), None, None
