"""Reading transformers' mask closures as ranges, instead of calling them on every pair of positions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from .. import intervals
from ..intervals import Visible

HOME = "transformers.masking_utils"


def recognise(function: Callable, columns: Tensor) -> Visible | None:
    """The ranges of queries that a mask function shows each key to, or None where the function is not known.

    Args:
        function: `f(batch, head, query position, key position) -> visible`.
        columns: int64 `(1, keys)`, the keys' positions.
    """
    maker, free = _maker(function), _free_variables(function)
    if maker in PLAIN:
        return PLAIN[maker](columns) if _plain_holds(function) else None
    if _is_combination(function):
        functions = free["mask_functions"]
        packed = _packed_row(functions, columns) if maker == "and_masks" else None
        return packed or _combine(maker, [recognise(part, columns) for part in functions])
    if maker not in MAKERS or set(free) != set(TRIALS[maker]) or not _maker_holds(function.__module__, maker):
        return None
    return MAKERS[maker](columns, **free)


def _combine(maker: str, parts: Sequence[Visible | None]) -> Visible | None:
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return reduce(lambda a, b: a & b if maker == "and_masks" else a | b, known)


def _packed_row(functions: Sequence[Callable], columns: Tensor) -> Visible | None:
    """Documents packed in one row, each with positions of its own: what transformers makes of position_ids.

    A mask of positions is one of indices inside each document alone, so documents and what is seen in them are read together.
    """
    packed = [function for function in functions if _maker(function) == "packed_sequence_mask_function"]
    others = [function for function in functions if function not in packed]
    if len(packed) != 1 or not any(map(_has_positions, others)) or not _maker_holds(HOME, "packed_sequence_mask_function"):
        return None
    documents = _documents(columns, _free_variables(packed[0])["packed_sequence_mask"], made_by_transformers=True)
    seen = _combine("and_masks", [_within_documents(function, columns) for function in others])
    return None if documents is None or seen is None else documents & seen


def _has_positions(function: Callable) -> bool:
    if _is_combination(function):
        return any(map(_has_positions, _free_variables(function)["mask_functions"]))
    return _maker(function) == "remap_positions_for_packed_sequence"


def _within_documents(function: Callable, columns: Tensor) -> Visible | None:
    """`recognise`, right for a key and a query of one document.

    There positions rise by one, so a range of positions is the same range of indices, shifted.
    """
    free = _free_variables(function)
    if _is_combination(function):
        return _combine(_maker(function), [_within_documents(part, columns) for part in free["mask_functions"]])
    if not _has_positions(function):
        return recognise(function, columns)
    if set(free) != {"mask_function", "position_ids"}:
        return None
    positions = free["position_ids"].to(columns)[:, columns[0]]  # which int32 ids may be too narrow for
    seen = _positional(free["mask_function"], positions)
    return None if seen is None else seen.shift(columns - positions)


def _positional(function: Callable, positions: Tensor) -> Visible | None:
    """`recognise`, for functions that use positions as numbers and never as indices into a tensor."""
    maker = _maker(function)
    if _is_combination(function):
        functions = _free_variables(function)["mask_functions"]
        return _combine(maker, [_positional(part, positions) for part in functions])
    return None if maker in INDEXING else recognise(function, positions)


def _is_combination(function: Callable) -> bool:
    known = _maker(function) in ("and_masks", "or_masks") and function.__module__ == HOME
    return known and "mask_functions" in _free_variables(function)


def _maker(function: Callable) -> str:
    """The name of the function that made a closure, or of the plain function itself."""
    return getattr(function, "__qualname__", "").partition(".<locals>.")[0]


def _free_variables(function: Callable) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _window(columns: Tensor, left: int, right: int | None) -> Visible | None:
    # A window that hides a key from its own query is outside the range algebra.
    return intervals.window(columns, left, right) if left >= 0 else None


def _image_blocks(columns: Tensor, ids: Tensor) -> Visible | None:
    """Keys of one id >= 0 see each other. Models number them by cumsum: unreadable ids are taken for runs."""
    if ids.dim() != 2 or (_readable(ids) and not intervals.contiguous(ids)):
        return None
    return _at(intervals.runs(ids).hide(ids < 0), columns)


def _documents(columns: Tensor, ids: Tensor, made_by_transformers: bool = False) -> Visible | None:
    """Keys of one id see each other. Ids that a caller brings may repeat elsewhere, so they must be read."""
    if ids.dim() != 2 or not (intervals.contiguous(ids - ids.min()) if _readable(ids) else made_by_transformers):
        return None
    return _at(intervals.runs(ids), columns)


def _readable(ids: Tensor) -> bool:
    return ids.device.type == "cpu" or os.environ.get("WARPLOOM_CHECK") == "1"


def _at(seen: Visible, columns: Tensor) -> Visible:
    index = columns[0].to(seen.start.device)
    return Visible(seen.start[:, index].to(columns.device), seen.end[:, index].to(columns.device))


PLAIN: dict[str, Callable[[Tensor], Visible]] = {
    "causal_mask_function": intervals.causal,
    "bidirectional_mask_function": intervals.everything,
}
# By the function that makes the closure; the keywords are the closure's own variables.
MAKERS: dict[str, Callable[..., Visible | None]] = {
    "sliding_window_overlay": lambda columns, sliding_window: _window(columns, sliding_window - 1, None),
    "sliding_window_bidirectional_overlay": lambda columns, sliding_window: _window(columns, sliding_window, sliding_window),
    "_bidirectional_window_overlay": lambda columns, sliding_window: _window(columns, sliding_window - 1, sliding_window - 1),
    "chunked_overlay": lambda columns, chunk_size, left_padding: intervals.chunked(columns, chunk_size, left_padding),
    "blockwise_overlay": lambda columns, block_sequence_ids: _image_blocks(columns, block_sequence_ids),
    "packed_sequence_mask_function": lambda columns, packed_sequence_mask: _documents(columns, packed_sequence_mask),
}
INDEXING = ("blockwise_overlay", "packed_sequence_mask_function")

# Arguments to try each maker out with, once, so that a closure that a release of transformers has changed is
# evaluated instead of misread.
TRIALS: dict[str, dict[str, Any]] = {
    "sliding_window_overlay": {"sliding_window": 3},
    "sliding_window_bidirectional_overlay": {"sliding_window": 2},
    "_bidirectional_window_overlay": {"sliding_window": 3},
    "chunked_overlay": {"chunk_size": 3, "left_padding": torch.tensor([0, 2])},
    "blockwise_overlay": {"block_sequence_ids": torch.tensor([[-1, 0, 0, -1, 1, 1], [0, 0, -1, -1, 1, 2]])},
    "packed_sequence_mask_function": {"packed_sequence_mask": torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]])},
}
TRIAL_LENGTH = 6


@cache
def _plain_holds(function: Callable) -> bool:
    return function.__module__ == HOME and _agrees(function, PLAIN[_maker(function)])


@cache
def _maker_holds(module: str, maker: str) -> bool:
    make = getattr(sys.modules.get(module), maker, None)
    if make is None or not module.startswith("transformers."):
        return False
    trial = TRIALS[maker]
    try:
        closure = make(**trial)
    except TypeError:
        return False
    return set(_free_variables(closure)) == set(trial) and _agrees(closure, lambda c: MAKERS[maker](c, **trial))


def _agrees(function: Callable, ranges: Callable[[Tensor], Visible | None]) -> bool:
    """Whether ranges say what the function says, on all pairs of TRIAL_LENGTH positions in two batch rows."""
    index = torch.arange(TRIAL_LENGTH)
    batch = torch.arange(2)[:, None, None]
    dense = function(batch, torch.zeros_like(batch), index[None, :, None], index[None, None, :])
    seen = ranges(index[None])
    if seen is None:
        return False
    query = index[None, :, None]
    expected = (seen.start[:, None] <= query) & (query < seen.end[:, None])
    return bool((dense == expected).all())
