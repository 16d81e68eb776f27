"""A stand-in for flashinfer (0.7.4) on a CPU: the signatures that the bench calls, what they refuse, their results."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

Pages = tuple[Tensor, Tensor]
GROUPS = 1, 2, 3, 4, 6, 8, 16  # heads to a key head that its decode without tensor cores takes


def gathered(pages: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, batch: int) -> Tensor:
    """The keys of one sequence, (n, heads, head_dim)."""
    begin, end = int(indptr[batch]), int(indptr[batch + 1])
    found = pages[indices[begin:end].long()].flatten(0, 1)
    assert 1 <= int(last[batch]) <= pages.shape[1]
    return found[: (end - begin - 1) * pages.shape[1] + int(last[batch])]


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Of the last queries, q (T, heads, head_dim), causal."""
    queries, keys = len(q), len(k)
    rows = q.double().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("thgd,nhd->hgtn", rows, k.double()) * scale
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hgtn,nhd->thgd", weights, v.double()).flatten(1, 2).to(q.dtype)


def host(*tensors: Tensor) -> None:
    """A plan that gets a tensor of the device waits for it."""
    assert all(t.device.type == "cpu" and t.dtype == torch.int32 and t.is_contiguous() for t in tensors)


class BatchDecodeWithPagedKVCacheWrapper:
    plans = 0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD" and use_cuda_graph and float_workspace_buffer.dtype == torch.uint8
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.tensor_cores = use_tensor_cores
        self.buffers = [t for t in buffers if t is not None]
        if len(self.buffers) < 3:
            raise ValueError("paged_kv_indptr_buffer should be a torch.Tensor in cudagraph mode")

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        host(indptr, last_page_len)
        group = num_qo_heads // num_kv_heads
        if not self.tensor_cores and group not in GROUPS:
            raise RuntimeError(f"Unsupported group_size: {group}")
        type(self).plans += 1
        if len(indices) > len(self.buffers[1]) or len(indices) != indptr[-1]:
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        for buffer, given in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
            buffer[: len(given)].copy_(given)
        self.planned = num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type
        self.at = [t.clone() for t in self.buffers]  # its schedule is of these lengths alone

    def run(self, q: Tensor, paged_kv_cache: Pages) -> Tensor:
        k, v = paged_kv_cache
        given = q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, k.dtype
        assert self.planned == given and len(q) == len(self.at[2]), (self.planned, given)
        indptr, indices, last = self.at
        rows = []
        for b in range(len(q)):
            keys, values = (gathered(t, indptr, indices, last, b) for t in (k, v))
            rows.append(attended(q[b : b + 1], keys, values, q.shape[2] ** -0.5))
        return torch.cat(rows)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False) -> None:
        assert kv_layout == "NHD" and not use_cuda_graph

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        host(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert causal
        self.starts, self.table = qo_indptr, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.planned = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: Pages) -> Tensor:
        k, v = paged_kv_cache
        assert self.planned == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, k.dtype)
        rows = []
        for b in range(len(self.starts) - 1):
            part = q[int(self.starts[b]) : int(self.starts[b + 1])]
            keys, values = (gathered(t, *self.table, b) for t in (k, v))
            rows.append(attended(part, keys, values, q.shape[2] ** -0.5))
        return torch.cat(rows)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_cuda_graph and all(t is not None for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr))

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        host(qo_indptr, kv_indptr, kv_len_arr)
        assert not causal and torch.equal(qo_indptr, torch.arange(len(kv_len_arr) + 1, dtype=torch.int32))
        self.table = kv_indptr, kv_indices, kv_len_arr - (kv_indptr.diff() - 1) * page_size
        self.planned = num_heads, head_dim_ckv, head_dim_kpe, page_size, q_data_type, kv_data_type
        self.scale = sm_scale

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor) -> Tensor:
        sizes = q_nope.shape[1], ckv_cache.shape[2], kpe_cache.shape[2], ckv_cache.shape[1]
        assert self.planned == (*sizes, q_nope.dtype, ckv_cache.dtype)
        q, pages = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)[:, :, None]
        rows = []
        for b in range(len(q)):
            keys = gathered(pages, *self.table, b)
            rows.append(attended(q[b : b + 1], keys, keys[..., : ckv_cache.shape[2]], self.scale))
        return torch.cat(rows)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Pages,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert all(t.dtype == torch.int32 for t in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len))
    size = paged_kv_cache[0].shape[1]
    for row, (b, at) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indices[int(kv_indptr[b]) + at // size])
        for pages, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
            pages[page, at % size] = new[row]


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake: Any = ModuleType("flashinfer")
    fake.mla = ModuleType("flashinfer.mla")
    fake.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    fake.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    fake.append_paged_kv_cache = append_paged_kv_cache
    fake.mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", fake.mla)
    return fake
