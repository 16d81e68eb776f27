"""FlashInfer's paged attention (flashinfer-python 0.2 to 0.7) over the pages of our caches, each call planned beforehand.

Its kernels are compiled at their first use, by nvcc and ninja, and kept under ~/.cache/flashinfer. A plan is made on the
host from the lengths, with use_cuda_graph where its run may be captured and replayed at other lengths, as engines do.
"""

from __future__ import annotations

from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from warploom import PagedKVCache
from warploom.bench.harness import Call
from warploom.bench.peers import NotHere

WORKSPACE_BYTES = 2**28  # twice what its documentation recommends: many sequences of many heads split need more than that
LAYOUT = "NHD"  # (pages, page_size, heads, head_dim), as ours


def batch_decode(q: Tensor, cache: PagedKVCache, tensor_cores: bool) -> Call:
    """One query a sequence, q (batch, 1, heads_q, head_dim), by its kernels for tensor cores or by those without."""
    found = _flashinfer()
    indptr, indices, last = pages_of(cache)
    device = q.device
    wrapper = found.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(device),
        LAYOUT,
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=indptr.to(device),
        paged_kv_indices_buffer=indices.to(device),
        paged_kv_last_page_len_buffer=last.to(device),
    )
    heads_kv, head_dim = cache.k_pages.shape[2:]
    wrapper.plan(
        indptr, indices, last, q.shape[2], heads_kv, head_dim, cache.page_size, q_data_type=q.dtype, kv_data_type=q.dtype
    )
    rows, pages = q[:, 0], (cache.k_pages, cache.v_pages)
    return lambda: wrapper.run(rows, pages)[:, None]


def paged_prefill(q: Tensor, cache: PagedKVCache) -> Call:
    """The last queries of each sequence, q (batch, T, heads_q, head_dim), causal."""
    found = _flashinfer()
    wrapper = found.BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), LAYOUT)
    batch, queries, heads, head_dim = q.shape
    starts = torch.arange(batch + 1, dtype=torch.int32) * queries
    dims = heads, cache.k_pages.shape[2], head_dim, cache.page_size
    wrapper.plan(starts, *pages_of(cache), *dims, causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
    rows, pages = q.flatten(0, 1), (cache.k_pages, cache.v_pages)
    return lambda: wrapper.run(rows, pages).view(batch, queries, heads, -1)


def latent_decode(q: Tensor, cache: PagedKVCache, scale: float) -> Call:
    """One query a sequence over latent pages, q (batch, 1, heads_q, columns)."""
    mla = _flashinfer().mla
    indptr, indices, _ = pages_of(cache)
    batch, _, heads, columns = q.shape
    latent, device = cache.v_pages.shape[3], q.device
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = cache.lengths.cpu()
    wrapper = mla.BatchMLAPagedAttentionWrapper(
        _workspace(device),
        use_cuda_graph=True,
        qo_indptr=starts.to(device),
        kv_indptr=indptr.to(device),
        kv_indices=indices.to(device),
        kv_len_arr=lengths.to(device),
    )
    wrapper.plan(
        qo_indptr=starts,
        kv_indptr=indptr,
        kv_indices=indices.to(device),
        kv_len_arr=lengths,
        num_heads=heads,
        head_dim_ckv=latent,
        head_dim_kpe=columns - latent,
        page_size=cache.page_size,
        causal=False,
        sm_scale=scale,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    rows, pages = q[:, 0], cache.k_pages[:, :, 0]
    parts = {"q_nope": rows[..., :latent], "q_pe": rows[..., latent:]}
    parts |= {"ckv_cache": pages[..., :latent], "kpe_cache": pages[..., latent:]}
    return lambda: wrapper.run(**parts)[:, None]


class Steps:
    """Decode of sequences of one length that grows by a token a step, over the pages of one table in every layer.

    `plan` runs on the host before each step; `append` and `attend` may be captured once and replayed.
    """

    def __init__(self, table: Tensor, page_size: int, q: Tensor, heads_kv: int, tensor_cores: bool) -> None:
        """``table``: int32 (batch, pages_per_sequence); ``q``: queries as `attend` gets them."""
        self.found = _flashinfer()
        device, batch = table.device, len(table)
        self.table, self.page_size, self.dtype = table, page_size, q.dtype
        self.dims = q.shape[2], heads_kv, q.shape[3], page_size
        self.batches = torch.arange(batch, dtype=torch.int32, device=device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32)
        self.positions, self.last = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2))
        self.indptr = self.starts.to(device, copy=True)
        self.indices = torch.zeros(table.numel(), dtype=torch.int32, device=device)
        self.planned: Any = None
        self.wrapper = self.found.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(device),
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=self.indptr,
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last,
        )

    def plan(self, length: int) -> None:
        """For a step after which every sequence has so many keys."""
        if self.planned is not None:
            # A plan is copied from pinned memory that the next plan writes: the copy must have been made.
            self.planned.synchronize()
        pages = -(-length // self.page_size)
        last = torch.full((len(self.table),), length - (pages - 1) * self.page_size, dtype=torch.int32)
        self.positions.fill_(length - 1)
        indices = self.table[:, :pages].reshape(-1)
        self.wrapper.plan(self.starts * pages, indices, last, *self.dims, q_data_type=self.dtype, kv_data_type=self.dtype)
        if self.table.is_cuda:
            self.planned = torch.cuda.Event()
            self.planned.record()

    def append(self, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor]) -> None:
        """New keys and values (batch, 1, heads_kv, head_dim) into a layer's pages."""
        where = self.batches, self.positions, pages, self.indices, self.indptr, self.last
        self.found.append_paged_kv_cache(k[:, 0], v[:, 0], *where)

    def attend(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        """Out (batch, 1, heads_q, head_dim) of q of the same shape."""
        out: Tensor = self.wrapper.run(q[:, 0], pages)
        return out[:, None]


def pages_of(cache: PagedKVCache) -> tuple[Tensor, Tensor, Tensor]:
    """A table as FlashInfer takes it, int32 on the host: each sequence's start in the pages, pages, keys of its last."""
    lengths, table = cache.lengths.cpu(), cache.block_table.cpu()
    pages = (lengths + cache.page_size - 1) // cache.page_size
    used = torch.arange(table.shape[1]) < pages[:, None]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), pages.cumsum(0)]).int()
    return indptr, table[used].int(), (lengths - (pages - 1) * cache.page_size).int()


@once
def _workspace(device: torch.device) -> Tensor:
    """Shared by all calls, which run one after the other; zero at its first use, as the documentation asks."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer() -> Any:
    try:
        import flashinfer
        import flashinfer.mla
    except Exception as error:  # absent, or without what it needs, of which there is much
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotHere(f"flashinfer does not import here (pip install flashinfer-python): {words}") from None
    return flashinfer
