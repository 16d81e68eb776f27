"""Exact attention and its gradients in closed form, in fp64; and the same as a correct low-precision kernel computes it.

S = c·tanh(scale·QKᵀ / c) + bias, P = exp(S - lse), O = (P∘keep)V; with dP = dO·Vᵀ∘keep and delta = rowsum(dO∘O) - dlse:
dS = P∘(dP - delta)∘(1 - tanh²), dQ = scale·dS·K, dK = scale·dSᵀ·Q, dV = (P∘keep)ᵀdO, dsink = -Σ exp(sink - lse)·delta.
Every step that a mutant may replace is a function of the namespace that `functions` makes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.oracle import masks, philox, tf32

_LOG2E = 1.4426950408889634


def products(q: Tensor, k: Tensor, rounded: torch.dtype | None) -> Tensor:
    """q kᵀ; ``rounded``: as a low-precision model computes it."""
    return tf32.product(q, k.transpose(-1, -2), rounded)


def rounded_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """P as a low-precision model has it."""
    return weights.to(dtype).to(weights.dtype)


def bend(scores: Tensor, softcap: float) -> tuple[Tensor, Tensor | float]:
    """Scores under a softcap, and the derivative."""
    if not softcap:
        return scores, 1.0
    squashed = torch.tanh(scores / softcap)
    return softcap * squashed, 1.0 - squashed * squashed


def biased(scores: Tensor, bias: Tensor) -> Tensor:
    """A bias is added behind the softcap."""
    return scores + bias


def over_queries(t: Tensor, heads_q: int) -> Tensor:
    """(batch, heads_kv, …) to the query heads: query head h takes key head h // group."""
    return t if t.shape[1] == heads_q else t.repeat_interleave(heads_q // t.shape[1], dim=1)


def over_keys(t: Tensor, heads_kv: int) -> Tensor:
    """The sum over the query heads of each key head."""
    return t if t.shape[1] == heads_kv else t.unflatten(1, (heads_kv, -1)).sum(2)


def sink_score(sink: Tensor, scale: float) -> Tensor:
    """A sink joins the softmax as it is."""
    return sink


def denominator(scores: Tensor, sink: Tensor | None) -> Tensor:
    """lse (…, 1) of scores and sink; -inf of a row without either."""
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if sink is not None:
        top = torch.maximum(top, sink)
    top = torch.where(top.isinf(), 0.0, top)
    total = torch.exp(scores - top).sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    return top + torch.log(total)


def returned_lse(lse: Tensor, scores: Tensor) -> Tensor:
    """What the caller gets: the softmax's denominator, whatever it holds."""
    return lse


def denominator_of_keys(scores: Tensor) -> Tensor:
    """What column sums are relative to: without the sink."""
    return denominator(scores, None)


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    found = (dout * out).sum(-1, keepdim=True)
    return found if dlse is None else found - dlse[..., None]


def to_scores(gradient: Tensor, scale: float) -> Tensor:
    """The gradient of q·k from that of the scaled score."""
    return gradient * scale


def functions() -> SimpleNamespace:
    """The oracle's functions by name."""
    return SimpleNamespace(
        position=masks.position,
        band=masks.band,
        interval=masks.interval,
        over_heads=masks.over_heads,
        seen_of_chunks=masks.of_chunks,
        kept_of_chunks=masks.of_chunks,
        kept=philox.kept,
        factor=philox.factor,
        products=products,
        rounded_weights=rounded_weights,
        bend=bend,
        biased=biased,
        over_queries=over_queries,
        over_keys=over_keys,
        sink_score=sink_score,
        denominator=denominator,
        returned_lse=returned_lse,
        denominator_of_keys=denominator_of_keys,
        delta=delta,
        scaled_q=to_scores,
        scaled_k=to_scores,
        used=lambda used, lengths: torch.minimum(used, lengths),
    )


def attend(
    oracle: SimpleNamespace,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    backward: bool = True,
    stats: bool = False,
    rounded: torch.dtype | None = None,
    shift: float = 0.0,
    late: bool = True,
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv, dsink and the terms that dsink sums.

    Args:
        q, k, v, dout: (batch, heads, seqlen, dim), in the dtype to compute in (fp64, or fp32 for the model).
        seen: bool, broadcastable to (batch, heads_q, seqlen_q, seqlen_k).
        bias: added to the scores where they are seen, (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1); with one, dscores are
            returned too, its gradient before it is summed.
        sink: (heads_q,); keep: bool multipliers of dropout and their factor in one, or None.
        dlse: (batch, heads_q, seqlen_q).
        stats: max logits and column sums are returned too, which neither the sink nor dropout changes.
        rounded: a low-precision model rounds unnormalised P, dS and out to it; None: nothing is rounded.
        shift: by so much the model's running maximum is above the true one when P is rounded.
        late: the model rounds P before dropout's factor, not after: all its errors differ where weights are equal.
    """
    heads_q, heads_kv = q.shape[1], k.shape[1]
    seen = seen.expand(*q.shape[:3], k.shape[2])

    def low(t: Tensor) -> Tensor:
        return t if rounded is None else t.to(rounded).to(t.dtype)

    def held(weights: Tensor) -> Tensor:
        """Weights under dropout, rounded."""

        def rounded_to(weights: Tensor) -> Tensor:
            return weights if rounded is None else oracle.rounded_weights(weights, rounded)

        if keep is None:
            return rounded_to(weights)
        return rounded_to(weights) * keep if late else rounded_to(weights * keep)

    def exponent(scores: Tensor, level: Tensor) -> Tensor:
        """Of 2, in the weights relative to a level: both are rounded on their way."""
        assert rounded is not None
        wide = torch.promote_types(rounded, torch.float32)
        return _jittered(scores * _LOG2E, wide, shift, 2.0) - _jittered(level * _LOG2E, wide, -shift, 2.0)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return tf32.product(a, b, rounded)

    def added(scores: Tensor) -> Tensor:
        return scores if bias is None else oracle.biased(scores, bias)

    def scored_again() -> tuple[Tensor, Tensor | float]:
        """Scores as a later pass computes them, which sums them in another order, and the softcap's derivative."""
        again, slope = oracle.bend(oracle.products(q.flip(-1), ks.flip(-1), rounded) * scale, softcap)
        return torch.where(seen, added(again), float("-inf")), slope

    # What no query sees, and a query that sees nothing, changes nothing, whatever it holds.
    q = torch.where(seen.any(-1)[..., None], q, 0.0)
    shown = seen.any(2)[..., None]
    ks, vs = (torch.where(shown, oracle.over_queries(t, heads_q), 0.0) for t in (k, v))
    lost = torch.isnan(vs)
    vs = torch.where(lost, 0.0, vs)

    scores, slope = oracle.bend(oracle.products(q, ks, rounded) * scale, softcap)
    scores = torch.where(seen, added(scores), float("-inf"))
    sinks = None if sink is None else oracle.sink_score(sink, scale).to(q.dtype)[None, :, None, None]
    lse = oracle.denominator(scores, sinks)
    empty = lse == float("-inf")
    level = torch.where(empty, 0.0, lse)
    weights = torch.exp(scores - level)
    if rounded is None:
        out = held(weights) @ vs
    else:  # P is rounded before it is divided by its sum
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else torch.full_like(level, float("-inf"))
        top = torch.where(top.isinf(), 0.0, top) + shift
        bulk = torch.exp2(exponent(scores, top)) if shift else torch.exp(scores - top)
        out = product(held(bulk), vs) * torch.exp(top - level)
        out = low(_jittered(out, rounded, shift) if shift else out)
    if rounded is None:
        # A NaN among the values stays one wherever it is seen, and nowhere else.
        out = torch.where((seen.to(vs.dtype) @ lost.to(vs.dtype)) > 0, float("nan"), out)
    found = {"out": out, "lse": oracle.returned_lse(lse, scores)[..., 0]}
    if stats:
        nothing = scores.new_full((*scores.shape[:2], 1), float("-inf"))
        found["max_logits"] = torch.cat([scores.flatten(2), nothing], -1).amax(-1)
        own = oracle.denominator_of_keys(scores)
        own = torch.where(own == float("-inf"), 0.0, own)
        again = scores if rounded is None else scored_again()[0]
        found["column_sums"] = (torch.exp2(exponent(again, own)) if shift else torch.exp(again - own)).sum(-2)
    if not backward:
        return found

    if rounded is not None:
        scores, slope = scored_again()
        weights = torch.exp2(exponent(scores, level)) if shift else torch.exp(scores - level)
    if dout is None:
        dout = torch.zeros_like(out)
    dweights = product(dout, vs.transpose(-1, -2))
    if keep is not None:
        dweights = dweights * keep
    delta = oracle.delta(dout, out, dlse)
    dscores = weights * (dweights - torch.where(empty, 0.0, delta))
    if bias is not None:
        found["dscores"] = dscores
    slopes = low(dscores * slope)
    found["dq"] = low(oracle.scaled_q(product(slopes, ks), scale))
    dk = oracle.scaled_k(product(slopes.transpose(-1, -2), q), scale)
    dv = product(held(weights).transpose(-1, -2), dout)
    found["dk"], found["dv"] = (low(oracle.over_keys(t, heads_kv)) for t in (dk, dv))
    if sinks is not None:
        terms = -(torch.exp(sinks - lse) * delta)[..., 0]
        found["terms"] = torch.where(lse[..., 0] == float("-inf"), 0.0, terms)
        found["dsink"] = found["terms"].sum((0, 2))
    return found


def _jittered(t: Tensor, dtype: torch.dtype, turn: float, halves: float = 1.0) -> Tensor:
    """Off by up to so many half ulps of the dtype, as roundings leave it: the next one goes either way."""
    noise = torch.frac(torch.sin(torch.arange(t.numel(), device=t.device, dtype=torch.float64) * 12.9898 + turn) * 43758.5453)
    return t * (1 + halves * torch.finfo(dtype).eps / 2 * noise.view(t.shape).to(t.dtype))


def model(oracle: SimpleNamespace, tensors: dict[str, Any], dtype: torch.dtype, turn: int, **options: Any) -> dict[str, Tensor]:
    """What a correct low-precision kernel gives.

    Each `turn` sums in another order and rounds P at another scale; every other one rounds it after dropout's factor.

    tensors: q, k, v and dout as `attend` takes them.
    """
    if not turn:
        return attend(oracle, **tensors, rounded=dtype, **options)

    def rolled(t: Tensor | None, back: bool = False) -> Tensor | None:
        return None if t is None else t.roll((-turn if back else turn) * 5, -1)

    found = attend(
        oracle, **{n: rolled(t) for n, t in tensors.items()}, rounded=dtype, shift=0.37 * turn, late=turn % 2 == 0, **options
    )
    for name in ("out", "dq", "dk", "dv"):
        if name in found:
            found[name] = rolled(found[name], back=True)
    return found


def farthest(exact: Tensor, models: list[Tensor]) -> Tensor:
    """Element by element the model's result with the largest error."""
    worst = torch.zeros_like(exact)
    for model in models:
        error = model.double() - exact
        worst = torch.where(error.abs() > worst.abs(), error, worst)  # a NaN, of two infinities, is not taken
    return exact + worst


def dsink_model(exact: dict[str, Tensor], low: dict[str, Tensor]) -> Tensor:
    """dsink with the error expected of it.

    One number a head sums many terms, and the model's error may vanish by luck: one and a half times the root of the terms'
    squared errors, and of the sum's own fp32 roundings, stands for it. Three standard deviations are granted so. Where rows
    are alike their errors are too, and do not cancel: the model's own error stands where it is larger.
    """
    error = low["terms"].double() - exact["terms"]
    apart = 1.5 * (error.square() + (2.0**-24 * exact["terms"]).square()).sum((0, 2)).sqrt()
    return exact["dsink"] + torch.maximum(apart, error.sum((0, 2)).abs())
