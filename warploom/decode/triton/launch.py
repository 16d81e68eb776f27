"""Launching the decode kernels: shapes and strides on the host, everything else read on the device."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from warploom.decode.problem import DecodeArgs, DecodeProblem
from warploom.decode.triton.parts import NARROW, NEAR, WIDE
from warploom.decode.triton.plan import UNIT, UNIT_FP8, BiasVariant, Plan, Shape, plan, worth_sharing
from warploom.decode.triton.tree import ancestors
from warploom.runtime.device import on_device
from warploom.runtime.triton_launch import RawLaunch

# Distances the kernels add to positions in 32 bits.
_FAR = 2**30


class SplitNumbers(NamedTuple):
    """What the split kernel takes after its pointers and the strides of q, k and v, in its order."""

    stride_table: int
    stride_tree: int
    programs: int
    grouped: int
    crowded: int
    max_units: int
    capacity: int
    pages: int
    page_shift: int
    page_mask: int
    left: int
    right: int
    scale: float
    softcap: float
    stride_ksb: int
    stride_ksn: int
    stride_ksh: int
    stride_vsb: int
    stride_vsn: int
    stride_vsh: int
    stride_bias_b: int | None
    stride_bias_h: int | None
    stride_bias_k: int | None
    bias_entries: int | None
    bias_origin: int | None
    sequences: int | None  # these three without a shared prefix: None
    chunk: int | None
    prefix_keys: int | None  # None too where the device knows what is shared


class MergeNumbers(NamedTuple):
    """What the merge kernel takes after its pointers, in its order."""

    heads_q: int
    grouped: int
    max_units: int
    capacity: int
    left: int
    right: int
    sequences: int | None
    chunk: int | None
    prefix_keys: int | None


def forward(args: DecodeArgs) -> tuple[Tensor, Tensor]:
    """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse, fp32 (batch, heads_q, T)."""
    p, strides, numbers = _plan_of(args)
    q, v, lengths, sink = args.q, args.v, args.lengths, args.sink
    batch, queries, heads_q, _ = q.shape
    out = q.new_empty((batch, queries, heads_q, v.shape[3]))
    lse = q.new_empty((batch, heads_q, queries), dtype=torch.float32)
    part_out, part_lse = out, lse
    whole = (out, lse) if p.whole else (None, None)
    if p.merge is not None:
        part_out = q.new_empty((p.parts, v.shape[3]), dtype=torch.float32)
        part_lse = q.new_empty((p.parts, 2), dtype=torch.float32)
    with on_device(q):
        bits = None
        if args.tree is not None:
            left = _FAR if args.left is None else numbers.left
            bits = ancestors(args.tree, (left, numbers.right) if args.measures_paths else None)
        prefix = args.prefix if p.chunk else None
        read = (q, args.k, v, lengths, args.block_table, sink, bits, args.k_scale, args.v_scale, args.bias, prefix)
        split = (*read, part_out, part_lse, *whole, *strides, *numbers)
        if p.share is not None:
            p.share(p.share_grid, *split)
        p.split(p.grid, *split)
        if p.merge is not None:
            p.merge(p.merge_grid, part_out, part_lse, lengths, sink, prefix, out, lse, *_merge_numbers(p, heads_q, numbers))
    return out, lse


class Ready:
    """A decode call without a tree or bias whose cache, shapes and options are known: what is left of the host's work."""

    def __init__(
        self,
        args: DecodeArgs,
        p: Plan,
        strides: tuple[int, ...],
        numbers: SplitNumbers,
        split: RawLaunch,
        merge: RawLaunch | None,
        share: RawLaunch | None,
    ) -> None:
        q, v = args.q, args.v
        self._cache = args.k, args.v, args.lengths, args.block_table, args.k_scale, args.v_scale
        self._device = q.device.index
        self._out_shape = (*q.shape[:3], v.shape[3])
        self._lse_shape = (q.shape[0], q.shape[2], q.shape[1])
        # One buffer: lse, lse of the parts, parts; each from a multiple of 16 bytes on.
        self._part_lse = -(-prod(self._lse_shape) // 4) * 16
        self._part_out = self._part_lse + -(-p.parts // 2) * 16
        parts = 0 if merge is None else p.parts * v.shape[3]
        self._buffer = self._part_out // 4 + parts
        self._split, self._split_grid, self._split_numbers = split, p.grid, (*strides, *numbers)
        self._merge, self._merge_grid = merge, p.merge_grid
        self._merge_numbers = _merge_numbers(p, q.shape[2], numbers)
        self._share, self._share_grid, self._whole = share, p.share_grid, p.whole

    def __call__(
        self, q: Tensor, sink: Tensor | None, return_lse: bool, prefix: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Out and, if asked for, lse; None where this q or device does not fit and the call must take the long way.

        ``prefix``: what was found, as the op takes it; a number of keys is one of those that all these calls have.
        """
        q_pointer = q.data_ptr()
        if q_pointer % 16 or torch._C._cuda_getDevice() != self._device:
            return None
        out = q.new_empty(self._out_shape)
        buffer = q.new_empty((self._buffer,), dtype=torch.float32)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32) if return_lse else None
        base = buffer.data_ptr()
        out_pointer, lse_pointer = out.data_ptr(), base if lse is None else lse.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        k, v, lengths, table, k_scale, v_scale = self._cache
        lengths_pointer = lengths.data_ptr()
        sink_pointer = None if sink is None else sink.data_ptr()
        prefix_pointer = None if prefix is None or self._share is None else prefix.data_ptr()
        pointers = (
            q_pointer,
            k.data_ptr(),
            v.data_ptr(),
            lengths_pointer,
            None if table is None else table.data_ptr(),
            sink_pointer,
            None,
            None if k_scale is None else k_scale.data_ptr(),
            None if v_scale is None else v_scale.data_ptr(),
            None,
            prefix_pointer,
        )
        if self._merge is None:
            self._split(self._split_grid, stream, *pointers, out_pointer, lse_pointer, None, None, *self._split_numbers)
            return out, lse
        parts = (base + self._part_out, base + self._part_lse)
        whole = (out_pointer, lse_pointer) if self._whole else (None, None)
        if self._share is not None:
            self._share(self._share_grid, stream, *pointers, *parts, *whole, *self._split_numbers)
        self._split(self._split_grid, stream, *pointers, *parts, *whole, *self._split_numbers)
        results = (lengths_pointer, sink_pointer, prefix_pointer, out_pointer, lse_pointer)
        self._merge(self._merge_grid, stream, *parts, *results, *self._merge_numbers)
        return out, lse


def ready(args: DecodeArgs) -> Ready | None:
    """The short way for calls like this one, which has run; None where there is none (the interpreter, odd strides)."""
    if not args.q.is_cuda or args.q.device.index != torch._C._cuda_getDevice():
        return None
    p, strides, numbers = _plan_of(args)
    split, merge, share = (None if launch is None else launch.raw() for launch in (p.split, p.merge, p.share))
    if split is None or (p.merge is not None and merge is None) or (p.share is not None and share is None):
        return None
    return Ready(args, p, strides, numbers, split, merge, share)


def _plan_of(args: DecodeArgs) -> tuple[Plan, tuple[int, ...], SplitNumbers]:
    """The plan, and the strides and numbers that the split kernel takes after its pointers."""
    q, k, v, _, table, sink, tree, k_scale, v_scale, left, right, scale, softcap, *_ = args
    batch, queries, heads_q, head_dim = q.shape
    pages, page_size, heads_kv, head_dim_v = v.shape
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    odd = 0
    for stride in strides:
        odd |= stride
    unit = 1
    if not (odd % UNIT or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16):
        unit = UNIT if k_scale is None or odd % UNIT_FP8 else UNIT_FP8
        strides = tuple([stride // unit for stride in strides])
    table_width, table_stride = (0, 0) if table is None else (table.shape[1], table.stride(0))
    capacity = args.capacity
    bias, bias_numbers = _bias(args)
    prefix = "found" if args.prefix is not None else "keys" if args.prefix_keys else ""
    if prefix and not worth_sharing(DecodeProblem.from_args(args)):
        prefix = ""
    scales = *scale_strides(k_scale), *scale_strides(v_scale)
    places = _places(pages, page_size, (strides[3:5], strides[6:8], scales[:2], scales[3:5]))
    p = plan(
        Shape(
            batch=batch,
            queries=queries,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            capacity=capacity,
            page_size=page_size,
            table_width=table_width,
            dtype=q.dtype,
            sink=None if sink is None else sink.dtype,
            tree=tree is not None,
            tree_depths=args.measures_paths,
            fp8=k_scale is not None,
            bias=bias,
            latent=args.latent,
            left=left,
            softcap=softcap != 0.0,
            prefix=prefix,
            places=places,
            same=strides[3:5] == strides[6:8],
            unit=unit,
            device=q.device.index if q.is_cuda else None,
        )
    )
    left = 0 if left is None else max(min(left, _FAR), -_FAR)
    ksb, ksn, ksh, vsb, vsn, vsh = scales
    numbers = SplitNumbers(
        stride_table=table_stride,
        stride_tree=0 if tree is None or tree.shape[0] == 1 else queries * (2 if args.measures_paths else 1),
        programs=p.programs,
        grouped=p.grouped,
        crowded=p.crowded,
        max_units=p.max_units,
        capacity=capacity,
        pages=pages,
        page_shift=page_size.bit_length() - 1,
        page_mask=page_size - 1,
        left=left,
        right=max(right, -_FAR),
        scale=scale,
        softcap=softcap,
        stride_ksb=ksb,
        stride_ksn=ksn,
        stride_ksh=ksh,
        stride_vsb=vsb,
        stride_vsn=vsn,
        stride_vsh=vsh,
        stride_bias_b=bias_numbers[0],
        stride_bias_h=bias_numbers[1],
        stride_bias_k=bias_numbers[2],
        bias_entries=bias_numbers[3],
        bias_origin=bias_numbers[4],
        sequences=batch if p.chunk else None,
        chunk=p.chunk or None,
        prefix_keys=min(args.prefix_keys, capacity) if p.chunk and args.prefix is None else None,
    )
    return p, strides, numbers


def _places(pages: int, page_size: int, strides: tuple[tuple[int, ...], ...]) -> int:
    """What holds distances of keys by these strides, of pages and of keys: `Shape.places`."""
    most = max((pages - 1) * page + (page_size - 1) * key for page, key in strides)
    if max(map(max, strides)) >= 2**31:
        return int(WIDE.value)
    return int(NEAR.value if most < 2**31 else NARROW.value)


def _bias(args: DecodeArgs) -> tuple[BiasVariant | None, tuple[int | None, ...]]:
    """What the split kernel takes of a bias: strides of batch, heads and keys, 0 of what is shared; entries and origin."""
    bias, kind = args.bias, args.bias_kind
    if bias is None:
        return None, (None,) * 5
    if kind == "distance":
        return BiasVariant(kind, bias.dtype, False), (0, bias.shape[1], None, bias.shape[1], args.bias_origin)
    batch = bias.stride(0) if bias.shape[0] > 1 else 0
    if kind == "alibi":
        return BiasVariant(kind, bias.dtype, False), (batch, None, None, None, None)
    strides = batch, bias.stride(1) if bias.shape[1] > 1 else 0, bias.stride(2)
    return BiasVariant(kind, bias.dtype, max(strides) >= 2**31), (*strides, None, None)


def scale_strides(scale: Tensor | None) -> tuple[int, ...]:
    """Of an FP8 cache's scales by page or sequence, token and head; 0 where one serves all."""
    if scale is None or scale.shape == (1,):
        return 0, 0, 0
    return (0, 0, scale.stride(0)) if scale.ndim == 1 else scale.stride()


def _merge_numbers(p: Plan, heads_q: int, numbers: SplitNumbers) -> MergeNumbers:
    shared = numbers.sequences, numbers.chunk, numbers.prefix_keys
    return MergeNumbers(heads_q, p.grouped, p.max_units, numbers.capacity, numbers.left, numbers.right, *shared)
