"""Reading the arguments of mask builders: ints, lists, ragged lists per batch entry, tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def is_int(value: Any) -> bool:
    """An int, a symbolic int while compiling, or NumPy's; not a bool."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, torch.SymInt)) or (
        hasattr(value, "__index__") and not isinstance(value, Tensor) and not hasattr(value, "__len__")
    )


def integer(name: str, value: Any, minimum: int | None = None, optional: bool = False) -> Any:
    """An int argument, checked; None passes where `optional`."""
    if optional and value is None:
        return None
    if not is_int(value):
        raise TypeError(f"{name} takes an int{' or None (unlimited)' if optional else ''}, got {describe(value)}")
    value = value if isinstance(value, torch.SymInt) else int(value)
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value


def describe(value: Any) -> str:
    """An argument in a few words, for error messages."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _as_tensor(name: str, value: Any, takes: str, pad: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if is_int(value):
        return torch.tensor([int(value)], dtype=torch.int32)
    if hasattr(value, "__array__"):
        return torch.as_tensor(value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} takes {takes}, got {describe(value)}")
    nested = [isinstance(row, (Sequence, Tensor)) or hasattr(row, "__array__") for row in value]
    if not any(nested):
        rows: list[list[Any]] = [list(value)]
    elif all(nested):
        rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in value]  # type: ignore[union-attr]
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
    width = max((len(row) for row in rows), default=0)
    padded = [[int(item) for item in row] + [pad] * (width - len(row)) for row in rows]
    result = torch.tensor(padded, dtype=torch.int32).reshape(len(rows), width)
    return result if any(nested) else result[0]


def per_batch_rows(name: str, value: Any, takes: str, *, pad: int = 0, allow_bool: bool = False) -> Tensor:
    """`value` as an integer tensor (batch|1, n); ragged rows are filled with `pad`. A bool tensor passes if
    `allow_bool`.
    """
    tensor = _as_tensor(name, value, takes, pad)
    if tensor.dtype not in _INTEGERS and not (allow_bool and tensor.dtype == torch.bool):
        raise TypeError(f"{name} takes {takes}; got {describe(tensor)}")
    if tensor.ndim > 2:
        raise ValueError(f"{name} takes {takes}; got {describe(tensor)}")
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(1, 1) if tensor.ndim == 0 else tensor.unsqueeze(0)


def per_batch_value(name: str, value: Any) -> Any:
    """An int for the whole batch, or an integer tensor (batch, 1)."""
    takes = "an int, or one int per batch entry (list or 1-D tensor)"
    if is_int(value):
        return integer(name, value, minimum=0)
    tensor = _as_tensor(name, value, takes, 0)
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} takes {takes}; got {describe(tensor)}, which is not integer")
    if tensor.ndim == 0:
        tensor = tensor.unsqueeze(0)
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        return tensor
    if tensor.ndim != 1:
        raise ValueError(f"{name} takes {takes}; got {describe(tensor)}")
    check_values(name, tensor, minimum=0)
    return tensor.unsqueeze(1)


def readable(tensor: Any) -> bool:
    """Whether contents may be looked at: on a CPU, or under WARPLOOM_CHECK=1; not while compiling."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return False
    return tensor.device.type == "cpu" or (os.environ.get("WARPLOOM_CHECK") == "1" and tensor.device.type != "meta")


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
