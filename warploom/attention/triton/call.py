"""From a call's arguments to the kernels': shapes, strides and constants, read on the host; contents never are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from warploom.attention import philox
from warploom.attention.problem import AttentionArgs
from warploom.attention.triton.config import Config, config, padded

# Elements that strides count in where they can: 16 bytes of the narrowest dtype.
_UNIT = 8
# Beyond it a limit changes nothing, and 32-bit arithmetic on positions stays in range.
_FAR = 2**30


@dataclass(frozen=True)
class Call:
    """One call as every kernel of it sees it."""

    args: AttentionArgs
    config: Config
    batches: int
    seqlen_q: int  # all packed tokens where the call is packed
    seqlen_k: int  # likewise; the most keys of a sequence where it is paged
    mask: dict[str, Any]
    scalars: dict[str, Any]

    @classmethod
    def of(cls, args: AttentionArgs) -> Call:
        q, k, v, table = args.q, args.k, args.v, args.block_table
        if args.cu_seqlens_q is None:
            batches, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        else:
            batches, seqlen_q = args.cu_seqlens_q.shape[0] - 1, q.shape[0]
            seqlen_k = k.shape[0] if table is None else k.shape[1] * table.shape[1]
        heads, heads_kv = q.shape[-2], k.shape[-2]
        names = ("lts", "lte", "uts", "ute")
        vectors = {n: None if (t := getattr(args, n)) is None else t.contiguous() for n in names}
        shape = next((t.shape for t in vectors.values() if t is not None), (1, 1))
        mask: dict[str, Any] = {f"{name}_ptr": t for name, t in vectors.items()}
        mask["stride_mb"] = shape[1] * seqlen_k if shape[0] > 1 else 0
        mask["stride_mh"] = seqlen_k if shape[1] > 1 else 0
        mask["mask_group"] = heads // shape[1]
        mask["left"], mask["right"] = _limit(args.left), _limit(args.right)
        scalars = {
            "seed_ptr": args.dropout_seed if args.dropout_p else None,
            "batches": batches,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "heads": heads,
            "group": heads // heads_kv,
            "scale": args.scale,
            "softcap": args.softcap or None,
            "threshold": _signed(philox.threshold(args.dropout_p)),
            "keep_scale": 1.0 / (1.0 - args.dropout_p),
            "DIM": q.shape[-1],
            "DIM_V": v.shape[-1],
            "D": padded(q.shape[-1]),
            "DV": padded(v.shape[-1]),
            "DESCENDING": args.scale <= 0.0,
        }
        chosen = config(q.dtype, q.shape[-1], v.shape[-1], _capability(q.device))
        return cls(args, chosen, batches, seqlen_q, seqlen_k, mask, scalars)

    def tiles(self, seqlen: int, rows: int) -> tuple[int, int]:
        """Tiles of `rows` that cover seqlen, and how many batches have each of them.

        Packed tokens take a few slots more, one batch of them: see `find_tile` in device.py.
        """
        if self.args.cu_seqlens_q is not None:
            return seqlen // rows + self.batches + 1, 1
        return -(-seqlen // rows), self.batches

    def sequences(self) -> dict[str, Tensor | None]:
        """Pointers to the lengths of packed sequences."""
        args = self.args
        return {"cu_q_ptr": args.cu_seqlens_q, "cu_k_ptr": args.cu_seqlens_k, "used_ptr": args.seqused_k}

    def bounds(self) -> dict[str, Any]:
        """The prepared bounds, (batch|1, heads|1, blocks, 8), and their strides."""
        bounds = self.args.bounds
        if bounds is None:
            return {"bounds_ptr": None, "stride_bb": 0, "stride_bh": 0}
        batch, head = (bounds.stride(d) if bounds.shape[d] > 1 else 0 for d in (0, 1))
        return {"bounds_ptr": bounds, "stride_bb": batch, "stride_bh": head}


def strides(unit: int, **tensors: Tensor) -> dict[str, int]:
    """stride_{name}{b,s,h} of (batch, seqlen, heads, dim) or packed (tokens, heads, dim) tensors, in `unit` elements."""
    result = {}
    for name, t in tensors.items():
        b, s, h = (0, *t.stride()[:2]) if t.ndim == 3 else t.stride()[:3]
        result.update({f"stride_{name}b": b // unit, f"stride_{name}s": s // unit, f"stride_{name}h": h // unit})
    return result


def unit_of(*tensors: Tensor) -> int:
    """8 where all strides are multiples of 8 elements, which lets the compiler use 16-byte accesses, else 1."""
    merged = 0
    for t in tensors:
        for stride in t.stride()[:-1]:
            merged |= stride
    return 1 if merged % _UNIT else _UNIT


def is_wide(rows: int, *tensors: Tensor) -> bool:
    """Whether offsets within a tile of `rows` rows pass 31 bits."""
    return any(t.stride(-3) * rows >= 2**31 for t in tensors)


def on_device(t: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device: make that the tensor's."""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return nullcontext()


def _limit(value: int | None) -> int | None:
    return None if value is None else max(min(value, _FAR), -_FAR)


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return word - 2**32 if word >= 2**31 else word


@cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
