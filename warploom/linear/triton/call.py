"""From a call to the kernels' arguments: shapes, strides and constants, read on the host; contents never are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from warploom.linear.triton.config import Config, config, padded
from warploom.runtime.device import capability
from warploom.runtime.likeness import like
from warploom.runtime.qkv import last_contiguous

if TYPE_CHECKING:
    from warploom.linear.problem import LinearCall

# Elements that strides count in where they can: 16 bytes of the narrowest dtype.
UNIT = 8


class Variant(NamedTuple):
    """Everything about a call that a binary depends on, beyond a kernel's tile sizes."""

    dtype: torch.dtype
    e: int
    m: int
    group: int
    map_q: str
    map_k: str
    causal: bool
    normalize: bool
    unit: int  # strides are multiples of so many elements
    wide: bool  # offsets within a chunk pass 31 bits
    direct: bool  # pointers are aligned to 16 bytes and all integers fit 32 bits: every launch fits one binary
    decay: bool
    a_head: bool  # a decay is one constant a head, and weighed in rows
    by_rows: bool  # a decay is weighed in rows
    present: tuple[bool, ...]  # which optional arguments there are
    device: int | None  # None: the interpreter


class Cut(NamedTuple):
    """How the sequences of one launch are cut into segments."""

    slots: int
    segments: int  # of a sequence, where they are not packed
    segment: int  # tokens

    @property
    def whole(self) -> bool:
        """Whether a segment is a sequence."""
        return self.segment == _WHOLE


# A segment longer than any sequence.
_WHOLE = 2**30


# S and z, or what stands for them.
States = tuple[Tensor | None, Tensor | None]
NO_STATES: States = (None, None)


class Tensors(NamedTuple):
    """Those of a call that kernels read, as launchers take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor | None
    z: Tensor | None
    decay: Tensor | None
    lengths: Tensor | None
    cu: Tensor | None
    sums: Tensor | None = None  # of the decay's logs, where they are weighed in rows

    @classmethod
    def of(cls, c: LinearCall) -> Tensors:
        return cls(c.q, c.k, c.v, c.s, c.z, c.decay, c.lengths, c.cu_seqlens)

    @property
    def states(self) -> States:
        """The initial ones."""
        return self.s, self.z


@dataclass(frozen=True)
class Call:
    """One call as every kernel of it sees it, without its tensors."""

    variant: Variant
    config: Config
    device: torch.device
    packed: bool
    batch: int
    sequences: int
    seqlen_q: int  # all packed tokens where the call is packed
    seqlen_k: int
    heads: int
    heads_kv: int
    scale: float
    eps: float
    strides_q: tuple[int, ...]  # batch, seqlen, head, in variant.unit elements; likewise the others
    strides_k: tuple[int, ...]
    strides_v: tuple[int, ...]
    strides_do: tuple[int, ...]
    strides_g: tuple[int, ...] | tuple[None, ...]  # of decays (batch, seqlen_k, heads_kv), in elements

    @classmethod
    def of(cls, c: LinearCall, dout: Tensor | None = None, flags: tuple[bool, ...] = ()) -> Call:
        """Of a call whose tensors are ``readable``."""
        q, k, v = c.q, c.k, c.v
        inputs = [t for t in (q, k, v, dout) if t is not None]
        mapped = c.map_q != "identity" or c.map_k != "identity"
        fades = c.decay is not None
        kind = fades, c.decay_grad, _weighed_by_rows(c)
        tiling = config(v.dtype, q.shape[3], v.shape[3], capability(q.device), c.normalize, mapped, *kind)
        strides = [t.stride()[:3] for t in inputs]
        unit = UNIT
        for group in strides:
            for stride in group:
                if stride % UNIT:
                    unit = 1
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        longest = max(t.chunk for t in (tiling.forward, tiling.state, tiling.dq, tiling.dk, tiling.dv))
        strides_g = None if c.decay is None else c.decays().stride()
        in_units = [tuple(s // unit for s in group) for group in strides]
        aligned = all(t.data_ptr() % 16 == 0 for t in inputs)
        by_rows = fades and tiling.by_rows
        small = max(seqlen_q, seqlen_k) < _WHOLE and all(abs(s) < 2**31 for group in in_units for s in group)
        if strides_g is not None:
            small = small and max(abs(s) for s in strides_g) < 2**31
        return cls(
            variant=Variant(
                dtype=v.dtype,
                e=q.shape[3],
                m=v.shape[3],
                group=q.shape[2] // k.shape[2],
                map_q=c.map_q,
                map_k=c.map_k,
                causal=c.causal,
                normalize=c.normalize,
                unit=unit,
                wide=any(abs(group[1]) * longest >= 2**31 for group in strides),
                direct=aligned and small,
                decay=fades,
                # With a gradient its logs are those of tokens: the kernels are then the same.
                a_head=by_rows and c.decay is not None and c.decay.ndim == 1 and not c.decay_grad,
                by_rows=by_rows,
                present=(c.s is not None, c.lengths is not None, c.cu_seqlens is not None, *flags),
                device=q.device.index,
            ),
            config=tiling,
            device=q.device,
            packed=c.cu_seqlens is not None,
            batch=q.shape[0],
            sequences=c.sequences,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads=q.shape[2],
            heads_kv=k.shape[2],
            scale=c.scale,
            eps=c.eps,
            strides_q=in_units[0],
            strides_k=in_units[1],
            strides_v=in_units[2],
            strides_do=in_units[3] if dout is not None else (0, 0, 0),
            strides_g=(None, None, None) if strides_g is None else strides_g,
        )

    @property
    def with_state(self) -> bool:
        """Whether there is an initial one."""
        return self.variant.present[0]

    def cut(self, seqlen: int, segment: int = _WHOLE) -> Cut:
        """Segments that cover sequences of up to seqlen tokens; of packed ones, whose lengths only the device knows, all.

        Packed tokens take a few slots more, and one for those past the last sequence: see `place` in device.py.
        """
        if self.packed:
            return Cut(seqlen // segment + self.sequences + 1, 1, segment)
        segments = max(-(-seqlen // segment), 1)
        return Cut(segments * self.sequences, segments, segment)

    def crowded(self, programs: int) -> bool:
        """Whether so many programs, walking whole sequences, fill the device; packed lengths may differ, so those need more."""
        enough, tokens = self.config.fill * _processors(self.device), max(self.seqlen_q, self.seqlen_k)
        if self.packed:
            enough, tokens = 4 * enough, tokens // max(self.sequences, 1)
        return programs >= enough and tokens <= self.config.longest

    def looks_back(self, programs: int) -> bool:
        """Whether segments find the states before them by looking back, in one launch, where `programs` walk a sequence."""
        weighed = not self.variant.decay or self.variant.by_rows
        same = weighed and self.variant.causal and self.variant.group == 1 and self.seqlen_q == self.seqlen_k
        short = not self.packed and self.seqlen_q <= self.config.segment
        return self.config.lookback and same and not short and not self.crowded(programs * self.sequences)

    def looking_back(self, programs: int) -> Cut:
        """The cut into segments that look back, where `programs` walk a sequence: longer ones if those occupy the device."""
        coarse = self.cut(self.seqlen_q, self.config.segment * self.config.coarse)
        enough = coarse.slots * programs >= 0.9 * _processors(self.device)
        return coarse if enough else self.cut(self.seqlen_q, self.config.segment)

    def numbers(self, cut: Cut) -> tuple[int, ...]:
        return (self.sequences, cut.segments, cut.segment, self.seqlen_q, self.seqlen_k)

    def chunks(self, chunk: int) -> int:
        """Room for so many chunks of all sequences: see `chunk_of` in fading.py."""
        longest = max(self.seqlen_q, self.seqlen_k)
        if self.packed:
            return longest // chunk + self.sequences + 1
        return -(-longest // chunk) * self.sequences

    def like(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """What stands for a new tensor on the call's device."""
        return like(shape, dtype, self.device)

    def states(self, count: int) -> tuple[Tensor, Tensor]:
        """What stands for room for `count` states of every key head."""
        e, m = self.variant.e, self.variant.m
        return self.like((count, self.heads_kv, e, m)), self.like((count, self.heads_kv, e))


def _weighed_by_rows(c: LinearCall) -> bool:
    """Whether rows of a call with a decay may be weighed: the kinds of calls whose results were held against fp64 on a GPU."""
    square = c.q.shape == c.k.shape == c.v.shape and c.q.shape[3] in (64, 128, 256)
    whole = c.lengths is None and c.cu_seqlens is None
    return square and whole and (c.map_q, c.map_k, c.normalize) in (("identity", "identity", False), ("elu+1", "elu+1", True))


def readable(c: LinearCall) -> LinearCall:
    """The call as kernels read it: itself, or with copies of what has other strides."""
    q, k, v = (last_contiguous(t) for t in (c.q, c.k, c.v))
    s, z = (None if t is None else t.contiguous() for t in (c.s, c.z))
    if q is c.q and k is c.k and v is c.v and s is c.s and z is c.z:
        return c
    return replace(c, q=q, k=k, v=v, s=s, z=z)


def new(like: Tensor | None) -> Tensor | None:
    """A tensor like one that stands for it; None of None."""
    return None if like is None else torch.empty_like(like)


def new_states(likes: States) -> States:
    """The same of both."""
    return new(likes[0]), new(likes[1])


def dims(variant: Variant, **blocks: int) -> dict[str, Any]:
    """Constants of every kernel with tokens; `blocks` name the padded dims."""
    return {"E": variant.e, "M": variant.m, "UNIT": variant.unit, "WIDE": variant.wide, **blocks}


def block_of(dim: int, block: int) -> int:
    """The columns that a program holds of a dim, no more than it has."""
    return min(block, padded(dim))


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
