"""Shared memory simulated byte by byte and cycle by cycle, from the hardware's rules and without the model's code."""

from __future__ import annotations

import re


def lanes_per_turn(name: str) -> int:
    if "matrix" in name:
        return 8
    return {8: 32, 16: 32, 32: 32, 64: 16, 128: 8}[int(name.split(".")[1])]


def bytes_per_lane(name: str) -> int:
    return 16 if "matrix" in name else int(name.split(".")[1]) // 8


def address_count(name: str) -> int:
    found = re.search(r"\.x(\d)", name)
    return 8 * int(found[1]) if found else 32


def cycles(requests: list[tuple[int, int]]) -> int:
    """Each cycle every bank opens one 4-byte row of it, serving all bytes that are wanted from that row."""
    waiting = {(address + n) for address, width in requests for n in range(width)}
    used = 0
    while waiting:
        opened: dict[int, int] = {}
        for byte in sorted(waiting):
            opened.setdefault(byte // 4 % 32, byte // 128)
        waiting = {byte for byte in waiting if opened[byte // 4 % 32] != byte // 128}
        used += 1
    return used


def simulate(name: str, addresses: list[int | None]) -> tuple[int, int]:
    """(turns with work, cycles) of one instruction."""
    count, turn, width = address_count(name), lanes_per_turn(name), bytes_per_lane(name)
    lanes = addresses[:count]
    if name in ("lds.64", "lds.128"):
        quads = [lanes[n : n + 4] for n in range(0, 32, 4)]

        def same(*values: int | None) -> bool:
            return len({value for value in values if value is not None}) <= 1

        if all(same(a, b) and same(c, d) for a, b, c, d in quads) or all(same(a, c) and same(b, d) for a, b, c, d in quads):
            turn *= 2
    turns = used = 0
    for start in range(0, count, turn):
        requests = [(address, width) for address in lanes[start : start + turn] if address is not None]
        turns += bool(requests)
        used += cycles(requests)
    return turns, used
