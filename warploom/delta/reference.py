"""The gated delta rule as its definition says, token by token: the specification, in fp64.

Yang et al., 2024, "Gated Delta Networks" (arXiv 2412.06464), eq. 10, and without a decay "Parallelizing Linear Transformers
with the Delta Rule" (arXiv 2406.06484), eq. 3; states here are (E, M), transposed to the papers'.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from warploom.delta.backend import DeltaBackend
from warploom.delta.packing import sequences
from warploom.delta.problem import DeltaCall, StepArgs

_TENSORS = ("q", "k", "v", "beta", "decay", "state")


def recurrent(call: DeltaCall) -> tuple[Tensor, Tensor]:
    """Out and the last state of a call that is not packed, in fp64."""
    q, k, v, beta = (t.double() for t in (call.q, call.k, call.v, call.beta))
    decay = None if call.decay is None else call.decay.double()
    counts = None
    if call.lengths is not None:
        counts = torch.arange(q.shape[1], device=q.device) < call.lengths[:, None]
        # A hidden token may hold anything: it is replaced rather than multiplied. Zeros add nothing to a state.
        q, k, v = (t.masked_fill(~counts[:, :, None, None], 0.0) for t in (q, k, v))
        beta = beta.masked_fill(~counts[:, :, None], 0.0)
        decay = None if decay is None else decay.masked_fill(~counts[:, :, None], 0.0)
    if call.normalize_qk:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + call.eps) for t in (q, k))
    q, k = (t.repeat_interleave(call.group, 2) for t in (q * call.scale, k))
    batch, seqlen, heads, dim = q.shape
    s = q.new_zeros(batch, heads, dim, v.shape[3]) if call.state is None else call.state.double()
    rows = []
    for i in range(seqlen):
        if decay is not None:
            s = s * decay[:, i, :, None, None].exp()
        read = torch.einsum("bhe,bhem->bhm", k[:, i], s)
        s = s + torch.einsum("bhe,bhm->bhem", k[:, i], beta[:, i, :, None] * (v[:, i] - read))
        rows.append(torch.einsum("bhe,bhem->bhm", q[:, i], s))
    out = torch.stack(rows, 1) if rows else v.new_zeros(v.shape)
    if counts is not None:
        # Times a state that is not finite even a zero query is NaN.
        out = out.masked_fill(~counts[:, :, None, None], 0.0)
    return out, s


class Reference(DeltaBackend):
    """Every call."""

    name = "reference"
    eager = True

    def supports(self, call: DeltaCall) -> str | None:
        return None

    def forward(self, call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
        """Everything is computed in fp64 and differentiable by autograd to any order; memory is O(seqlen · E · M)."""
        if call.cu_seqlens is None:
            out, state = recurrent(call)
        else:
            v, end, outs, states = call.v, 0, [], []
            for _, span, part in sequences(call):
                end = span.stop
                part_out, part_state = recurrent(part)
                outs.append(part_out)
                states.append(part_state)
            outs.append(v.new_zeros((1, v.shape[1] - end, *v.shape[2:]), dtype=torch.float64))
            states.append(v.new_zeros((0, v.shape[2], call.q.shape[3], v.shape[3]), dtype=torch.float64))
            out, state = torch.cat(outs, 1), torch.cat(states)
        # A sum over nothing of everything given: without a token, gradients are zeros rather than torch's error.
        given = [t for t in (getattr(call, name) for name in _TENSORS) if t is not None]
        nothing = sum(t.flatten()[:0].sum(dtype=torch.float64) for t in given)
        out, state = out + nothing, state + nothing
        return out.to(call.v.dtype), state.to(call.accumulator) if return_state else None

    def backward(
        self, call: DeltaCall, dout: Tensor, dstate: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients by autograd."""
        names = [name for name in _TENSORS if getattr(call, name) is not None]
        leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
        with torch.enable_grad():
            out, state = self.forward(dataclasses.replace(call, **leaves), True)
            assert state is not None
            pairs = [(t, d.to(t.dtype)) for t, d in ((out, dout), (state, dstate)) if d is not None]
            outputs, upstream = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
        found = dict(zip(leaves, gradients, strict=True))
        return found["q"], found["k"], found["v"], found["beta"], found.get("decay"), found.get("state")

    def step(self, args: StepArgs, into: Tensor | None) -> tuple[Tensor, Tensor]:
        out, state = self.forward(args.call(), True)
        assert state is not None
        return out.squeeze(1), state if into is None else into.copy_(state)


BACKEND = Reference()
