"""The ways to embed the same sentences: padded batches and packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warploom.integrations.collators import position_ids_bounds


@dataclass(frozen=True)
class Route:
    """One way: an attention implementation, and how sentences become batches.

    Attributes:
        key: short name, for JSON.
        name: for people.
        attention: transformers' `attn_implementation`.
        layout: "padded", "sorted" (padded, like lengths together) or "packed".
    """

    key: str
    name: str
    attention: str
    layout: str


ROUTES = (
    Route("eager_padded", "eager, padded", "eager", "padded"),
    Route("sdpa_padded", "SDPA, padded", "sdpa", "padded"),
    Route("sdpa_sorted", "SDPA, padded, sorted by length", "sdpa", "sorted"),
    Route("warploom_padded", "warploom, padded", "warploom", "padded"),
    Route("warploom_packed", "warploom, packed", "warploom", "packed"),
)


def groups(lengths: Sequence[int], layout: str, batch_size: int, row_tokens: int) -> list[list[int]]:
    """Indices of the sentences of each batch or packed row, in the order they are run.

    Padded batches hold `batch_size` sentences. Sorted batches and packed rows hold as many as fit into
    `row_tokens` positions, padding included, so that those two differ in padding alone.
    """
    order = list(range(len(lengths)))
    if layout == "padded":
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if layout == "sorted":
        return _sorted_groups(sorted(order, key=lambda i: -lengths[i]), lengths, row_tokens)
    rows: list[list[int]] = []
    room = 0
    for i in order:
        if not rows or lengths[i] > room:
            rows.append([])
            room = max(row_tokens, lengths[i])
        rows[-1].append(i)
        room -= lengths[i]
    return rows


def _sorted_groups(order: list[int], lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """From the longest down: the first sentence of a batch is as long as its padding."""
    found = []
    while order:
        count = max(1, row_tokens // lengths[order[0]])
        found.append(order[:count])
        order = order[count:]
    return found


def embed(
    model: Any,
    tokens: Sequence[Sequence[int]],
    route: Route,
    plan: Sequence[Sequence[int]],
    step: Callable[[], None],
) -> tuple[Tensor, int]:
    """Mean-pooled, normalised embeddings of every sentence, and how many positions the model computed.

    Returns:
        fp32 `(sentences, hidden)` in the order of `tokens`, on the model's device, and the number of positions.
    """
    run = _packed_row if route.layout == "packed" else _padded_batch
    result = torch.empty(len(tokens), model.config.hidden_size, device=model.device)
    computed = 0
    model.set_attn_implementation(route.attention)
    with torch.no_grad():
        for indices in plan:
            pooled, positions = run(model, [tokens[i] for i in indices])
            result[torch.tensor(indices, device=result.device)] = pooled
            computed += positions
            step()
    return torch.nn.functional.normalize(result, dim=-1), computed


def _padded_batch(model: Any, sentences: list[Sequence[int]]) -> tuple[Tensor, int]:
    longest = max(map(len, sentences))
    pad = model.config.pad_token_id
    ids = torch.tensor([[*s, *[pad] * (longest - len(s))] for s in sentences], device=model.device)
    lengths = torch.tensor([len(s) for s in sentences], device=model.device)
    real = torch.arange(longest, device=model.device) < lengths[:, None]
    hidden = model(input_ids=ids, attention_mask=real.long()).last_hidden_state.float()
    return (hidden * real[..., None]).sum(1) / lengths[:, None], ids.numel()


def _packed_row(model: Any, sentences: list[Sequence[int]]) -> tuple[Tensor, int]:
    """Sentences one after the other in a single row: each sees only itself, and its positions start from 0."""
    lengths = torch.tensor([len(s) for s in sentences], device=model.device)
    ids = torch.tensor([[token for s in sentences for token in s]], device=model.device)
    sentence = torch.repeat_interleave(torch.arange(len(sentences), device=model.device), lengths)
    first = (lengths.cumsum(0) - lengths)[sentence]
    positions = (torch.arange(ids.shape[1], device=model.device) - first)[None]
    hidden = (
        model(input_ids=ids, position_ids=positions, attention_mask=position_ids_bounds(positions, causal=False))
        .last_hidden_state[0]
        .float()
    )
    sums = torch.zeros(len(sentences), hidden.shape[-1], device=model.device).index_add_(0, sentence, hidden)
    return sums / lengths[:, None], ids.numel()
