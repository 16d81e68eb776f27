"""Reading a user's arguments: what is meant by them, or a TypeError or ValueError that says what was got and what is taken.

Numbers come as Python's, NumPy's or CPU tensors of one element; index tensors in any integer dtype. Nothing here waits for a
device: values that live on one saturate, and are looked at under WARPLOOM_CHECK=1 only.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from numbers import Real
from typing import Any

import torch
from torch import Tensor

INT32 = -(2**31), 2**31 - 1
INT64 = -(2**63), 2**63 - 1
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NARROW = (torch.int8, torch.int16, torch.uint8, torch.uint16)
INTEGERS = (*_NARROW, torch.int32, torch.int64, torch.uint32, torch.uint64)
# Farther than any two positions are apart, and far from the limits of 64 bits.
FAR = 2**40
_PLAIN = (Tensor, torch.nn.Parameter)
# What os.environ wraps: os.environ itself answers by an exception where a variable is not set, which takes 30 times as long.
_variables = vars(os.environ)["_data"]
_CHECK, _ON = os.environ.encodekey("WARPLOOM_CHECK"), os.environ.encodevalue("1")

Window = tuple[int | None, int | None]


def describe(value: Any) -> str:
    """An argument in a few words."""
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor"
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}{place}"
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def checked() -> bool:
    """Whether values on a device are to be looked at: WARPLOOM_CHECK=1."""
    on: bool = _CHECK in _variables and _variables[_CHECK] == _ON  # without a call: kept launchers ask at every one
    return on


def plain(value: Any) -> bool:
    """Whether a tensor is torch's own kind, which nothing traces."""
    return type(value) in _PLAIN and not torch.compiler.is_compiling()


def readable(value: Any) -> bool:
    """Whether a tensor's values may be looked at: on the CPU, or anywhere under WARPLOOM_CHECK=1; not while compiling."""
    if not plain(value):
        return False
    return value.device.type == "cpu" or (value.device.type != "meta" and checked())


def whole(value: Any) -> Any:
    """An int, or a symbolic one, from what means one; None from anything else."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, Tensor):
        return int(value.item()) if _holds_number(value) and value.dtype in INTEGERS else None
    if _is_flag(value):
        return None
    if isinstance(value, (list, tuple)):  # torch.compile of torch 2.11 fails where it asks these for an index
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real(value: Any) -> Any:
    """A float, or a symbolic number, from what means one; None from anything else."""
    if type(value) is float or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, Tensor):
        return float(value.item()) if _holds_number(value) and (value.dtype in FLOATS or value.dtype in INTEGERS) else None
    if _is_flag(value) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def integer(name: str, value: Any, minimum: int | None = None, maximum: int | None = None, optional: bool = False) -> Any:
    """An int argument within its limits; None passes where ``optional``."""
    if value is None and optional:
        return None
    found = whole(value)
    if found is None:
        raise TypeError(f"{name} must be an int{' or None' * optional}, got {describe(value)}{_out_of_reach(value)}")
    if minimum is not None and found < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {found}")
    if maximum is not None and type(found) is int and found > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {found}")
    return found


def number(name: str, value: Any) -> Any:
    """A float argument."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(f"{name} requires grad, and a number has no gradient: multiply a tensor by it, or give {name}.item()")
    found = real(value)
    if found is None:
        raise TypeError(f"{name} must be a number, got {describe(value)}{_out_of_reach(value)}")
    return found


def flag(name: str, value: Any, optional: bool = False) -> Any:
    """A bool argument; None passes where ``optional``."""
    if value is True or value is False or isinstance(value, torch.SymBool) or (value is None and optional):
        return value
    if _is_flag(value):
        return bool(value)
    if isinstance(value, Tensor) and value.dtype == torch.bool and _holds_number(value):
        return bool(value.item())
    takes = "True, False or None" if optional else "True or False"
    raise TypeError(f"{name} must be {takes}, got {describe(value)}{_out_of_reach(value)}")


def text(name: str, value: Any, optional: bool = True) -> Any:
    """A str argument; None passes where ``optional``."""
    if isinstance(value, str) or (value is None and optional):
        return value
    raise TypeError(f"{name} must be a str{' or None' * optional}, got {describe(value)}")


def window(name: str, value: Any) -> Window:
    """left and right of a window argument, each an int or None; None is (None, None)."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair (left, right) of ints or None, got {value!r:.80}")
    left, right = (_side(f"{name}'s {side}", bound) for side, bound in zip(("left", "right"), value, strict=True))
    check_not_unlimited(name, left, right)
    return left, right


def check_not_unlimited(name: str, left: Any, right: Any) -> None:
    """ValueError for exactly (-1, -1), by which other libraries mean no window at all."""
    if type(left) is int and type(right) is int and left == right == -1:
        raise ValueError(
            f"{name} is (-1, -1), which shows no key; flash-attn means no window by it, which is None here: give None, "
            "or None for a side without limit"
        )


def _side(name: str, bound: Any) -> Any:
    found = None if bound is None else whole(bound)
    if found is None and bound is not None:
        raise TypeError(f"{name} must be an int or None, got {describe(bound) if isinstance(bound, Tensor) else repr(bound)}")
    return found


def near(distance: int | None) -> int | None:
    """A side of a band, brought to within 64 bits; beyond any length of a sequence it changes nothing."""
    return max(-FAR, min(distance, FAR)) if type(distance) is int else distance


def keeps_nothing(left: int | None, right: int | None) -> bool:
    """Whether the band is empty: then no key may be read, whatever it holds."""
    return left is not None and right is not None and left < -right


def device(name: str, value: Any) -> torch.device | None:
    """A device argument that memory can be had on; None passes."""
    if value is None:
        return None
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"{name} must be a device such as 'cpu' or 'cuda', got {describe(value)}") from None
    if found.type == "meta":
        raise ValueError(f"{name} must hold values, which the meta device does not")
    return found


def float_dtype(name: str, value: Any) -> torch.dtype:
    """A dtype argument of numbers that attention computes with."""
    if not isinstance(value, torch.dtype) or value not in FLOATS:
        raise TypeError(f"{name} must be torch.float16, bfloat16, float32 or float64, got {describe(value)}")
    return value


def strided(name: str, value: Any) -> Tensor:
    """A tensor of elements that lie in memory by strides: not nested, not sparse, not spread over processes."""
    if not isinstance(value, Tensor):
        fx = sys.modules.get("torch.fx")
        if fx is not None and isinstance(value, fx.Proxy):
            raise TypeError(
                f"{name} is a Proxy of torch.fx.symbolic_trace, which cannot trace this call; use torch.export.export, "
                "or torch.fx.wrap with the function's name where you import it"
            )
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor; pack its sequences and give cu_seqlens, or pad them")
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}; only strided tensors are taken, as {name}.to_dense() gives")
    if type(value) is not Tensor and hasattr(value, "to_local"):
        raise TypeError(
            f"{name} is a DTensor; give what this process holds of it, such as its heads: {name}.to_local(), or "
            "use_local_output=True where a plan of tensor parallelism makes it"
        )
    return value


def with_values(name: str, value: Tensor) -> Tensor:
    """A tensor that is not on the meta device."""
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the meta device and holds no values; give a tensor on the CPU or a GPU")
    return value


def int32(name: str, value: Any, ndim: int, like: Tensor, owner: str = "q") -> Any:
    """An index tensor as int32, from any integer dtype, a vector contiguous, as kernels read it; None passes.

    Values past int32 are an error where they may be read, and saturate elsewhere.

    Args:
        ndim: its rank.
        like: the tensor on whose device it must be, named ``owner``.
    """
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        raise TypeError(f"{name} must be an int32 tensor, got {describe(value)}")
    strided(name, value)
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, got shape {tuple(value.shape)}")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device} but {owner} is on {like.device}")
    if value.dtype == torch.int32:
        return value.contiguous() if ndim == 1 else value
    check_fits(name, value)
    return saturated(value)


def check_fits(name: str, value: Tensor) -> None:
    """ValueError where an integer tensor holds what int32 does not, if it may be read."""
    if value.dtype == torch.int32 or value.dtype in _NARROW or not value.numel() or not readable(value):
        return
    wide = widened(value)
    low, high = (int(t) for t in torch.aminmax(wide))
    if low < INT32[0] or high > INT32[1]:
        raise ValueError(f"{name} must hold values that fit int32, got {low if low < INT32[0] else high}")


def saturated(value: Tensor) -> Tensor:
    """An integer tensor as int32, values past its limits brought to them."""
    if value.dtype == torch.int32:
        return value
    return value.to(torch.int32) if value.dtype in _NARROW else widened(value).clamp(*INT32).to(torch.int32)


def widened(value: Tensor) -> Tensor:
    """As int64; of uint64 what is past it is its largest."""
    wide = value.to(torch.int64)
    return torch.where(wide < 0, INT64[1], wide) if value.dtype == torch.uint64 else wide


def _holds_number(value: Tensor) -> bool:
    """Whether a tensor is one number that can be read without waiting."""
    return type(value) in _PLAIN and value.device.type == "cpu" and value.layout == torch.strided and value.numel() == 1


def _out_of_reach(value: Any) -> str:
    on_device = isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and value.numel() == 1
    return ", which cannot be read without waiting for the device" if on_device else ""


def _is_flag(value: Any) -> bool:
    """Whether it is a bool, NumPy's included: no number."""
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))
