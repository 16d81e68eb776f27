"""Running a call: the forward kernel, or the three or four of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from warploom.attention.problem import AttentionArgs, Kind
from warploom.attention.triton.backward_kernels import dkdv_kernel, dq_kernel, rows_kernel
from warploom.attention.triton.bias_sums import BiasGradient, bias_box
from warploom.attention.triton.call import Call, Variant, contiguous_strides, dims, lse_strides, read_bounds, strides_in
from warploom.attention.triton.config import Tiling
from warploom.attention.triton.forward_kernel import forward_kernel
from warploom.attention.triton.shared_gradient import shared_dq_kernel
from warploom.kernels.triton.widths import tile_widths
from warploom.runtime.device import on_device
from warploom.runtime.likeness import like
from warploom.runtime.triton_launch import Launch


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
    call = Call.of(args)
    mask = (*call.vectors, read_bounds(args))
    scales = args.k_scale, args.v_scale
    tensors = (args.q, args.k, args.v, args.sink, mask, call.sequences, _seed(args), args.block_table)
    return _forward(args, call)(*tensors, args.bias, scales)


def bind(args: AttentionArgs) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """What launches further calls of this kind by q, k, v, sink and what is behind them in ``AttentionArgs.launched``."""
    call = Call.of(args).alone()
    if not call.variant.direct:
        return None
    launch, kind, paged = _forward(args, call), Kind(args), args.block_table is not None

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *others: Tensor | None) -> tuple[Tensor, Tensor]:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return forward(kind.call(q, k, v, sink, *others))
        if paged:
            return launch(q, k, v, sink, *_parted(call, (*others[:3], *others[4:])), others[3])
        return launch(q, k, v, sink, *_parted(call, others))

    return run


def _forward(args: AttentionArgs, call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    """What launches a call by q, k, v, sink, the mask's vectors and bounds, what says where sequences are, seed and table."""
    q, tiling = args.q, call.config.forward
    shape, lse_shape = (*q.shape[:-1], args.v.shape[-1]), (q.shape[-2], *q.shape[:-2])
    if not call.packed:
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    like_out, like_lse = like(shape, q.dtype, q.device), like(lse_shape, torch.float32, q.device)
    tiles, batches = call.tiles(call.seqlen_q, tiling.m)
    boxes, bias_box = _key_boxes(args.k, args.v, tiling, call.variant), _bias_box(args.bias, tiling, call.variant)
    launch = _forward_launch(call.variant, tiling).kept(
        (tiles * batches * call.heads, 1),
        (
            *(*call.strides, *contiguous_strides(shape), *lse_strides(lse_shape), *call.mask_strides, *call.bounds_strides),
            *(0 if args.block_table is None else args.block_table.stride(0), call.batches, tiles, *call.lengths),
            *(*args.k.shape[:2], *call.mask, *call.bias, *call.scales),
        ),
    )

    def run(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, mask: Sequence[Tensor | None],
        sequences: Sequence[Tensor | None], seed: Tensor | None, table: Tensor | None = None, bias: Tensor | None = None,
        scales: Sequence[Tensor | None] = (None, None),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = torch.empty_like(like_out), torch.empty_like(like_lse)
        with on_device(q):
            key_boxes = boxes if boxes[0] is None else _moved(boxes, (k, v))
            box = None if bias is None else _moved_bias(bias_box, bias)
            launch(q, k, v, out, lse, *mask, sink, seed, *sequences, table, *key_boxes, bias, box, *scales)
        return out, lse

    return run


def backward(args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsink (empty without a sink) in the dtypes of q, k, v and sink; with ``bias_grad`` dbias too."""
    dout, dlse, out, lse = _readable(dout, dlse, out, lse)
    call = Call.of(args, dout, out, dlse is not None)
    tensors = (args.q, args.k, args.v, args.sink, (*call.vectors, read_bounds(args)), call.sequences, _seed(args))
    return _backward(args, dout, call)(dout, dlse, out, lse, *tensors, args.bias)


def bind_backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> Callable[..., tuple[Tensor, ...]] | None:
    """As ``bind``, of backward passes: dout, dlse, out and lse come first."""
    dout, dlse, out, lse = _readable(dout, dlse, out, lse)
    call = Call.of(args, dout, out, dlse is not None).alone()
    if not call.variant.direct:
        return None
    launch, kind = _backward(args, dout, call), Kind(args)

    def run(
        dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *others: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dout, dlse, out, lse = _readable(dout, dlse, out, lse)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr() | out.data_ptr()) & 15:
            return backward(kind.call(q, k, v, sink, *others), dout, dlse, out, lse)
        return launch(dout, dlse, out, lse, q, k, v, sink, *_parted(call, others))

    return run


def _readable(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """What backward kernels take of the results and their gradients."""
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    return dout, None if dlse is None else dlse.contiguous(), out.contiguous(), lse.contiguous()


def _backward(args: AttentionArgs, dout: Tensor, call: Call) -> Callable[..., tuple[Tensor, ...]]:
    """As ``_forward``, of the three or four launches of a backward pass, and those that sum a bias's gradient."""
    q, k, v, variant = args.q, args.k, args.v, call.variant
    row_tile = call.config.dkdv.m
    row_tiles, batches = call.tiles(call.seqlen_q, row_tile)
    grid = (row_tiles * batches * call.heads, 1)
    like_rows = like((grid[0], 2, row_tile), torch.float32, q.device)
    like_edges = like((grid[0],), torch.int32, q.device)
    shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (call.batches, call.heads, call.seqlen_q)
    lse_steps = lse_strides(lse_shape[1:] if call.packed else lse_shape)
    rows_launch = _rows_launch(variant, row_tile).kept(
        grid,
        (
            *(*strides_in(variant.unit, q), *contiguous_strides(shape), *strides_in(variant.unit, dout), *lse_steps),
            *(call.batches, row_tiles, call.seqlen_q, call.seqlen_k, call.heads),
        ),
    )
    fixed = (*call.mask_strides, *call.bounds_strides)
    tiling = call.config.dkdv
    tiles, batches = call.tiles(call.seqlen_k, tiling.n)
    dkdv_launches = []
    for part, with_edges in product(call.config.dkdv_parts, (False, True) if variant.edges else (False,)):
        # Rows that see nothing are not read: descriptors cannot leave them out.
        boxes = _box_pair(q, dout, tiling.m, variant) if tiling.boxes and not with_edges else (None, None)
        launch = _dkdv_launch(variant, tiling, part, with_edges).kept(
            (tiles * batches * call.heads_kv, 1),
            (
                *(*call.strides, *contiguous_strides(k.shape), *contiguous_strides(v.shape), *fixed),
                *(call.batches, tiles, row_tiles, *call.lengths, *call.mask, *call.bias),
            ),
        )
        dkdv_launches.append((launch, boxes, _bias_box(args.bias, tiling, variant), "k" in part))
    tiling = call.config.dq
    tiles, batches = call.tiles(call.seqlen_q, tiling.m)
    key_boxes, dq_bias_box = _key_boxes(k, v, tiling, variant), _bias_box(args.bias, tiling, variant)
    dq_launch = _dq_launch(variant, tiling, row_tile).kept(
        (tiles * batches * call.heads, 1),
        (
            *(*call.strides, *contiguous_strides(q.shape), *fixed),
            *(call.batches, tiles, row_tiles, *call.lengths, *call.mask, *call.bias),
        ),
    )

    shared_launch = None if call.shared is None else _shared_dq(args, dout, call, row_tile, row_tiles)

    def run(
        dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
        mask: Sequence[Tensor | None], sequences: Sequence[Tensor | None], seed: Tensor | None, bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dq, dk, dv = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        rows, edges = torch.empty_like(like_rows), torch.empty_like(like_edges)
        behind = (*mask, seed, *sequences)
        gradient = None if bias is None else BiasGradient(call, bias)
        of_columns, of_rows = (None, None) if gradient is None else (gradient.of_columns, gradient.of_rows)
        with on_device(q):
            rows_launch(out, dout, lse, dlse, rows, edges, sequences[0], q, sink)
            for launch, boxes, bias_box, with_dk in dkdv_launches:
                q_rows, dout_rows = (q, dout) if boxes[0] is None else _moved(boxes, (q, dout))
                box = None if bias is None else _moved_bias(bias_box, bias)
                sums = of_columns if with_dk else None
                launch(q_rows, k, v, dout_rows, rows, edges, dk, dv, *behind, bias, box, sums)
            if shared_launch is not None and bias is not None and gradient is not None:
                shared_launch(q, k, v, dout, rows, dq, bias, gradient)
            else:
                keys = key_boxes if key_boxes[0] is None else _moved(key_boxes, (k, v))
                box = None if bias is None else _moved_bias(dq_bias_box, bias)
                to = None if of_rows is None or gradient is None else gradient.box(call.config.dq)
                dq_launch(q, k, v, dout, rows, dq, *behind, *keys, bias, box, of_rows if to is None else None, to)
            if gradient is not None:
                gradient.finish((q, k, v, dout), rows, row_tiles, mask[:4], seed, sequences)
        found = (dq, dk, dv, _dsink(q, sink, dout, dlse, out, lse))
        return found if gradient is None or gradient.result is None else (*found, gradient.result)

    return run


def _shared_dq(
    args: AttentionArgs, dout: Tensor, call: Call, row_tile: int, row_tiles: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, BiasGradient], None]:
    """What launches dQ of batch entries that share a bias, with its gradient, by q, k, v, dout, rows, dq, bias and gradient."""
    assert call.shared is not None
    tiling, entries = call.shared
    q, unit = args.q, call.variant.unit
    tiles, _ = call.tiles(call.seqlen_q, tiling.m)
    boxes, box = _box_pair(args.k, args.v, tiling.n, call.variant), _bias_box(args.bias, tiling, call.variant)
    strides = (*strides_in(unit, q), *strides_in(unit, dout), *contiguous_strides(q.shape), *call.bias[1:3])
    numbers = (tiles, row_tiles, *call.lengths[:4], *call.mask[:4])
    launches = []
    for i, count in enumerate(entries):
        launch = _shared_launch(call.variant, tiling, row_tile, count, i > 0)
        launches.append(launch.kept((tiles * call.heads, 1), (*strides, sum(entries[:i]), *numbers)))

    def run(
        q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor, dq: Tensor, bias: Tensor, gradient: BiasGradient
    ) -> None:
        read = *_moved(boxes, (k, v)), bias, _moved_bias(box, bias), gradient.result, gradient.box(tiling)
        for launch in launches:
            launch(q, dout, rows, dq, *read)

    return run


_NO_COLUMNS, _NO_SEQUENCES = (None,) * 5, (None,) * 4


def _parted(
    call: Call, others: tuple[Tensor | None, ...]
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...], Tensor | None]:
    """Of what a kept launch is given behind sink: the mask's vectors and bounds, what says where sequences are, the seed."""
    seed = None
    if call.variant.features.dropout:
        others, seed = others[:-1], others[-1]
    if call.packed:
        mask = (*others[3:7], None) if len(others) > 3 else _NO_COLUMNS
        return mask, (*others[:3], None), seed
    return others or _NO_COLUMNS, _NO_SEQUENCES, seed


def _moved(
    boxes: tuple[TensorDescriptor, TensorDescriptor], bases: tuple[Tensor, Tensor]
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The same boxes of other tensors of the same shapes and strides; a new descriptor would look at all of it again."""
    first, second = object.__new__(TensorDescriptor), object.__new__(TensorDescriptor)
    first.__dict__.update(boxes[0].__dict__, base=bases[0])
    second.__dict__.update(boxes[1].__dict__, base=bases[1])
    return first, second


def _moved_bias(box: TensorDescriptor | None, bias: Tensor) -> TensorDescriptor | None:
    """`_moved` of a bias, which has a box or none."""
    if box is None:
        return None
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(box.__dict__, base=bias)
    return found


def _box_pair(t: Tensor, t_v: Tensor, rows: int, variant: Variant) -> tuple[TensorDescriptor, TensorDescriptor]:
    """How the copy engine reads `rows` of one head at a time of tensors of head_dim and head_dim_v, (batch, seqlen, heads, ·).

    ``_moved`` gives them their tensors: these would be kept alive.
    """
    features = variant.features
    widths = tile_widths(features.head_dim, features.head_dim_v, features.dtype.itemsize)
    first, second = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, width])
        for x, width in zip((t, t_v), widths, strict=True)
    )
    first.base = second.base = None
    return first, second


def _bias_box(bias: Tensor | None, tiling: Tiling, variant: Variant) -> TensorDescriptor | None:
    """`bias_box` without its tensor, which it would keep alive."""
    found = None if bias is None else bias_box(bias, tiling, variant)
    if found is not None:
        found.base = None
    return found


def _key_boxes(    k: Tensor, v: Tensor, tiling: Tiling, variant: Variant
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    return _box_pair(k, v, tiling.n, variant) if tiling.boxes else (None, None)


def _seed(args: AttentionArgs) -> Tensor | None:
    """Of calls with query offsets the seed and the number of the first head, which kernels read behind it."""
    seed = args.dropout_seed if args.dropout_p else None
    if seed is None or args.q_offset is None or seed.numel() == 2:
        return seed
    return torch.cat([seed.reshape(1), seed.new_zeros(1)])


def _options(variant: Variant, tiling: Tiling) -> dict[str, Any]:
    return {
        **dims(variant),
        "M": tiling.m,
        "N": tiling.n,
        "WIDE": variant.wide,
        "DESCENDING": variant.descending,
        "BIAS": "" if variant.bias is None else variant.bias.kind,
        "BIAS_UNIT": 0 if variant.bias is None else variant.bias.unit,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        **({} if tiling.registers is None else {"maxnreg": tiling.registers}),
    }


@cache
def _forward_launch(variant: Variant, tiling: Tiling) -> Launch:
    features = variant.features
    options = {**_options(variant, tiling), "SCATTERED": variant.scattered, "ASCENDING": features.batch_invariant}
    return Launch(forward_kernel, options, direct=variant.direct)


@cache
def _rows_launch(variant: Variant, row_tile: int) -> Launch:
    return Launch(rows_kernel, {**dims(variant), "M": row_tile, "num_warps": 4}, direct=variant.direct)


@cache
def _dkdv_launch(variant: Variant, tiling: Tiling, part: str, edges: bool) -> Launch:
    kind = {"TAIL": variant.tail, "BOXES": tiling.boxes and not edges, "EDGES": edges, "SCAN": variant.edges}
    options = {**_options(variant, tiling), **kind, "WITH_DK": "k" in part, "WITH_DV": "v" in part}
    return Launch(dkdv_kernel, options, direct=variant.direct)


@cache
def _dq_launch(variant: Variant, tiling: Tiling, row_tile: int) -> Launch:
    sums = variant.bias is not None and variant.bias.gradient == "rows"
    return Launch(dq_kernel, {**_options(variant, tiling), "ROW_TILE": row_tile, "SUMS": sums}, direct=variant.direct)


@cache
def _shared_launch(variant: Variant, tiling: Tiling, row_tile: int, entries: int, before: bool) -> Launch:
    options = {
        **dims(variant), "M": tiling.m, "N": tiling.n, "DESCENDING": variant.descending, "ROW_TILE": row_tile,
        "ENTRIES": entries, "BEFORE": before, "num_warps": tiling.warps, "num_stages": tiling.stages,
    }  # fmt: skip
    return Launch(shared_dq_kernel, options, direct=variant.direct)


def _dsink(
    q: Tensor, sink: Tensor | None, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    """-sum over queries of exp(sink - lse) · (rowsum(dO * O) - dLSE), (heads_q,); tokens past the sequences have none."""
    if sink is None:
        return q.new_empty(0)
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sink.float()[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return -(share * delta).sum(dim=[d for d in range(lse.ndim) if d != lse.ndim - 2]).to(sink.dtype)
