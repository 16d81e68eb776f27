"""Where a bias's gradient is summed: by a backward kernel that holds its tiles, or from what those leave."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from warploom.attention.triton.bias_gradient import bias_gradient_kernel, bias_sums_kernel, distance_sums_kernel
from warploom.attention.triton.call import Call, Variant, dims
from warploom.attention.triton.config import Tiling
from warploom.runtime.triton_launch import Launch

_BLOCK = 128  # elements that a program of the small kernels sums
_SLOTS = 16  # histograms that it reads at once


class BiasGradient:
    """The gradient of one backward pass: what kernels write to, and the launches behind them.

    Workspace in fp32: about 8 · batch · heads · (seqlen_q + seqlen_k + a tile) bytes for a table, of packed calls tokens in
    place of batch · seqlen and a tile a sequence; 4 · batch · heads · seqlen for sums of rows or columns; else none.

    Attributes:
        result: the gradient once the pass has run; None where none is asked for.
        of_rows: what the dQ kernel writes to: tiles of the gradient, or sums of rows.
        of_columns: what the dK/dV kernel writes to: sums of columns.
    """

    def __init__(self, call: Call, bias: Tensor) -> None:
        assert call.variant.bias is not None
        self._call, self._bias, self._way = call, bias, call.variant.bias.gradient
        self.result: Tensor | None = None
        self.of_rows: Tensor | None = None
        self.of_columns: Tensor | None = None
        if not self._way:
            return
        features = call.variant.features
        if self._way == "tiles":
            # Hidden tiles are not visited.
            every = not (call.packed or features.left or features.right or features.columns or features.q_offset)
            self.result = bias.new_empty(bias.shape) if every else bias.new_zeros(bias.shape)
            self.of_rows = self.result
            return
        if call.shared is not None:
            every = not (features.left or features.right)
            self.result = bias.new_empty(bias.shape) if every else bias.new_zeros(bias.shape)
            return
        self.result = bias.new_empty(bias.shape)
        sequences = () if call.packed else (call.batches,)
        if self._way == "rows":
            self.of_rows = bias.new_empty((*sequences, call.heads, call.seqlen_q), dtype=torch.float32)
        elif self._way == "columns":
            self.of_columns = bias.new_empty((*sequences, call.heads, call.seqlen_k), dtype=torch.float32)

    def box(self, tiling: Tiling) -> TensorDescriptor | None:
        """How the copy engine writes a tile of the gradient; None where it cannot, or where no tiles are written."""
        assert self._call.variant.bias is not None
        if self._way not in ("tiles", "tensor") or not self._call.variant.bias.boxes or self.result is None:
            return None
        return TensorDescriptor.from_tensor(self.result, [1, 1, tiling.m, tiling.n])

    def finish(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        rows: Tensor,
        row_tiles: int,
        vectors: Sequence[Tensor | None],
        seed: Tensor | None,
        sequences: Sequence[Tensor | None],
    ) -> None:
        """The launches behind the dQ kernel's, on the current device; ``tensors`` are q, k, v and dout."""
        cu_q, cu_k, _, offset = sequences
        if self._way == "rows":
            assert self.of_rows is not None
            self._sum(self.of_rows, self._call.seqlen_q, cu_q, offset)
        elif self._way == "columns":
            assert self.of_columns is not None
            self._sum(self.of_columns, self._call.seqlen_k, cu_q if cu_k is None else cu_k, None)
        elif self._way in ("tensor", "distance") and self._call.shared is None:
            self._own((*tensors, rows), row_tiles, (*vectors, seed, *sequences))

    def _steps(self) -> tuple[int, int]:
        """Batch entries and heads that share an element."""
        batch, heads = self._bias.shape[:2]
        return (self._call.batches if batch == 1 else 1), (self._call.heads if heads == 1 else 1)

    def _sum(self, sums: Tensor, seqlen: int, cu: Tensor | None, offset: Tensor | None) -> None:
        call, result = self._call, self.result
        assert result is not None
        batch, heads = result.shape[:2]
        places = result.numel() // (batch * heads)
        blocks = -(-places // _BLOCK)
        launch = _sums_launch(call.variant, places == 1)
        numbers = (call.batches, call.heads, seqlen, places, blocks, *self._steps())
        launch((blocks * batch * heads, 1), sums, result, cu, offset, *numbers)

    def _own(self, tensors: tuple[Tensor, ...], row_tiles: int, behind: tuple[Tensor | None, ...]) -> None:
        """The pass that computes dscores anew."""
        call, result = self._call, self.result
        assert result is not None
        distance = self._way == "distance"
        tiling = call.config.dtable if distance else call.config.dbias
        slots, places, to = 0, None, result
        seqlen_q, seqlen_k = (call.seqlen_q, call.seqlen_k) if distance else result.shape[2:]
        tiles_q, tiles_k = -(-seqlen_q // tiling.m), -(-seqlen_k // tiling.n)
        steps = (1, 1) if distance else self._steps()
        if distance:
            slots = call.batches * (tiles_q + tiles_k - 1)
            if call.packed:
                slots = seqlen_q // tiling.m + seqlen_k // tiling.n + 2 * call.batches
            places = result.new_empty(slots, dtype=torch.int32)
            to = result.new_empty((call.heads, slots, 2 * tiling.n + 2))
            programs = slots * call.heads
        else:
            programs = tiles_q * tiles_k * result.shape[0] * result.shape[1]
        numbers = (call.batches, slots, tiles_q, tiles_k, *steps, row_tiles, *call.lengths, *call.mask, *call.bias)
        launch = _gradient_launch(call.variant, tiling, call.config.dkdv.m)
        boxes = (None, None) if distance else (bias_box(self._bias, tiling, call.variant), self.box(tiling))
        read: Sequence[Tensor | TensorDescriptor] = tensors[:4]
        if tiling.boxes:
            read = rows_boxes(tensors[:4], (tiling.m, tiling.n, tiling.n, tiling.m), call.variant)
        given = (*read, tensors[4], self._bias, *boxes, to, places, *behind)
        launch((programs, 1), *given, *call.strides, *call.mask_strides, *numbers)
        if distance:
            heads, entries = result.shape
            blocks = -(-entries // _BLOCK)
            launch = _distance_launch(call.variant, tiling.n)
            launch((blocks * heads, 1), to, places, result, slots, entries, blocks)


def rows_boxes(tensors: tuple[Tensor, ...], rows: tuple[int, ...], variant: Variant) -> list[TensorDescriptor]:
    """How the copy engine reads so many rows of one head at a time of q, k, v and dout."""
    width, width_v = dims(variant)["D"], dims(variant)["DV"]
    return [
        TensorDescriptor(t, list(t.shape), list(t.stride()), [1, n, 1, w])
        for t, n, w in zip(tensors, rows, (width, width, width_v, width_v), strict=True)
    ]


def bias_box(bias: Tensor, tiling: Tiling, variant: Variant) -> TensorDescriptor | None:
    """How the copy engine reads a tile of a bias, of what batch entries or heads share one; None where it cannot."""
    if variant.bias is None or not variant.bias.boxes:
        return None
    shape = [1 if stride == 0 else n for n, stride in zip(bias.shape, bias.stride(), strict=True)]
    # Of a dimension of size 1 any stride will do, but for the copy engine's own bounds.
    strides = [bias.stride(2) if n == 1 else stride for n, stride in zip(shape, bias.stride(), strict=True)]
    return TensorDescriptor(bias, shape, [*strides[:3], 1], [1, 1, tiling.m, tiling.n])


@cache
def _sums_launch(variant: Variant, total: bool) -> Launch:
    # Pointers are not specialised, and integers are small where the call's are.
    return Launch(bias_sums_kernel, {"TOTAL": total, "BLOCK": _BLOCK, "num_warps": 4}, direct=variant.direct)


@cache
def _gradient_launch(variant: Variant, tiling: Tiling, row_tile: int) -> Launch:
    assert variant.bias is not None
    options = {
        **dims(variant), "M": tiling.m, "N": tiling.n, "WIDE": variant.wide, "DESCENDING": variant.descending,
        "ROW_TILE": row_tile, "BIAS": variant.bias.kind, "BIAS_UNIT": variant.bias.unit, "BOXES": tiling.boxes,
        "num_warps": tiling.warps, "num_stages": tiling.stages,
    }  # fmt: skip
    return Launch(bias_gradient_kernel, options, direct=variant.direct)


@cache
def _distance_launch(variant: Variant, n: int) -> Launch:
    return Launch(distance_sums_kernel, {"N": n, "SLOTS": _SLOTS, "BLOCK": _BLOCK, "num_warps": 4}, direct=variant.direct)
