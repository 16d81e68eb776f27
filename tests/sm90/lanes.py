"""Integer instructions of a warp: a value is an int, of all lanes, a list of 32 of them, or unknown.

Registers hold unsigned ints; what an instruction's type says about signs, it says here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

LANES = 32


class Unknown:
    """What was computed from tensors."""

    def __repr__(self) -> str:
        return "?"

    def __bool__(self) -> bool:
        raise TypeError("nothing is decided by what is unknown")


UNKNOWN = Unknown()
Value = Any  # int | list[int | Unknown] | Unknown


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def unsigned(x: int, bits: int) -> int:
    return x & (1 << bits) - 1


def _divide(a: int, b: int) -> int:
    """Towards zero; by zero, which PTX leaves open: all bits."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _exclusive_or(a: int, b: int, c: int, table: int) -> int:
    """The only function of three words that kernels have."""
    assert table == 0x96, table
    return a ^ b ^ c


# Of unsigned words, and the same of signed ones: cut to their bits afterwards.
MODULAR: dict[str, Callable[[int], Callable[..., int]]] = {
    "add": lambda mask: lambda a, b: a + b & mask,
    "sub": lambda mask: lambda a, b: a - b & mask,
    "and": lambda mask: lambda a, b: a & b & mask,
    "or": lambda mask: lambda a, b: (a | b) & mask,
    "xor": lambda mask: lambda a, b: (a ^ b) & mask,
    "not": lambda mask: lambda a: ~a & mask,
    "neg": lambda mask: lambda a: -a & mask,
}
ARITHMETIC: dict[str, Callable[..., int]] = {
    "min": min,
    "max": max,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "abs": abs,
    "popc": lambda a: a.bit_count(),
    "bfind": lambda a: a.bit_length() - 1,
}
# By its bits and, of signed words, the highest of them, which turned over sorts them as unsigned ones.
COMPARE: dict[str, Callable[[int, int], Callable[[int, int], bool]]] = {
    "eq": lambda mask, top: lambda a, b: not (a - b & mask),  # which fails with what is unknown, as the others do
    "ne": lambda mask, top: lambda a, b: bool(a - b & mask),
    "lt": lambda mask, top: lambda a, b: (a & mask) ^ top < (b & mask) ^ top,
    "le": lambda mask, top: lambda a, b: (a & mask) ^ top <= (b & mask) ^ top,
    "gt": lambda mask, top: lambda a, b: (a & mask) ^ top > (b & mask) ^ top,
    "ge": lambda mask, top: lambda a, b: (a & mask) ^ top >= (b & mask) ^ top,
}


@cache
def function(parts: tuple[str, ...]) -> Callable[..., Value] | None:
    """What an instruction computes of one lane's values; None: it is not one of these."""
    head, kind = parts[0], parts[-1]
    if head == "setp":
        bits = int(kind[1:])
        return COMPARE[parts[1]]((1 << bits) - 1, 1 << bits - 1 if kind[0] == "s" else 0)
    if head == "selp":
        return lambda a, b, p: a if p else b
    if kind == "pred":
        return {
            "and": lambda a, b: a and b,
            "or": lambda a, b: a or b,
            "xor": lambda a, b: a != b,
            "not": lambda a: not a,
            "mov": lambda a: bool(a),
        }.get(head)
    if head in ("mov", "cvta", "mapa") or not kind[1:].isdigit():
        return None
    bits = int(kind[1:])
    if head == "cvt":
        target = int(parts[-2][1:])
        take = signed if kind[0] == "s" else unsigned
        return lambda a: take(a, bits) & ((1 << target) - 1)
    take = signed if kind[0] == "s" else unsigned
    mask = (1 << bits) - 1
    if head == "mul":
        if parts[1] == "wide":
            return lambda a, b: take(a, bits) * take(b, bits) & ((1 << 2 * bits) - 1)
        shift = bits if parts[1] == "hi" else 0
        return lambda a, b: take(a, bits) * take(b, bits) >> shift & mask
    if head == "mad":
        if parts[1] == "wide":
            return lambda a, b, c: take(a, bits) * take(b, bits) + c & ((1 << 2 * bits) - 1)
        assert parts[1] == "lo", parts
        return lambda a, b, c: a * b + c & mask
    if head == "lop3":
        return _exclusive_or
    if head == "prmt":
        return lambda a, b, c: sum((b << 32 | a) >> 8 * (c >> 4 * i & 7) << 8 * i & 0xFF << 8 * i for i in range(4))
    if head == "shf":
        assert parts[1:3] == ("l", "wrap"), parts
        return lambda a, b, c: (b << bits | a) << (c & 31) >> bits & mask
    if head == "shl":
        return lambda a, b: a << min(b, bits) & mask
    if head == "shr":
        return lambda a, b: take(a, bits) >> min(b, bits) & mask
    if head in MODULAR and "relu" not in parts:
        return MODULAR[head](mask)
    if head in ARITHMETIC or head in MODULAR:
        compute = ARITHMETIC.get(head) or MODULAR[head](-1)
        if "relu" in parts:
            return lambda *xs: max(compute(*(take(x, bits) for x in xs)), 0) & mask
        return lambda *xs: compute(*(take(x, bits) for x in xs)) & mask
    return None


def apply(compute: Callable[..., Value], values: list[Value]) -> Value:
    """Lane by lane where lanes differ."""
    for v in values:
        if type(v) is list:
            break
    else:
        return compute(*values) if UNKNOWN not in values else _partly(compute, values)
    columns = [v if type(v) is list else [v] * LANES for v in values]
    if any(UNKNOWN in column for column in columns):
        found = [compute(*xs) if UNKNOWN not in xs else _partly(compute, xs) for xs in zip(*columns, strict=True)]
    else:
        found = list(map(compute, *columns))
    return found[0] if found.count(found[0]) == LANES else found


def _partly(compute: Callable[..., Value], values: Any) -> Value:
    """Of unknown values what is the same whatever they are: a choice whose condition is known, half of a predicate."""
    try:
        return compute(*values)
    except TypeError:
        return UNKNOWN


def lane(value: Value, i: int) -> Any:
    return value[i] if type(value) is list else value
