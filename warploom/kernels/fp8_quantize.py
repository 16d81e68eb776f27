"""The op that makes FP8 numbers of q, k and v by one kernel, and how values lie for tensor cores."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from warploom.kernels.e4m3 import E4M3, slices
from warploom.runtime.device import capability
from warploom.runtime.flops import nothing
from warploom.runtime.op import Op, settled_dtypes

BLOCK = 128  # rows that share a scale: a multiple of what tiles have, or a tile is one of it
# Earlier ones have no e4m3; for 10.0 Triton 3.6 fails to compile the kernel.
_CAPABILITIES = (89, 90)
# Looked up here: torch.compile does not trace that.
_HAS_TRITON = find_spec("triton") is not None


def takes(q: Tensor, k: Tensor, v: Tensor, seed: int | None) -> bool:
    """Whether one launch of a kernel makes the numbers; elsewhere torch does."""
    if not (q.is_cuda and _HAS_TRITON and capability(q.device) in _CAPABILITIES):
        return False
    dims = q.shape[-1], v.shape[-1]
    return max(dims) <= 256 and (seed is None or slices(dims[0]) is not None) and q.numel() > 0 and v.numel() > 0


class QuantizeOp(Op):
    """Data and scale of q, of k and of v, whose data is (…, heads, head_dim, rows up to a multiple of 16)."""

    name, public = "fp8_quantize", "warploom.fp8.quantize"
    without = "quantise before the exported part"
    signature = (
        "(Tensor q, Tensor k, Tensor v, int? seed, str granularity, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_q, Tensor? seqused_k) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    )

    def forward(self, *flat: Any) -> tuple[Tensor, ...]:
        from warploom.kernels.triton import fp8_launch

        found = self.fake(*flat)
        with settled_dtypes(flat[0]):
            fp8_launch.quantize(found, *flat)
        return found

    def fake(self, *flat: Any) -> tuple[Tensor, ...]:
        q, k, v, _, granularity, cu_seqlens = flat[:6]

        def scale(t: Tensor) -> Tensor:
            rows, heads = t.shape[-3:-1]
            shape: tuple[Any, ...] = {"head": (heads,), "tensor": (1,)}.get(granularity, ())
            if granularity == "block" and cu_seqlens is not None:
                shape = (rows // BLOCK + max(cu_seqlens.shape[0] - 1, 1), heads)
            elif granularity == "block":
                shape = (t.shape[0], -(-rows // BLOCK), heads)
            return t.new_empty(shape, dtype=torch.float32)

        rows, heads, dim = v.shape[-3:]
        storage = v.new_empty((*v.shape[:-3], heads, dim, _padded(rows)), dtype=E4M3)
        return q.new_empty(q.shape, dtype=E4M3), scale(q), k.new_empty(k.shape, dtype=E4M3), scale(k), storage, scale(v)

    def flops(self, *flat: Any) -> int:
        return nothing()


quantize_op = QuantizeOp()


def _padded(rows: Any) -> Any:
    """Numbers of a row of keys, so that each begins where a tensor map may."""
    return -(-rows // 16) * 16


def of_storage(storage: Tensor, rows: int) -> Tensor:
    """(…, rows, heads, head_dim) of (…, heads, head_dim, rows and zeros)."""
    return storage[..., :rows].transpose(-1, -2).transpose(-2, -3)


def keys_last(data: Tensor) -> Tensor:
    """The same numbers as a view of (…, heads, head_dim, rows and zeros)."""
    rows, heads, dim = data.shape[-3:]
    found = of_storage(data.new_zeros((*data.shape[:-3], heads, dim, _padded(rows)), dtype=torch.uint8), rows)
    return found.copy_(data.view(torch.uint8)).view(E4M3)
