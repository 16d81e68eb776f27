"""What auto counts: bytes that a forward and a backward pass wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom import distributed, masks
from warploom.bench.masks import document_lengths
from warploom.distributed import by_heads, gather, ring
from warploom.distributed.api import _sharded, _whole
from warploom.distributed.choice import _AGAIN, _BACKWARD, _COLUMNS, Choice
from warploom.distributed.plan import planned

ROWS = 8192


def explained(
    ranks: int, heads_q: int, heads_kv: int, gradients: bool, options: dict[str, Any], mask: dict[str, Any]
) -> Choice:
    """Of the first rank of so many, 8192 tokens a rank, head_dim 128, bf16."""
    plan = planned(ROWS * ranks, ranks, 0, **mask)
    q = torch.empty(1, ROWS, heads_q, 128, dtype=torch.bfloat16, requires_grad=gradients)
    k = torch.empty(1, ROWS, heads_kv, 128, dtype=torch.bfloat16)
    return distributed.explain(q, k, k, plan=plan, **mask, **options)


def longer(ranks: int, heads: int, mask: masks.Mask) -> int:
    """Bytes that could be on their way in the time that gather's kernels of many keys take longer, backward."""
    elements = mask.density(ROWS * ranks, ROWS * ranks) * (ROWS * ranks) ** 2
    return int(elements * heads * 256 * 2 / ranks / gather.SPEED * _BACKWARD * _COLUMNS * gather.LINK)


def costs(*call: Any) -> dict[str, tuple[int, int]]:
    choice = explained(*call)
    back = dict(choice.backward_costs)
    return {method: (forward, back[method]) for method, forward in choice.costs}


def test_the_backward_pass_counts_whether_or_not_gradients_are_wanted() -> None:
    """A rank that wants none must not choose otherwise than one that does."""
    alone, both = (costs(4, 16, 4, gradients, {}, {"mask": masks.PrefixLM(ROWS)}) for gradients in (False, True))
    assert alone == both and all(backward > 0 for _, backward in both.values())
    # Three ranks' keys and values are sent again, for the rank that sees all of them, and as many gradients come back.
    assert both["gather"][1] == 2 * 3 * ROWS * 4 * 256 * 2 + longer(4, 16, masks.PrefixLM(ROWS))


def test_keys_that_are_kept_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call = 4, 16, 4, True, {}, {"mask": masks.PrefixLM(ROWS)}
    sent = costs(*call)["gather"][1] - longer(4, 16, masks.PrefixLM(ROWS))
    monkeypatch.setattr(gather, "KEPT", 1)
    assert costs(*call)["gather"][1] == sent // 2


def test_causal_gradients_come_back_under_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys are kept, what a backward pass adds is a sum of two terms of dq."""
    monkeypatch.setattr(gather, "KEPT", 1)
    assert costs(4, 16, 4, True, {}, {"causal": True})["gather"][1] == 3 * ROWS * 16 * 128 * 2 // 8


def test_two_groups_wait_for_half_of_the_heads_and_copy_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    call = 4, 16, 4, True, {}, {"mask": masks.PrefixLM(ROWS)}
    one = costs(*call)["gather"][1]
    monkeypatch.setattr(gather, "ONE_BACKWARD", 0)
    same = longer(4, 16, masks.PrefixLM(ROWS))
    assert costs(*call)["gather"][1] - same == (one - same) // 2 + 2 * ROWS * 16 * 128 * 2 // 8


def test_what_packed_documents_hide_costs_nothing() -> None:
    mask = {"mask": masks.Document(document_lengths(4 * ROWS))}
    forward, backward = costs(4, 64, 8, False, {}, mask)["gather"]
    assert forward == 0 and backward > 0
    ordered = costs(4, 64, 8, False, {"deterministic": True}, mask)["gather"]  # all keys, by an all-gather
    assert ordered[0] > 0


def test_both_passes_decide_between_methods() -> None:
    """Twelve ranks' keys of as many heads as queries have: gather waits for a quarter of them, then for two more."""
    mask = {"mask": masks.PrefixLM(ROWS)}
    choice = explained(12, 48, 48, False, {}, mask)
    forward, backward = dict(choice.costs), dict(choice.backward_costs)
    assert forward["gather"] < forward["heads"] and backward["gather"] > backward["heads"] > backward["gather-heads"]
    assert choice.method == explained(12, 48, 48, True, {}, mask).method == "gather-heads"
    assert "MiB forward and " in str(choice) and "MiB backward that nothing hides" in str(choice)


def test_heads_compute_gradients_where_gather_would_send_many_keys_again() -> None:
    """On two ranks keys are kept; a window's and documents' are few; and ranks must divide heads."""
    calls: list[tuple[int, int, dict[str, Any]]] = [(4, 8, {"causal": True}), (4, 8, {"mask": masks.PrefixLM(ROWS)})]
    assert {explained(ranks, 64, heads, True, {}, mask).method for ranks, heads, mask in calls} == {"gather-heads"}
    documents = {"mask": masks.Document(document_lengths(4 * ROWS))}
    calls = [(2, 8, {"causal": True}), (2, 8, {"mask": masks.PrefixLM(ROWS)}), (4, 2, {"causal": True}), (4, 8, documents)]
    calls.append((4, 8, {"window": (4095, 0)}))
    assert {explained(ranks, 64, heads, True, {}, mask).method for ranks, heads, mask in calls} == {"gather"}


def test_the_first_share_is_waited_for_and_the_last_ones_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 heads over 8 on four ranks: keys, an eighth of q, dout and out; then the rest of dq, and keys' gradients."""
    call = 4, 64, 8, True, {}, {"causal": True}
    two = costs(*call)["gather-heads"][1]
    monkeypatch.setattr(by_heads, "FIRST", 1)
    spared = ROWS * 64 * 128 * 2 * (3 * 7 + 1) // 8 * 3 // 4 - gather.END * gather.LINK
    assert costs(*call)["gather-heads"][1] - two == pytest.approx(spared, abs=2)


def test_shares_of_heads() -> None:
    """Of query heads that share key heads, else of key heads: neighbours, where a mask tells heads apart."""

    def cuts(ranks: int, heads: int, heads_kv: int, dropout: bool = False, vectors: int = 1) -> list[Any]:
        mask = {"mask": masks.ColumnMask(torch.full((1, vectors, 64), 64))}
        plan = planned(64, ranks, 0, **mask)
        sharded = _sharded(plan, _whole(plan, mask["mask"], False, None), torch.device("cpu"))
        return [(each.kv, each.members) for each in by_heads.shares_of(sharded, heads, heads_kv, dropout)]

    assert cuts(4, 64, 8) == [((0, 2), (0, 1)), ((0, 2), (1, 8))]
    assert cuts(2, 14, 2) == [((0, 1), (0, 1)), ((0, 1), (1, 7))]
    assert cuts(2, 32, 32) == [((0, 2), (0, 1)), ((2, 16), (0, 1))]
    assert cuts(2, 2, 2) == [((0, 1), (0, 1))]
    assert cuts(4, 64, 8, dropout=True) == cuts(4, 64, 8, vectors=64) == [((0, 1), (0, 8)), ((1, 2), (0, 8))]


def test_ring_pays_for_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    call = 4, 64, 8, True, {}, {"causal": True}
    eight = costs(*call)["ring"]
    monkeypatch.setattr(ring, "LEAST_BACKWARD", 2**40)
    one = costs(*call)["ring"]
    spared = ROWS * 8 * 256 * 2 * 7 // 8  # gradients of a group's keys are waited for, not those of all
    assert eight[0] == one[0] and eight[1] - one[1] == pytest.approx(7 * 4 * _AGAIN - spared)
