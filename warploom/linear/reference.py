"""Linear attention as its definition says: the specification (Katharopoulos et al., 2020, eq. 5-9), in fp64.

Query i sees keys j <= i when causal: positions are counted from the start of both, so keys past the last query are never seen
and queries past the last key see every key. The denominator is scale * q.z + eps, eps added once, as in idiap's code.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from warploom.linear.backend import LinearBackend
from warploom.linear.feature_maps import NAMED
from warploom.linear.packing import sequences
from warploom.linear.problem import LinearCall, StepArgs
from warploom.linear.state import LinearState


def _leaves(call: LinearCall) -> tuple[str, ...]:
    states = () if call.s is None else ("s", "z")
    return ("q", "k", "v", *states, *(("decay",) if call.decay_grad else ()))


def _dense(call: LinearCall) -> tuple[Tensor, Tensor, LinearState]:
    """Out, norm and the last state of a call that is not packed, in fp64."""
    group = call.q.shape[2] // max(call.k.shape[2], 1)
    q, k, v = call.q.double(), call.k.double(), call.v.double()
    decay = None if call.decay is None else call.decays().double()
    if call.lengths is None:
        k = NAMED[call.map_k](k)
    else:
        hidden = (torch.arange(k.shape[1], device=k.device) >= call.lengths[:, None])[:, :, None, None]
        # A hidden key or value may hold anything: it is replaced rather than multiplied, and before the map, whose
        # derivative there would be NaN as well.
        k = NAMED[call.map_k](k.masked_fill(hidden, 0.0)).masked_fill(hidden, 0.0)
        v = v.masked_fill(hidden, 0.0)
        decay = None if decay is None else decay.masked_fill(hidden.squeeze(-1), 0.0)
    q = NAMED[call.map_q](q)
    if decay is not None:
        out, norm, last = _recurrent(q, k, v, decay, call)
        norm = norm + call.eps
        return out / norm.unsqueeze(-1) if call.normalize else out, norm.transpose(1, 2), last
    s, z = torch.einsum("bshe,bshm->bhem", k, v), k.sum(1)
    state = None
    if call.s is not None and call.z is not None:
        s, z = s + call.s, z + call.z
        state = LinearState(*(t.double().repeat_interleave(group, 1) for t in (call.s, call.z)))
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    out, norm = _quadratic(q, k, v, call.causal, call.scale, state)
    norm = norm + call.eps
    return out / norm.unsqueeze(-1) if call.normalize else out, norm.transpose(1, 2), LinearState(s, z)


def _recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, call: LinearCall) -> tuple[Tensor, Tensor, LinearState]:
    """Numerator (batch, seqlen_q, heads, M), scale * q.z (batch, seqlen_q, heads) and the last state, token by token.

    s_t = exp(decay_t) s_{t-1} + k_t v_t^T, z alike (Dao and Gu, 2024, "Transformers are SSMs", eq. 1 with a scalar A).
    """
    batch, seqlen_k, heads, dim = k.shape
    s, z = k.new_zeros(batch, heads, dim, v.shape[3]), k.new_zeros(batch, heads, dim)
    if call.s is not None and call.z is not None:
        s, z = call.s.double(), call.z.double()
    rows, sums = [], []
    for t in range(max(q.shape[1], seqlen_k)):
        if t < seqlen_k:
            kept = decay[:, t].exp().unsqueeze(-1)
            s = kept.unsqueeze(-1) * s + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            z = kept * z + k[:, t]
        if t < q.shape[1]:
            row = (q[:, t] * call.scale).unflatten(1, (heads, q.shape[2] // max(heads, 1)))
            rows.append((row @ s).flatten(1, 2))
            sums.append((row @ z.unsqueeze(-1)).squeeze(-1).flatten(1, 2))
    # Sums over nothing tie what no token used to the results.
    nothing = sum(t.flatten()[:0].sum() for t in (q, k, v, decay))
    out = torch.stack(rows, 1) if rows else q.new_zeros(batch, 0, q.shape[2], v.shape[3])
    norm = torch.stack(sums, 1) if sums else q.new_zeros(batch, 0, q.shape[2])
    return out + nothing, norm + nothing, LinearState(s + nothing, z + nothing)


def _quadratic(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, state: LinearState | None) -> tuple[Tensor, Tensor]:
    """Numerator (batch, seqlen_q, heads, M) and scale * q.z (batch, seqlen_q, heads)."""
    scores = torch.einsum("blhe,bshe->bhls", q * scale, k)
    if causal:
        scores = scores.tril()
    out = torch.einsum("bhls,bshm->blhm", scores, v)
    norm = scores.sum(-1).transpose(1, 2)
    if state is not None:
        out = out + torch.einsum("blhe,bhem->blhm", q * scale, state.s)
        norm = norm + torch.einsum("blhe,bhe->blh", q * scale, state.z)
    return out, norm


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    state: LinearState | None = None,
) -> Tensor:
    """Linear attention through the (seqlen_q, seqlen_k) score matrix, in fp64.

    Args:
        q: mapped queries (batch, seqlen_q, heads, E).
        k: mapped keys (batch, seqlen_k, heads, E).
        v: values (batch, seqlen_k, heads, M).
        causal: whether query i sees only keys j <= i.
        normalize: whether to divide by scale * q.z + eps.
        eps: added to the denominator.
        scale: factor of the mapped queries, in numerator and denominator.
        state: sums over earlier keys, which every query sees.

    Returns:
        (batch, seqlen_q, heads, M) fp64.
    """
    q, k, v = (t.double() for t in (q, k, v))
    held = None if state is None else LinearState(state.s.double(), state.z.double())
    out, norm = _quadratic(q, k, v, causal, scale, held)
    return out / (norm + eps).unsqueeze(-1) if normalize else out


def cumulative(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float = 1.0,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Causal linear attention one token at a time, in fp64; seqlen_q equals seqlen_k, other arguments as `quadratic`.

    Returns:
        out (batch, seqlen, heads, M) and the state after the last token, both fp64.
    """
    q, k, v = (t.double() for t in (q, k, v))
    batch, seqlen, heads, dim = q.shape
    s = q.new_zeros(batch, heads, dim, v.shape[-1]) if state is None else state.s.double()
    z = q.new_zeros(batch, heads, dim) if state is None else state.z.double()
    rows = []
    for i in range(seqlen):
        s = s + torch.einsum("bhe,bhm->bhem", k[:, i], v[:, i])
        z = z + k[:, i]
        row = torch.einsum("bhe,bhem->bhm", q[:, i] * scale, s)
        if normalize:
            row = row / (torch.einsum("bhe,bhe->bh", q[:, i] * scale, z) + eps).unsqueeze(-1)
        rows.append(row)
    out = torch.stack(rows, 1) if rows else v.new_zeros(batch, 0, heads, v.shape[-1])
    return out, LinearState(s, z)


class Reference(LinearBackend):
    """Every call."""

    name = "reference"
    eager = True

    def supports(self, call: LinearCall) -> str | None:
        return None

    def forward(self, call: LinearCall, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Out (batch, seqlen_q, heads_q, M), norm (batch, heads_q, seqlen_q) or None, and the last state or None.

        Everything is computed in fp64 and differentiable by autograd to any order; memory is O(seqlen²).
        """
        q, k, v = call.q, call.k, call.v
        if call.cu_seqlens is None:
            out, norm, state = _dense(call)
        else:
            outs, norms, states, end = [], [], [], 0
            for _, span, part in sequences(call):
                end = span.stop
                part_out, part_norm, part_state = _dense(part)
                outs.append(part_out)
                norms.append(part_norm)
                states.append(part_state)
            # A sum of nothing ties these tokens to every input, so that gradients are zeros even where there is no sequence.
            tie = sum(t[:0].sum().double() for t in (q, k, v, call.s, call.z, call.decay) if t is not None)
            outs.append(v.new_zeros((1, q.shape[1] - end, q.shape[2], v.shape[3]), dtype=torch.float64) + tie)
            norms.append(v.new_ones((1, q.shape[2], q.shape[1] - end), dtype=torch.float64))
            empty = k.new_zeros((0, k.shape[2], k.shape[3]), dtype=torch.float64) + tie
            states.append(LinearState(empty.new_zeros((*empty.shape, v.shape[3])), empty))
            # A sum over nothing of everything given: without a sequence, gradients are zeros rather than torch's error.
            given = (q, k, v, call.s, call.z, call.decay)
            nothing = sum(t.flatten()[:0].sum(dtype=torch.float64) for t in given if t is not None)
            out, norm = torch.cat(outs, 1) + nothing, torch.cat(norms, 2)
            state = LinearState(*(torch.cat(parts) + nothing for parts in zip(*states, strict=True)))
        s, z = (t.to(call.accumulator) for t in state)
        wide = norm.to(call.accumulator) if call.normalize else None
        return out.to(v.dtype), wide, s if return_state else None, z if return_state else None

    def backward(
        self, call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of q, k, v, the initial state and the decay, by autograd."""
        leaves = {name: getattr(call, name).detach().requires_grad_() for name in _leaves(call)}
        with torch.enable_grad():
            out, _, s, z = self.forward(dataclasses.replace(call, **leaves), True)
            assert s is not None and z is not None
            pairs = [(t, d.to(t.dtype)) for t, d in ((out, dout), (s, ds), (z, dz)) if d is not None]
            outputs, upstream = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
        found = dict(zip(leaves, gradients, strict=True))
        return found["q"], found["k"], found["v"], found.get("s"), found.get("z"), found.get("decay")

    def step(self, args: StepArgs) -> tuple[Tensor, Tensor, Tensor]:
        out, _, new_s, new_z = self.forward(args.call(), True)
        assert new_s is not None and new_z is not None
        return out.squeeze(1), new_s, new_z


BACKEND = Reference()
