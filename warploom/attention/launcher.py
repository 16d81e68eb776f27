"""Launchers of attention that are kept: what tells kinds of calls apart, and what a call under a mask takes of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from warploom.attention.arguments import PACKED_MASKS, seed_of
from warploom.attention.bounds import bounds_of_kept, packed_bounds_of
from warploom.attention.ops import attention_op
from warploom.attention.problem import AttentionArgs, Kind
from warploom.bias import Bias
from warploom.masks import ColumnMask, Mask
from warploom.masks.kept import Kept
from warploom.runtime import dispatch, invariance
from warploom.runtime.arguments import Window, checked
from warploom.runtime.kept import Launcher, casts
from warploom.runtime.op import plain, recorded

if TYPE_CHECKING:
    from warploom.runtime.backend import Backend

Launch = Callable[..., tuple[Tensor, Tensor]]

_NUMBERS = (float, int, type(None))


def bind(backend: Backend, args: AttentionArgs, records: bool) -> Launch | None:
    """What launches further calls of the kind of ``args``, which has run; None: nothing quicker.

    It takes q, k, v and sink, of packed calls the three that say where sequences are, then of calls under a column mask that
    mask as it is kept, and last the seed of those that drop.
    ``records``: gradients are recorded.
    """
    forward = backend.bind(args)
    if forward is None:
        return None
    run: Launch = forward
    if records:
        run = attention_op.recorded_by(Launcher(attention_op, Kind(args).call, forward, backend.bind_backward))
    if args.lts is None and args.ute is None:
        return run
    left, right = args.left, args.right
    if args.cu_seqlens_q is not None:
        return _packed_launch(run, left, right, args.bounds is not None)
    if args.documents is not None:
        return _document_launch(run)
    seqlen_q = args.q.shape[1]

    def launch(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, mask: Kept, *seed: Tensor | None) -> tuple[Tensor, Tensor]:
        _, _, lts, lte, uts, ute = mask.resolved
        return run(q, k, v, sink, lts, lte, uts, ute, bounds_of_kept(mask, left, right, seqlen_q), *seed)

    return launch


def _document_launch(run: Launch) -> Launch:
    """What gives ``run`` a mask of documents, of which it needs no bounds."""

    def launch(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, mask: Kept) -> tuple[Tensor, Tensor]:
        return run(q, k, v, sink, *mask.resolved[2:], None, mask.documents)

    return launch


def _packed_launch(run: Launch, left: int | None, right: int | None, with_bounds: bool) -> Launch:
    """What gives ``run`` the bounds of packed vectors too, or None in their place where no bounds were prepared."""

    def launch(
        q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
        cu_q: Tensor | None, cu_k: Tensor | None, used: Tensor | None, mask: Kept, *seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        vectors = mask.resolved[2:]
        bounds = None
        if with_bounds:
            bounds = packed_bounds_of(vectors, (cu_q, cu_k, used), left, right, q.shape[0], straight=True)
        return run(q, k, v, sink, cu_q, cu_k, used, *vectors, bounds, *seed)

    return launch


# What is known of a call before its arguments are checked: the key that a launcher is or may be kept under (None: none may),
# the launcher, what it takes behind q, k, v and sink, the call's mask where it was asked, and whether gradients are recorded.
Found = tuple[Hashable, Launch | None, tuple[Any, ...], Kept | None, bool]

NOTHING: Found = (None, None, (), None, False)


def find(
    q: Any,
    k: Any,
    v: Any,
    sink: Tensor | None,
    mask: Mask | None,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    dropout_seed: Tensor | int | None,
    deterministic: bool | None,
    backend: str | None,
    return_lse: bool,
    vectors: tuple[Tensor | None, ...] = (),
    longest: tuple[int | None, ...] = (),
    bias: Tensor | Bias | None = None,
    batch_invariant: bool | None = None,
) -> Found:
    """The launcher that an earlier call of this kind left, and the key that it is or may be kept under.

    The key holds all that a call on a GPU depends on but contents and addresses; None where something would see the op, or a
    keyword is not of the plainest type: 1 is equal to True, and would find what True left. A call with a bias has neither.
    ``vectors`` and ``longest``: of a packed call, what says where sequences are, and its two lengths. A mask comes behind them.
    """
    if (
        not (type(dropout_p) is float or type(dropout_p) is int)
        or bias is not None
        or torch.compiler.is_compiling()
        or (vectors and checked())
    ):
        return NOTHING
    kept = None
    try:
        if (
            not q.is_cuda
            or not plain(q, k, v, sink, dropout_seed, *vectors)
            or (torch._C._is_any_autocast_enabled() and casts(q, k, v))
            or type(scale) not in _NUMBERS
            or type(softcap) not in _NUMBERS
            or not (causal is False or causal is True)
            or not (return_lse is False or return_lse is True)
            or not (deterministic is None or deterministic is False or deterministic is True)
            or not (batch_invariant is None or batch_invariant is False or batch_invariant is True)
        ):
            return NOTHING
        records = recorded(q, k, v, sink)
        shape, shape_k, device = q.shape, k.shape, q.device
        key: tuple[Any, ...] = (
            shape, shape_k, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            device, k.device, v.device, causal, scale, softcap, deterministic, backend, records,
            torch.are_deterministic_algorithms_enabled(), dropout_p,
            invariance.enabled if batch_invariant is None else batch_invariant,
        )  # fmt: skip
        if window is not None:
            key += (type(window), *window, *map(type, window))
        if sink is not None:
            key += (sink.shape, sink.stride(), sink.dtype, sink.device)
        others: tuple[Any, ...] = vectors
        rank, length = 4, 1  # of q and k, and where their lengths stand
        if vectors:
            key += (
                longest,
                *map(type, longest),
                *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in vectors],
            )
            rank, length = 3, 0
        if mask is not None:
            if not isinstance(mask, PACKED_MASKS if vectors else Mask) or len(shape) != rank or len(shape_k) != rank:
                return NOTHING
            kept = mask.kept(shape[length], shape_k[length], mask.device if isinstance(mask, ColumnMask) else device)
            kind = kept.kind
            if kind is None:
                return None, None, (), kept, records
            key += kind
            if len(kind) > 2:
                others = (*vectors, kept)
        launch = dispatch.bound(key)
        if launch is not None and (dropout_p or dropout_seed is not None):
            seed = seed_of(dropout_p, dropout_seed, q)  # drawn here only where the checks, which draw too, are left out
            others = (*others, seed) if dropout_p else others
        return key, launch, others, kept, records
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return NOTHING  # whatever this is, the checks say it in words
