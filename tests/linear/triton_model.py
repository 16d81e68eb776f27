"""What the Triton kernels compute, chunk by chunk in torch: in fp64 the truth, in the inputs' dtype a correct kernel's model.

The model rounds to the inputs' dtype (fp32: to two TF32 numbers) what a tensor core takes as operands: mapped queries and
keys, products within a chunk, f = scale / norm * phi(q) and delta * f, and the states; sums are fp32.
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


def results(c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None, *, exact: bool) -> Results:
    """Forward and backward of a call; contents of lengths and cu_seqlens are read."""
    if c.cu_seqlens is not None:
        return _packed(c, dout, ds, dz, exact)
    if c.lengths is not None:
        return _padded(c, dout, ds, dz, exact)
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

    spans = [slice(t, t + CHUNK) for t in range(0, max(rows, keys), CHUNK)]

    def seen(span: slice) -> Tensor:
        """Which keys of the chunk which of its rows sees."""
        sizes = len(range(rows)[span]), len(range(keys)[span])
        return torch.ones(sizes, dtype=r.wide, device=q.device).tril() * c.causal

    s, z = first_s, first_z
    if not c.causal:
        s, z = s + fk.mT @ v, z + fk.sum(2)
    out, norm, dfq, delta = (torch.zeros_like(t) for t in (g, g[..., 0], fq, g[..., 0]))
    one = torch.ones((), dtype=r.wide, device=q.device)
    for span in spans:
        a, b, x, y = fq[:, :, span], fk[:, :, span], v[:, :, span], g[:, :, span]
        p = a @ b.mT * seen(span)
        total = p.sum(-1) + (a * z[:, :, None]).sum(-1)
        norm[:, :, span] = (c.scale * total + c.eps) if c.normalize else one
        factor = (c.scale / norm[:, :, span])[..., None]
        out[:, :, span] = (r(p) @ x + a @ r(s)) * factor
        gradient = r(y @ x.mT * seen(span)) @ b + y @ r(s).mT
        if c.normalize:
            delta[:, :, span] = (a * gradient).sum(-1) * factor[..., 0]
        sums = z[:, :, None] + seen(span) @ b
        dfq[:, :, span] = (gradient - delta[:, :, span, None] * sums) * factor
        if c.causal:
            s, z = s + b.mT @ x, z + b.sum(2)
    f = r(fq * (c.scale / norm)[..., None])
    df = r(fq * (c.scale / norm * delta)[..., None])
    dfk, dv = torch.zeros_like(fk), torch.zeros_like(v)
    ds_now, dz_now = last_ds, last_dz
    if not c.causal:
        ds_now, dz_now = ds_now + f.mT @ g, dz_now - df.sum(2)
    for span in reversed(spans):
        a, b, x, y, d = f[:, :, span], fk[:, :, span], v[:, :, span], g[:, :, span], df[:, :, span]
        dv[:, :, span] = r(a @ b.mT * seen(span)).mT @ y + b @ r(ds_now)
        sums = dz_now[:, :, None] - seen(span).mT @ d
        dfk[:, :, span] = r(y @ x.mT * seen(span)).mT @ a + x @ r(ds_now).mT + sums
        if c.causal:
            ds_now, dz_now = ds_now + a.mT @ y, dz_now - d.sum(2)

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
    )


def _padded(c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None, exact: bool) -> Results:
    """Each sequence without its padding; gradients of padding are 0."""
    assert c.lengths is not None
    parts = []
    for i, length in enumerate(c.lengths.tolist()):
        one = [None if t is None else t[i : i + 1] for t in (c.s, c.z, ds, dz)]
        lone = replace(
            c, q=c.q[i : i + 1], k=c.k[i : i + 1, :length], v=c.v[i : i + 1, :length], lengths=None, s=one[0], z=one[1]
        )
        got = results(lone, dout[i : i + 1], one[2], one[3], exact=exact)
        pad = (0, 0, 0, 0, 0, c.k.shape[1] - length)
        parts.append(got._replace(dk=torch.nn.functional.pad(got.dk, pad), dv=torch.nn.functional.pad(got.dv, pad)))
    return Results(*[torch.cat(ts) for ts in zip(*parts, strict=True)])


def _packed(c: LinearCall, dout: Tensor, ds: Tensor | None, dz: Tensor | None, exact: bool) -> Results:
    """Each sequence alone; tokens past the last one have out 0, norm 1 and no gradient."""
    assert c.cu_seqlens is not None
    cu = c.cu_seqlens.tolist()
    parts = []
    for i, (start, stop) in enumerate(pairwise(cu)):
        one = [None if t is None else t[i : i + 1] for t in (c.s, c.z, ds, dz)]
        qkv = {name: getattr(c, name)[:, start:stop] for name in ("q", "k", "v")}
        lone = replace(c, **qkv, cu_seqlens=None, s=one[0], z=one[1])
        parts.append(results(lone, dout[:, start:stop], one[2], one[3], exact=exact))
    rest = c.q.shape[1] - cu[-1]
    joined = []
    for name, ts in zip(Results._fields, zip(*parts, strict=True), strict=True):
        if name in ("s", "z", "ds0", "dz0"):
            joined.append(torch.cat(ts))
        elif name == "norm":
            joined.append(torch.nn.functional.pad(torch.cat(ts, 2), (0, rest), value=1.0))
        else:
            joined.append(torch.nn.functional.pad(torch.cat(ts, 1), (0, 0, 0, 0, 0, rest)))
    return Results(*joined)
