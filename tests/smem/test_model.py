"""The model against a simulation of the banks that shares no code with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.smem.oracle import address_count, bytes_per_lane, simulate
from warploom.smem.access import ACCESSES, access
from warploom.smem.model import predict

NAMES = sorted(ACCESSES)


def agree(name: str, addresses: list[int | None]) -> None:
    prediction = predict(access(name), addresses)
    assert (len(prediction.phases), prediction.wavefronts) == simulate(name, addresses), addresses
    assert prediction.ideal == len(prediction.phases)
    assert prediction.excess == prediction.wavefronts - prediction.ideal


@pytest.mark.parametrize("name", NAMES)
def test_every_stride(name: str) -> None:
    """Lane n at n × stride, alone, in pairs at distance 1 and 2, in rows of 4 and 8: every stride up to two lines of banks."""
    width = bytes_per_lane(name)
    orders = [
        range(32),
        [lane & ~1 for lane in range(32)],
        [lane & ~2 for lane in range(32)],
        [lane // 4 for lane in range(32)],
        [lane % 8 for lane in range(32)],
        [0] * 32,
    ]
    for stride in range(0, 256 + width, width):
        for order in orders:
            agree(name, [place * stride for place in order])


@given(st.sampled_from(NAMES), st.data())
def test_random_addresses(name: str, data: st.DataObject) -> None:
    width = bytes_per_lane(name)
    place = st.integers(0, data.draw(st.sampled_from([3, 31, 2047])))
    one = place if "matrix" in name else st.none() | place
    places = data.draw(st.lists(one, min_size=32, max_size=32))
    agree(name, [None if place is None else place * width for place in places])


@given(st.sampled_from(["lds.64", "lds.128", "sts.64", "sts.128"]), st.data())
def test_lane_pairs_and_almost_pairs(name: str, data: st.DataObject) -> None:
    """Pairs at one address with up to three lanes moved elsewhere or switched off: both sides of the merging rule."""
    distance = data.draw(st.sampled_from([1, 2, 4]))
    width = bytes_per_lane(name)
    base = data.draw(st.lists(st.integers(0, 100), min_size=32, max_size=32))
    lanes: list[int | None] = [base[lane & ~distance] * width for lane in range(32)]
    for _ in range(data.draw(st.integers(0, 3))):
        lane = data.draw(st.integers(0, 31))
        lanes[lane] = data.draw(st.none() | st.integers(0, 100).map(lambda place: place * width))
    agree(name, lanes)


@given(st.sampled_from(NAMES), st.integers(0, 1 << 12), st.data())
def test_moving_all_lanes_by_whole_lines_changes_nothing(name: str, lines: int, data: st.DataObject) -> None:
    width = bytes_per_lane(name)
    places = data.draw(st.lists(st.integers(0, 500), min_size=32, max_size=32))
    here = predict(access(name), [place * width for place in places])
    there = predict(access(name), [place * width + 128 * lines for place in places])
    assert here.to_dict() == there.to_dict()


def test_merging_halves_the_phases_of_wide_loads_only() -> None:
    pairs: dict[int, list[int | None]] = {d: [16 * (lane & ~d) for lane in range(32)] for d in (1, 2, 4)}
    assert [len(predict(access("lds.128"), pairs[d]).phases) for d in (1, 2, 4)] == [2, 2, 4]
    assert [len(predict(access("lds.64"), pairs[d]).phases) for d in (1, 2, 4)] == [1, 1, 2]
    assert [len(predict(access("sts.128"), pairs[d]).phases) for d in (1, 2, 4)] == [4, 4, 4]
    broken = [*pairs[1][:31], 16 * 999]
    assert len(predict(access("lds.128"), broken).phases) == 4


def test_inactive_lanes_cost_nothing() -> None:
    assert predict(access("lds.32"), [None] * 32).wavefronts == 0
    assert predict(access("sts.128"), [0, *[None] * 31]).wavefronts == 1
    half = [16 * lane if lane < 16 else None for lane in range(32)]
    assert len(predict(access("sts.128"), half).phases) == 2


def test_a_word_is_named_by_its_bank() -> None:
    (phase,) = predict(access("lds.32"), [128 * lane for lane in range(32)]).phases
    assert phase.banks == {0: tuple(32 * lane for lane in range(32))}


@pytest.mark.parametrize(
    ("name", "addresses", "message"),
    [
        ("lds.32", [0] * 31, "takes 32 addresses for lds.32, got 31"),
        ("ldmatrix.x1", [0] * 9, "takes 8 or 32 addresses for ldmatrix.x1, got 9"),
        ("lds.64", [4, *[0] * 31], "multiples of 8 from 0 for lds.64, got 4 in lane 0"),
        ("lds.8", [0, -1, *[0] * 30], "got -1 in lane 1"),
        ("ldmatrix.x4", [*[0] * 31, None], "needs every lane, and lane 31 is switched off"),
    ],
)
def test_refuses(name: str, addresses: list[int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(access(name), addresses)


def test_unknown_access() -> None:
    with pytest.raises(ValueError, match=r"access takes one of lds\.8, .* got 'ldmatrix.x3'"):
        access("ldmatrix.x3")


def test_matrix_rows_beyond_the_instruction_are_not_read() -> None:
    for name in ("ldmatrix.x1", "stmatrix.x2"):
        count = address_count(name)
        rows = [16 * n for n in range(count)]
        assert predict(access(name), rows) == predict(access(name), [*rows, *[None] * (32 - count)])
