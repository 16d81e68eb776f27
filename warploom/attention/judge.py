"""How a result is judged: its distance to the fp64 reference, against that of a correct low-precision kernel.

A kernel passes when, for every output and gradient,

    max |out - ref|          <= 2   * max |lowp - ref|          + atol + u * max |ref|
    |out - ref| / |ref|      <= 1.5 * |lowp - ref| / |ref|      + eps

where `lowp` models a correct flash kernel: fp32 scores and softmax, unnormalised P and dS rounded to the input dtype,
fp32 products, one final rounding, whose unit (half an ulp of 1) is u.  The bound follows the data; no test brings its
own number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slack:
    """What is granted beyond the model: `atol` of the largest element, at least of 1; `eps` of the norm."""

    atol: float
    eps: float


# fp32: sums in another order. Half precision: an lse of fp32 accuracy by a kernel whose exp is a short polynomial
# (torch's own CPU kernel errs by up to 8e-5 there), where the model's lse is all but exact.
SLACK = {
    torch.float64: Slack(1e-13, 1e-13),
    torch.float32: Slack(1e-6, 1e-6),
    torch.float16: Slack(2e-5, 1e-4),
    torch.bfloat16: Slack(2e-4, 2e-4),
}

# Elements from which on the norms' ratio of two independent roundings stays within the criterion's factor.
FEWEST_FOR_NORM = 64
# Likewise rows (of head_dim elements, so not of lse) that are not zero: the elements of one share the rounding of its scores.
FEWEST_ROWS_FOR_NORM = 16


@dataclass(frozen=True)
class Verdict:
    """One compared tensor; a ratio above 1 is a failure, and so is a NaN."""

    name: str
    max_error: float
    max_ratio: float
    norm_ratio: float

    @property
    def ratio(self) -> float:
        return max(self.max_ratio, self.norm_ratio)

    @property
    def passed(self) -> bool:
        return self.max_ratio <= 1.0 and self.norm_ratio <= 1.0  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.name}: max error {self.max_error:.3g}, {self.max_ratio:.2f} of its bound; "
            f"norm {self.norm_ratio:.2f} of its bound"
        )


def judge(name: str, out: Tensor, ref: Tensor, lowp: Tensor, dtype: torch.dtype) -> Verdict:
    """Compare one tensor with the fp64 reference.

    Args:
        name: what it is called in the verdict.
        out: the result, any dtype, shape of `ref`.
        ref: the fp64 reference; where it is infinite (lse of a query that sees no key) `out` must equal it.
        lowp: the model's result.
        dtype: of the kernel's inputs; selects the slack.
    """
    if out.shape != ref.shape:
        raise ValueError(f"{name} has shape {tuple(out.shape)}, the reference {tuple(ref.shape)}")
    slack = SLACK[dtype]
    out, ref, lowp = (t.detach().double() for t in (out, ref, lowp))
    if ref.numel() == 0:
        return Verdict(name, 0.0, 0.0, 0.0)
    infinite = torch.isinf(ref)
    error, model, finite = (t.masked_fill(infinite, 0.0) for t in (out - ref, lowp - ref, ref))
    numbers = [((out != ref) & infinite).any(), (ref != 0).any(-1).sum()]
    numbers += [n for t in (error, model, finite) for n in (t.abs().max(), t.norm())]
    # Fetched together: on a device that others use too every wait takes long.
    wrong, rows, max_error, norm_error, max_model, norm_model, largest, size = torch.stack(
        [n.double() for n in numbers]
    ).tolist()
    if wrong:
        return Verdict(name, float("inf"), float("inf"), float("inf"))
    # The final rounding of the largest elements is granted apart: how the model happens to round those few is luck.
    rounding = torch.finfo(dtype).eps / 2 * largest
    max_ratio = max_error / (2.0 * max_model + slack.atol * max(1.0, largest) + rounding)
    # Norms compare averages: of a handful of numbers, or of a result that cancels to zero, they would compare luck.
    # The maximum is bounded all the same.
    averages = error.numel() >= FEWEST_FOR_NORM and size > slack.atol * error.numel() ** 0.5
    if ref.ndim > 1 and name != "lse":
        averages = averages and rows >= FEWEST_ROWS_FOR_NORM
    norm_ratio = norm_error / (1.5 * norm_model + slack.eps * size) if averages else 0.0
    return Verdict(name, max_error, max_ratio, norm_ratio)


def _unlucky(errors: Tensor) -> Tensor:
    """What is added to a sum over the last dimension whose ``errors`` cancel by luck, so that its error is the expected one.

    That is 1.5 times the root of their squares' sum, as ``dsink_like`` has it, where they do not add up to more.
    """
    found, expected = errors.sum(-1, keepdim=True), 1.5 * errors.norm(dim=-1, keepdim=True)
    return torch.copysign(torch.maximum(expected, found.abs()), found) - found


@dataclass(frozen=True)
class LowPrecision:
    """What a correct kernel returns for one dense call; see `low_precision`."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    dsink_terms: Tensor | None  # what dsink sums, (batch, heads_q, seqlen_q)
    dsink_rounding: Tensor | None  # standard deviation of each of these for the rounding of out
    dscores: Tensor  # what a bias's gradient sums, fp32 (batch, heads_q, seqlen_q, seqlen_k)

    def dsink_like(self, exact: LowPrecision) -> Tensor:
        """dsink with the error expected of it, given the same call's fp64 model.

        One number a head sums many terms; its error may vanish by luck, so 1.5 times the root of the terms' squared
        errors, and of the sum's own fp32 roundings, stands for it: the criterion then allows three standard
        deviations. Two would refuse one correct kernel in a hundred. One term may outweigh all others, and its error
        vanish by luck too: together they count at least what rounding out is expected to do to them.
        """
        assert self.dsink_terms is not None and exact.dsink_terms is not None and exact.dsink is not None
        assert self.dsink_rounding is not None
        found, expected = self.dsink_terms.double() - exact.dsink_terms, self.dsink_rounding.double()
        error, expected, sums = [t.square().sum((0, 2)) for t in (found, expected, 2.0**-24 * exact.dsink_terms)]
        return exact.dsink + 1.5 * (torch.maximum(error, expected) + sums).sqrt()


def low_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
) -> LowPrecision:
    """The model of a correct flash kernel, forward and backward (FlashAttention-2, algorithms 1 and 2).

    What rounding out does to delta is shared by all elements of dscores in a row. Of few rows it is luck, and the whole error
    of dq and dk where the exact ones are 0, as of one key under dropout: there the model's is as large as expected.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim) in the kernel's dtype; heads of k and v divide those of q.
        dout: gradient of out, in the same dtype; dlse: gradient of lse, fp32 (batch, heads, seqlen_q).
        visible: bool (batch|1, heads|1, seqlen_q, seqlen_k); heads is 1 or that of q.
        keep: dropout multipliers (batch, heads, seqlen_q, seqlen_k): 0 or `philox.keep_scale`.
        bias: added to the scores, finite where visible, (batch|1, heads|1, seqlen_q|1, seqlen_k|1).
    """
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    group = q.shape[2] // k.shape[2]

    def lift(t: Tensor) -> Tensor:
        return t.transpose(1, 2).to(wide)

    def lower(t: Tensor) -> Tensor:
        return t.transpose(1, 2).to(dtype)

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).to(wide)

    qs, gs = lift(q), lift(dout)
    ks, vs = (lift(t).repeat_interleave(group, dim=1) for t in (k, v))
    keeps = torch.ones((), dtype=wide, device=q.device) if keep is None else keep.to(wide)
    sinks = None if sink is None else sink.to(wide)[None, :, None, None]

    scores = qs @ ks.transpose(-1, -2) * scale
    bend = torch.ones_like(scores)
    if softcap:
        squashed = torch.tanh(scores / softcap)
        scores, bend = softcap * squashed, 1.0 - squashed**2
    if bias is not None:
        scores = scores + bias.to(wide)
    scores = scores.masked_fill(~visible, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    top = top if sinks is None else torch.maximum(top, sinks)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks - top)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = rounded(rounded(weights * keeps) @ vs / total)
    lse = (top + torch.log(total)).masked_fill(empty, float("-inf"))

    probability = torch.exp(scores - lse.masked_fill(empty, 0.0))
    delta = (gs * out).sum(-1, keepdim=True) - dlse.to(wide)[..., None].masked_fill(empty, 0.0)
    taken = delta
    if scores[..., :1].numel() < FEWEST_ROWS_FOR_NORM:
        taken = delta + _unlucky(gs * (out - weights * keeps @ vs / total))
    dscores = probability * (gs @ vs.transpose(-1, -2) * keeps - taken)
    slope = rounded(dscores * bend)
    dk, dv = slope.transpose(-1, -2) @ qs * scale, rounded(probability * keeps).transpose(-1, -2) @ gs
    dk, dv = (t.unflatten(1, (k.shape[2], group)).sum(2) for t in (dk, dv))
    dsink, terms, rounding = None, None, None
    if sinks is not None:
        share = torch.exp(sinks - lse)
        terms = -(share * delta).squeeze(-1)
        dsink = terms.sum((0, 2))
        size = torch.exp2(torch.frexp(out).exponent - 1.0)  # the power of two below each
        ulp = torch.finfo(dtype).eps / 2 / 3**0.5  # what is at most half of one, evenly spread
        rounding = share.squeeze(-1) * (gs * size).square().sum(-1).sqrt() * ulp
    found = lower(out), lse.squeeze(-1), lower(slope @ ks * scale), lower(dk), lower(dv), dsink, terms, rounding
    return LowPrecision(*found, dscores)
