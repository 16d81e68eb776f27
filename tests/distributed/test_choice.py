"""What auto counts: bytes that a forward pass waits for, and a backward pass where gradients are wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom import distributed, masks
from warploom.bench.masks import document_lengths
from warploom.distributed import gather
from warploom.distributed.choice import Choice
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


def costs(*call: Any) -> dict[str, tuple[int, int]]:
    choice = explained(*call)
    back = dict(choice.backward_costs)
    return {method: (forward, back.get(method, 0)) for method, forward in choice.costs}


def test_the_backward_pass_counts_where_gradients_are_wanted() -> None:
    call = (4, 16, 4), ({}, {"causal": True})
    alone, both = (costs(*call[0], gradients, *call[1]) for gradients in (False, True))
    assert {method: forward for method, (forward, _) in alone.items()} == {name: forward for name, (forward, _) in both.items()}
    assert all(backward == 0 for _, backward in alone.values()) and all(backward > 0 for _, backward in both.values())
    # Three ranks' keys and values are sent again, for the rank that sees all of them, and as many gradients come back.
    assert both["gather"][1] == 2 * 3 * ROWS * 4 * 256 * 2


def test_keys_that_are_kept_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call = 4, 16, 4, True, {}, {"causal": True}
    sent = costs(*call)["gather"][1]
    monkeypatch.setattr(gather, "KEPT", 1)
    assert costs(*call)["gather"][1] == sent // 2


def test_two_groups_wait_for_half_of_the_heads_and_copy_dq(monkeypatch: pytest.MonkeyPatch) -> None:
    call = 4, 16, 4, True, {}, {"causal": True}
    one = costs(*call)["gather"][1]
    monkeypatch.setattr(gather, "ONE_BACKWARD", 0)
    assert costs(*call)["gather"][1] == one // 2 + 2 * ROWS * 16 * 128 * 2 // 8


def test_what_packed_documents_hide_costs_nothing() -> None:
    mask = {"mask": masks.Document(document_lengths(4 * ROWS))}
    assert costs(4, 64, 8, False, {}, mask)["gather"] == (0, 0)
    assert costs(4, 64, 8, True, {}, mask)["gather"][1] > 0
    ordered = costs(4, 64, 8, False, {"deterministic": True}, mask)["gather"]  # all keys, by an all-gather
    assert ordered[0] > 0


def test_gradients_decide_between_methods() -> None:
    """Twelve ranks' keys of as many heads as queries have: gather waits for a quarter of them, then for two more."""
    found = [explained(12, 48, 48, gradients, {}, {"causal": True}) for gradients in (False, True)]
    assert [choice.method for choice in found] == ["gather", "heads"]
    assert [" backward " in str(choice) for choice in found] == [False, True]
    assert "MiB that nothing hides" in str(found[0]) and "MiB backward that nothing hides" in str(found[1])
