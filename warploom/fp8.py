"""FP8 inputs of attention: e4m3 numbers with fp32 scales, and queries and keys that were rotated.

The numbers, the scales and the rotation are those of FP8 caches (`warploom.kernels.e4m3`): the same seed gives the same
rotation. `quantize()` makes them of q, k and v, and `attention(*quantize(q, k, v))` takes them. Inference only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from warploom.kernels.e4m3 import AGAIN_FROM, AGAIN_TO, E4M3, as_bytes, quantized, rotate, rounded_again, scales_of
from warploom.kernels.fp8_quantize import BLOCK, keys_last, of_storage, quantize_op, takes
from warploom.runtime import arguments
from warploom.runtime.op import differentiates_forward
from warploom.runtime.qkv import autocast_inputs, check_starts, check_tensors

__all__ = ["Fp8Tensor", "quantize"]

Granularity = Literal["block", "head", "tensor"]
GRANULARITIES = ("block", "head", "tensor")
Accumulate = Literal["fp32", "fast"]
ACCUMULATES = ("fp32", "fast")


@dataclass(frozen=True, eq=False)
class Fp8Tensor:
    """q, k or v in FP8: number x is ``data`` times its scale. A pytree node that moves with ``.to(device)``.

    Attributes:
        data: float8_e4m3fn, (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim). Of v on a GPU it is a view of
            (batch, heads, head_dim, seqlen) or (heads, head_dim, total), as a tensor core reads e4m3 values, whose last
            dimension has zeros up to a multiple of 16.
        scale: float32, of all numbers (1,), of each head (heads,), or of each block of 128 rows and head: (batch,
            ⌈seqlen / 128⌉, heads), of packed sequences (total // 128 + sequences, heads).
        cu_seqlens: int32 (sequences + 1,), with scales of packed blocks: those of sequence n begin at cu_seqlens[n] // 128 + n.
        hadamard_seed: of the rotation of head_dim, which q and k share; None: not rotated.
        dtype: of the numbers that were quantised; attention's result has q's.
        accumulate: of v, how a kernel that multiplies the numbers as they are sums P V, as `quantize()` has it.
    """

    data: Tensor
    scale: Tensor
    cu_seqlens: Tensor | None = None
    hadamard_seed: int | None = None
    dtype: torch.dtype = torch.bfloat16
    accumulate: Accumulate = "fp32"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "data": as_bytes(self.data)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "data": state["data"].view(E4M3)})

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that these stand for, of ``data``'s shape, in fp32 and rounded to ``dtype``. A rotation stays."""
        scale = self.scale
        if scale.ndim > 1:
            rows = _Rows.of(self.data, self.cu_seqlens)
            scale = scale.flatten(0, -2)[rows.block].unflatten(0, self.data.shape[:-2])
        return (self.data.float() * scale[..., None]).to(arguments.float_dtype("dtype", dtype))

    def to(self, device: torch.device | str) -> Fp8Tensor:
        """The same on a device."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"an Fp8Tensor moves to a device, got {device}; dequantize(dtype) gives its numbers")
        cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens.to(device)
        return replace(self, data=self.data.to(device), scale=self.scale.to(device), cu_seqlens=cu_seqlens)


torch.serialization.add_safe_globals([Fp8Tensor])
_pytree.register_pytree_node(
    Fp8Tensor,
    lambda t: ([t.data, t.scale, t.cu_seqlens], (t.hadamard_seed, t.dtype, t.accumulate)),
    lambda children, context: Fp8Tensor(*children, *context),
)


class _Rows(NamedTuple):
    """The rows of a tensor (…, heads, head_dim), those of all sequences one behind the other."""

    block: Tensor  # int64, which of all blocks each is in
    blocks: int
    counts: Tensor | None  # bool, which are not padding; None: all count

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, used: Tensor | None = None) -> _Rows:
        """``used``: how many rows of each sequence count; None: all of them."""
        if cu_seqlens is None:
            batch, seqlen = x.shape[:2]
            row, each = torch.arange(seqlen, device=x.device), -(-seqlen // BLOCK)
            block = torch.arange(batch, device=x.device)[:, None] * each + row // BLOCK
            return cls(block.flatten(), batch * each, None if used is None else (row < used[:, None]).flatten())
        sequences, starts = cu_seqlens.shape[0] - 1, cu_seqlens.long()
        row = torch.arange(x.shape[0], device=x.device)
        owner = torch.searchsorted(starts[1:], row, right=True)
        counts = owner < sequences
        # What lies behind the last sequence is looked up in it. Wrong contents, on a GPU, stay within the scales.
        owner = owner.clamp(max=max(sequences - 1, 0))
        place, blocks = row - starts[owner], x.shape[0] // BLOCK + max(sequences, 1)
        if used is not None and sequences:
            counts = counts & (place < used[owner])
        return cls((starts[owner] // BLOCK + owner + place // BLOCK).clamp(0, blocks - 1), blocks, counts)


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    hadamard: bool = True,
    seed: int = 0,
    granularity: Granularity = "block",
    accumulate: Accumulate = "fp32",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Fp8Tensor, Fp8Tensor, Fp8Tensor]:
    """q, k and v in FP8, as `attention()` and `attention_varlen()` take them.

    A scale makes the largest finite number that shares it 448, e4m3's largest. NaN stays NaN, and infinity becomes NaN.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim); float16, bfloat16, float32 or float64.
        k, v: (batch, seqlen_k, heads_kv, ·), or packed (total_k, heads_kv, ·).
        hadamard: rotate q and k along head_dim, by random signs and a Hadamard matrix (FlashAttention-3's incoherent
            processing, arXiv 2407.08608): their products stay, and a large number spreads over all others before it is rounded.
        seed: of the signs.
        granularity: what shares a scale: "block", 128 rows of one sequence and head, counted from its first; "head", all rows
            of a head, of every sequence; "tensor", everything.
        accumulate: how P V is summed where a kernel multiplies the numbers as they are: "fp32", the sums of 128 keys are added
            in fp32; "fast", tensor cores alone sum all keys, of which they keep some 14 bits. explain() names it.
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), with packed tensors: starts of the sequences, from 0; that of k
            defaults to that of q.
        seqused_q, seqused_k: int32 (batch or sequences,), rows of each sequence that are not padding; default: all. Padding
            becomes 0, as what lies behind the last packed sequence does, and no scale looks at it.

    Returns:
        (q, k, v), each with the dtype that it had.

    Raises:
        TypeError, ValueError: before any work, naming the argument; a tensor that requires grad is one of the reasons.
    """
    q, k, v = autocast_inputs(q, k, v)
    packed = cu_seqlens_q is not None
    if isinstance(q, Tensor) and q.ndim == 3 and not packed:
        raise ValueError(f"q is packed, with 3 dimensions {tuple(q.shape)}: give cu_seqlens_q, or add a batch dimension")
    check_tensors(q, k, v, 3 if packed else 4, "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)")
    refuse_gradients(q=q, k=k, v=v)
    hadamard = arguments.flag("hadamard", hadamard)
    seed = arguments.integer("seed", seed, *arguments.INT64)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be one of 'block', 'head', 'tensor', got {granularity!r}")
    if accumulate not in ACCUMULATES:
        raise ValueError(f"accumulate must be one of 'fp32', 'fast', got {accumulate!r}")
    if not packed and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} but k has batch {k.shape[0]}")
    if not packed and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k goes with packed tensors and cu_seqlens_q")
    if packed and cu_seqlens_k is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has {k.shape[0]} packed tokens but q has {q.shape[0]}: give cu_seqlens_k")
    of_q = _lengths("q", q, cu_seqlens_q, seqused_q)
    of_k = _lengths("k", k, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)
    if packed and len(of_q[0]) != len(of_k[0]):
        raise ValueError(f"cu_seqlens_k has {len(of_k[0])} entries but cu_seqlens_q has {len(of_q[0])}")
    rotation = seed if hadamard else None
    if takes(q, k, v, rotation):
        x = [t.float() if t.dtype == torch.float64 else t for t in (q, k, v)]
        found = quantize_op(*x, rotation, granularity, of_q[0], of_k[0], of_q[1], of_k[1])
        cu_q, cu_k = (cu if granularity == "block" else None for cu in (of_q[0], of_k[0]))
        return (
            Fp8Tensor(found[0], found[1], cu_q, rotation, q.dtype),
            Fp8Tensor(found[2], found[3], cu_k, rotation, k.dtype),
            Fp8Tensor(of_storage(found[4], v.shape[-3]), found[5], cu_k, None, v.dtype, accumulate),
        )
    numbers = replace(_quantize(v, None, granularity, *of_k), accumulate=accumulate)
    if v.is_cuda:
        numbers = replace(numbers, data=keys_last(numbers.data))
    return _quantize(q, rotation, granularity, *of_q, queries=True), _quantize(k, rotation, granularity, *of_k), numbers


def _lengths(name: str, x: Tensor, cu_seqlens: Any, used: Any) -> tuple[Any, Any]:
    """The two tensors that say where sequences of x are, checked."""
    cu_seqlens = arguments.int32(f"cu_seqlens_{name}", cu_seqlens, 1, x, name)
    used = arguments.int32(f"seqused_{name}", used, 1, x, name)
    if cu_seqlens is not None and not cu_seqlens.shape[0]:
        raise ValueError(f"cu_seqlens_{name} must have an entry at least, got none")
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if used is not None and used.shape[0] != sequences:
        raise ValueError(f"seqused_{name} has {used.shape[0]} entries but {name} has {sequences} sequences")
    if arguments.readable(x):
        if cu_seqlens is not None:
            check_starts(f"cu_seqlens_{name}", cu_seqlens, x.shape[0])
        if used is not None:
            lengths = cu_seqlens.diff() if cu_seqlens is not None else torch.full_like(used, x.shape[1])
            wrong = ((used < 0) | (used > lengths)).nonzero()
            if len(wrong):
                n = int(wrong[0])
                raise ValueError(f"seqused_{name}[{n}] is {int(used[n])}, but sequence {n} has {int(lengths[n])} rows")
    return cu_seqlens, used


def _quantize(
    x: Tensor, seed: int | None, granularity: str, cu_seqlens: Tensor | None, used: Tensor | None, *, queries: bool = False
) -> Fp8Tensor:
    lead, dtype = x.shape[:-2], x.dtype
    rows = _Rows.of(x, cu_seqlens, used)
    y = (x.float() if seed is None else rotate(x, seed)).flatten(0, -3)  # rows, heads, head_dim
    if rows.counts is not None:
        y = y.masked_fill(~rows.counts[:, None, None], 0.0)
    # A NaN takes no other number of its block along, which queries may see where a mask hides the NaN itself.
    top = y.abs().masked_fill(~y.isfinite(), 0.0).amax(-1)
    heads = top.shape[1]
    if granularity == "block":
        index = rows.block[:, None].expand(-1, heads)
        top = top.new_zeros(rows.blocks, heads).scatter_reduce(0, index, top, "amax")
    else:
        top = torch.cat([top, top.new_zeros(1, heads)])  # of no rows too
        top = top.amax(0) if granularity == "head" else top.amax()[None]
    scale = scales_of(top[..., None])
    of_rows = scale[rows.block] if granularity == "block" else scale.expand(y.shape[:-1])
    data = quantized(y, of_rows)
    if seed is not None and AGAIN_FROM <= x.shape[-1] <= AGAIN_TO and y.numel():
        data = rounded_again(data, y, of_rows, x.flatten(0, -3), seed, queries)
    data = data.unflatten(0, lead)
    if granularity != "block":
        return Fp8Tensor(data, scale, None, seed, dtype)
    if cu_seqlens is None:
        scale = scale.unflatten(0, (lead[0], -1)) if scale.numel() else scale.new_ones(lead[0], -(-lead[1] // BLOCK), heads)
    return Fp8Tensor(data, scale, cu_seqlens, seed, dtype)


def refuse_gradients(**tensors: Tensor | None) -> None:
    """An error that names the tensor: rounding has no derivative, and its result would look constant."""
    if torch.is_grad_enabled():
        for name, t in tensors.items():
            if t is not None and t.requires_grad:
                raise ValueError(
                    f"{name} requires grad, and attention in FP8 has no backward: call it under torch.no_grad(), or use "
                    "attention() in bfloat16, which is differentiable"
                )
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("attention in FP8 under a torch.func transform is not supported; use attention() in bfloat16")
    if differentiates_forward(*[t for t in tensors.values() if t is not None]):
        raise NotImplementedError("forward-mode AD through attention in FP8 is not supported; use attention() in bfloat16")
