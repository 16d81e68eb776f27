"""Tiles that ALiBi leaves anything of: the kernels' own text, run on integers, against every query and key."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plain import ceil_div, plain

FILE = "attention/hopper/near.py"
cute = SimpleNamespace(ceil_div=ceil_div)
near_keys, near_queries = (plain(FILE, f"Near.{name}", cute=cute) for name in ("near_keys", "near_queries"))
LENGTHS = st.integers(1, 70)


def counts(query: int, key: int, seqlen_q: int, seqlen_k: int, keys: int, causal: bool) -> bool:
    """Whether a key is seen, and at the most so much farther from the query than the nearest one."""
    position = query + seqlen_k - seqlen_q
    nearest = min(max(position, 0), seqlen_k - 1)
    return abs(position - key) - abs(position - nearest) <= keys and not (causal and key > position)


@settings(max_examples=300)
@given(LENGTHS, LENGTHS, st.integers(0, 80), st.booleans())
def test_no_key_that_counts_is_left_out(seqlen_q: int, seqlen_k: int, keys: int, causal: bool) -> None:
    kernel = SimpleNamespace(tile_n=4, config=SimpleNamespace(right=causal))
    shift, all_tiles = seqlen_k - seqlen_q, ceil_div(seqlen_k, 4)
    for row in range(0, seqlen_q, 6):
        queries = range(row, min(row + 6, seqlen_q))
        first, end = near_keys(kernel, (0, all_tiles), (row + shift, queries[-1] + shift), keys, seqlen_k)
        needed = {key // 4 for q in queries for key in range(seqlen_k) if counts(q, key, seqlen_q, seqlen_k, keys, causal)}
        assert first >= 0 and end <= all_tiles and needed <= set(range(first, end))
        reached = 2 * keys + len(queries) + 6  # of keys on both sides, and what tiles hold besides
        assert causal or end - first <= ceil_div(reached, 4) + 1


@settings(max_examples=300)
@given(LENGTHS, LENGTHS, st.integers(0, 80), st.booleans(), st.booleans())
def test_no_query_that_a_key_counts_for_is_left_out(seqlen_q: int, seqlen_k: int, keys: int, causal: bool, whole: bool) -> None:
    kernel = SimpleNamespace(tile_m=6, config=SimpleNamespace(right=causal))
    shift, all_tiles = seqlen_k - seqlen_q, ceil_div(seqlen_q, 6)
    for key in range(0, seqlen_k, 4):
        given_first = min(max(key - shift, 0) // 6, all_tiles) if causal else 0
        tiles = given_first, *((given_first, all_tiles) if whole else (all_tiles, all_tiles)), all_tiles
        first, whole_first, whole_end, end = near_queries(kernel, tiles, (key, key + 4), keys, (seqlen_k, shift))
        block = range(key, min(key + 4, seqlen_k))
        needed = {q // 6 for q in range(seqlen_q) for k in block if counts(q, k, seqlen_q, seqlen_k, keys, causal)}
        assert given_first <= first <= whole_first <= whole_end <= end <= all_tiles
        assert needed <= set(range(first, end))
        assert not whole or whole_first == first


@pytest.mark.parametrize("keys", [100, 1 << 29])
def test_all_tiles_stay_where_keys_reach_everywhere(keys: int) -> None:
    for causal in (False, True):
        kernel = SimpleNamespace(tile_m=6, tile_n=4, config=SimpleNamespace(right=causal))
        assert near_keys(kernel, (0, 9), (40, 45), keys, 36) == (0, 9)
        assert near_queries(kernel, (1, 3, 6, 7), (8, 12), keys, (36, -4)) == (1, 3, 6, 7)
