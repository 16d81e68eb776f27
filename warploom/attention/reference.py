"""The specification: eager attention in plain differentiable torch ops, any float dtype, every feature.

Arithmetic is fp32, or fp64 for fp64 inputs. Memory is O(seqlen_q · seqlen_k). Everything torch can differentiate
works through it: double backward, forward AD, vmap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from warploom.attention import philox
from warploom.attention.bias_terms import add_gradient, terms
from warploom.attention.packing import Gradients, alone, entries, gradients, no_bias, sequences
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import StatsBackend
from warploom.masks.visible import visible
from warploom.runtime.op import settled_dtypes


def _forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    if args.cu_seqlens_q is not None:
        return _attend_packed(args)
    batches = torch.arange(args.q.shape[0], device=args.q.device)
    if not args.batch_invariant or not args.q.shape[0]:
        return _attend(args, batches)
    found = [_attend(alone(entry), batches[n : n + 1]) for n, entry in enumerate(entries(args))]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _attend_packed(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    q = args.q
    accumulate = torch.promote_types(q.dtype, torch.float32)
    # Once, so that gradients of what sequences share, the sink, a bias and pages, are summed over them in this precision.
    if args.sink is not None:
        args = args._replace(sink=args.sink.to(accumulate))
    if args.bias is not None:
        args = args._replace(bias=args.bias.to(accumulate))
    if args.block_table is not None and args.k_scale is None:
        args = args._replace(k=args.k.to(accumulate), v=args.v.to(accumulate))
    outs, lses = [], []
    for index, sequence in enumerate(sequences(args)):
        dense = alone(sequence.args) if args.batch_invariant else sequence.args
        out, lse = _attend(dense, torch.tensor([index], device=q.device))
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - sum(o.shape[0] for o in outs)
    # A sum of nothing ties the tokens of no sequence to every input: gradients are zeros even where there is no sequence.
    tied = (q, args.sink, args.bias) if args.k_scale is not None else (q, args.k, args.v, args.sink, args.bias)
    tie = sum(t[:0].sum() for t in tied if t is not None)
    outs.append(q.new_zeros((rest, q.shape[1], args.v.shape[-1])) + tie)
    lses.append(q.new_full((q.shape[1], rest), float("-inf"), dtype=accumulate) + tie)
    return torch.cat(outs), torch.cat(lses, dim=1)


def _attend(args: AttentionArgs, batches: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, seen, bias = _shown(args)
    accumulate, seqlen_k = q.dtype, k.shape[2]
    exact = _has_nonfinite(q, k, v)
    scores = _logits(args, q, k, seen, bias, exact)
    top = scores.detach().amax(-1, keepdim=True) if seqlen_k else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    sink = None if args.sink is None else args.sink.to(accumulate)[:, None, None]
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (top + torch.log(total)).masked_fill(nothing, float("-inf")).squeeze(-1)

    weights = weights / total
    if args.dropout_p:
        weights = weights * _keep(args, q, k, batches) * philox.keep_scale(args.dropout_p)
    out = _weighted_sum(weights, v, seen, exact)
    # Of a query that sees nothing this is 0 already; its gradient, NaN included, goes no further so.
    out = out.masked_fill(~seen.any(-1)[..., None], 0.0)
    return out.transpose(1, 2).to(args.q.dtype), lse


def _logits(args: AttentionArgs, q: Tensor, k: Tensor, seen: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """What enters the softmax, of what ``_shown`` returns: -inf where nothing is seen."""
    scores = _scores(q, k, seen, exact) * args.scale
    if args.softcap:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(~seen, float("-inf"))


def _stats(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Max logits (batch, heads_q) and column sums (batch, heads_q, seqlen_k) of a dense call."""
    q, k, _, seen, bias = _shown(args)
    if not q.shape[2] or not k.shape[2]:
        return q.new_full(q.shape[:2], float("-inf")), q.new_zeros((*q.shape[:2], k.shape[2]))
    scores = _logits(args, q, k, seen, bias, _has_nonfinite(q, k))
    top = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1).masked_fill(~seen | (top == float("-inf")), 0.0)  # NaN in a row of nothing but -inf
    return top.amax((-2, -1)), weights.sum(-2)


def _shown(args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v as (batch, heads_q, seqlen, dim), wide, without what is hidden; what is seen of the scores; the bias."""
    accumulate = torch.promote_types(args.q.dtype, torch.float32)
    group = args.q.shape[2] // max(args.k.shape[2], 1)
    q = args.q.transpose(1, 2).to(accumulate)
    k, v = (t.transpose(1, 2).to(accumulate).repeat_interleave(group, dim=1) for t in (args.k, args.v))
    heads, seqlen_q, seqlen_k = q.shape[1], q.shape[2], k.shape[2]
    cols = torch.arange(seqlen_k, device=q.device)
    shift = seqlen_k - seqlen_q if args.q_offset is None else 0
    rows, bias = _rows(args, seqlen_q), None
    seen = visible(args.mask, rows, cols, shift)
    if seen.shape[1] not in (1, heads):
        seen = seen.repeat_interleave(heads // seen.shape[1], dim=1)
    if args.bias is not None:
        bias = terms(args, rows, cols, shift, accumulate)
        seen = seen & (bias != float("-inf"))
        bias = bias.masked_fill(~seen, 0.0)
    # What no query sees, and a query that sees nothing, must not reach a matmul: 0 · NaN is NaN.
    k, v = (t.masked_fill(~seen.any(-2)[..., None], 0.0) for t in (k, v))
    return q.masked_fill(~seen.any(-1)[..., None], 0.0), k, v, seen, bias


def _rows(args: AttentionArgs, seqlen_q: int) -> Tensor:
    """The queries' numbers: (seqlen_q,), or (batch, 1, seqlen_q) of chunks."""
    rows = torch.arange(seqlen_q, device=args.q.device)
    return rows if args.q_offset is None else rows + args.q_offset.long()[:, None, None]


def _keep(args: AttentionArgs, q: Tensor, k: Tensor, batches: Tensor) -> Tensor:
    """Which weights dropout keeps."""
    assert args.dropout_seed is not None
    heads, cols = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[2]))
    if args.q_offset is not None:
        batches = batches // args.q_chunks
    seed, first = philox.split_seed(args.dropout_seed)
    return philox.keep_mask(seed, args.dropout_p, batches, heads + first, _rows(args, q.shape[2]), cols)


def _backward_dense(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, first_batch: int
) -> Gradients:
    """P = exp(S - lse), dV = Pᵀ dO, dS = P∘(dP - delta), dQ = dS·K, dK = dSᵀ·Q, all wide."""
    q, k, v, seen, bias = _shown(args)
    blind = ~seen.any(-1)[..., None]
    dout, out = (t.transpose(1, 2).to(q.dtype).masked_fill(blind, 0.0) for t in (dout, out))
    scores = (q @ k.transpose(-1, -2)) * args.scale
    squashed = None
    if args.softcap:
        squashed = torch.tanh(scores / args.softcap)
        scores = args.softcap * squashed
    if bias is not None:
        scores = scores + bias
    nothing = lse == float("-inf")
    weights = torch.exp(scores.masked_fill(~seen, float("-inf")) - lse.masked_fill(nothing, 0.0)[..., None])
    dweights, kept = dout @ v.transpose(-1, -2), weights
    if args.dropout_p:
        batches = torch.arange(first_batch, first_batch + q.shape[0], device=q.device)
        keep = _keep(args, q, k, batches).to(q.dtype) * philox.keep_scale(args.dropout_p)
        dweights, kept = dweights * keep, weights * keep
    delta = (dout * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    dscores = weights * (dweights - delta[..., None])
    dbias = no_bias(args, q.dtype)
    if args.bias_grad:
        cols = torch.arange(k.shape[2], device=q.device)
        shift = k.shape[2] - q.shape[2] if args.q_offset is None else 0
        add_gradient(dbias, args, dscores.masked_fill(~seen, 0.0), _rows(args, q.shape[2]), cols, shift)
    dscores = dscores * args.scale
    if squashed is not None:
        dscores = dscores * (1.0 - squashed * squashed)
    dk, dv = dscores.transpose(-1, -2) @ q, kept.transpose(-1, -2) @ dout
    heads_kv = args.k.shape[2]
    dk, dv = (t.unflatten(1, (heads_kv, -1)).sum(2).transpose(1, 2) for t in (dk, dv))
    dsink = q.new_zeros(0)
    if args.sink is not None:
        share = torch.exp(args.sink.to(q.dtype)[:, None] - lse).masked_fill(nothing, 0.0)
        dsink = -(share * delta).sum((0, 2))
    return (dscores @ k).transpose(1, 2), dk, dv, dsink, dbias


def _has_nonfinite(*tensors: Tensor) -> bool:
    """Whether matmuls would spread a NaN or infinity to rows that do not see it; unknown while tracing: no."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if any(type(t) is not Tensor for t in tensors):
        return False
    return not all(bool(torch.isfinite(t.detach()).all()) for t in tensors)


def _scores(q: Tensor, k: Tensor, seen: Tensor, exact: bool) -> Tensor:
    """q·kᵀ; `exact` multiplies element by element, so that a hidden NaN reaches no value and no gradient."""
    if not exact:
        return _product(q, k.transpose(-1, -2))
    pairs = torch.where(seen[..., None], k[..., None, :, :], 0.0)
    return (q[..., :, None, :] * pairs).sum(-1)


def _weighted_sum(weights: Tensor, v: Tensor, seen: Tensor, exact: bool) -> Tensor:
    if not exact:
        return _product(weights, v)
    return (weights[..., None] * torch.where(seen[..., None], v[..., None, :, :], 0.0)).sum(-2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, whose gradients autocast leaves alone too, wherever they are asked for."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    ):
        return a @ b
    return _Product.apply(a, b)


class _Product(torch.autograd.Function):
    """a @ b of tensors of one batch shape, to any order of derivatives."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            return _product(gradient, b.transpose(-1, -2)), _product(a.transpose(-1, -2), gradient)


class Reference(StatsBackend):
    """Every call."""

    name = "reference"
    eager = True

    def supports(self, problem: AttentionProblem) -> str | None:
        return None

    def describe(self, problem: AttentionProblem) -> str:
        return "batch-invariant: each sequence by itself, in memory of its own" if problem.batch_invariant else ""

    def forward(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Out (…, heads_q, head_dim_v) in q's dtype and lse, fp32 (fp64 for fp64 inputs), of validated arguments."""
        if torch.is_autocast_enabled(args.q.device.type):
            # The call's dtypes are settled: autocast would round the scores.
            with torch.autocast(args.q.device.type, enabled=False):
                return _forward(args)
        return _forward(args)

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> Gradients:
        """dq, dk, dv, dsink (empty without a sink) and a bias's gradient in closed form, for kernels without a backward pass.

        A call of the reference itself is differentiated op by op.
        """
        return gradients(args, dout, dlse, out, lse, _backward_dense)

    def stats(
        self, args: AttentionArgs, lse: Tensor | None, max_logits: bool, column_sums: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both from the matrix of scores; lse is not read."""
        with settled_dtypes(args.q):
            if args.cu_seqlens_q is None:
                largest, sums = _stats(args)
            else:
                found = [(sequence, *_stats(sequence.args)) for sequence in sequences(args)]
                wide, heads = torch.promote_types(args.q.dtype, torch.float32), args.q.shape[1]
                sums = args.q.new_zeros((heads, args.k.shape[0]), dtype=wide)
                for sequence, _, part in found:
                    assert sequence.keys is not None
                    sums[:, sequence.keys] = part[0]
                largest = torch.cat([args.q.new_empty((0, heads), dtype=wide), *[part for _, part, _ in found]])
        return largest if max_logits else None, sums if column_sums else None


BACKEND = Reference()
