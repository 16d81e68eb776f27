"""Running a validated call: who runs it, what further calls of its kind take, FP8 inputs, stats."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from warploom.attention import (
    launcher,
    registry,  # noqa: F401  (it fills the dispatch list)
)
from warploom.attention.ops import attention_op, attention_with_max_logits_op, stats_op
from warploom.attention.problem import AttentionArgs, AttentionProblem, page_box
from warploom.attention.stats import FAMILY, AttentionStats, StatsBackend, comes_beside, measured_by, stats_args
from warploom.runtime import dispatch
from warploom.runtime.backend import Backend
from warploom.runtime.plan import describer

if TYPE_CHECKING:
    from warploom.attention.fp8 import Fp8Call


def of_fp8(
    q: Any,
    k: Any,
    v: Any,
    descale: Any,
    out_dtype: Any,
    backend: str | None,
    others: dict[str, Any],
    cu_seqlens: tuple[Any, Any] | None = None,
    paged: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Fp8Call | None]:
    """q, k and v, or what stands for them while a call of FP8 is checked, whose modules nobody else needs."""
    plain = all([isinstance(t, Tensor) and t.dtype != torch.float8_e4m3fn for t in (q, k, v)])
    if plain and descale is None and out_dtype is None:
        return q, k, v, None
    for name, t in (("q", q), ("k", k), ("v", v)):
        if describer(t) is not None:
            raise TypeError(
                f"{name} is a {type(t).__name__}: decode(q, cache) reads caches, and a PagedKVCache for more queries "
                "attention_varlen(q, cache, cu_seqlens_q=...)"
            )
    from warploom.attention.fp8 import checked

    found = checked(q, k, v, descale, out_dtype, backend, others, cu_seqlens, paged)
    return *found.stand_ins(), found


def results(
    args: AttentionArgs,
    backend: str | None,
    key: Hashable,
    records: bool,
    return_lse: bool,
    names: tuple[str, ...],
    fp8: Fp8Call | None,
) -> Tensor | tuple[Any, ...]:
    """What a validated call returns; ``names``: of the stats that it asks for."""
    if fp8 is not None and fp8.refusal(args, backend, bool(names)) is None:
        out, lse = fp8.run(args)
        return (out, lse) if return_lse else out
    chosen, settled = _choose(args, backend)
    if fp8 is None and comes_beside(args, chosen, names):
        args = dispatch.find(chosen).prepare(args)._replace(backend=chosen)
        out, lse, largest = attention_with_max_logits_op(*args)
        found = AttentionStats(max_logits=largest)
        return (out, lse, found) if return_lse else (out, found)
    measuring = measured_by(args, problem_of(args), chosen, names)
    if fp8 is not None:
        args = fp8.as_numbers(args)
    out, lse = _run(args, chosen, key if settled else None, records)
    out = out if fp8 is None else out.to(fp8.out_dtype)
    if measuring is None:
        return (out, lse) if return_lse else out
    stats = _stats(args, lse, measuring, names)
    return (out, lse, stats) if return_lse else (out, stats)


def _choose(args: AttentionArgs, backend: str | None) -> tuple[str, bool]:
    """The implementation that runs a call, and whether it will run all calls of this kind."""
    if backend is not None and not isinstance(backend, str):
        dispatch.find(backend)  # says what there is
    key = key_of(args, backend) if args.q.is_cuda and not torch.compiler.is_compiling() else None
    chosen = None if key is None else dispatch.settled(key)
    if chosen is not None:
        return chosen, True
    chosen = dispatch.choose(problem_of(args), backend)
    if key is not None:
        dispatch.settle(key, chosen, by_name=backend is not None)
    return chosen, key is not None and dispatch.settled(key) is not None


def _run(args: AttentionArgs, chosen: str, call_key: Hashable, records: bool) -> tuple[Tensor, Tensor]:
    implementation = dispatch.find(chosen)
    if implementation.eager:
        out, lse = implementation.forward(args)
        return out, lse.float()
    args = implementation.prepare(args)._replace(backend=chosen)
    result: tuple[Tensor, Tensor] = attention_op(*args)
    if call_key is not None and type(implementation).bind is not Backend.bind:
        dispatch.bind(call_key, partial(launcher.bind, implementation, args, records))
    return result


def _stats(args: AttentionArgs, lse: Tensor, measuring: str, names: tuple[str, ...]) -> AttentionStats:
    """The stats of a call that has run, by the implementation called ``measuring``."""
    implementation = dispatch.find(measuring, FAMILY)
    assert isinstance(implementation, StatsBackend)
    max_logits, column_sums = "max_logits" in names, "column_sums" in names
    if implementation.eager:
        found = implementation.stats(stats_args(args), None, max_logits, column_sums)
        return AttentionStats(*[None if t is None else t.float() for t in found])
    given = lse.detach() if column_sums and args.sink is None else None
    args = implementation.prepare(stats_args(args))._replace(backend=measuring)
    largest, sums = stats_op(*args, given, max_logits, column_sums)
    return AttentionStats(largest if max_logits else None, sums if column_sums else None)


def are(given: tuple[object, ...], read: tuple[Tensor | None, ...]) -> bool:
    """Whether a call runs on the caller's own tensors. A launcher takes them as they are: of copies, none is kept."""
    return all([t is found for t, found in zip(given, read, strict=True)])


def sequences_of(args: AttentionArgs) -> tuple[Tensor | None, ...]:
    """What says where the sequences of a packed call are."""
    found = args.cu_seqlens_q, args.cu_seqlens_k, args.seqused_k
    return found if args.block_table is None else (*found, args.block_table)


def key_of(args: AttentionArgs, backend: str | None) -> tuple[Any, ...]:
    """All that the problem of a call depends on, at a tenth of its cost."""
    q, k, v, sink, cu_q = args.q, args.k, args.v, args.sink, args.cu_seqlens_q
    backward = args.bias_grad or (
        torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad))
    )
    return (
        *(backend, backward, q.dtype, q.shape, k.shape, v.shape[-1], args.left, args.right, args.deterministic),
        *(args.softcap != 0.0, args.dropout_p > 0.0, sink is None, args.lts is None, args.lte is None),
        *(args.uts is None, args.ute is None, None if cu_q is None else cu_q.shape, page_box(args)),
        *(args.seqused_k is None, args.max_seqlen_q, args.max_seqlen_k, args.q_offset is None),
        *(args.bias_kind, args.bias_grad, args.batch_invariant, args.k_scale is None, args.documents is None),
    )


def problem_of(args: AttentionArgs) -> AttentionProblem:
    tensors = (args.q, args.k, args.v, args.sink, args.bias)
    backward = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
    return AttentionProblem.from_args(args, backward)
