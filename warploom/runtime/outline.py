"""Tensors of which there are but shape, dtype and device: for plans of calls that nobody makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Outline(Tensor):
    """Contiguous, without memory, on a device that need not be here. It is asked about and never computed with."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool = False) -> Outline:
        made: Outline = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says no classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:
            like, shape = args
            return cls(shape, (kwargs or {}).get("dtype") or like.dtype, like.device)
        raise NotImplementedError(f"{func} was asked of a tensor without values")
