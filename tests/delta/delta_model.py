"""What a correct kernel of the gated delta rule computes, chunk by chunk in torch: in fp64 its definition, else its model.

The model rounds to the inputs' dtype (fp32: to two TF32 numbers) what a tensor core takes as operands: normalized queries and
keys, products within a chunk, the inverse T of I + A, U = T βv and W = T βk of the WY form, what is written (X), the states and
their gradients. A, its inverse, decays and sums are fp32: within a chunk the inverse multiplies keys by each other up to 63
times, which in half precision leaves nothing. `test_delta_model.py` holds the fp64 form against the specification.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.delta.problem import DeltaCall

CHUNK = 64


class Results(NamedTuple):
    """All that forward and backward return."""

    out: Tensor
    state: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    ddecay: Tensor | None
    dstate: Tensor | None


class Rounding(NamedTuple):
    """The dtype that sums are computed in, and the one that operands are rounded to."""

    wide: torch.dtype
    narrow: torch.dtype

    def __call__(self, t: Tensor) -> Tensor:
        if self.narrow == torch.float32:
            # Two TF32 numbers, as three products of them take it.
            high = _tf32(t)
            return high + _tf32(t - high)
        if self.narrow != torch.float16 or not t.numel():
            return t.to(self.narrow).to(self.wide)
        # Past fp16's range kernels keep a power of two apart.
        top = t.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30)
        factor = torch.exp2(torch.floor(torch.log2(top)))
        return (t / factor).to(self.narrow).to(self.wide) * factor


def _tf32(t: Tensor) -> Tensor:
    """The upper ten bits of fp32's mantissa."""
    return (t.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def results(c: DeltaCall, dout: Tensor, dstate: Tensor | None, *, exact: bool) -> Results:
    """Forward and backward of a call; contents of lengths and cu_seqlens are read."""
    if c.cu_seqlens is not None:
        return _packed(c, dout, dstate, exact)
    if c.lengths is not None:
        return _padded(c, dout, dstate, exact)
    wide = torch.float64 if exact else c.accumulator
    r = Rounding(wide, wide if exact else c.v.dtype)
    group, heads = c.group, c.v.shape[2]

    def lift(t: Tensor, times: int = 1) -> Tensor:
        """(batch, heads_v, seqlen, …) wide."""
        return t.transpose(1, 2).to(wide).repeat_interleave(times, 1)

    raw = {"q": lift(c.q, group), "k": lift(c.k, group)}
    inverse = {n: torch.rsqrt(t.square().sum(-1, keepdim=True) + c.eps) if c.normalize_qk else 1.0 for n, t in raw.items()}
    q, k = (r(t * inverse[n]) for n, t in raw.items())
    v, g = lift(c.v), lift(dout) * c.scale
    beta = lift(c.beta)[..., None]
    decay = torch.zeros_like(beta) if c.decay is None else lift(c.decay)[..., None]
    batch, _, seqlen, dim = q.shape
    s = q.new_zeros(batch, heads, dim, v.shape[-1]) if c.state is None else c.state.to(wide)
    spans = [slice(t, t + CHUNK) for t in range(0, seqlen, CHUNK)]

    out, dq, dk, dv, dbeta, ddecay = (torch.zeros_like(t) for t in (v, q, k, v, beta, decay))
    kept = []
    for span in spans:
        a, b, x, w = q[:, :, span], k[:, :, span], v[:, :, span], beta[:, :, span]
        pairs, first, last, whole = _decays(decay[:, :, span])
        eye = torch.eye(a.shape[2], dtype=wide, device=a.device)
        keys = b @ b.mT * pairs.tril(-1)
        t = torch.linalg.solve_triangular(eye + w * keys, eye.expand_as(keys), upper=False, unitriangular=True)
        written = r(t) @ r(w * x) - r(r(t) @ r(w * first * b)) @ r(s)
        p = a @ b.mT * pairs
        out[:, :, span] = (first * a @ r(s) + r(p) @ r(written)) * c.scale
        kept.append((s, t, keys, written, p))
        s = whole * s + r(last * b).mT @ r(written)
    state = s
    ds = torch.zeros_like(s) if dstate is None else dstate.to(wide)
    for span, (s, t, keys, written, p) in zip(reversed(spans), reversed(kept), strict=True):
        a, b, x, w, y = q[:, :, span], k[:, :, span], v[:, :, span], beta[:, :, span], g[:, :, span]
        pairs, first, last, whole = _decays(decay[:, :, span])
        dx = r(p).mT @ r(y) + r(last * b) @ r(ds)
        solved = r(t).mT @ r(dx)
        dinner = -(r(solved) @ r(written).mT).tril(-1)
        dkeys = dinner * pairs
        dp = r(y) @ r(written).mT * pairs
        read_q, read_k, wrote = first * (y @ r(s).mT), -first * (r(w * solved) @ r(s).mT), last * (r(written) @ r(ds).mT)
        dq[:, :, span] = r(dp) @ b + read_q
        dk[:, :, span] = r(dp).mT @ a + r(w * dkeys) @ b + r(w * dkeys).mT @ b + read_k + wrote
        dv[:, :, span] = w * solved
        dbeta[:, :, span] = (solved * (x - first * b @ r(s))).sum(-1, keepdim=True) + (dinner * keys).sum(-1, keepdim=True)
        crossing = dp * (a @ b.mT) + w * dkeys * (b @ b.mT)
        ends = (read_q * a + read_k * b).sum(-1, keepdim=True)
        starts = (wrote * b).sum(-1, keepdim=True)
        through = (whole * (s * ds).sum((-2, -1), keepdim=True)).expand_as(ends)
        over = torch.ones_like(crossing).triu() @ crossing
        before = starts.cumsum(2) - starts
        ddecay[:, :, span] = over.tril(-1).sum(-1, keepdim=True) + ends.flip(2).cumsum(2).flip(2) + before + through
        ds = whole * ds + r(first * a).mT @ r(y) - r(r(t) @ r(w * first * b)).mT @ r(dx)

    def through_norm(gradient: Tensor, name: str) -> Tensor:
        if not c.normalize_qk:
            return gradient
        unit = raw[name] * inverse[name]
        return inverse[name] * (gradient - unit * (unit * gradient).sum(-1, keepdim=True))

    def lower(t: Tensor, times: int = 1, dtype: torch.dtype = c.v.dtype) -> Tensor:
        return t.unflatten(1, (-1, times)).sum(2).transpose(1, 2).to(wide if exact else dtype)

    return Results(
        lower(out),
        state,
        lower(through_norm(dq, "q"), group),
        lower(through_norm(dk, "k"), group),
        lower(dv),
        lower(dbeta, dtype=wide).squeeze(-1),
        None if c.decay is None else lower(ddecay, dtype=wide).squeeze(-1),
        None if c.state is None else ds,
    )


def _decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a chunk (…, rows, 1): from key to query (…, rows, rows), from the start to each, from each to the end, over all."""
    forgets = decay < -800.0  # exp of it is 0 even in fp64
    total, resets = decay.masked_fill(forgets, 0.0).cumsum(-2), forgets.cumsum(-2)

    def between(later: Tensor, earlier: Tensor, resets: Tensor) -> Tensor:
        return torch.exp((later - earlier).masked_fill(resets != 0, float("-inf")))

    upper = torch.ones(decay.shape[-2], decay.shape[-2], dtype=torch.bool, device=decay.device).triu(1)
    pairs = between(total, total.mT, (resets - resets.mT).masked_fill(upper, 1))
    last, ended = total[..., -1:, :], resets[..., -1:, :]
    zero = torch.zeros_like(total)
    return pairs, between(total, zero, resets), between(last, total, ended - resets), between(last, zero[..., -1:, :], ended)


def _padded(c: DeltaCall, dout: Tensor, dstate: Tensor | None, exact: bool) -> Results:
    """Each sequence without its padding, whose out and gradients are 0."""
    assert c.lengths is not None
    parts = []
    for i, length in enumerate(c.lengths.tolist()):
        row, state = slice(i, i + 1), None if c.state is None else c.state[i : i + 1]
        lone = replace(_cut(c, row, slice(0, length)), lengths=None, state=state)
        found = results(lone, dout[row, :length], None if dstate is None else dstate[row], exact=exact)
        parts.append(_wider(found, c.v.shape[1] - length))
    return Results(*[None if ts[0] is None else torch.cat(ts) for ts in zip(*parts, strict=True)])


def _packed(c: DeltaCall, dout: Tensor, dstate: Tensor | None, exact: bool) -> Results:
    """Each sequence alone; tokens past the last one have out 0 and no gradient."""
    assert c.cu_seqlens is not None
    cu = c.cu_seqlens.tolist()
    parts = []
    for i, (start, stop) in enumerate(pairwise(cu)):
        state = None if c.state is None else c.state[i : i + 1]
        lone = replace(_cut(c, slice(None), slice(start, stop)), cu_seqlens=None, state=state)
        found = results(lone, dout[:, start:stop], None if dstate is None else dstate[i : i + 1], exact=exact)
        parts.append(_wider(found, c.v.shape[1] - cu[-1] if i == len(cu) - 2 else 0))
    joined = {n: [getattr(part, n) for part in parts] for n in Results._fields}
    return Results(**{n: None if ts[0] is None else torch.cat(ts, int("state" not in n)) for n, ts in joined.items()})


def _cut(c: DeltaCall, rows: slice, tokens: slice) -> DeltaCall:
    """Some tokens of some rows."""
    tensors = {name: getattr(c, name) for name in ("q", "k", "v", "beta", "decay")}
    return replace(c, **{name: None if t is None else t[rows, tokens] for name, t in tensors.items()})


def _wider(found: Results, more: int) -> Results:
    """With zeros for further tokens."""

    def pad(name: str, t: Tensor | None) -> Tensor | None:
        if t is None or "state" in name:
            return t
        return torch.cat([t, t.new_zeros((t.shape[0], more, *t.shape[2:]))], 1)

    return Results(*[pad(name, t) for name, t in found._asdict().items()])
