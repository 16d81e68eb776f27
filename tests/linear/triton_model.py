"""What the Triton kernels compute, chunk by chunk in torch: in fp64 the truth, in the inputs' dtype a correct kernel's model.

The model rounds to the inputs' dtype (fp32: to two TF32 numbers) what a tensor core takes as operands: mapped queries and
keys, products within a chunk, f = scale / norm * phi(q) and delta * f, the states, and what is left of these where they fade;
sums are fp32.
`test_triton_model.py` holds the fp64 form against autograd through the score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.linear.feature_maps import NAMED
from warploom.linear.problem import LinearCall

CHUNK = 64
# Chunks of other correct kernels, see `decay_of_heads`.
CHUNKS = (16, 32, 64, 96, 128)


class Results(NamedTuple):
    """All that forward and backward return; norm is (batch, heads, seqlen_q)."""

    out: Tensor
    norm: Tensor
    s: Tensor
    z: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds0: Tensor
    dz0: Tensor
    ddecay: Tensor  # (batch, seqlen_k, heads_kv), zeros where the call has no decay


@dataclass(frozen=True)
class Rounding:
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
    return (t.view(torch.int32) & -(1 << 13)).view(torch.float32)


def results(c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None, *, exact: bool, chunk: int = CHUNK) -> Results:
    """Forward and backward of a call; contents of lengths and cu_seqlens are read."""
    if c.cu_seqlens is not None:
        return _packed(c, dout, ds, dz, exact, chunk)
    if c.lengths is not None:
        return _padded(c, dout, ds, dz, exact, chunk)
    dtype = c.v.dtype
    r = Rounding(torch.float64, torch.float64) if exact else Rounding(torch.promote_types(dtype, torch.float32), dtype)
    group = c.q.shape[2] // c.k.shape[2]

    def lift(t: Tensor, heads: int) -> Tensor:
        """(batch, heads_q, seqlen, dim) wide."""
        return t.transpose(1, 2).to(r.wide).repeat_interleave(heads, 1)

    q, k, v, g = lift(c.q, 1), lift(c.k, group), lift(c.v, group), lift(dout, 1)
    rows, keys = q.shape[2], k.shape[2]
    fq, fk = r(NAMED[c.map_q](q)), r(NAMED[c.map_k](k))
    batch, heads, _, dim = fq.shape
    zeros = q.new_zeros(batch, heads, dim, v.shape[-1])
    first_s = zeros if c.s is None else c.s.to(r.wide).repeat_interleave(group, 1)
    first_z = zeros[..., 0] if c.z is None else c.z.to(r.wide).repeat_interleave(group, 1)
    last_ds = zeros if ds is None else ds.to(r.wide).repeat_interleave(group, 1) / group
    last_dz = zeros[..., 0] if dz is None else dz.to(r.wide).repeat_interleave(group, 1) / group

    spans = [slice(t, t + chunk) for t in range(0, max(rows, keys), chunk)]
    # fp64 in the model too: kernels keep these sums in two numbers.
    logs = q.new_zeros((batch, heads, max(rows, keys)), dtype=torch.float64)
    if c.decay is not None:
        logs[:, :, :keys] = c.decays().mT.double().clamp_min(-1000.0).repeat_interleave(group, 1)

    def fading(span: slice) -> tuple[Tensor, Tensor, Tensor]:
        """What is left at rows of the chunk of what came before it, at its end of its keys, and of what came before it."""
        sums = logs[:, :, span].cumsum(-1)
        count = sums.shape[-1], len(range(rows)[span]), len(range(keys)[span])
        at_rows, of_keys = sums[..., : count[1], None], (sums[..., -1:] - sums)[..., : count[2], None]
        return at_rows.exp().to(r.wide), of_keys.exp().to(r.wide), sums[..., -1].exp().to(r.wide)

    def seen(span: slice) -> Tensor:
        """What is left of which keys of the chunk at which of its rows, 0 where a row does not see a key."""
        sums = logs[:, :, span].cumsum(-1)
        apart = sums[..., : len(range(rows)[span]), None] - sums[..., None, : len(range(keys)[span])]
        return torch.ones_like(apart).tril().mul(apart.clamp_max(0.0).exp()).to(r.wide) * c.causal

    s, z = first_s, first_z
    if not c.causal:
        s, z = s + fk.mT @ v, z + fk.sum(2)
    out, norm, dfq, delta = (torch.zeros_like(t) for t in (g, g[..., 0], fq, g[..., 0]))
    one = torch.ones((), dtype=r.wide, device=q.device)
    starts = []
    for span in spans:
        starts.append((s, z))
        before, left, kept = fading(span)
        a, b, x, y = fq[:, :, span], fk[:, :, span], v[:, :, span], g[:, :, span]
        p = a @ b.mT * seen(span)
        total = p.sum(-1) + (a * z[:, :, None] * before).sum(-1)
        norm[:, :, span] = (c.scale * total + c.eps) if c.normalize else one
        factor = (c.scale / norm[:, :, span])[..., None]
        out[:, :, span] = (r(p) @ x + a @ r(s) * before) * factor
        gradient = r(y @ x.mT * seen(span)) @ b + y @ r(s).mT * before
        if c.normalize:
            delta[:, :, span] = (a * gradient).sum(-1) * factor[..., 0]
        sums = z[:, :, None] * before + (seen(span) if c.decay is None else r(seen(span))) @ b
        dfq[:, :, span] = (gradient - delta[:, :, span, None] * sums) * factor
        if c.causal:
            b = b if c.decay is None else r(b * left)
            s, z = s * kept[..., None, None] + b.mT @ x, z * kept[..., None] + b.sum(2)
    f = r(fq * (c.scale / norm)[..., None])
    df = r(fq * (c.scale / norm * delta)[..., None])
    dfk, dv = torch.zeros_like(fk), torch.zeros_like(v)
    dlogs = torch.zeros_like(logs[:, :, :keys], dtype=r.wide)
    ds_now, dz_now = last_ds, last_dz
    if not c.causal:
        ds_now, dz_now = ds_now + f.mT @ g, dz_now - df.sum(2)
    for span, (s0, z0) in zip(reversed(spans), reversed(starts), strict=True):
        before, left, kept = fading(span)
        a, b, x, y, d = f[:, :, span], fk[:, :, span], v[:, :, span], g[:, :, span], df[:, :, span]
        dv[:, :, span] = r(a @ b.mT * seen(span)).mT @ y + b @ r(ds_now) * left
        sums = dz_now[:, :, None] * left - seen(span).mT @ d
        dfk[:, :, span] = r(y @ x.mT * seen(span)).mT @ a + x @ r(ds_now).mT * left + sums
        if c.decay is not None:
            # Every pair of a query at or after a token and a key before it: one where both are in the chunk, or come before
            # or after it.
            y, delta_now = torch.nn.functional.pad(y, (0, 1)), delta[:, :, span, None]
            y[..., -1:] = -delta_now
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
            first, after = torch.cat([s0, z0[..., None]], -1), torch.cat([ds_now, dz_now[..., None]], -1)
            met = (a @ b.mT * r(y @ x.mT * seen(span))).tril(-1)
            gives = torch.zeros_like(logs[:, :, span])
            gives[..., : a.shape[2]] = met.sum(-1) + (a * (y @ r(first).mT * before)).sum(-1)
            gives[..., : b.shape[2]] -= met.sum(-2)
            of_keys = (b * (x @ r(after).mT * left)).sum(-1)
            both = (after * r(first)).sum((-1, -2)) * kept
            later = gives.flip(-1).cumsum(-1).flip(-1)[..., : b.shape[2]]
            dlogs[:, :, span] = later + of_keys.cumsum(-1) - of_keys + both[..., None]
            y, x = y[..., :-1], x[..., :-1]
        if c.causal:
            faded = a if c.decay is None else r(fq[:, :, span] * (c.scale / norm[:, :, span])[..., None] * before)
            ds_now, dz_now = ds_now * kept[..., None, None] + faded.mT @ y, dz_now * kept[..., None] - (d * before).sum(2)

    def through(gradient: Tensor, mapped: Tensor, name: str) -> Tensor:
        """The slope of a map by its value, which kernels have as an operand."""
        slopes = {"elu+1": mapped.clamp_max(1.0), "relu": (mapped > 0).to(r.wide)}
        return gradient * slopes[name] if name in slopes else gradient

    def lower(t: Tensor, heads: int) -> Tensor:
        t = t.unflatten(1, (heads, -1)).sum(2)
        return t.transpose(1, 2).to(r.wide if exact else dtype)

    def state(t: Tensor) -> Tensor:
        return t.unflatten(1, (c.k.shape[2], group)).sum(2)

    return Results(
        out=lower(out, heads),
        norm=norm,
        s=state(s) / group,
        z=state(z) / group,
        dq=lower(through(dfq, fq, c.map_q), heads),
        dk=lower(through(dfk, fk, c.map_k), c.k.shape[2]),
        dv=lower(dv, c.k.shape[2]),
        ds0=state(ds_now),
        dz0=state(dz_now),
        ddecay=state(dlogs.where(logs[:, :, :keys] > -100.0, 0.0)).mT * (c.decay is not None),
    )


def decay_of_heads(c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradient of one log a head, (heads,): exact, and with the error expected of a correct kernel.

    One number a head sums the errors of all tokens, which may cancel by luck, so that kernels of another chunk err by
    several times as much. The largest error of `CHUNKS` stands for all.
    """
    exact = results(c, dout, ds, dz, exact=True).ddecay.double().sum((0, 1))
    errors = [results(c, dout, ds, dz, exact=False, chunk=chunk).ddecay.double().sum((0, 1)) - exact for chunk in CHUNKS]
    return exact, exact + torch.stack(errors).abs().amax(0)


def _padded(c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None, exact: bool, chunk: int) -> Results:
    """Each sequence without its padding; gradients of padding are 0."""
    assert c.lengths is not None
    parts = []
    for i, length in enumerate(c.lengths.tolist()):
        one = [None if t is None else t[i : i + 1] for t in (c.s, c.z, ds, dz)]
        decay = c.decay if c.decay is None or c.decay.ndim == 1 else c.decay[i : i + 1, :length]
        kv = {"k": c.k[i : i + 1, :length], "v": c.v[i : i + 1, :length], "decay": decay}
        lone = replace(c, q=c.q[i : i + 1], **kv, lengths=None, s=one[0], z=one[1])
        got = results(lone, dout[i : i + 1], one[2], one[3], exact=exact, chunk=chunk)
        pad = (0, 0, 0, 0, 0, c.k.shape[1] - length)
        padded = {name: torch.nn.functional.pad(getattr(got, name), pad) for name in ("dk", "dv")}
        parts.append(got._replace(**padded, ddecay=torch.nn.functional.pad(got.ddecay, pad[2:])))
    return Results(*[torch.cat(ts) for ts in zip(*parts, strict=True)])


def _packed(c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None, exact: bool, chunk: int) -> Results:
    """Each sequence alone; tokens past the last one have out 0, norm 1 and no gradient."""
    assert c.cu_seqlens is not None
    cu = c.cu_seqlens.tolist()
    parts = []
    for i, (start, stop) in enumerate(pairwise(cu)):
        one = [None if t is None else t[i : i + 1] for t in (c.s, c.z, ds, dz)]
        qkv = {name: getattr(c, name)[:, start:stop] for name in ("q", "k", "v")}
        if c.decay is not None and c.decay.ndim == 3:
            qkv["decay"] = c.decay[:, start:stop]
        lone = replace(c, **qkv, cu_seqlens=None, s=one[0], z=one[1])
        parts.append(results(lone, dout[:, start:stop], one[2], one[3], exact=exact, chunk=chunk))
    rest = c.q.shape[1] - cu[-1]
    joined = []
    for name, ts in zip(Results._fields, zip(*parts, strict=True), strict=True):
        if name in ("s", "z", "ds0", "dz0"):
            joined.append(torch.cat(ts))
        elif name == "norm":
            joined.append(torch.nn.functional.pad(torch.cat(ts, 2), (0, rest), value=1.0))
        elif name == "ddecay":
            joined.append(torch.nn.functional.pad(torch.cat(ts, 1), (0, 0, 0, rest)))
        else:
            joined.append(torch.nn.functional.pad(torch.cat(ts, 1), (0, 0, 0, 0, 0, rest)))
    return Results(*joined)
