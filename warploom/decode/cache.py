"""Key/value caches: what decode reads and a model's layers append to. Lengths live on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from warploom.decode.accept import accept
from warploom.decode.contents import check_append, check_cache, is_latent
from warploom.decode.ops import append_op
from warploom.decode.prefix import SharedPrefix, shared_prefix
from warploom.decode.problem import AppendArgs
from warploom.decode.scales import Granularity, append_quantized, check_scales, scale_memory
from warploom.kernels.e4m3 import E4M3, as_bytes
from warploom.kernels.pages import PagedCache
from warploom.runtime import arguments

Cache = TypeVar("Cache", "KVCache", "PagedKVCache")


@dataclass(frozen=True, eq=False)
class KVCache:
    """A contiguous cache: row b holds sequence b from its first key on.

    Attributes:
        k: (batch, max_seqlen, heads_kv, head_dim), the last dimension contiguous; other strides are free.
        v: (batch, max_seqlen, heads_kv, head_dim_v). The first columns of k itself, ``k[..., :n]``, where values are those of
            the keys, as in multi-head latent attention: the cache is ``latent`` then, and its memory is read once.
        lengths: int32 (batch,) on k's device, keys held by each sequence. Of another integer dtype a copy is kept.
        k_scale: of a cache of float8_e4m3fn, float32 (1,), (heads_kv,) or (batch, max_seqlen, heads_kv): what k's numbers are
            multiplied by.
        v_scale: the same of v, a scale a token where k_scale has them.
        hadamard_seed: of such a cache, the rotation of its keys, which queries then take too; None is none.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    hadamard_seed: int | None = None
    latent: bool = field(default=False, init=False)
    ready: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # decode's short ways, by call

    def __post_init__(self) -> None:
        layout = "(batch, max_seqlen, heads_kv, head_dim)"
        lengths, _ = check_cache("k", self.k, "v", self.v, layout, self.lengths, None, paged=False)
        _keep(self, "lengths", lengths)
        check_scales("k", self.k, self.k_scale, self.v_scale, self.hadamard_seed)
        _keep(self, "latent", is_latent(self.k, self.v))

    def __getstate__(self) -> dict[str, Any]:
        return _state(self, "v")

    def __setstate__(self, state: dict[str, Any]) -> None:
        _restore(self, state, "k", "v")

    @classmethod
    def allocate(
        cls,
        batch: int,
        max_seqlen: int,
        kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        granularity: Granularity = "token",
        hadamard_seed: int | None = 0,
        latent: bool = False,
    ) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``max_seqlen`` keys.

        Of dtype torch.float8_e4m3fn it quantises what is appended. ``granularity``: a scale for each "token" and key head,
        which append() finds, or one for each "head" or the whole "tensor", which are 1 until you write them into
        k_scale and v_scale, before the first append. ``hadamard_seed``: of the keys' rotation, None for none. Other dtypes
        have neither.

        ``latent``: values are the first ``head_dim_v`` columns of the keys, and take no memory of their own.
        """
        sizes = _sizes(batch=batch, max_seqlen=max_seqlen, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v)
        k, v = _memory(sizes[:3], sizes[3:], dtype, device, latent)
        lengths = torch.zeros(sizes[0], dtype=torch.int32, device=k.device)
        if k.dtype != E4M3:
            return _told(cls(k, v, lengths), latent)
        return cls(k, v, lengths, *scale_memory(k, granularity), hadamard_seed)

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Keys a sequence can hold."""
        return self.k.shape[1]

    def append(self, k: Tensor, v: Tensor | None = None) -> None:
        """Write new keys and values behind each sequence, in place, and advance the lengths.

        No host synchronisation; works inside a CUDA graph. Tokens for which a sequence has no room are an error in words
        where lengths are read, on the CPU and under WARPLOOM_CHECK=1; else they are dropped, and the length stays at the
        capacity.

        Args:
            k: (batch, T, heads_kv, head_dim) in the cache's dtype; floats of any kind for a cache of FP8.
            v: (batch, T, heads_kv, head_dim_v); left out of a latent cache, whose values are in k.
        """
        _append(self, self.k, self.v, None, None, k, v)

    def accept(self, path: Tensor, drafted: int) -> None:
        """Keep of the last ``drafted`` tokens those of ``path``, side by side in its order, and drop the others, in place.

        What follows a `decode(..., tree=...)` that verified a draft: the keys of the accepted tokens lie scattered among
        those of the rejected ones. No host synchronisation; works inside a CUDA graph. Every layer's cache has its own.

        Args:
            path: integers (batch, n), n at most ``drafted``: the accepted tokens by their number in the draft, from the root
                on, -1 behind the last. All -1 rejects the draft.
            drafted: tokens of the draft, the last ones of every sequence.
        """
        accept(_tensors(self, self.k, self.v), self.lengths, None, path, drafted)


@dataclass(frozen=True, eq=False)
class PagedKVCache(PagedCache):
    """A cache in pages drawn from one pool; a page may serve several sequences (a shared prefix).

    Attributes:
        k_pages: (pages, page_size, heads_kv, head_dim), page_size a power of two (or one page a sequence: any size).
        v_pages: (pages, page_size, heads_kv, head_dim_v), or the first columns of k_pages, as in a `KVCache`.
        block_table: int32 (batch, pages_per_sequence), the pages of each sequence in order.
        lengths: int32 (batch,), keys held by each sequence. Of it and the table copies are kept where the dtype is another.
        k_scale, v_scale, hadamard_seed: of pages of float8_e4m3fn, as in a `KVCache`; a scale a token and head is (pages,
            page_size, heads_kv).
    """

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    hadamard_seed: int | None = None
    latent: bool = field(default=False, init=False)
    ready: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # decode's short ways, by call

    def __post_init__(self) -> None:
        layout = "(pages, page_size, heads_kv, head_dim)"
        lengths, table = check_cache(
            "k_pages", self.k_pages, "v_pages", self.v_pages, layout, self.lengths, self.block_table, paged=True
        )
        _keep(self, "lengths", lengths)
        _keep(self, "block_table", table)
        check_scales("k_pages", self.k_pages, self.k_scale, self.v_scale, self.hadamard_seed)
        _keep(self, "latent", is_latent(self.k_pages, self.v_pages))

    def __getstate__(self) -> dict[str, Any]:
        return _state(self, "v_pages")

    def __setstate__(self, state: dict[str, Any]) -> None:
        _restore(self, state, "k_pages", "v_pages")

    @classmethod
    def allocate(
        cls,
        batch: int,
        max_seqlen: int,
        kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        granularity: Granularity = "token",
        hadamard_seed: int | None = 0,
        latent: bool = False,
    ) -> PagedKVCache:
        """An empty cache whose sequences own ⌈max_seqlen / page_size⌉ pages each, in order; FP8, latent as in a `KVCache`."""
        sizes = _sizes(batch=batch, max_seqlen=max_seqlen, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v)
        batch, max_seqlen, kv_heads, *dims = sizes
        page_size = arguments.integer("page_size", page_size)
        if page_size < 1:
            raise ValueError(f"page_size must be a power of two, got {page_size}")
        each = -(-max_seqlen // page_size)
        if batch * each > arguments.INT32[1]:
            raise ValueError(f"batch of {batch} takes {batch * each} pages, and page numbers are int32; take larger pages")
        k, v = _memory((batch * each, page_size, kv_heads), dims, dtype, device, latent)
        table = torch.arange(batch * each, dtype=torch.int32, device=k.device).view(batch, each)
        lengths = torch.zeros(batch, dtype=torch.int32, device=k.device)
        if k.dtype != E4M3:
            return _told(cls(k, v, table, lengths), latent)
        return cls(k, v, table, lengths, *scale_memory(k, granularity), hadamard_seed)

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    @property
    def capacity(self) -> int:
        """Keys a sequence can hold."""
        return self.block_table.shape[1] * self.page_size

    def append(self, k: Tensor, v: Tensor | None = None, slot_mapping: Tensor | None = None) -> None:
        """Write new keys and values behind each sequence, in place, and advance the lengths.

        Args:
            k: (batch, T, heads_kv, head_dim) in the cache's dtype; floats of any kind for a cache of FP8.
            v: (batch, T, heads_kv, head_dim_v); left out of a latent cache, whose values are in k.
            slot_mapping: int32 or int64 (batch, T), where in the pool each token goes, page · page_size + offset, in place
                of what block_table says. A negative slot leaves its token out, and the length does not count it.

        Tokens without room, or whose page is outside the pool, are an error in words on the CPU and under WARPLOOM_CHECK=1,
        and not written otherwise.
        """
        _append(self, self.k_pages, self.v_pages, self.block_table, slot_mapping, k, v)

    def accept(self, path: Tensor, drafted: int) -> None:
        """As `KVCache.accept`, within the pages of block_table; a page that sequences share must hold no draft.

        Args:
            path: integers (batch, n), -1 behind a sequence's last accepted token.
            drafted: tokens of the draft, the last ones of every sequence.
        """
        accept(_tensors(self, self.k_pages, self.v_pages), self.lengths, self.block_table, path, drafted)

    def shared_prefix(self) -> SharedPrefix:
        """What neighbours of the batch share by their first pages, for `decode(..., prefix=)` of all layers with this table.

        Found on the device in a few small kernels: no host synchronisation; works inside a CUDA graph. It holds as long as
        the pages that were shared stay in the table, whatever is appended.
        """
        return shared_prefix(self.block_table, self.page_size)


torch.serialization.add_safe_globals([KVCache, PagedKVCache])


def append(args: AppendArgs) -> None:
    """The append of both caches on bare tensors."""
    args = _slots_widened(args)
    check_append(args)
    append_op(*args)


def _append(
    cache: KVCache | PagedKVCache, k_cache: Tensor, v_cache: Tensor, table: Tensor | None, slots: Any, k: Any, v: Any
) -> None:
    if cache.latent:
        if v is not None:
            raise TypeError(f"v has no place in a latent cache: its values are the first {v_cache.shape[3]} columns of k")
        v_cache = k_cache[..., :0]
        v = arguments.strided("k", k)
        v = v[..., :0] if v.ndim else v
    elif v is None:
        raise TypeError("v must be a torch.Tensor, got None; only a latent cache takes keys alone")
    args = AppendArgs(k_cache, v_cache, cache.lengths, table, slots, k, v)
    if cache.k_scale is None or cache.v_scale is None:
        append(args)
    else:
        append_quantized(_slots_widened(args), cache.k_scale, cache.v_scale, cache.hadamard_seed)


def _slots_widened(args: AppendArgs) -> AppendArgs:
    slots = args.slot_mapping
    if isinstance(slots, Tensor) and slots.dtype in arguments.INTEGERS and slots.dtype != torch.int32:
        return args._replace(slot_mapping=arguments.widened(slots))
    return args


def _tensors(cache: KVCache | PagedKVCache, k: Tensor, v: Tensor) -> list[Tensor]:
    """The memory of each token: keys, values that are not among them, and scales that lie beside them."""
    scales = [t for t in (cache.k_scale, cache.v_scale) if t is not None and t.ndim > 1]
    return [k, *scales] if cache.latent else [k, v, *scales]


def _state(cache: KVCache | PagedKVCache, v: str) -> dict[str, Any]:
    """What a copy or a pickle holds: the short ways launch this process's kernels, on the memory of this cache.

    Of a latent cache's values how many columns they are: a pickle would give them memory of their own.
    """
    held = {name: as_bytes(value) if isinstance(value, Tensor) else value for name, value in vars(cache).items()}
    return {**held, "ready": {}, **({v: held[v].shape[3]} if cache.latent else {})}


def _restore(cache: KVCache | PagedKVCache, state: dict[str, Any], k: str, v: str) -> None:
    """Make a cache of what `_state` gave."""
    vars(cache).update(state)
    if cache.k_scale is not None:
        vars(cache).update({name: state[name].view(E4M3) for name in (k, v)})
    if cache.latent:
        vars(cache)[v] = state[k][..., : state[v]]


def _keep(cache: KVCache | PagedKVCache, name: str, value: Tensor | bool | None) -> None:
    """Set a frozen cache's field to what was found out about it."""
    if value is not getattr(cache, name):
        object.__setattr__(cache, name, value)


def _told(cache: Cache, latent: bool) -> Cache:
    """The cache, latent if `allocate` was told so, which a compiler does not see of its tensors."""
    if latent:
        _keep(cache, "latent", True)
    return cache


def _sizes(**given: Any) -> list[int]:
    """The sizes of a cache to allocate, in their order; head_dim_v of None is head_dim."""
    given["head_dim_v"] = given["head_dim"] if given["head_dim_v"] is None else given["head_dim_v"]
    return [arguments.integer(name, value, 0, arguments.INT32[1]) for name, value in given.items()]


def _memory(shape: Sequence[int], dims: Sequence[int], dtype: Any, device: Any, latent: Any) -> tuple[Tensor, Tensor]:
    """Memory for keys and values, uninitialised; of a latent cache the same."""
    latent = arguments.flag("latent", latent)
    if latent and dims[1] > dims[0]:
        raise ValueError(f"head_dim_v of a latent cache is at most head_dim, {dims[0]}, got {dims[1]}")
    if latent and dtype == E4M3:
        raise TypeError(f"a latent cache takes float16, bfloat16, float32 or float64, not {dtype}, whose keys are rotated")
    if not isinstance(dtype, torch.dtype) or dtype not in (*arguments.FLOATS, E4M3):
        takes = "torch.float16, bfloat16, float32, float64 or float8_e4m3fn"
        raise TypeError(f"dtype must be {takes}, got {arguments.describe(dtype)}")
    options: dict[str, Any] = {"dtype": dtype, "device": arguments.device("device", device)}
    k = torch.empty((*shape, dims[0]), **options)
    return k, k[..., : dims[1]] if latent else torch.empty((*shape, dims[1]), **options)
