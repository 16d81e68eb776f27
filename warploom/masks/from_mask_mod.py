"""The column mask of FlexAttention's mask_mod: the function evaluated block by block, as FlexAttention evaluates it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from warploom.masks.arguments import describe, integer
from warploom.masks.base import LONGEST
from warploom.masks.intervals import ResolvedMask
from warploom.masks.scan import Span, scan
from warploom.runtime.progress import Progress

PAGE = "docs/from-flexattention.md"
_SILENT = 2.0  # seconds of work before progress is shown


def from_mask_mod(
    mask_mod: Any, seqlen_q: Any, seqlen_k: Any, batch: Any, heads: Any, device: torch.device | str | None
) -> ResolvedMask:
    """See `ColumnMask.from_mask_mod`."""
    _check_function(mask_mod)
    shape = (
        _size("batch", 1 if batch is None else batch, optional=True),
        _size("heads", 1 if heads is None else heads, optional=True),
        _size("seqlen_q", seqlen_q),
        _size("seqlen_k", seqlen_k),
    )
    if torch.compiler.is_compiling():
        raise ValueError("from_mask_mod reads every value of the mask: call it outside of the compiled region")
    where = _place(device)
    name = getattr(mask_mod, "__name__", type(mask_mod).__name__)
    total = shape[0] * shape[1] * shape[2] * shape[3]
    progress = Progress(total, enabled=sys.stderr.isatty(), after=_SILENT)
    progress.start(f"reading {name} over {shape[2]} x {shape[3]} positions")
    try:
        # Vectors of an inference tensor could not be kept for autograd later.
        with torch.inference_mode(False), torch.no_grad():
            return scan(f"mask_mod {name}", _blocks(mask_mod, name, where), shape, where, progress.step)
    finally:
        progress.close()


def _size(name: str, value: Any, optional: bool = False) -> int:
    size: int = integer(name, value, 0, optional)
    if size > LONGEST:
        raise ValueError(f"{name} must be at most {LONGEST}, got {size}")
    return size


def _check_function(mask_mod: Any) -> None:
    if hasattr(mask_mod, "mask_mod") and hasattr(mask_mod, "kv_num_blocks"):
        raise TypeError("from_mask_mod takes the function that a BlockMask was made of: pass block_mask.mask_mod")
    if not callable(mask_mod):
        raise TypeError(f"from_mask_mod takes a function mask_mod(b, h, q_idx, kv_idx), got {describe(mask_mod)}")
    try:
        parameters = inspect.signature(mask_mod).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(needed) == 4:
        return
    hint = f"; with five it is a score_mod, and {PAGE} says what becomes of those" if len(needed) == 5 else ""
    raise TypeError(f"from_mask_mod takes a function mask_mod(b, h, q_idx, kv_idx), got one of {len(needed)} arguments{hint}")


def _place(device: torch.device | str | None) -> torch.device:
    """Where indices are: as create_block_mask has it, on the accelerator if there is one."""
    if device is not None:
        try:
            return torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device takes a device such as 'cpu' or 'cuda', got {describe(device)}") from None
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _blocks(mask_mod: Callable[..., Any], name: str, device: torch.device) -> Callable[[Span, Span, Span, Span], Tensor]:
    """Blocks of the mask, by FlexAttention's own evaluation of a whole one: one index each, under torch.vmap."""
    from torch.nn.attention.flex_attention import create_mask

    def block(batch: Span, heads: Span, rows: Span, columns: Span) -> Tensor:
        spans = (batch, heads, rows, columns)
        lengths = [stop - start for start, stop in spans]

        def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
            return mask_mod(*(i + start if start else i for i, (start, _) in zip((b, h, q_idx, kv_idx), spans, strict=True)))

        try:
            seen: Tensor = create_mask(shifted, lengths[0], lengths[1], lengths[2], lengths[3], device)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(
                f"mask_mod {name} failed when called as FlexAttention calls it, with one b, h, q_idx and kv_idx each under "
                f"torch.vmap: {type(error).__name__}: {first_line}"
            ) from error
        if seen.dtype != torch.bool:
            raise TypeError(f"mask_mod {name} must return a bool, True = visible, got {seen.dtype}")
        if list(seen.shape) != lengths:
            raise ValueError(
                f"mask_mod {name} must return one bool for each pair of q_idx and kv_idx, got shape {tuple(seen.shape[4:])}"
            )
        return seen

    return block
