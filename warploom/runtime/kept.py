"""Launchers that are kept: they run further calls of a kind, which differ from earlier ones in contents and addresses alone.

A kind is all that a call on a GPU depends on but those. What finds it out takes a few microseconds, checking arguments and
planning launches a hundred. `warploom.runtime.dispatch` holds the launchers, for a limited number of kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from warploom.runtime import dispatch
from warploom.runtime.arguments import checked
from warploom.runtime.op import plain, recorded, watched

if TYPE_CHECKING:
    from warploom.runtime.op import DifferentiableOp

# The key that a call's launcher is or may be kept under (None: none may), the launcher, and whether gradients are recorded.
Found = tuple[Hashable, Callable[..., Any] | None, bool]

NOTHING: Found = (None, None, False)
MOST_BACKWARD = 16  # launchers of backward passes that one of a forward pass keeps, by strides
_OPTIONS = frozenset((float, int, bool, str, type(None)))
# torch.compile's own test of tensors' types, dtypes, devices, shapes, strides and gradients, in C++: a third of a key's time.
_Guards = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
_grad_enabled, _any_autocast = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_MISSES = 8
_ABSENT = frozenset((None,))
# What arguments of other types than they should be raise, and a private test of another torch's given what it does not take.
_UNFIT = (AttributeError, TypeError, RuntimeError, ValueError)


@dataclass(slots=True)
class Recent:
    """A call of those with one place: calls that differ from it in nothing but contents and addresses are of its kind.

    The place has the options, the types of all arguments, the shape of q and whether q asks for a gradient. Of several kinds
    with one place, as by the length of k or by strides, one is remembered and the others go by keys: the first until _MISSES
    calls in a row were unlike it. A function's latest call is found without its place, which takes a microsecond to make.
    """

    is_given: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # of a call's tensors those that are not None here
    is_absent: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # the others
    options: tuple[Any, ...]
    types: tuple[type, ...]  # of the options: 1 is equal to True
    grad: bool  # whether gradients were enabled
    same: Callable[..., bool]  # of those that are given
    found: Found
    misses: int = 0  # calls unlike it since the last one like it


def find(name: str, given: tuple[Any, ...], differentiable: int, options: tuple[Any, ...]) -> Found:
    """What is kept for calls of this kind of the function ``name``.

    Args:
        given: tensors, None for one that is not given; q, k and v first.
        differentiable: so many of them, the first, may have gradients.
        options: all other arguments. No launcher is kept unless each is of the plainest type: 1 is equal to True.

    Returns:
        NOTHING where something would see the op, where contents are to be looked at, or where an argument is of another type
        than it should be: the checks say that in words.
    """
    if torch.compiler.is_compiling() or checked():
        return NOTHING
    try:
        auto = _any_autocast()
        seen = auto or watched()
        latest = dispatch.recent(name)
        if (
            latest is not None
            and not seen
            and latest.types == tuple(map(type, options))
            and latest.options == options
            and latest.grad is _grad_enabled()
            and _ABSENT.issuperset(latest.is_absent(given))
        ):
            try:
                if latest.same(*latest.is_given(given)):
                    latest.misses = 0
                    return latest.found
            except _UNFIT:
                pass
        q, types = given[0], tuple(map(type, given + options))
        place = (name, q.shape, q.requires_grad, _grad_enabled(), types, options)
        recent = dispatch.recent(place)
        if recent is not None and not seen:
            try:
                if recent is not latest and recent.same(*recent.is_given(given)):
                    recent.misses = 0
                    dispatch.remember(name, recent)
                    return recent.found
            except _UNFIT:
                pass
            recent.misses += 1
        found = _find(name, given, differentiable, options)
        if found[1] is not None and not auto and (recent is None or recent.misses >= _MISSES):
            _remember(name, place, given, options, found)
        return found
    except _UNFIT:
        return NOTHING


def _remember(name: str, place: Hashable, given: tuple[Any, ...], options: tuple[Any, ...], found: Found) -> None:
    """Keep what says whether further calls are like this one; it holds none of its tensors."""
    tensors = [t for t in given if t is not None]
    # The test takes no tensor twice.
    if _Guards is None or len(set(map(id, tensors))) < len(tensors):
        return
    try:
        same = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except _UNFIT:
        return
    is_given, is_absent = (_picker([i for i, t in enumerate(given) if (t is None) is none]) for none in (False, True))
    types = tuple(map(type, options))
    recent = Recent(is_given, is_absent, options, types, _grad_enabled(), same, found)
    dispatch.remember(place, recent)
    dispatch.remember(name, recent)


def _picker(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes these elements of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _find(name: str, given: tuple[Any, ...], differentiable: int, options: tuple[Any, ...]) -> Found:
    """The same by a key, whatever was called before."""
    if not given[0].is_cuda or not plain(*given) or (_any_autocast() and casts(*given[:3])):
        return NOTHING
    tensors, types = given[:differentiable], tuple(map(type, options))
    records = recorded(*tensors)
    key = [name, records, options, types]
    if records:
        key += [t is not None and t.requires_grad for t in tensors]
    for t in given:
        # Of contiguous tensors strides follow from shapes, but for those that nothing is multiplied by.
        key += (None,) if t is None else (t.shape, t.is_contiguous() or t.stride(), t.dtype, t.get_device())
    found = tuple(key)
    launch = dispatch.bound(found)
    if launch is None and not _OPTIONS.issuperset(types):
        return NOTHING
    return found, launch, records


def casts(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autocast would give these another dtype."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return False
    dtype = torch.get_autocast_dtype(device)
    return q.dtype != dtype or k.dtype != dtype or v.dtype != dtype


def bind(
    key: Hashable,
    problem: Any,
    chosen: str,
    family: str,
    by_name: bool,
    make: Callable[[], Callable[..., Any] | None],
) -> None:
    """Keep the launcher of a call that has run, if ``chosen`` runs all calls of its kind; it is made at the second one.

    Args:
        key: of `find`; None does nothing.
        by_name: the user named the implementation.
    """
    if key is None:
        return
    dispatch.settle(key, chosen, family, by_name, problem)
    if dispatch.settled(key) is not None:
        dispatch.bind(key, make)


def same(given: Sequence[Tensor | None], read: Sequence[Tensor | None]) -> bool:
    """Whether a call reads the caller's own memory: through views with more dimensions, but no copies.

    A launcher takes tensors as the caller gives them, so of copies none is kept.
    """
    for t, found in zip(given, read, strict=True):
        if t is found:
            continue
        if t is None or found is None or t.dtype != found.dtype or t.data_ptr() != found.data_ptr():
            return False
        if t.shape != found.shape[found.ndim - t.ndim :] or t.stride() != found.stride()[found.ndim - t.ndim :]:
            return False
    return True


class Launcher:
    """Both passes of one kind of call of a differentiable op.

    Args:
        flat: the op's arguments of a call with these tensors, whatever addresses they have.
        forward: the results of such a call, or None where it does not take these addresses.
        bind_backward: as a backend's, of the op's arguments, the gradients of its results and the results that it keeps. What
            it makes takes those gradients, those results, then the tensors, and returns gradients, or None as ``forward`` does.
        constant: results without gradients.
    """

    def __init__(
        self,
        op: DifferentiableOp,
        flat: Callable[..., Sequence[Any]],
        forward: Callable[..., tuple[Tensor, ...] | None],
        bind_backward: Callable[..., Callable[..., Sequence[Tensor] | None] | None],
        constant: tuple[int, ...] = (),
    ) -> None:
        self.constant = constant
        self._op, self._flat, self._forward, self._bind_backward = op, flat, forward, bind_backward
        self._strided = len(op.gradients) if op.launched is None else op.launched
        self._backward: dict[Hashable, Callable[..., Sequence[Tensor] | None]] = {}

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        found = self._forward(*tensors)
        return self._op.forward(*self._flat(*tensors)) if found is None else found

    def arguments(self, tensors: Sequence[Tensor | None]) -> Sequence[Any]:
        return self._flat(*tensors)

    def backward(
        self, upstream: Sequence[Tensor | None], kept: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        if upstream[0] is None or torch._C._is_any_autocast_enabled():
            return self._op.backward(upstream, kept, self._flat(*tensors))
        # Hooks of saved tensors may have brought others back.
        key = (
            upstream[0].device,
            *[None if t is None else t.stride() for t in (*upstream, *kept, *tensors[: self._strided])],
        )
        launch = self._backward.get(key)
        if launch is None:
            if len(self._backward) >= MOST_BACKWARD:
                self._backward.clear()
            bound = self._bind_backward(self._flat(*tensors), *upstream, *kept)
            launch = self._backward[key] = bound or _nothing
        found = launch(*upstream, *kept, *tensors)
        return self._op.backward(upstream, kept, self._flat(*tensors)) if found is None else found


def _nothing(*given: Tensor | None) -> None:
    """In the place of a launcher where a backend has none."""
