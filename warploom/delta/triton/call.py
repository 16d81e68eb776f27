"""From a call to the kernels' arguments: shapes, strides and constants, read on the host; contents never are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from warploom.delta.triton.config import Config, config
from warploom.runtime.device import capability
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


@dataclass(frozen=True)
class Call:
    """One call as every kernel of it sees it."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    beta: Tensor
    decay: Tensor | None
    state: Tensor | None
    lengths: Tensor | None
    cu: Tensor | None
    variant: Variant
    config: Config
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
        q, k, v = (last_contiguous(t) for t in (c.q, c.k, c.v))
        dout = None if dout is None else last_contiguous(dout)
        given = {name: t for name, t in (("q", q), ("k", k), ("v", v), ("dout", dout)) if t is not None}
        unit = UNIT if all(s % UNIT == 0 for t in given.values() for s in t.stride()[:3]) else 1
        strides = {name: tuple(s // unit for s in t.stride()[:3]) for name, t in given.items()}
        strides |= {"beta": c.beta.stride(), "decay": (0, 0, 0) if c.decay is None else c.decay.stride()}
        aligned = all(t.data_ptr() % 16 == 0 for t in given.values())
        small = q.shape[1] < _WHOLE and all(abs(s) < 2**31 for group in strides.values() for s in group)
        e, m, seqlen = q.shape[3], v.shape[3], q.shape[1]
        tiling = config(v.dtype, e, m, capability(q.device), dout is not None)
        chunks = -(-seqlen // tiling.chunk)
        return cls(
            q=q,
            k=k,
            v=v,
            dout=dout,
            beta=c.beta,
            decay=c.decay,
            state=None if c.state is None else c.state.contiguous(),
            lengths=_contiguous(c.lengths),
            cu=_contiguous(c.cu_seqlens),
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
            sequences=c.sequences,
            seqlen=seqlen,
            chunks=chunks,
            slots=c.sequences * chunks if c.cu_seqlens is None else seqlen // tiling.chunk + c.sequences + 1,
            heads=q.shape[2],
            heads_v=v.shape[2],
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
        return self.sequences + (self.cu is not None)

    def whole(self) -> Ranges:
        """One range, of all chunks."""
        return Ranges(self.cu is None, _WHOLE, 1, self.slots, 0)

    def ranges(self) -> Ranges:
        """The fewest ranges whose room is no more than the bytes of q, k, v and out; the least room where there are none."""
        allowed = (self.q.numel() + self.k.numel() + 2 * self.v.numel()) * self.q.element_size()
        cuts = [self.cut(per_sequence, n) for per_sequence in ((True, False) if self.cu is None else (False,)) for n in _RANGES]
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
        size = self.q.element_size()
        prepared = self.slots * (2 * c * c * size + 4 * c * 4)
        kept = cut.entries * (2 * e * m + c * m) * size
        boundaries = 0 if cut.number == 1 else (cut.number - 1 + (1 if cut.per_sequence else 2)) * cut.carriers * e * m * 4
        return self.heads_v * (prepared + kept + boundaries)

    def states(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for `count` states of every value head."""
        return self.q.new_empty((count, self.heads_v, self.variant.e, self.variant.m), dtype=dtype)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()
