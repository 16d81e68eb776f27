"""Which method a call takes, and why: what explain() prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from warploom.attention.problem import AttentionArgs
from warploom.distributed import by_heads, gather, ring
from warploom.distributed.layout import Run
from warploom.distributed.pieces import Sharded

METHODS = ("gather", "heads", "ring", "gather-heads")
# A GPU's own memory moves bytes about eight times as fast as the links between GPUs.
_MEMORY = 1 / 8
# How often heads reads and writes what it sends and gets, each way: side by side, padded, in order.
_SORTED = 6
# Bytes that ring moves for each element of out that it merges, and of dq that it adds up.
_MERGED, _ADDED = 18, 12
# Bytes that could be on their way in the time that ring loses backward to a step of each group of heads past the first: 0.9 ms,
# of documents and causal calls in 8 groups on two H200.
_AGAIN = 0.9e-3 * gather.LINK
# A backward pass takes about so many times as long as a forward one, and by gather that part longer where keys are sent again:
# many, of which a rank's rows are columns. Four H200, 8192 tokens a rank: causal 19.1 to 21.7 ms, a prefix 19.8 to 23.2, of
# which 1 are copies and ways; one device's own call, over four, 16.5 to 17.2, and 18.8 to 19.3.
_BACKWARD, _COLUMNS = 2.8, 0.1


@dataclass(frozen=True)
class Choice:
    """A call's method; ``str(choice)`` is the text for people.

    Attributes:
        method: gather, heads, ring or gather-heads.
        reason: in words.
        refused: (method, why) of those that cannot take the call.
        costs: (method, bytes a rank waits for in a forward pass) of those that can, as the model has them.
        calls: of attention on this rank, forward: (queries, keys, mask, implementation).
        backward_costs: the same of a backward pass.
    """

    method: str
    reason: str
    refused: tuple[tuple[str, str], ...] = ()
    costs: tuple[tuple[str, int], ...] = ()
    calls: tuple[tuple[int, int, str, str], ...] = ()
    backward_costs: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        lines = [f"method    {self.method}: {self.reason}"]
        back = dict(self.backward_costs)
        for method, size in self.costs:
            both = f"{size / 2**20:.3g} MiB forward and {back[method] / 2**20:.3g} MiB backward"
            lines.append(f"cost      {method}: {both} that nothing hides")
        lines += [f"refused   {method}: {why}" for method, why in self.refused]
        lines += [f"call      {m} queries, {n} keys, {mask}: {name}" for m, n, mask, name in self.calls]
        return "\n".join(lines)


def refusal(method: str, ranks: int, heads_q: int, heads_kv: int, dropout: bool) -> str | None:
    """Why a method cannot take a call, in words, or None."""
    if method == "gather-heads" and not (heads_q and heads_kv):
        return "needs heads to send, got none"
    if method in ("heads", "gather-heads") and (heads_kv % ranks or heads_q % ranks):
        return f"needs heads in multiples of the {ranks} ranks, got {heads_q} of q and {heads_kv} of k and v"
    if dropout and method == "ring":
        return "has some keys of the call at a time, and dropout counts keys of the whole"
    return None


def choose(asked: str, sharded: Sharded, args: AttentionArgs) -> Choice:
    """The method of a call: as the plan says, or the one that leaves least to wait for.

    The cost is a model, in bytes that a rank receives and no kernel hides, of a forward and a backward pass: gather waits for
    its first group of heads, and in the backward pass for the last one's gradients, and pays for kernels that take longer where
    keys are many; heads for everything, which it also sorts; ring for nothing but pays for merging what each rank's keys give.
    The backward pass of gather-heads waits for its first heads' rows and its last ones' gradients, and copies all. Both passes
    count whether or not a call wants gradients: ranks may differ in that, and would wait for each other in two methods.

    Args:
        args: the call of this rank; its mask is ``sharded``.

    Raises:
        ValueError: the method that the plan names cannot take the call, or no method can.
    """
    ranks, heads_q, heads_kv, dropout = len(sharded.queries.counts), args.q.shape[2], args.k.shape[2], args.dropout_p > 0.0
    if dropout and sharded.whole.starts is not None:
        raise ValueError(
            "dropout_p must be 0 with cu_seqlens: dropout counts elements of each sequence, which no method here can"
        )
    why = {method: refusal(method, ranks, heads_q, heads_kv, dropout) for method in METHODS}
    if asked != "auto":
        words = why[asked]
        if words is not None:
            other = next(method for method in METHODS if why[method] is None)
            raise ValueError(f"method {asked!r} of the plan {words}; make the plan with method='auto' or {other!r}")
        return Choice(asked, f"the plan says method={asked!r}")
    if args.batch_invariant:
        words = "has bits that depend on the number of ranks"
        why = {method: why[method] or (None if method.startswith("gather") else words) for method in METHODS}
    refused = tuple([(method, words) for method, words in why.items() if words is not None])
    if ranks == 1:
        return Choice("gather", "one rank, which has everything")
    models = {"gather": _gather, "heads": _heads, "ring": _ring, "gather-heads": _gather_heads}
    costs, back = {}, {}
    for method in METHODS:
        if why[method] is None:
            costs[method], back[method] = map(int, models[method](sharded, args))
    method = min(costs, key=lambda each: costs[each] + back[each])
    reason = "leaves least to wait for, as the model below has it"
    return Choice(method, reason, refused, tuple(costs.items()), backward_costs=tuple(back.items()))


def _gather(sharded: Sharded, args: AttentionArgs) -> tuple[float, float]:
    """Bytes of the forward and of the backward pass."""
    q, k, v = args.q, args.k, args.v
    heads, dims = k.shape[2], k.shape[3] + v.shape[3]
    forward, back = [gather.in_order(sharded, args, bool(invariant)) for invariant in (args.batch_invariant, False)]
    found = gather.amount(sharded, q, heads, dims, forward)
    groups = gather.head_groups(heads, found)
    there = 0.0 if gather.packs(sharded, args) else _of_group(found.taken, groups, 0)

    found = gather.amount(sharded, q, heads, dims, back)
    groups = gather.head_groups(heads, found, backward=True)
    kept = not forward and gather.few(sharded, q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32).itemsize // q.element_size() if back else 1
    dq = sharded.queries.longest * q.shape[0] * q.shape[2] * q.shape[3] * q.element_size()
    if kept and sharded.causal:
        return there, 3 * dq * _MEMORY  # gradients are on their way under own keys, and two terms of dq are added
    parts = 2 * dq if len(groups) > 1 else 0
    sent = 0.0 if kept else _of_group(found.taken, groups, 0)
    longer = 0.0 if kept or found.seconds is None else found.seconds * _BACKWARD * _COLUMNS * gather.LINK
    return there, sent + wide * _of_group(found.taken, groups, -1) + parts * _MEMORY + longer


def _of_group(taken: int, groups: Sequence[Run], number: int) -> float:
    """Bytes of a group's heads."""
    first, past = groups[number]
    return taken * (past - first) / max(groups[-1][1], 1)


def _heads(sharded: Sharded, args: AttentionArgs) -> tuple[float, float]:
    q, k, v = args.q, args.k, args.v
    ranks, size = len(sharded.queries.counts), q.shape[0] * (k.shape[3] + v.shape[3]) * q.element_size()
    held = (sharded.queries.longest * q.shape[2] + sharded.keys.longest * k.shape[2]) * size
    each = held * ((ranks - 1) / ranks + _SORTED * _MEMORY)
    return each, each  # dout goes out's way, and gradients that of what they are of


def _gather_heads(sharded: Sharded, args: AttentionArgs) -> tuple[float, float]:
    there, _ = _gather(sharded, args)
    q, k, v = args.q, args.k, args.v
    ranks, size = len(sharded.queries.counts), q.shape[0] * q.element_size()
    shares = by_heads.shares_of(sharded, q.shape[2], k.shape[2], args.dropout_p > 0.0)
    of_q, of_keys = sharded.queries.longest * q.shape[2] * size, sharded.keys.longest * k.shape[2] * size
    of_keys *= k.shape[3] + v.shape[3]
    given, back = of_q * (q.shape[3] + 2 * v.shape[3]), of_q * q.shape[3]
    ways = 0.0
    for heads, of_rows in ((shares[0], given), (shares[-1], back)):
        ways += (of_keys * heads.of_keys.number / k.shape[2] + of_rows * heads.number / q.shape[2]) * ranks
    copied = 2 * (given + back + 2 * of_keys) * _MEMORY
    seconds = 2 * gather.START + gather.END * (len(shares) - 1)
    return there, ways * (ranks - 1) / ranks + copied + seconds * gather.LINK


def _ring(sharded: Sharded, args: AttentionArgs) -> tuple[float, float]:
    """Ranks must agree, so both are those of the rank that merges most blocks."""
    q, k, v = args.q, args.k, args.v
    ranks = range(len(sharded.queries.counts))
    blocks = max(sum(bool(sharded.needed(reader, source)) for source in ranks) for reader in ranks)
    rows = blocks * sharded.queries.longest * q.shape[0] * q.shape[2] * _MEMORY
    groups = ring.backward_groups(sharded, q, k.shape[2])
    # Gradients of the last group's keys, in their own dtype.
    last = sharded.keys.longest * q.shape[0] * k.shape[2] // groups * (k.shape[3] + v.shape[3]) * k.element_size()
    return rows * v.shape[3] * _MERGED, rows * q.shape[3] * _ADDED + last + (groups - 1) * blocks * _AGAIN
