"""The gated delta rule on the CPU in chunks of matrix products: time O(seqlen), and little memory beside results.

Heads are walked a few at a time and their tokens in blocks of several chunks. Backward is written by hand: it walks forward
once more, keeps the state before each block, and forms everything else anew, block by block from the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from warploom.delta.backend import DeltaBackend
from warploom.delta.cpu_block import Block, Gradients
from warploom.delta.packing import sequences
from warploom.delta.problem import DeltaCall, StepArgs

CHUNK = 64
# Tokens of a block: the state before it, which backward keeps, is then at most half of what the block's heads hold in fp32.
TOKENS = 256
# Elements of a block's largest tile, 2 MB in fp32: the dozen tiles of a block stay in a last-level cache.
BLOCK = 2**19


@dataclasses.dataclass(frozen=True)
class Part:
    """Some heads of some rows: a call that is not packed, and where it lies in the whole one's tensors."""

    call: DeltaCall
    rows: slice
    tokens: slice
    heads: slice  # of q and k
    heads_v: slice
    states: slice

    def cut(self, t: Tensor) -> Tensor:
        """A view of a tensor of v's heads, (batch, seqlen, heads_v, …)."""
        return t[self.rows, self.tokens, self.heads_v]

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None) -> Gradients:
        """Views of them."""
        own_q, own_k = (t[self.rows, self.tokens, self.heads] for t in (q, k))
        return Gradients(own_q, own_k, self.cut(v), self.cut(beta), None if decay is None else self.cut(decay))

    @cached_property
    def stop(self) -> int:
        """Where the last token that counts ends."""
        stop = self.call.q.shape[1]
        return stop if self.call.lengths is None else min(stop, max(0, *self.call.lengths.tolist()))

    def starts(self) -> range:
        """Of its blocks."""
        return range(0, self.stop, TOKENS)

    def block(self, start: int) -> Block:
        """A new one: the tiles that it forms are freed with it."""
        return Block(self.call, CHUNK, start, min(start + TOKENS, self.stop))


def _parts(call: DeltaCall) -> Iterator[Part]:
    if call.cu_seqlens is not None:
        for n, tokens, dense in sequences(call):
            yield from _heads(dense, slice(0, 1), tokens, slice(n, n + 1))
        return
    each = min(TOKENS, call.q.shape[1]) * call.v.shape[2] * max(call.q.shape[3], call.v.shape[3])
    size = max(1, BLOCK // max(each, 1))
    for start in range(0, call.q.shape[0], size):
        rows = slice(start, start + size)
        names = ("q", "k", "v", "beta", "decay", "state", "lengths")
        given: dict[str, Any] = {name: getattr(call, name) for name in names}
        cut: dict[str, Any] = {name: None if t is None else t[rows] for name, t in given.items()}
        yield from _heads(dataclasses.replace(call, **cut), rows, slice(None), rows)


def _heads(call: DeltaCall, rows: slice, tokens: slice, states: slice) -> Iterator[Part]:
    """A dense call's heads, as many at a time as fill a block."""
    each = min(TOKENS, call.q.shape[1]) * call.q.shape[0] * call.group * max(call.q.shape[3], call.v.shape[3])
    size = max(1, BLOCK // max(each, 1))
    for start in range(0, call.q.shape[2], size):
        heads, heads_v = slice(start, start + size), slice(start * call.group, (start + size) * call.group)
        q, k = (t[:, :, heads] for t in (call.q, call.k))
        v, beta = (t[:, :, heads_v] for t in (call.v, call.beta))
        decay = None if call.decay is None else call.decay[:, :, heads_v]
        cut = dataclasses.replace(call, q=q, k=k, v=v, beta=beta, decay=decay)
        yield Part(cut, rows, tokens, heads, heads_v, states)


def _first_state(call: DeltaCall) -> Tensor:
    """A copy of the initial state, or zeros: (sequences, heads_v, E, M)."""
    shape = (call.sequences, call.v.shape[2], call.q.shape[3], call.v.shape[3])
    if call.state is None:
        return call.v.new_zeros(shape, dtype=call.accumulator)
    return torch.empty(shape, dtype=call.accumulator, device=call.v.device).copy_(call.state)


class Cpu(DeltaBackend):
    """Every call on CPU tensors."""

    name = "cpu"
    device = "cpu"

    def supports(self, call: DeltaCall) -> str | None:
        if call.device != "cpu":
            return f"runs on CPU tensors, not on {call.device}"
        return None

    def forward(self, call: DeltaCall, return_state: bool) -> tuple[Tensor, Tensor | None]:
        """Out (batch, seqlen, heads_v, M) and the last state (sequences, heads_v, E, M) or None."""
        out, states, end = torch.empty_like(call.v, memory_format=torch.contiguous_format), _first_state(call), 0
        for part in _parts(call):
            held, rows, end = states[part.states, part.heads_v], part.cut(out), part.tokens.stop
            state = held.flatten(0, 1)
            for start in part.starts():
                state = part.block(start).walk(state, rows)
            rows[:, part.stop :] = 0.0
            if part.stop:
                held.copy_(state.view(held.shape))
        if call.cu_seqlens is not None:
            out[:, end:] = 0.0
        return out, states if return_state else None

    def backward(
        self, call: DeltaCall, dout: Tensor, dstate: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Gradients of all that the call has."""
        states = _first_state(call)
        dstates = torch.zeros_like(states) if dstate is None else torch.empty_like(states).copy_(dstate)
        dq, dk, dv, dbeta = (t.new_empty(t.shape) for t in (call.q, call.k, call.v, call.beta))
        ddecay, end = None if call.decay is None else call.decay.new_empty(call.decay.shape), 0
        for part in _parts(call):
            end = part.tokens.stop
            into = part.gradients(dq, dk, dv, dbeta, ddecay)
            state = states[part.states, part.heads_v].flatten(0, 1)
            before = []
            for start in part.starts():
                before.append(state)
                state = part.block(start).walk(state)
            held, rows = dstates[part.states, part.heads_v], part.cut(dout)
            gradient = held.flatten(0, 1)
            for start in reversed(part.starts()):
                gradient = part.block(start).backward(before.pop(), gradient, rows, into)
            if part.stop:
                held.copy_(gradient.view(held.shape))
            for t in into:
                if t is not None:
                    t[:, part.stop :] = 0.0
        if call.cu_seqlens is not None:
            for t in (dq, dk, dv, dbeta, *([] if ddecay is None else [ddecay])):
                t[:, end:] = 0.0
        return dq, dk, dv, dbeta, ddecay, None if call.state is None else dstates

    def step(self, args: StepArgs, into: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, beta, state, decay, scale, normalize_qk, eps, _ = args
        wide, group = state.dtype, v.shape[1] // q.shape[1]
        q, k = q.to(wide), k.to(wide)
        if normalize_qk:
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps) for t in (q, k))
        q, k = (t.repeat_interleave(group, 1).unsqueeze(2) for t in (q * scale, k))
        held = state if decay is None else state * decay.exp()[:, :, None, None]
        written = beta[:, :, None, None] * (v.to(wide).unsqueeze(2) - k @ held)
        new = torch.addcmul(held, k.mT, written) if into is None else torch.addcmul(held, k.mT, written, out=into)
        return (q @ new).squeeze(2).to(v.dtype), new


BACKEND = Cpu()
