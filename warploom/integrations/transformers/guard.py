"""Column bounds that refuse arithmetic: what a model that computes its own scores gets for a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What may be asked of bounds without reading them as a dense mask: what they are, and copies of them. By name, because
# torch's properties are only known as "__get__".
# fmt: off
_FACTS = frozenset((
    "size", "dim", "ndimension", "stride", "storage_offset", "numel", "nelement", "element_size", "nbytes", "data_ptr",
    "get_device", "is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_pinned", "is_set_to",
    "is_shared", "is_signed", "is_same_size", "has_names", "is_conj", "is_neg", "is_tensor", "is_storage", "_is_view",
    "_is_zerotensor", "_has_symbolic_sizes_strides", "untyped_storage", "storage", "_typed_storage", "__len__",
    "__hash__", "__repr__", "__str__", "__format__", "__reduce_ex__", "__reduce__", "__set__", "__dir__",
    "requires_grad_", "retain_grad", "register_hook", "share_memory_", "record_stream",
))
_COPIES = frozenset((
    "clone", "detach", "detach_", "contiguous", "to", "cpu", "cuda", "xpu", "pin_memory", "alias", "positive", "expand",
    "expand_as", "as_subclass", "type",
))
# These pick, repeat or join whole rows of the batch, their dimension 0 and nothing else.
_BATCH = frozenset((
    "index_select", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "repeat_interleave", "cat", "concat",
    "concatenate",
))
# fmt: on
_ATTRIBUTES = ("model", "seqlen_q", "open_ended")


class Bounds(Tensor):
    """int32 column bounds `(batch, 1, keys, 4)` of a call with `seqlen_q` queries, made for a model.

    Only the attention function reads them. Copies, `.to(device)`, pickles, rows of the batch and slices written for a dense
    mask (`mask[:, :, :, :keys]`) are bounds again; anything else is a ValueError that names the model, since a model that
    adds its mask to scores of its own would add row numbers to them.
    """

    model: str
    seqlen_q: int | None
    open_ended: bool

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            return _getitem(args[0], args[1])
        if name == "as_subclass" and args[1] is Tensor:
            return plain(args[0])
        if name == "__deepcopy__":
            return _like(args[0], plain(args[0]).clone())
        if name == "__get__":
            if getattr(func, "__self__", None) in _TRANSPOSED:
                raise ValueError(_refusal(_first(args, kwargs), "transpose"))
        elif name in _BATCH:
            if _dimension(name, args, kwargs) != 0:
                raise ValueError(_refusal(_first(args, kwargs), name))
        elif name not in _FACTS and name not in _COPIES:
            raise ValueError(_refusal(_first(args, kwargs), name))
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if name not in ("expand", "expand_as"):
                    raise
                raise ValueError(_refusal(_first(args, kwargs), name)) from error
        if name in _FACTS or (name == "__get__" and getattr(func, "__self__", None) is not Tensor.data):
            return result
        bounds = _first(args, kwargs)
        if isinstance(result, (tuple, list)):
            return type(result)(_like(bounds, part) if isinstance(part, Tensor) else part for part in result)
        if not isinstance(result, Tensor):
            return result
        if result.dtype != torch.int32:
            raise ValueError(_refusal(bounds, f"a conversion to {result.dtype}"))
        return _like(bounds, result)


_TRANSPOSED = tuple(getattr(Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag") if hasattr(Tensor, name))


def guard(bounds: Tensor, model: str, seqlen_q: int, open_ended: bool = False) -> Bounds:
    """The same int32 bounds, guarded, for the model named."""
    guarded = bounds.as_subclass(Bounds)
    guarded.model, guarded.seqlen_q, guarded.open_ended = model, seqlen_q, open_ended
    return guarded


def plain(bounds: Tensor) -> Tensor:
    """The same memory and version as an ordinary tensor."""
    if not isinstance(bounds, Bounds):
        return bounds
    with torch._C.DisableTorchFunctionSubclass():
        return bounds.detach()


def _like(bounds: Any, tensor: Tensor) -> Any:
    copy = tensor if isinstance(tensor, Bounds) else tensor.as_subclass(Bounds)
    for name in _ATTRIBUTES:
        setattr(copy, name, getattr(bounds, name, None))
    return copy


def _getitem(bounds: Any, index: Any) -> Any:
    """Rows of the batch, or a slice as it is written for a dense mask: the last index is of keys, the third of queries."""
    at: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    everything = slice(None)
    if len(at) > 4 or any(part is None for part in at):
        raise ValueError(_refusal(bounds, "indexing"))
    if Ellipsis in [part for part in at if not isinstance(part, Tensor)]:
        where = [part is Ellipsis for part in at].index(True)
        at = at[:where] + (everything,) * (5 - len(at)) + at[where + 1 :]
    batch, heads, rows, keys = at + (everything,) * (4 - len(at))
    slices = isinstance(heads, slice) and isinstance(rows, slice) and isinstance(keys, slice)
    if not slices or isinstance(batch, int) or not _whole(rows, bounds.seqlen_q):
        raise ValueError(_refusal(bounds, "indexing"))
    return _like(bounds, plain(bounds)[batch, heads, keys])


def _whole(rows: slice, count: int | None) -> bool:
    if rows == slice(None):
        return True
    return rows.start in (None, 0) and rows.step in (None, 1) and count is not None and (rows.stop or 0) >= count


def _dimension(name: str, args: Any, kwargs: dict[str, Any]) -> int | None:
    if "dim" in kwargs:
        return kwargs["dim"]
    at = {"index_select": 1, "narrow": 1}.get(name, 2)
    if name in ("cat", "concat", "concatenate"):
        at = 1
    default = None if name in ("index_select", "narrow", "repeat_interleave") else 0
    return args[at] if len(args) > at else default


def _first(args: Any, kwargs: dict[str, Any]) -> Any:
    """The guarded tensor a function was called on."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Bounds):
            return value
        if isinstance(value, (tuple, list)) and (found := _first(value, {})) is not None:
            return found
    return None


def _refusal(bounds: Any, operation: str) -> str:
    model = getattr(bounds, "model", None) or "this model"
    return (
        f"attention_mask: {model} works on its attention mask by itself ({operation}), and what attn_implementation='warploom' "
        "makes are column bounds, not a dense mask; use attn_implementation='eager' for this model"
    )
