"""Reading the arguments of mask builders: ints, lists, ragged lists per batch entry, tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from warploom.runtime.arguments import (
    INT64,
    INTEGERS,
    describe,
    flag,
    near,
    readable,
    saturated,
    strided,
    whole,
    widened,
    with_values,
)

__all__ = ["describe", "near", "readable", "saturated", "strided", "with_values"]

_UNCOMPUTED = (torch.uint16, torch.uint32, torch.uint64)  # dtypes that torch holds but hardly computes with


def is_int(value: Any) -> bool:
    """An int, a symbolic int while compiling, NumPy's, or a CPU tensor without dimensions; not a bool."""
    return not getattr(value, "ndim", 0) and not isinstance(value, (str, bytes)) and whole(value) is not None


def integer(name: str, value: Any, minimum: int | None = None, optional: bool = False) -> Any:
    """An int argument, checked; None passes where `optional`."""
    if optional and value is None:
        return None
    found = whole(value)
    if found is None:
        raise TypeError(f"{name} takes an int{' or None (unlimited)' if optional else ''}, got {describe(value)}")
    if minimum is not None and found < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {found}")
    return found


def boolean(name: str, value: Any) -> bool:
    """A bool argument, NumPy's included."""
    if value is True or value is False:
        return value
    try:
        return bool(flag(name, value))
    except TypeError:
        raise TypeError(f"{name} takes a bool, got {describe(value)}") from None


def _as_tensor(name: str, value: Any, takes: str, pad: int) -> Tensor:
    if isinstance(value, Tensor):
        return with_values(name, strided(name, value))
    if is_int(value):
        return _integers(name, [[whole(value)]])[0]
    if hasattr(value, "__array__"):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError):
            raise TypeError(f"{name} takes {takes}, got {describe(value)}") from None
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} takes {takes}, got {describe(value)}")
    nested = [not is_int(row) and (isinstance(row, (Sequence, Tensor)) or hasattr(row, "__array__")) for row in value]
    if not any(nested):
        rows: list[list[Any]] = [list(value)]
    elif all(nested):
        rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in value]
        if not all(isinstance(row, list) for row in rows):
            raise TypeError(f"{name} takes {takes}; it holds {describe(value[0])}")
    else:
        raise TypeError(f"{name} mixes ints and lists; it takes {takes}, got {describe(value)}")
    flags = [isinstance(item, bool) for row in rows for item in row]
    if flags and all(flags):
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"{name}: rows of booleans must have one length, got {sorted({len(row) for row in rows})}")
        result = torch.tensor(rows, dtype=torch.bool)
        return result if any(nested) else result[0]
    for item in (item for row in rows for item in row):
        if not is_int(item):
            raise TypeError(f"{name} takes {takes}; it holds {describe(item)}")
    width = max([0, *[len(row) for row in rows]])
    result = _integers(name, [[int(whole(item)) for item in row] + [pad] * (width - len(row)) for row in rows])
    result = result.reshape(len(rows), width)
    return result if any(nested) else result[0]


def _integers(name: str, rows: list[list[int]]) -> Tensor:
    """Rows of one length as int32, or as int64 where they take it."""
    values = [0, *[item for row in rows for item in row]]
    low, high = min(values), max(values)  # of a list: torch.compile reads no default=
    if low < INT64[0] or high > INT64[1]:
        raise ValueError(f"{name} must hold values that fit int64, got {low if low < INT64[0] else high}")
    return torch.tensor(rows, dtype=torch.int32 if low >= -(2**31) and high < 2**31 else torch.int64)


def per_batch_rows(name: str, value: Any, takes: str, *, pad: int = 0, allow_bool: bool = False) -> Tensor:
    """`value` as an integer tensor (batch|1, n); ragged rows are filled with `pad`.

    A bool tensor passes if `allow_bool`.
    """
    tensor = _as_tensor(name, value, takes, pad)
    if tensor.dtype not in INTEGERS and not (allow_bool and tensor.dtype == torch.bool):
        raise TypeError(f"{name} takes {takes}; got {describe(tensor)}")
    if tensor.ndim > 2:
        raise ValueError(f"{name} takes {takes}; got {describe(tensor)}")
    tensor = widened(tensor) if tensor.dtype in _UNCOMPUTED else tensor
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(1, 1) if tensor.ndim == 0 else tensor.unsqueeze(0)


def per_batch_value(name: str, value: Any) -> Any:
    """An int for the whole batch, or an integer tensor (batch, 1)."""
    takes = "an int, or one int per batch entry (list or 1-D tensor)"
    if is_int(value):
        return integer(name, value, minimum=0)
    tensor = _as_tensor(name, value, takes, 0)
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{name} takes {takes}; got {describe(tensor)}, which is not integer")
    tensor = widened(tensor) if tensor.dtype in _UNCOMPUTED else tensor
    if tensor.ndim == 0:
        tensor = tensor.unsqueeze(0)
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor.squeeze(1)
    if tensor.ndim != 1:
        raise ValueError(f"{name} takes {takes}; got {describe(tensor)}")
    check_values(name, tensor, minimum=0)
    return tensor.unsqueeze(1)


def check_values(name: str, tensor: Any, minimum: int | None = None, what: str | None = None) -> None:
    """Every value at least `minimum`, if contents may be read."""
    if minimum is None or not readable(tensor) or tensor.numel() == 0:
        return
    low = int(tensor.min())
    if low < minimum:
        where = (tensor == low).nonzero()[0].tolist()
        raise ValueError(f"{name} must hold {what or f'values of at least {minimum}'}, got {low} at {where}")


def summary(value: Any) -> str:
    """An argument as repr() of a mask shows it: short lists in full, everything else by shape."""
    if not isinstance(value, Tensor):
        return repr(value)
    if type(value) is Tensor and value.device.type == "cpu" and value.numel() <= 16:
        rows = value
        while rows.ndim > 1 and rows.shape[0] == 1:
            rows = rows[0]
        while rows.ndim > 1 and rows.shape[-1] == 1:
            rows = rows[..., 0]
        return repr(rows.tolist())
    place = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"<{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape))}{place}>"
