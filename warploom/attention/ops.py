"""The op of exact attention, with its backward pass, those of FP8 and of stats: shapes for tracers, results of empty calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warploom.attention.problem import LAUNCHED, AttentionArgs
from warploom.attention.stats import FAMILY, Beside, StatsBackend
from warploom.runtime import dispatch
from warploom.runtime.flops import lengths_of
from warploom.runtime.op import DifferentiableOp, Op, schema, settled_dtypes


class AttentionOp(DifferentiableOp):
    """out, lse = attention(*AttentionArgs), differentiable in q, k, v, sink and bias."""

    name, public = "attention", "warploom.attention"
    without = "export the model with backend='reference' or torch's scaled_dot_product_attention in its place"
    arguments, names = schema(AttentionArgs), AttentionArgs._fields
    results, upstream, kept = 2, (0, 1), (0, 1)
    gradients = ("q", "k", "v", "sink", "bias")
    launched = 4  # a call with a bias has no launcher
    order = LAUNCHED

    def forward(self, *flat: Any) -> tuple[Tensor, ...]:
        args = AttentionArgs(*flat)
        if _is_empty(args):
            return args.q.new_zeros((*args.q.shape[:-1], args.v.shape[-1])), _only_sinks(args)
        with settled_dtypes(args.q):
            found: tuple[Tensor, ...] = dispatch.find(args.backend).forward(args)
        return found

    def backward(self, upstream: Sequence[Tensor | None], kept: Sequence[Tensor], flat: Sequence[Any]) -> tuple[Tensor, ...]:
        args, (dout, dlse), (out, lse) = AttentionArgs(*flat), upstream, kept
        if _is_empty(args):
            dsink = args.q.new_zeros(0) if args.sink is None else torch.zeros_like(args.sink)
            if args.sink is not None and dlse is not None:
                # Where lse is -inf it is not the sink: a token of no sequence.
                dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
                dsink += dlse.sum(dim=[d for d in range(dlse.ndim) if d != dlse.ndim - 2]).to(dsink.dtype)
            dq, dk, dv = (t.new_zeros(t.shape) for t in (args.q, args.k, args.v))
            return dq, dk, dv, dsink, _no_bias_gradient(args)
        if dout is None:
            dout = torch.zeros_like(out)
        with settled_dtypes(args.q):
            gradients: tuple[Tensor, ...] = dispatch.find(args.backend).backward(args, dout, dlse, out, lse)
        return gradients if args.bias_grad else (*gradients, args.q.new_zeros(0))

    def fake(self, *flat: Any) -> tuple[Tensor, ...]:
        args = AttentionArgs(*flat)
        out = args.q.new_empty((*args.q.shape[:-1], args.v.shape[-1]))
        return out, args.q.new_empty(_lse_shape(args), dtype=torch.float32)

    def fake_backward(self, *flat: Any) -> tuple[Tensor, ...]:
        args = AttentionArgs(*flat)
        dsink = args.q.new_empty(0) if args.sink is None else args.sink.new_empty(args.sink.shape)
        dbias = args.q.new_empty(0)
        if args.bias_grad:
            assert args.bias is not None
            dbias = args.bias.new_empty(args.bias.shape)
        return (*(t.new_empty(t.shape) for t in (args.q, args.k, args.v)), dsink, dbias)

    def flops(self, *flat: Any) -> Any:
        args = AttentionArgs(*flat)
        return 2 * _scores(args) * (args.q.shape[-1] + args.v.shape[-1])  # q kᵀ, p v

    def flops_backward(self, *flat: Any) -> Any:
        args = AttentionArgs(*flat)
        return 2 * _scores(args) * (3 * args.q.shape[-1] + 2 * args.v.shape[-1])  # q kᵀ, ds k, dsᵀ q; do vᵀ, pᵀ do


class AttentionWithMaxLogitsOp(AttentionOp):
    """out, lse, max_logits = attention_with_max_logits(*AttentionArgs): as ``attention``; no gradient goes through the last."""

    name, public = "attention_with_max_logits", "warploom.attention with return_stats"
    results = 3

    def forward(self, *flat: Any) -> tuple[Tensor, ...]:
        args = AttentionArgs(*flat)
        if _is_empty(args):
            out, lse = super().forward(*flat)
            return out, lse, args.q.new_full(_heads_shape(args), float("-inf"), dtype=torch.float32)
        backend = dispatch.find(args.backend)
        assert isinstance(backend, Beside)
        with settled_dtypes(args.q):
            return backend.forward_with_max_logits(args)

    def fake(self, *flat: Any) -> tuple[Tensor, ...]:
        args = AttentionArgs(*flat)
        return *super().fake(*flat), args.q.new_empty(_heads_shape(args), dtype=torch.float32)


class Fp8Op(Op):
    """out, lse = attention_fp8(*AttentionArgs, …) of q, k and v that are e4m3 as they are, besides their scales.

    The scales and ``fast`` are those of `warploom.fp8.Fp8Tensor`, and the backend is one with a kernel that takes the call.
    """

    name, public = "attention_fp8", "warploom.attention of FP8 tensors"
    without = AttentionOp.without
    signature = (
        f"({schema(AttentionArgs)}, Tensor scale_q, Tensor scale_k, Tensor scale_v, ScalarType out_dtype, "
        "bool fast) -> (Tensor, Tensor)"
    )

    def forward(self, *flat: Any) -> tuple[Tensor, Tensor]:
        args, scales, (out_dtype, fast) = AttentionArgs(*flat[:-5]), flat[-5:-2], flat[-2:]
        found: tuple[Tensor, Tensor] = dispatch.find(args.backend).forward_fp8(args, scales, out_dtype, fast)  # type: ignore[attr-defined]
        return found

    def fake(self, *flat: Any) -> tuple[Tensor, Tensor]:
        args, out_dtype = AttentionArgs(*flat[:-5]), flat[-2]
        out = args.q.new_empty((*args.q.shape[:-1], args.v.shape[-1]), dtype=out_dtype)
        return out, args.q.new_empty(_lse_shape(args), dtype=torch.float32)

    def flops(self, *flat: Any) -> Any:
        args = AttentionArgs(*flat[:-5])
        return 2 * _scores(args) * (args.q.shape[-1] + args.v.shape[-1])


class StatsOp(Op):
    """max_logits, column_sums = attention_stats(*AttentionArgs, lse, …), fp32; no elements in what is not asked for.

    The call is one that `warploom.attention.stats.stats_args` made, and lse is its; None: column sums need one that is computed
    here.
    """

    name, public = "attention_stats", "warploom.attention with return_stats"
    without = AttentionOp.without
    signature = f"({schema(AttentionArgs)}, Tensor? lse, bool max_logits, bool column_sums) -> (Tensor, Tensor)"

    def forward(self, *flat: Any) -> tuple[Tensor, Tensor]:
        args, (lse, max_logits, column_sums) = AttentionArgs(*flat[:-3]), flat[-3:]
        if _is_empty(args):
            largest, sums = self.fake(*flat)
            return largest.fill_(float("-inf")), sums.zero_()
        backend = dispatch.find(args.backend, FAMILY)
        assert isinstance(backend, StatsBackend)
        with settled_dtypes(args.q):
            if column_sums and lse is None:
                _, lse = backend.forward(args)
            found = backend.stats(args, lse, max_logits, column_sums)
        largest, sums = [args.q.new_empty(0, dtype=torch.float32) if t is None else t for t in found]
        return largest, sums

    def fake(self, *flat: Any) -> tuple[Tensor, Tensor]:
        args, (_, max_logits, column_sums) = AttentionArgs(*flat[:-3]), flat[-3:]
        q, k = args.q, args.k
        shape = (q.shape[0], q.shape[2], k.shape[1]) if q.ndim == 4 else (q.shape[1], k.shape[0])
        return (
            q.new_empty(_heads_shape(args) if max_logits else 0, dtype=torch.float32),
            q.new_empty(shape if column_sums else 0, dtype=torch.float32),
        )

    def flops(self, *flat: Any) -> Any:
        args, (lse, _, column_sums) = AttentionArgs(*flat[:-3]), flat[-3:]
        products = 3 if column_sums and lse is None else 1  # q kᵀ, and those of a forward pass for lse
        return 2 * products * _scores(args) * args.q.shape[-1]


def _no_bias_gradient(args: AttentionArgs) -> Tensor:
    """Zeros of the bias's shape, where nobody read it; no elements where no gradient is asked for."""
    if not args.bias_grad:
        return args.q.new_zeros(0)
    assert args.bias is not None
    return args.bias.new_zeros(args.bias.shape)


def _scores(args: AttentionArgs) -> Any:
    """Scores of all heads, masked ones too: pairs of a query and a key of its sequence, as torch counts them."""
    if args.cu_seqlens_q is None:
        batch, seqlen_q, heads, _ = args.q.shape
        return batch * heads * seqlen_q * args.k.shape[1]
    starts_q, starts_k, used = args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k
    sequences = starts_q.shape[0] - 1
    if used is None:
        starts_k = starts_q if starts_k is None else starts_k
        used = starts_k.diff()
    queries = lengths_of(starts_q.diff(), sequences, args.max_seqlen_q)
    keys = lengths_of(used, sequences, args.max_seqlen_k)
    return args.q.shape[1] * sum(n * m for n, m in zip(queries, keys, strict=True))


def _lse_shape(args: AttentionArgs) -> tuple[int, ...]:
    q = args.q
    return (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])


def _heads_shape(args: AttentionArgs) -> tuple[int, int]:
    """Heads of all batch entries or sequences."""
    starts = args.cu_seqlens_q
    return args.q.shape[0] if starts is None else starts.shape[0] - 1, args.q.shape[-2]


def _is_empty(args: AttentionArgs) -> bool:
    """Whether there is no query or no key: no implementation sees such a call."""
    return args.q.numel() == 0 or args.k.numel() == 0


def _only_sinks(args: AttentionArgs) -> Tensor:
    """The lse of a call without keys: the sink, or -inf without one and of packed tokens past the last sequence."""
    lse = args.q.new_full(_lse_shape(args), float("-inf"), dtype=torch.float32)
    if args.sink is None:
        return lse
    lse.copy_(args.sink[:, None].expand(lse.shape))
    if args.cu_seqlens_q is not None:
        nobody = torch.arange(args.q.shape[0], device=args.q.device) >= args.cu_seqlens_q[-1]
        lse.masked_fill_(nobody, float("-inf"))
    return lse


attention_op = AttentionOp()
attention_with_max_logits_op = AttentionWithMaxLogitsOp()
fp8_op = Fp8Op()
stats_op = StatsOp()
