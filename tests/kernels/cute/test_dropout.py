"""What threads of a Hopper accumulator draw and get, in the kernel's own text, against dropout's definition.

A number of a kernel is an array here, of the 32 lanes of a warp; an address is the name of 16 bytes that each lane has.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.plain import plain
from warploom.attention.philox import numbers

FILE = "kernels/cute/dropout.py"
LANES = np.arange(32, dtype=np.uint32)


def lanes(number: int) -> Any:
    return np.full(32, number % 2**32, np.uint32)


def wide_product(x: Any, factor: int) -> list[Any]:
    found = np.asarray(x).astype(np.uint64) * np.uint64(factor)
    return [(found >> np.uint64(32)).astype(np.uint32), found.astype(np.uint32)]


def bytes_of(a: Any, b: Any, selector: Any) -> Any:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(a)
    for i in range(4):
        which = (selector >> np.uint32(4 * i) & np.uint32(7)).astype(np.uint64)
        found |= (both >> which * np.uint64(8) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
    return found


def load_matrices(shared: dict[Any, Any], source: Any, count: int, turned: bool) -> list[Any]:
    """ldmatrix of tiles whose rows are what eight lanes have stored."""
    halves = np.stack(shared[source], -1).astype("<u4").view("<u2").astype(np.uint32)  # (lane, 8)
    found = []
    for tile in halves.reshape(4, 8, 8)[:count]:
        rows = tile.T if turned else tile
        found.append(rows[LANES // 4, LANES % 4 * 2] | rows[LANES // 4, LANES % 4 * 2 + 1] << np.uint32(16))
    return found


def functions() -> SimpleNamespace:
    """The file's functions, which call each other."""
    shared: dict[Any, Any] = {}
    names: dict[str, Any] = {
        "cute": SimpleNamespace(arch=SimpleNamespace(lane_idx=lambda: LANES.copy())),
        "Int32": lanes,
        "word": lambda number: lanes(number),
        "xor3": lambda a, b, c: a ^ b ^ c,
        "wide_product": wide_product,
        "bytes_of": bytes_of,
        "store_words": lambda target, words: shared.__setitem__(target, words),
        "load_matrices": lambda *given: load_matrices(shared, *given),
        "MULTIPLIERS": (0xD2511F53, 0xCD9E8D57),
        "WEYL": (0x9E3779B9, 0xBB67AE85),
        "ROUNDS": 10,
        "EXCHANGED": 0x2301,
    }
    parts = "round_key", "head_part", "query_part", "keys_part", "words_of", "rounds_of", "exchanged"
    for name in (*parts, "draw_for_rows", "draw_for_columns", "drawn_for_rows", "drawn_for_columns"):
        names[name] = plain(FILE, name, **names)
    return SimpleNamespace(**names)


def dropout(seed: int, first: int) -> SimpleNamespace:
    return SimpleNamespace(seed=(lanes(seed), lanes(seed >> 32)), first=lanes(first))


def drawn(count: int) -> list[int]:
    return [int(x) for x in torch.randint(0, 1 << 20, (count,))]


def defined(seed: int, batch: int, head: int, rows: Any, cols: Any) -> Any:
    at = [torch.tensor(x) for x in ([batch], [head], rows, cols)]
    return numbers(torch.tensor([seed]), *at)[0, 0].numpy()


def of_pair(pair: Any, lane: int) -> list[int]:
    return [int(pair[lane]) & 0x7FFF, int(pair[lane]) >> 16 & 0x7FFF]


@pytest.mark.parametrize("columns", [32, 48, 64, 80, 112, 128])
def test_rows_that_are_queries(columns: int) -> None:
    """Lane l of a quad holds keys 8 g + 2 l and the next of rows r and r + 8."""
    torch.manual_seed(fresh := torch.seed() % 2**31)
    seed, (head, batch, query, counter, first) = int(torch.randint(-(2**63), 2**63 - 1, (1,))), drawn(5)
    call, own = dropout(seed, first), functions()
    targets = list(range(own.rounds_of(16, columns)))
    own.draw_for_rows(call, lanes(head), lanes(batch), lanes(query) + LANES % 16, lanes(counter), columns, targets)
    want = defined(seed, batch, head, np.arange(query, query + 16), 16 * (counter + first) + np.arange(columns))
    seen = 0
    for i in targets:
        for n, pair in enumerate(own.drawn_for_rows(i, i, columns)):
            for eight, found in ((0, pair), (8, own.exchanged(pair))):
                for lane in range(32):
                    key = 32 * i + n // 2 * 16 + eight + lane % 4 * 2
                    assert of_pair(found, lane) == want[lane // 4 + n % 2 * 8, key : key + 2].tolist(), (fresh, lane, i, n)
                    seen += 2
    assert seen == 16 * columns


@pytest.mark.parametrize("columns", [64, 80, 128])
def test_rows_that_are_keys(columns: int) -> None:
    """Lane l of a quad holds queries 8 g + 2 l and the next of keys r and r + 8."""
    torch.manual_seed(fresh := torch.seed() % 2**31)
    seed, (head, batch, query, counter, first) = int(torch.randint(-(2**63), 2**63 - 1, (1,))), drawn(5)
    call, own = dropout(seed, first), functions()
    targets = list(range(own.rounds_of(columns, 16)))
    at = lanes(head), lanes(batch), lanes(query), lanes(counter)
    own.draw_for_columns(call, lambda: call.seed, *at, columns, targets)
    want = defined(seed, batch, head, np.arange(query, query + columns), 16 * (counter + first) + np.arange(16))
    seen = 0
    for i in targets:
        for n, pair in enumerate(own.drawn_for_columns(i, i, columns)):
            for eight, found in ((0, pair), (8, own.exchanged(pair))):
                for lane in range(32):
                    row = 32 * i + 8 * n + lane % 4 * 2
                    assert of_pair(found, lane) == want[row : row + 2, lane // 4 + eight].tolist(), (fresh, lane, i, n)
                    seen += 2
    assert seen == 16 * columns
