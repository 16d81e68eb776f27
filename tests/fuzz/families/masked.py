"""Masks of warploom.masks from their specs."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz import maskspec
from tests.fuzz.maskspec import MaskSpec
from warploom import masks
from warploom.masks import Mask


def build(mask: MaskSpec, seqlen_q: int, seqlen_k: int, device: torch.device) -> Mask:
    """The builder's result; tensors that it is given are on the device."""
    if mask.kind == "and":
        one, other = (build(part, seqlen_q, seqlen_k, device) for part in mask.parts)
        return one & other
    kind, given = mask.kind, _Given(mask.form, device)
    if kind == "full":
        return masks.Full()
    if kind == "causal":
        return masks.Causal()
    if kind == "window":
        return masks.SlidingWindow(mask.left, mask.right)
    if kind == "chunked":
        return masks.Chunked(mask.a[0][0])
    if kind == "padding_lengths":
        return masks.Padding(given.numbers(mask.a))
    if kind == "padding_bits":
        bits = maskspec.bits(mask, seqlen_k).to(device)
        return masks.Padding(bits if mask.form == "list" else bits.to(torch.int64))
    if kind in ("document", "document_both", "blockwise"):
        rows = given.rows(mask.a)
        return masks.CausalBlockwise(rows) if kind == "blockwise" else masks.Document(rows, mask.causal)
    if kind == "document_cu":
        width = max(len(row) for row in mask.a)
        cu = tuple(tuple(sum(row[:n]) for n in range(width + 1)) for row in mask.a)
        return masks.Document.from_cu_seqlens(given.rows(cu), causal=mask.causal)
    if kind == "document_segments":
        return masks.Document.from_segment_ids(given.rows(mask.a), causal=mask.causal)
    if kind == "document_positions":
        return masks.Document.from_position_ids(given.rows(mask.a), causal=mask.causal)
    if kind == "prefix_lm":
        return masks.PrefixLM(given.numbers(mask.a))
    if kind == "prefix_document":
        return masks.PrefixDocument(given.rows(mask.a), given.rows(mask.b))
    if kind == "shared_question":
        return masks.SharedQuestion(given.numbers(mask.a), given.rows(mask.b))
    if kind in ("global_window", "global_window_causal"):
        assert mask.right is not None
        return masks.GlobalWindow(given.numbers(mask.a), mask.left, mask.right)
    if kind == "tree":
        return masks.Tree(given.rows(mask.a, pad=-2))
    if kind == "spans":
        return masks.BidirectionalSpans(given.rows(mask.a), given.rows(mask.b))
    if kind == "qk_sparse_bits":
        return masks.QKSparse(maskspec.bits(mask, seqlen_k).to(device))
    if kind == "qk_sparse_positions":
        return masks.QKSparse(given.rows(mask.a, pad=-1))
    if kind == "eviction":
        return masks.RandomEviction(maskspec.eviction_rows(mask, seqlen_q, seqlen_k).to(device))
    if kind == "block_diffusion":
        return masks.BlockDiffusion(*mask.a[0])
    if kind == "columns":
        vectors = {name: t.to(device) for name, t in maskspec.vectors(mask, seqlen_q, seqlen_k).items()}
        return masks.ColumnMask(vectors.pop("lts", None), **vectors, causal=mask.causal)
    raise ValueError(f"there is no mask {kind!r}")


class _Given:
    """Rows as a caller may give them."""

    def __init__(self, form: str, device: torch.device) -> None:
        self.form, self.device = form, device

    def rows(self, rows: maskspec.Rows, pad: int = 0) -> Any:
        if self.form == "list":
            return [list(row) for row in rows]
        width = max(len(row) for row in rows)
        padded = [[*row, *[pad] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=getattr(torch, self.form)).reshape(len(rows), width).to(self.device)

    def numbers(self, rows: maskspec.Rows) -> Any:
        values = [row[0] for row in rows]
        if self.form == "list":
            return values[0] if len(values) == 1 else values
        return torch.tensor(values, dtype=getattr(torch, self.form), device=self.device)
