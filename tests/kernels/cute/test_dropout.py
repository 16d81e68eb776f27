"""The bits that threads of a Hopper accumulator compute and exchange, in the kernel's own text, against dropout's definition.

A number of a kernel is an array here, of the 32 lanes of a warp.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.plain import plain
from warploom.attention.philox import keep_mask, threshold

FILE = "kernels/cute/dropout.py"
LANES = np.arange(32, dtype=np.uint32)


def lanes(number: int) -> Any:
    return np.full(32, number % 2**32, np.uint32)


def wide_product(x: Any, factor: int) -> list[Any]:
    found = np.asarray(x).astype(np.uint64) * np.uint64(factor)
    return [(found >> np.uint64(32)).astype(np.uint32), found.astype(np.uint32)]


def with_bit(bits: Any, position: int, x: Any, least: Any) -> Any:
    return bits | np.where(x >= least, np.uint32(1 << position), np.uint32(0))


def bytes_of(a: Any, b: Any, selector: Any) -> Any:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(a)
    for i in range(4):
        which = (selector >> np.uint32(4 * i) & np.uint32(7)).astype(np.uint64)
        found |= (both >> which * np.uint64(8) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
    return found


def functions() -> dict[str, Any]:
    """The file's functions, which call each other."""
    arch = SimpleNamespace(lane_idx=lambda: LANES.copy(), shuffle_sync_bfly=lambda x, mask: x[LANES ^ mask])
    names: dict[str, Any] = {
        "cute": SimpleNamespace(arch=arch),
        "Int32": lanes,
        "choose": lambda condition, a, b: np.where(condition, a, b).astype(np.uint32),
        "word": lambda number: lanes(number),
        "xor3": lambda a, b, c: a ^ b ^ c,
        "wide_product": wide_product,
        "with_bit": with_bit,
        "bytes_of": bytes_of,
        "MULTIPLIERS": (0xD2511F53, 0xCD9E8D57),
        "WEYL": (0x9E3779B9, 0xBB67AE85),
        "ROUNDS": 10,
    }
    for name in ("round_key", "head_part", "query_part", "keys_part", "four_words", "bits_of_rows", "bits_of_columns"):
        names[name] = plain(FILE, name, **names)
    return names


def dropout(seed: int, dropout_p: float, first: int) -> SimpleNamespace:
    words = lanes(seed), lanes(seed >> 32)
    return SimpleNamespace(seed=words, least=lanes(threshold(dropout_p)), scale=1.0, first=lanes(first))


def drawn(count: int) -> list[int]:
    return [int(x) for x in torch.randint(0, 1 << 20, (count,))]


def defined(seed: int, dropout_p: float, batch: int, head: int, rows: Any, cols: Any) -> Any:
    one = torch.tensor([seed])
    found = keep_mask(one, dropout_p, torch.tensor([batch]), torch.tensor([head]), torch.tensor(rows), torch.tensor(cols))
    return found[0, 0].numpy()


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.97])
@pytest.mark.parametrize("columns", [32, 40, 48, 56, 80, 112, 128])
def test_rows_that_are_queries(columns: int, dropout_p: float) -> None:
    """Lane l of a quad holds keys 8 g + 2 l and the next of rows r and r + 8."""
    torch.manual_seed(fresh := torch.seed() % 2**31)
    seed, (head, batch, query, four, first) = int(torch.randint(-(2**63), 2**63 - 1, (1,))), drawn(5)
    call = dropout(seed, dropout_p, first)
    found = functions()["bits_of_rows"](call, lanes(head), lanes(batch), lanes(query) + LANES // 4, lanes(four), columns)
    want = defined(seed, dropout_p, batch, head, np.arange(query, query + 16), 4 * (four + first) + np.arange(columns))
    for lane in range(32):
        for i in range(2):
            keys = [c // 2 * 8 + lane % 4 * 2 + c % 2 for c in range(columns // 4)]
            bits = [bool(int(found[i][lane]) >> c & 1) for c in range(columns // 4)]
            assert bits == want[lane // 4 + 8 * i, keys].tolist(), (fresh, lane, i)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.97])
def test_rows_that_are_keys(dropout_p: float) -> None:
    """Lane l of a quad holds queries 8 g + 2 l and the next of keys r and r + 8."""
    columns = 64
    torch.manual_seed(fresh := torch.seed() % 2**31)
    seed, (head, batch, query, four, first) = int(torch.randint(-(2**63), 2**63 - 1, (1,))), drawn(5)
    call = dropout(seed, dropout_p, first)
    at = lanes(head), lanes(batch), 4 * lanes(four) + LANES // 4, lanes(query)
    found = functions()["bits_of_columns"](call, lambda: call.seed, *at)
    want = defined(seed, dropout_p, batch, head, np.arange(query, query + columns), 4 * (four + first) + np.arange(16))
    for lane in range(32):
        for i in range(2):
            for c in range(columns // 4):
                kept = bool(int(found[lane]) >> (16 * i + c) & 1)
                assert kept == want[c // 2 * 8 + lane % 4 * 2 + c % 2, lane // 4 + 8 * i], (fresh, lane, i, c)
