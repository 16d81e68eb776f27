"""The door: decode()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from warploom.bias import Bias
from warploom.decode import registry  # noqa: F401  (it fills the dispatch list)
from warploom.decode.arguments import decode_args
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.chunk import as_chunk
from warploom.decode.ops import decode_op, is_empty
from warploom.decode.plan import plan_of
from warploom.decode.prefix import SharedPrefix
from warploom.decode.problem import DecodeArgs, DecodeProblem
from warploom.runtime import arguments, dispatch, invariance
from warploom.runtime.arguments import Window, checked
from warploom.runtime.op import plain, recorded
from warploom.runtime.plan import Describer, Plan, offer
from warploom.runtime.qkv import last_contiguous

MOST_READY = 64  # short ways that a cache keeps, by shapes of queries and numbers


@overload
def decode(
    q: Tensor, cache: KVCache | PagedKVCache, *, scale: float | None = ..., softcap: float = ...,
    window: Window | None = ..., sink: Tensor | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
    tree: Tensor | None = ..., bias: Bias | None = ..., prefix: SharedPrefix | int | None = ...,
) -> Tensor: ...


@overload
def decode(
    q: Tensor, cache: KVCache | PagedKVCache, *, scale: float | None = ..., softcap: float = ...,
    window: Window | None = ..., sink: Tensor | None = ..., return_lse: Literal[True], backend: str | None = ...,
    tree: Tensor | None = ..., bias: Bias | None = ..., prefix: SharedPrefix | int | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def decode(
    q: Tensor, cache: KVCache | PagedKVCache, *, scale: float | None = ..., softcap: float = ...,
    window: Window | None = ..., sink: Tensor | None = ..., return_lse: bool, backend: str | None = ...,
    tree: Tensor | None = ..., bias: Bias | None = ..., prefix: SharedPrefix | int | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def decode(
    q: Tensor,
    cache: KVCache | PagedKVCache,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: Window | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    tree: Tensor | None = None,
    bias: Bias | None = None,
    prefix: SharedPrefix | int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries over a long cache (split-KV, Flash-Decoding); causal, inference only.

    Query t of T sits at position p = length - T + t, so the cache holds the T new tokens already (append first), and
    sees keys j <= p. A query before the first key (T > length) or with an empty cache has out 0 and lse -inf.

    Nothing is planned on the host and nothing synchronises: lengths and page tables are read on the device, and a
    captured CUDA graph follows them. A sequence's bits depend on its own keys and length alone, never on the other
    sequences, the batch size or the page layout. Under `warploom.batch_invariant` the kernel of attention_varlen() runs over
    the pages, where that takes the call: on `triton` a query then has the bits that it has as a row of a prompt.

    Args:
        q: (batch, T, heads_q, head_dim), T from 1 to 16, under a tree to 64, in the cache's dtype; heads_q is a multiple of
            heads_kv.
        cache: a KVCache or PagedKVCache.
        scale: factor on q kᵀ; default 1/√head_dim.
        softcap: c > 0 replaces a scaled score s by c · tanh(s / c); 0 is off.
        window: (left, right) keys kept around the position, -right <= p - j <= left; None is unlimited.
        sink: (heads_q,) a logit a head that joins the softmax's denominator, neither scaled nor softcapped.
        return_lse: also return lse, natural log, float32 (batch, heads_q, T), sink included.
        backend: run this implementation or raise its refusal; default: the first that does not refuse.
        tree: int32 (batch or 1, T) parents of the T tokens, drafts of a speculative decoder: token t comes after token
            tree[b, t] < t, a root (-1) after the cache's last key before them. A token then sees the keys before the T, its
            ancestors and itself. Any order of the tokens in which parents come first will do. A token, and its key, then sit
            at p = length - T + depth, the number of its ancestors: a window shows it what plain decode of its path would.
        bias: `warploom.bias.ALiBi`, `Relative` or `Key`, added to scores behind the softcap in fp32, by the positions of
            queries and keys in their sequence; -inf hides a key. Key's values are (batch or 1, heads_q or 1, n), of as many
            keys as a sequence of the cache can hold, or more. Under a tree positions are as above, for a key of a draft too.
        prefix: which sequences begin with the same keys, so that these are read once for several of them: what
            `cache.shared_prefix()` found in a table, for every layer of a step; or a number n, by which you promise that the
            first n keys of neighbours b and b + 1, as far as both reach, lie in the same pages, or in a KVCache are equal.
            It changes no bit of a result, and what cannot be shared is read as ever. The promise is checked on CPU tensors and
            under WARPLOOM_CHECK=1.

    Returns:
        out (batch, T, heads_q, head_dim_v) in q's dtype, or (out, lse).

    Raises:
        TypeError, ValueError: before any work, naming the argument, what it got and what it takes; also where an input
            requires grad while gradients are recorded.
    """
    # Keywords of the plainest types: 1 is equal to True, and would find what True left.
    short = (
        not invariance.enabled
        and tree is None
        and bias is None
        and (prefix is None or type(prefix) is int or (type(prefix) is SharedPrefix and type(prefix.keys) is Tensor))
        and (scale is None or type(scale) is float or type(scale) is int)
        and (type(softcap) is float or type(softcap) is int)
        and (window is None or _whole(window))
        and (return_lse is False or return_lse is True)
        and (backend is None or type(backend) is str)
        and _is_plain(q, sink, cache)
        and not checked()
    )
    if short:
        sink_key = None if sink is None else (sink.dtype, sink.shape)
        key: tuple[Any, ...] = (q.shape, q.stride(), q.dtype, q.device, scale, softcap, window, sink_key, backend)
        found = None
        if prefix is not None:
            if isinstance(prefix, SharedPrefix):
                found = prefix.keys
            key += (prefix,) if found is None else (found.shape, found.stride(), found.device)
        run = cache.ready.get(key)
        if run is not None:
            results = run(q, sink, return_lse) if found is None else run(q, sink, return_lse, found)
            if results is not None:
                return results if return_lse else results[0]
    args = decode_args(q, cache, scale, softcap, window, sink, tree, bias, prefix)
    return_lse = arguments.flag("return_lse", return_lse)
    if invariance.enabled and not is_empty(args):
        results = as_chunk(args, bias, backend)
        if results is not None:
            return results if return_lse else results[0]
    chosen = dispatch.choose(DecodeProblem.from_args(args), backend, "decode")
    args = args._replace(backend=chosen)
    out, lse = decode_op(*args)
    if short and (args.prefix is None or args.prefix is found) and not is_empty(args):
        run = _bound(args, q, cache.hadamard_seed)
        if run is not None:
            if len(cache.ready) >= MOST_READY:
                cache.ready.clear()
            cache.ready[key] = run
    return (out, lse) if return_lse else out


def _prepare(q: Tensor, cache: KVCache | PagedKVCache, **keywords: Any) -> Plan:
    """The plan of a call, which runs: that compiles or loads what it takes, and changes nothing."""
    plan = plan_of(q, cache, **keywords)
    decode(q, cache, **keywords)
    return plan


offer(Describer(plan_of, _prepare), KVCache, PagedKVCache)


def _bound(args: DecodeArgs, q: Tensor, seed: int | None) -> Callable[..., Any] | None:
    """What runs later calls of queries like q, of which ``args`` are; over rotated keys ``seed`` rotates them first."""
    run: Callable[..., Any] | None = None
    if args.q is q or (seed is not None and last_contiguous(q) is q):  # nothing else is a copy that every call has to make
        run = dispatch.find(args.backend, "decode").bind(args)
    if run is None or seed is None:
        return run
    from warploom.kernels.rotation import bound

    turn, turned_run = bound(q, seed), run
    if turn is None:
        return None

    def rotated(q: Tensor, *others: Any) -> Any:
        turned = turn(q)
        return None if turned is None else turned_run(turned, *others)

    return rotated


def _whole(window: object) -> bool:
    """Whether a window is a pair of ints or None, and of nothing that is merely equal to them."""
    return type(window) is tuple and len(window) == 2 and type(window[0]) in _SIDES and type(window[1]) in _SIDES


_SIDES = (int, type(None))


def _is_plain(q: object, sink: object, cache: object) -> bool:
    """Whether a call may go without checks that a like call on this cache has passed: nothing records or transforms it.

    The host bounds a step of a small model; what differs between its calls is the contents of q.
    """
    if torch.compiler.is_compiling() or not isinstance(q, Tensor) or not q.is_cuda:
        return False
    if type(cache) is KVCache:
        k, v = cache.k, cache.v
    elif type(cache) is PagedKVCache:
        k, v = cache.k_pages, cache.v_pages
    else:
        return False
    if sink is not None and (not isinstance(sink, Tensor) or sink.device != q.device or sink.stride() != (1,)):
        return False
    scales = cache.k_scale, cache.v_scale
    # As `unobserved` has it: the host's calls are counted.
    return plain(q, sink, k, v, *scales) and not recorded(q, sink, k, v, *scales)
