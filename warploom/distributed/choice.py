"""Which method a call takes, and why: what explain() prints."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from warploom.distributed.gather import amount, head_groups
from warploom.distributed.pieces import Sharded

METHODS = ("gather", "heads", "ring")
# A merge moves out and lse of a rank through its own memory, about eight times as fast as the links between GPUs.
_MERGE = 1 / 8


@dataclass(frozen=True)
class Choice:
    """A call's method; ``str(choice)`` is the text for people.

    Attributes:
        method: gather, heads or ring.
        reason: in words.
        refused: (method, why) of those that cannot take the call.
        costs: (method, bytes a rank waits for in a forward pass) of those that can, as the model has them.
        calls: of attention on this rank, forward: (queries, keys, mask, implementation).
    """

    method: str
    reason: str
    refused: tuple[tuple[str, str], ...] = ()
    costs: tuple[tuple[str, int], ...] = ()
    calls: tuple[tuple[int, int, str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"method    {self.method}: {self.reason}"]
        lines += [f"cost      {method}: {size / 2**20:.3g} MiB that nothing hides" for method, size in self.costs]
        lines += [f"refused   {method}: {why}" for method, why in self.refused]
        lines += [f"call      {m} queries, {n} keys, {mask}: {name}" for m, n, mask, name in self.calls]
        return "\n".join(lines)


def refusal(method: str, ranks: int, heads_q: int, heads_kv: int, dropout: bool) -> str | None:
    """Why a method cannot take a call, in words, or None."""
    if method == "heads" and (heads_kv % ranks or heads_q % ranks):
        return f"needs heads in multiples of the {ranks} ranks, got {heads_q} of q and {heads_kv} of k and v"
    if dropout and method == "ring":
        return "has some keys of the call at a time, and dropout counts keys of the whole"
    return None


def choose(
    asked: str, sharded: Sharded, q: Tensor, k: Tensor, v: Tensor, dropout: bool, batch_invariant: bool = False
) -> Choice:
    """The method of a call: as the plan says, or the one that leaves least to wait for.

    The cost is a model, in bytes that a rank receives and no kernel hides: gather waits for its first group of heads, heads for
    everything, ring for nothing but pays for merging what each rank's keys give.

    Raises:
        ValueError: the method that the plan names cannot take the call, or no method can.
    """
    queries, keys = sharded.queries, sharded.keys
    ranks, (batch, _, heads_q, head_dim), (heads_kv, head_dim_v) = len(queries.counts), q.shape, v.shape[2:]
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
    if batch_invariant:
        words = "has bits that depend on the number of ranks"
        why = {method: why[method] or (None if method == "gather" else words) for method in METHODS}
    refused = tuple([(method, words) for method, words in why.items() if words is not None])
    if ranks == 1:
        return Choice("gather", "one rank, which has everything")
    token_kv = batch * heads_kv * (head_dim + head_dim_v) * q.element_size()
    token_q = batch * heads_q * (head_dim + head_dim_v) * q.element_size()
    others = ranks - 1
    # Ranks must agree, so the ring's cost is that of the rank that merges most blocks; each is read and written in fp32.
    blocks = max(sum(bool(sharded.needed(reader, source)) for source in range(ranks)) for reader in range(ranks))
    merges = blocks * queries.longest * batch * heads_q * head_dim_v * 4 * 3
    gathered = amount(sharded, q, heads_kv, head_dim + head_dim_v, in_order=False)
    _, first = head_groups(heads_kv, gathered)[0]
    model = {
        "gather": gathered.taken * first // max(heads_kv, 1),
        "heads": (queries.longest * token_q + keys.longest * token_kv) * others // ranks,
        "ring": int(merges * _MERGE),
    }
    costs = tuple([(method, model[method]) for method in METHODS if why[method] is None])
    method, _ = min(costs, key=lambda each: each[1])
    return Choice(method, "leaves least to wait for, as the model below has it", refused, costs)
