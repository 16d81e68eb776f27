"""From a call to the kernels' arguments: shapes, strides and constants, read on the host; contents never are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from warploom.delta.triton.config import Config, config
from warploom.runtime.device import capability
from warploom.runtime.likeness import like
from warploom.runtime.qkv import last_contiguous

if TYPE_CHECKING:
    from warploom.delta.problem import DeltaCall

# Elements that strides count in where they can: 16 bytes of the narrowest dtype.
UNIT = 8
# Chunks of a range that no sequence passes.
_WHOLE = 2**30
# Ranges that a backward pass is cut into where the one before needs too much room.
_RANGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Variant(NamedTuple):
    """Everything about a call that a binary depends on, beyond a kernel's tile sizes."""

    dtype: torch.dtype
    e: int
    m: int
    group: int
    normalize: bool
    unit: int  # strides are multiples of so many elements
    wide: bool  # offsets within a chunk pass 31 bits
    direct: bool  # pointers are aligned to 16 bytes and all integers fit 32 bits: every launch fits one binary
    present: tuple[bool, ...]  # which optional arguments there are
    device: int | None  # None: the interpreter


class Ranges(NamedTuple):
    """How a backward pass is cut: each range of chunks is walked again, back, and gives its gradients before the one before."""

    per_sequence: bool  # each holds `size` chunks of every sequence; else `size` slots
    size: int
    number: int
    entries: int  # chunks of one range
    carriers: int  # sequences that a boundary may cut


class Tensors(NamedTuple):
    """Those of a call that kernels read, as launchers take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor | None
    state: Tensor | None
    lengths: Tensor | None
    cu: Tensor | None

    @classmethod
    def of(cls, c: DeltaCall) -> Tensors:
        return cls(c.q, c.k, c.v, c.beta, c.decay, c.state, c.lengths, c.cu_seqlens)


@dataclass(frozen=True)
class Call:
    """One call as every kernel of it sees it, without its tensors."""

    variant: Variant
    config: Config
    device: torch.device
    packed: bool
    batch: int
    sequences: int
    seqlen: int  # all packed tokens where the call is packed
    chunks: int  # of a sequence, where they are not packed
    slots: int
    heads: int
    heads_v: int
    scale: float
    eps: float
    strides: dict[str, tuple[int, ...]]  # batch, seqlen, head: of q, k, v and dout in variant.unit elements

    @classmethod
    def of(cls, c: DeltaCall, dout: Tensor | None = None) -> Call:
        """Of a call whose tensors are ``readable``."""
        q, k, v = c.q, c.k, c.v
        given = {name: t for name, t in (("q", q), ("k", k), ("v", v), ("dout", dout)) if t is not None}
        unit = UNIT if all(s % UNIT == 0 for t in given.values() for s in t.stride()[:3]) else 1
        strides = {name: tuple(s // unit for s in t.stride()[:3]) for name, t in given.items()}
        strides |= {"beta": c.beta.stride(), "decay": (0, 0, 0) if c.decay is None else c.decay.stride()}
        aligned = all(t.data_ptr() % 16 == 0 for t in given.values())
        small = q.shape[1] < _WHOLE and all(abs(s) < 2**31 for group in strides.values() for s in group)
        batch, seqlen, heads, e = q.shape
        heads_v, m = v.shape[2:]
        tiling = config(v.dtype, e, m, capability(q.device), dout is not None)
        chunks = -(-seqlen // tiling.chunk)
        return cls(
            variant=Variant(
                dtype=v.dtype,
                e=e,
                m=m,
                group=c.group,
                normalize=c.normalize_qk,
                unit=unit,
                wide=any(abs(t.stride(1)) * tiling.chunk >= 2**31 for t in given.values()),
                direct=aligned and small,
                present=tuple(t is not None for t in (c.decay, c.state, c.lengths, c.cu_seqlens)),
                device=q.device.index,
            ),
            config=tiling,
            device=q.device,
            packed=c.cu_seqlens is not None,
            batch=batch,
            sequences=c.sequences,
            seqlen=seqlen,
            chunks=chunks,
            slots=c.sequences * chunks if c.cu_seqlens is None else seqlen // tiling.chunk + c.sequences + 1,
            heads=heads,
            heads_v=heads_v,
            scale=c.scale,
            eps=c.eps,
            strides=strides,
        )

    @property
    def tokens(self) -> tuple[int, int, int]:
        """What kernels know of the tokens' layout."""
        return self.sequences, self.seqlen, self.chunks

    @property
    def walked(self) -> int:
        """Sequences that walks visit: past packed ones there may be tokens."""
        return self.sequences + self.packed

    def whole(self) -> Ranges:
        """One range, of all chunks."""
        return Ranges(not self.packed, _WHOLE, 1, self.slots, 0)

    def ranges(self) -> Ranges:
        """The fewest ranges whose room is no more than the bytes of q, k, v and out; the least room where there are none."""
        tokens, variant = self.batch * self.seqlen, self.variant
        allowed = tokens * 2 * (self.heads * variant.e + self.heads_v * variant.m) * variant.dtype.itemsize
        cuts = [self.cut(per_sequence, n) for per_sequence in ((False,) if self.packed else (True, False)) for n in _RANGES]
        return next((cut for cut in cuts if self.room(cut) <= allowed), min(cuts, key=self.room))

    def cut(self, per_sequence: bool, wanted: int) -> Ranges:
        """About so many ranges; those of packed sequences, whose lengths only the device knows, are of slots."""
        chunks = self.chunks if per_sequence else self.slots
        size = -(-chunks // wanted)
        entries, carriers = (size * self.sequences, self.sequences) if per_sequence else (size, 1)
        return Ranges(per_sequence, size, -(-chunks // size), entries, carriers)

    def room(self, cut: Ranges) -> int:
        """Bytes that a backward pass takes beside its results."""
        c, e, m = self.config.chunk, self.variant.e, self.variant.m
        size = self.variant.dtype.itemsize
        prepared = self.slots * (2 * c * c * size + 4 * c * 4)
        kept = cut.entries * (2 * e * m + c * m) * size
        boundaries = 0 if cut.number == 1 else (cut.number - 1 + (1 if cut.per_sequence else 2)) * cut.carriers * e * m * 4
        return self.heads_v * (prepared + kept + boundaries)

    def like(self, piece: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        """What stands for a new tensor of this shape and dtype on the call's device."""
        return like(*piece, self.device)

    def states(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of `count` states of every value head."""
        return (count, self.heads_v, self.variant.e, self.variant.m), dtype


def readable(c: DeltaCall) -> DeltaCall:
    """The call as kernels read it: itself, or with copies of what has other strides."""
    q, k, v = (last_contiguous(t) for t in (c.q, c.k, c.v))
    state, lengths, cu = (None if t is None else t.contiguous() for t in (c.state, c.lengths, c.cu_seqlens))
    if q is c.q and k is c.k and v is c.v and state is c.state and lengths is c.lengths and cu is c.cu_seqlens:
        return c
    return replace(c, q=q, k=k, v=v, state=state, lengths=lengths, cu_seqlens=cu)
