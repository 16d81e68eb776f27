"""Linear attention on the CPU in chunks of matrix products: time and extra memory O(seqlen), most of it a state every block.

A sequence is walked in blocks of several chunks. Within a chunk scores are formed as in quadratic attention; what lies before
it is in running sums. Three steps and their adjoints make up every call: causal blocks, `accumulate` (keys into sums) and
`read` (queries from sums). Backward is written by hand; it forms scores and sums anew and reads no output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from warploom.linear.backend import LinearBackend
from warploom.linear.cpu_block import Block, Scratch, Sums
from warploom.linear.cpu_decay import DecayBlock
from warploom.linear.feature_maps import NAMED
from warploom.linear.packing import sequences
from warploom.linear.problem import LinearCall, StepArgs

# Elements of a block's largest tile, 2 MB in fp32: the half dozen tiles of a block stay in a last-level cache.
BLOCK = 2**19

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
Rows = tuple[Tensor, ...]  # gradients of q, k and v, and of each token's decay where that is asked for


def _parts(call: LinearCall) -> Iterator[tuple[slice, slice, slice, LinearCall]]:
    """Batch entries, tokens, states and dense calls: one sequence of a packed call, or a few entries of a batch.

    Eight chunks of that many fill a block; more would leave the caches, and keep a state for each few tokens.
    """
    if call.cu_seqlens is not None:
        for n, tokens, part in sequences(call):
            yield slice(0, 1), tokens, slice(n, n + 1), part
        return
    batch, _, heads, dim = call.q.shape
    size = max(1, BLOCK // (8 * 32 * heads * max(dim, call.v.shape[3])))
    for start in range(0, batch, size):
        rows = slice(start, start + size)
        cut = {name: getattr(call, name)[rows] for name in ("q", "k", "v")}
        if call.decay is not None and call.decay.ndim == 3:
            cut["decay"] = call.decay[rows]
        lengths = None if call.lengths is None else call.lengths[rows]
        yield rows, slice(None), rows, dataclasses.replace(call, **cut, lengths=lengths)


def _forward(call: LinearCall, tiles: Scratch, out: Tensor, norm: Tensor, sums: Sums, return_state: bool) -> None:
    """Write out and norm of a dense call, and leave the last state in ``sums``."""
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    both = min(seqlen_q, seqlen_k) if call.causal else 0
    for block in _chunked(call, tiles, both):
        block.causal(sums, out, norm)
    if return_state or not call.causal:
        for block in _whole(call, tiles, both, seqlen_k):
            block.accumulate(sums)
    for block in _whole(call, tiles, both, seqlen_q):
        block.read(sums, out, norm)


def _backward(
    call: LinearCall,
    tiles: Scratch,
    dout: Tensor,
    norm: Tensor | None,
    sums: Sums,
    dsums: Sums,
    gradients: Rows,
) -> None:
    """Write the gradients of a dense call; ``dsums`` goes from the last state's gradient to the first's."""
    seqlen_q, seqlen_k = call.q.shape[1], call.k.shape[1]
    both = min(seqlen_q, seqlen_k) if call.causal else 0
    rest_q, rest_k = _whole(call, tiles, both, seqlen_q), _whole(call, tiles, both, seqlen_k)
    blocks, before = _chunked(call, tiles, both), []
    for block in blocks:
        before.append((sums[0].clone(), sums[1].clone()))
        dataclasses.replace(block, chunk=block.stop - block.start).accumulate(sums)
    if call.causal:
        # Keys past the last query reach the last state alone.
        if call.decay_grad:
            starts = []
            for block in rest_k:
                starts.append((sums[0].clone(), sums[1].clone()))
                block.accumulate(sums)
            for block, first in zip(reversed(rest_k), reversed(starts), strict=True):
                assert isinstance(block, DecayBlock)
                block.accumulate_backward(dsums, gradients[1], gradients[2], gradients[3], first)
        else:
            for block in reversed(rest_k):
                block.accumulate_backward(dsums, *gradients[1:])
    else:
        for block in rest_k:
            block.accumulate(sums)
    for block in rest_q:
        block.read_backward(sums, dsums, dout, norm, gradients[0])
    if not call.causal:
        for block in rest_k:
            block.accumulate_backward(dsums, *gradients[1:])
    for block, first in zip(reversed(blocks), reversed(before), strict=True):
        block.causal_backward(first, dsums, dout, norm, gradients)


def _chunked(call: LinearCall, tiles: Scratch, stop: int) -> list[Block]:
    """Blocks of several chunks from 0 to stop, for causal steps."""
    heads, widest = call.q.shape[0] * call.q.shape[2], max(call.q.shape[3], call.v.shape[3])
    # Scores cost 2 · chunk · (E + M) a token beside 4 · E · M for the sums; yet small products of few heads run slowly.
    chunk = 32 if widest <= 64 and heads >= 8 else 64
    size = chunk * max(1, BLOCK // (heads * widest * chunk))
    kind = Block if call.decay is None else DecayBlock
    return [kind(call, tiles, chunk, at, min(at + size, stop)) for at in range(0, stop, size)]


def _whole(call: LinearCall, tiles: Scratch, start: int, stop: int) -> list[Block]:
    """Blocks of one chunk, for the steps without scores."""
    heads, widest = call.q.shape[0] * call.q.shape[2], max(call.q.shape[3], call.v.shape[3])
    size = max(64, BLOCK // (heads * widest))
    kind = Block if call.decay is None else DecayBlock
    return [kind(call, tiles, min(size, stop - at), at, min(at + size, stop)) for at in range(start, stop, size)]


def _first_state(call: LinearCall) -> Sums:
    """A copy of the initial state, or zeros: (sequences, heads_kv, E, M) and (sequences, heads_kv, E)."""
    if call.s is not None and call.z is not None:
        return _own(call.s, call.accumulator), _own(call.z, call.accumulator)
    shape = (call.sequences, call.k.shape[2], call.q.shape[3], call.v.shape[3])
    zeros = call.v.new_zeros(shape, dtype=call.accumulator)
    return zeros, zeros.new_zeros(shape[:3])


def _own(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy."""
    return torch.empty(t.shape, dtype=dtype, device=t.device).copy_(t)


def _flat(s: Tensor, z: Tensor) -> Sums:
    """Views with batch and heads as one dimension."""
    return s.flatten(0, 1), z.flatten(0, 1)


class Cpu(LinearBackend):
    """Every call on CPU tensors."""

    name = "cpu"
    device = "cpu"

    def supports(self, call: LinearCall) -> str | None:
        if call.device != "cpu":
            return f"runs on CPU tensors, not on {call.device}"
        return None

    def forward(self, call: LinearCall, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Out (batch, seqlen_q, heads_q, M), norm (batch, heads_q, seqlen_q) or None, and the last state or None."""
        q, v = call.q, call.v
        out = v.new_empty((*q.shape[:3], v.shape[3]))
        norm = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=call.accumulator)
        s, z = _first_state(call)
        tiles = Scratch()
        for rows, tokens, states, part in _parts(call):
            _forward(part, tiles, out[rows, tokens], norm[rows, :, tokens], _flat(s[states], z[states]), return_state)
        if call.cu_seqlens is not None:
            unused = slice(tokens.stop if call.sequences else 0, None)
            out[:, unused], norm[:, :, unused] = 0.0, 1.0
        return out, norm if call.normalize else None, s if return_state else None, z if return_state else None

    def backward(self, call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None) -> Gradients:
        """Gradients of q, k and v, of the initial state where the call has one, and of the decay where that is asked for."""
        dq, dk, dv = (t.new_empty(t.shape) for t in (call.q, call.k, call.v))
        faded = call.k.new_empty(call.k.shape[:3], dtype=call.accumulator) if call.decay_grad else None
        whole = (dq, dk, dv) if faded is None else (dq, dk, dv, faded)
        s, z = _first_state(call)
        first_s, first_z = (_own(t, s.dtype) if t is not None else torch.zeros_like(like) for t, like in ((ds, s), (dz, z)))
        tiles = Scratch()
        for rows, tokens, states, part in _parts(call):
            own = None if norm is None else norm[rows, :, tokens]
            sums, dsums = _flat(s[states], z[states]), _flat(first_s[states], first_z[states])
            gradients = tuple(t[rows, tokens] for t in whole)
            _backward(part, tiles, dout[rows, tokens], own, sums, dsums, gradients)
        if call.cu_seqlens is not None:
            for t in whole:
                t[:, tokens.stop if call.sequences else 0 :] = 0.0
        if faded is not None and call.decay is not None and call.decay.ndim == 1:
            faded = faded.sum((0, 1))
        return (dq, dk, dv, None, None, faded) if call.s is None else (dq, dk, dv, first_s, first_z, faded)

    def step(self, args: StepArgs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, s, z, map_q, map_k, normalize, eps, scale, _, decay = args
        k = NAMED[map_k](k.to(s.dtype))
        rows = NAMED[map_q](q.to(s.dtype)).unflatten(1, (k.shape[1], -1)) * scale
        if decay is not None:
            kept = decay.exp().unsqueeze(-1)
            s, z = s * kept.unsqueeze(-1), z * kept
        s, z = torch.addcmul(s, k.unsqueeze(-1), v.to(s.dtype).unsqueeze(-2)), z + k
        out = rows @ s
        if normalize:
            out /= rows @ z.unsqueeze(-1) + eps
        return out.flatten(1, 2).to(v.dtype), s, z


BACKEND = Cpu()
