"""The door of context parallel: attention() over sequences that ranks hold parts of."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from warploom.attention import registry  # noqa: F401  (it fills the dispatch list)
from warploom.attention.arguments import dense_args
from warploom.attention.problem import AttentionArgs, AttentionProblem, band_words, check_columns
from warploom.distributed import gather, groups
from warploom.distributed.call import Call
from warploom.distributed.choice import Choice, choose
from warploom.distributed.function import Sharded as Function
from warploom.distributed.layout import TILE
from warploom.distributed.local import Run
from warploom.distributed.pieces import Sharded
from warploom.distributed.plan import ShardPlan
from warploom.distributed.whole import Whole, resolved
from warploom.distributed.work import digest
from warploom.masks import Mask
from warploom.masks.intervals import ResolvedMask
from warploom.runtime import arguments, dispatch
from warploom.runtime.arguments import Window

_KEPT = 16  # kinds of calls whose masks a plan keeps: a model has a few
_UNSEEDED = torch.zeros(1, dtype=torch.int64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: ShardPlan,
    mask: Mask | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    batch_invariant: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`warploom.attention` over a sequence of which each rank holds the part that a plan gives it.

    A collective: every rank of the plan's group calls it, in the same order. The result is that of one device, sharded.
    Gradients are those of the sum of all ranks' losses; the sink's is the part of this rank's queries (with method heads: of
    this rank's heads), to be summed over the group as any parameter's.

    Shapes, options and a digest of the mask are compared between ranks at the first call of each kind, which waits for a mask
    on a GPU once; later calls compare nothing. Under torch.compile a call is a graph break.

    Args:
        q: (batch, tokens of this rank, heads_q, head_dim); of a plan with cu_seqlens (tokens of this rank, heads_q, head_dim).
        k, v: (batch, keys of this rank, heads_kv, ·), packed as q is.
        plan: by `shard_plan`, for the whole lengths.
        mask, causal, window: as `warploom.attention` takes them for the whole sequence, with cu_seqlens as
            `warploom.attention_varlen` does. Masks of layers may differ from the one that the plan was made for.
        dropout_p: over 0 needs another method than ring, and no cu_seqlens. Elements are those that one device drops.
        dropout_seed: the same on all ranks of the group; default: the first rank draws it by torch's generator and sends it.
        scale, softcap, sink, deterministic, return_lse, backend: as `warploom.attention` takes them.
        batch_invariant: as `warploom.attention` takes it; with methods gather and gather-heads, one of which auto then is, the
            bits of out and lse do not depend on the number of ranks nor on who holds what either.

    Returns:
        out (batch, tokens of this rank, heads_q, head_dim_v) in q's dtype, or (out, lse) with lse float32
        (batch, heads_q, tokens of this rank); of packed sequences without batch.

    Raises:
        TypeError, ValueError: at the first call of a kind on every rank, where one of them has an argument that is wrong or
            unlike the others'; later, where it is wrong, on that rank.
        RuntimeError: what another rank could not do at the first call; a collective that another rank never came to,
            when the group's timeout is over.
    """
    if not isinstance(plan, ShardPlan):
        raise TypeError(f"plan must be what shard_plan() returns, got {arguments.describe(plan)}")
    options = (scale, softcap, sink, dropout_p, dropout_seed, deterministic, batch_invariant, return_lse, backend)
    run: Any = _attention
    if "torch._dynamo" in sys.modules:  # nothing compiles without it, and its import costs a second
        run = torch.compiler.disable(_attention)
    return run(q, k, v, plan, mask, causal, window, options)


# A graph break, as torch.compiler.disable marks it: what such a function calls is compiled all the same.
setattr(attention, "_torchdynamo_disable", True)  # noqa: B010


def _attention(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, mask: Any, causal: Any, window: Any, options: tuple[Any, ...]
) -> Tensor | tuple[Tensor, Tensor]:
    """A call out of the compiler's sight."""
    dropout_seed, return_lse = options[4], options[7]
    call, choice, args = _prepared(q, k, v, plan, mask, causal, window, options)
    if args.dropout_p and dropout_seed is None and plan.group is not None:
        assert args.dropout_seed is not None
        torch.distributed.broadcast(args.dropout_seed, group=plan.group, group_src=0)
    out, lse = Function.apply(args.q, args.k, args.v, args.sink, call, choice.method)
    if plan.starts is not None:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: ShardPlan,
    mask: Mask | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    batch_invariant: bool | None = None,
) -> Choice:
    """The method that a call would take on this rank and why, without running it. No collective.

    Args:
        q, k, v: this rank's parts, as for `attention`; so are all keywords. Contents do not matter.

    Returns:
        A `Choice`: print it for the method, its reason and the kernel that runs.

    Raises:
        TypeError, ValueError: as `attention` on one rank.
    """
    if not isinstance(plan, ShardPlan):
        raise TypeError(f"plan must be what shard_plan() returns, got {arguments.describe(plan)}")
    arguments.flag("return_lse", return_lse)
    args = _args(q, k, v, plan, _keywords(scale, softcap, sink, dropout_p, dropout_seed, deterministic, batch_invariant))
    sharded = _sharded(plan, _whole(plan, mask, causal, window), args.q.device)
    backward = _wants_gradients(args)
    choice = choose(plan.method, sharded, args)
    if choice.method == "ring":
        pieces = [piece for step in range(plan.ranks) for piece in sharded.against((plan.rank - step) % plan.ranks)]
    elif choice.method != "heads":
        pieces = list(gather.forward_pieces(sharded, args, _unit(args, sharded.whole, backend, backward)))
    else:
        pieces = list(sharded.of_all(args.dropout_p > 0.0))
    calls = []
    for piece in pieces:
        (a, b), (c, d) = piece.rows if piece.among is None else (0, piece.among[1]), piece.keys
        some = args._replace(q=args.q[:, :1].expand(-1, b - a, -1, -1), **piece.mask._asdict())
        k_, v_ = (t[:, :1].expand(-1, d - c, -1, -1) for t in (args.k, args.v))
        problem = AttentionProblem.from_args(piece.packed(some._replace(k=k_, v=v_)), backward)
        problem = replace(problem, q_offset=piece.offset is not None)
        columns = [name for name in ("lts", "lte", "uts", "ute") if getattr(piece.mask, name) is not None]
        words = band_words(piece.mask.left, piece.mask.right) + (f", columns ({', '.join(columns)})" if columns else "")
        words += "" if piece.sequences is None else ", packed"
        calls.append((b - a, d - c, words, dispatch.choose(problem, backend)))
    return replace(choice, calls=tuple(calls))


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, plan: ShardPlan, mask: Any, causal: Any, window: Any, options: tuple[Any, ...]
) -> tuple[Call, Choice, AttentionArgs]:
    """A call's arguments validated and its mask sharded; compared between ranks where its kind is new."""
    error: Exception | None = None
    kind: Any = None
    backward = False
    sharded = choice = args = whole_mask = None
    scale, softcap, sink, dropout_p, seed, deterministic, batch_invariant, return_lse, backend = options
    given = seed is not None
    try:
        if plan.group is not None and not given and dropout_p:
            seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=getattr(q, "device", None))
        args = _args(q, k, v, plan, _keywords(scale, softcap, sink, dropout_p, seed, deterministic, batch_invariant))
        arguments.flag("return_lse", return_lse)
        whole_mask = resolved(mask, causal, window, plan.seqlen_q, plan.seqlen_k, plan.starts is not None)
        vectors = tuple([None if t is None else _identity(t) for t in whole_mask.vectors])
        backward = _wants_gradients(args)
        # Without whether gradients are wanted, which one rank may want and another not: what is sent must not depend on it.
        kind = (
            *(args.q.shape[0], args.q.shape[2:], args.k.shape[2:], args.v.shape[3], args.q.dtype, args.q.device),
            *(args.scale, args.softcap, args.sink is None, args.dropout_p, given if args.dropout_p else None),
            *(args.deterministic, args.batch_invariant, backend),
            *(whole_mask.left, whole_mask.right, vectors),
        )
        found = plan.kept.get(kind)
        if found is None:
            here, heads = _on(whole_mask, args.q.device), (args.q.shape[2], args.k.shape[2])
            check_columns(here, args.q.shape[0], *heads, plan.seqlen_k, args.q)
            whole = Whole.of(whole_mask, plan.seqlen_q, plan.seqlen_k, plan.starts)
            sharded = _sharded(plan, whole, args.q.device)
            choice = choose(plan.method, sharded, args)
        else:
            sharded, choice, _, _, _ = found
    except (TypeError, ValueError) as raised:
        error = raised
    compares = plan.group is not None and kind not in plan.kept and (error is None or not plan.kept)
    if compares:
        facts = {} if error else _facts(args, sharded, backend, backward, given)
        groups.compared(plan.group, facts, error, "a call of attention()")
    if error is not None:
        raise error
    assert sharded is not None and choice is not None and args is not None
    if kind not in plan.kept:
        places = [layout.places.to(args.q.device) for layout in (plan.keys, plan.queries)]
        plan.kept[kind] = (sharded, choice, *places, whole_mask)  # the mask too: its tensors' ids stay theirs
        if len(plan.kept) > _KEPT:
            plan.kept.popitem(last=False)
    _, _, key_places, query_places, _ = plan.kept[kind]
    run = Run(args._replace(sink=None), backend, backward, sharded.launchers)
    last = plan.seqlen_q if plan.starts is None else plan.starts[-1]
    tail = sum(max(0, b - max(a, last)) for a, b in plan.queries.runs[plan.rank])
    unit = _unit(args, sharded.whole, backend, backward)
    return Call(run, sharded, plan.group, plan.rank, key_places, query_places, tail, last, unit), choice, args


def _keywords(
    scale: Any, softcap: Any, sink: Any, dropout_p: Any, seed: Any, deterministic: Any, batch_invariant: Any
) -> dict[str, Any]:
    """What the local call is given beside its tensors and mask."""
    numbers = {"scale": scale, "softcap": softcap, "dropout_p": dropout_p}
    flags = {"deterministic": deterministic, "batch_invariant": batch_invariant}
    return {**numbers, "sink": sink, "dropout_seed": seed, **flags}


def _wants_gradients(args: AttentionArgs) -> bool:
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (args.q, args.k, args.v, args.sink)])


def _unit(args: AttentionArgs, whole: Whole, backend: str | None, backward: bool) -> int | None:
    """`Call.unit`: by the implementation that would take the whole, the same on every rank."""
    if not args.batch_invariant:
        return None
    problem = AttentionProblem.from_args(args._replace(**whole.mask._asdict()), backward)
    problem = replace(problem, seqlen_q=whole.seqlen_q, seqlen_k=whole.seqlen_k, q_offset=args.dropout_p > 0.0)
    return 0 if dispatch.find(dispatch.choose(problem, backend)).rows_apart(problem) else TILE


def _args(q: Any, k: Any, v: Any, plan: ShardPlan, keywords: dict[str, Any]) -> AttentionArgs:
    """The local call, validated but for its mask, with a batch of 1 where sequences are packed."""
    rank = 3 if plan.starts is not None else 4
    for name, t, count, what in (
        ("q", q, plan.queries.counts[plan.rank], "queries"),
        ("k", k, plan.keys.counts[plan.rank], "keys"),
        ("v", v, plan.keys.counts[plan.rank], "keys"),
    ):
        if arguments.strided(name, t).ndim != rank:
            layout = "(tokens, heads, head_dim), as its cu_seqlens ask" if rank == 3 else "(batch, tokens, heads, head_dim)"
            raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(t.shape)}")
        if t.shape[-3] != count:
            raise ValueError(
                f"{name} has {t.shape[-3]} tokens, and rank {plan.rank} of the plan holds {count} {what}: give its own part, "
                f"as plan.shard({name}, {rank - 3}) cuts it"
            )
    if rank == 3:
        q, k, v = q[None], k[None], v[None]
    return dense_args(q, k, v, **keywords)


def _whole(plan: ShardPlan, mask: Any, causal: Any, window: Any) -> Whole:
    found = resolved(mask, causal, window, plan.seqlen_q, plan.seqlen_k, plan.starts is not None)
    return Whole.of(found, plan.seqlen_q, plan.seqlen_k, plan.starts)


def _sharded(plan: ShardPlan, whole: Whole, device: torch.device) -> Sharded:
    return Sharded(whole, plan.queries, plan.keys, plan.rank, plan.chunk, device)


def _identity(t: Tensor) -> Any:
    """What is another where a mask's vector is another, or was changed; of an inference tensor only what it holds tells."""
    return digest("", [t.cpu()]) if t.is_inference() else (id(t), t._version)


def _on(mask: ResolvedMask, device: torch.device) -> ResolvedMask:
    """The mask where vectors that lie on the host count as lying with q: they are copied there."""
    vectors = [None if t is None else t.to(device) if t.device.type == "cpu" else t for t in mask.vectors]
    return ResolvedMask(mask.left, mask.right, *vectors)


def _facts(
    args: AttentionArgs | None, sharded: Sharded | None, backend: str | None, backward: bool, seeded: bool
) -> dict[str, Any]:
    """What ranks compare: everything of a call that must be the same on all; ``seeded``: whether a dropout_seed was given."""
    assert args is not None and sharded is not None
    q, k, v = args.q, args.k, args.v
    # One rank alone without a seed would wait for the others to send theirs. A seed on a device is waited for, once.
    seed = int(args.dropout_seed) if args.dropout_p and seeded and args.dropout_seed is not None else None
    return {
        "batch of q": q.shape[0],
        "heads and head_dim of q": tuple(q.shape[2:]),
        "heads and head_dim of k": tuple(k.shape[2:]),
        "heads and head_dim of v": tuple(v.shape[2:]),
        "dtype": q.dtype,
        "kind of device": q.device.type,
        "scale": args.scale,
        "softcap": args.softcap,
        "sink": "none" if args.sink is None else "one",
        "dropout_p": args.dropout_p,
        "dropout_seed": seed,
        "deterministic": args.deterministic,
        "batch_invariant": args.batch_invariant,
        "backend": backend,
        "whether gradients are wanted": backward,
        "mask, causal and window": sharded.whole.digest(),
    }
