"""From decode()'s arguments to validated DecodeArgs: every error of a call is raised here, before any work."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.bias import Bias
from warploom.decode.bias import parts_of, with_bias
from warploom.decode.cache import KVCache, PagedKVCache
from warploom.decode.contents import check_contents, checked_tree
from warploom.decode.prefix import SharedPrefix, prefix_of
from warploom.decode.problem import DecodeArgs
from warploom.kernels.e4m3 import E4M3
from warploom.runtime import arguments
from warploom.runtime.arguments import Window
from warploom.runtime.op import differentiates_forward
from warploom.runtime.qkv import check_sink, last_contiguous, scalars

MAX_QUERIES = 16
# Under a tree: a query's ancestors are the bits of one word.
MAX_TREE = 64
# More keys than any cache holds, in 32 bits.
_FAR = 2**30


def decode_args(
    q: Tensor,
    cache: KVCache | PagedKVCache,
    scale: float | None,
    softcap: float,
    window: Window | None,
    sink: Tensor | None,
    tree: Tensor | None,
    bias: Bias | None,
    prefix: SharedPrefix | int | None,
) -> DecodeArgs:
    """The op's arguments of a decode call."""
    if isinstance(cache, PagedKVCache):
        k, v, block_table = cache.k_pages, cache.v_pages, cache.block_table
    elif isinstance(cache, KVCache):
        k, v, block_table = cache.k, cache.v, None
    else:
        raise TypeError(f"cache must be a KVCache or PagedKVCache, got {type(cache).__name__}")
    lengths = cache.lengths
    if arguments.with_values("q", arguments.strided("q", q)).ndim != 4:
        raise ValueError(f"q must have 4 dimensions (batch, T, heads_q, head_dim), got shape {tuple(q.shape)}")
    if sink is not None:
        arguments.strided("sink", sink)
    _refuse_transforms(q, k, v, sink, parts_of(bias))
    if k.dtype == E4M3:
        if q.dtype not in arguments.FLOATS:
            raise TypeError(f"q has dtype {q.dtype}; over a cache of {k.dtype} it takes float16, bfloat16, float32 or float64")
    elif q.dtype != k.dtype:
        if not torch.is_autocast_enabled(q.device.type) or not q.is_floating_point():
            raise TypeError(f"q has dtype {q.dtype} but the cache has {k.dtype}; give q the cache's dtype")
        q = q.to(k.dtype)
    if q.device != k.device:
        raise ValueError(f"q is on {q.device} but the cache is on {k.device}; move them to one device")
    batch, queries, heads_q, head_dim = q.shape
    if batch != lengths.shape[0]:
        raise ValueError(f"q has batch {batch} but the cache holds {lengths.shape[0]} sequences")
    if queries > MAX_QUERIES and tree is None:
        raise ValueError(
            f"q has {queries} queries a sequence; decode takes 1 to {MAX_QUERIES}. attention_varlen(q, cache, cu_seqlens_q=...)"
            " takes more, over a PagedKVCache"
        )
    if queries > MAX_TREE:
        raise ValueError(f"q has {queries} queries a sequence; under a tree decode takes 1 to {MAX_TREE}")
    if head_dim != k.shape[3]:
        raise ValueError(f"q has head_dim {head_dim} but the cache has {k.shape[3]}")
    if head_dim == 0 or v.shape[3] == 0:
        raise ValueError(f"head_dim must be at least 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")
    heads_kv = k.shape[2]
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(
            f"q has {heads_q} heads, which is not a multiple of the cache's {heads_kv}; "
            f"q is (batch, T, heads_q, head_dim), got {tuple(q.shape)}"
        )
    scale, softcap, _ = scalars(scale, softcap, 0.0, head_dim)
    check_sink(sink, q)
    if sink is not None and sink.stride(0) != 1:
        sink = sink.contiguous()
    tree = checked_tree(tree, q)
    check_contents(k, lengths, block_table)
    scales = cache.k_scale, cache.v_scale
    shared, shared_keys = prefix_of(prefix, k, v, lengths, block_table, [t for t in scales if t is not None and t.ndim > 1])
    left, right = _band(window)
    q = last_contiguous(q)
    args = DecodeArgs(
        q, k, v, lengths, block_table, sink, tree, *scales, left, right, scale, softcap, "", latent=cache.latent,
        prefix=shared, prefix_keys=shared_keys,
    )  # fmt: skip
    args = with_bias(args, bias)
    if cache.hadamard_seed is not None:  # when all is checked
        from warploom.kernels.rotation import rotated_like

        args = args._replace(q=rotated_like(args.q, cache.hadamard_seed))
    return args


def _band(window: Window | None) -> tuple[int | None, int]:
    """left and right of the window cut by causality."""
    left, right = arguments.window("window", window)
    left, right = arguments.near(left), 0 if right is None else max(min(right, 0), -_FAR)
    if arguments.keeps_nothing(left, right):
        # It keeps no key, and so none is to be read, which may hold anything: the newest ones are hidden, and all before them.
        return left, -_FAR
    return left, right


def _refuse_transforms(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bias: list[Tensor]) -> None:
    """decode has no derivative: it says so rather than return a result that looks constant."""
    tensors = [("q", q), ("the cache's k", k), ("the cache's v", v), *(("bias", part) for part in bias)]
    if sink is not None:
        tensors.append(("sink", sink))
    if torch.is_grad_enabled():
        for name, t in tensors:
            if t.requires_grad:
                raise ValueError(
                    f"{name} requires grad, and decode() has no backward: call it under torch.no_grad(), "
                    "or use attention(), which is differentiable"
                )
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("decode() under a torch.func transform is not supported; use attention()")
    if differentiates_forward(*[t for _, t in tensors]):
        raise NotImplementedError("forward-mode AD through decode() is not supported; use attention()")
