"""Causal linear attention for Hopper (sm_90a) past head_dim 64, with a denominator past 128, in the CuTe DSL.

One kernel, the walk (TMA, wgmma, warp specialisation), sums (a_i · b_j) c_j over earlier or later tokens; out and all
gradients are such sums. A block walks a sequence in chunks with a slice of the state in registers; two walks that read the
same go side by side where heads leave processors idle. Modules are compiled ahead of time by `warploom build`, or once at
first use. Maps and denominators are passes over rows in Triton, and so are the states of segments where few sequences are
cut. A state that is asked for, and the gradient of a decay past head_dim 128 are the next implementation's.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from warploom.linear.backend import LinearBackend
from warploom.linear.hopper.plan import (
    FILL,
    LEAST,
    LONGEST,
    TERMS,
    WIDTHS,
    blocks,
    configs,
    narrowest,
    outwalks,
    segments,
    side_by_side,
    width,
)
from warploom.runtime import dispatch, modules, traced
from warploom.runtime.backend import Backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from warploom.linear.problem import LinearCall

NAME = "hopper"


@traced.constant
def _examine() -> str | None:
    """Why this machine cannot run it."""
    if find_spec("triton") is None:
        return "its passes over rows are Triton's, and the triton package is not installed (pip install 'warploom[triton]')"
    return modules.cannot_run()


@traced.constant
def _module_refusal(width: int, normalize: bool, fading: bool, a_head: bool, cut: bool, logs: bool, paired: bool) -> str | None:
    """Why a module can be neither loaded nor built here."""
    kind = (width, normalize, fading, a_head, cut, logs, paired)
    return _found.refusal(kind, lambda: [variant.spec for variant in configs(*kind)])


_found = traced.Found()


@cache
def _properties(index: int | None) -> Any:
    return torch.cuda.get_device_properties(index)


@traced.constant
def _processors(index: int | None) -> int:
    """Streaming multiprocessors of a device."""
    return int(_properties(index).multi_processor_count)


def _beside(call: LinearCall) -> Backend:
    """The next implementation that takes the call."""
    return dispatch.delegate(NAME, call, "linear")


def _segments(call: LinearCall) -> int:
    """How many a sequence is cut into."""
    batch, seqlen, heads, head_dim = call.q.shape
    if call.decay is None or width(head_dim, call.v.shape[3]) != WIDTHS[0]:
        return 1
    return segments(batch * heads, seqlen, _processors(call.q.device.index))


def _paired(call: LinearCall) -> bool:
    """Whether walks of dk and dv run side by side."""
    if not call.decay_grad:
        return False
    batch, _, heads, head_dim = call.q.shape
    return side_by_side(width(head_dim, call.v.shape[3]), batch * heads, _processors(call.q.device.index))


def _goes_on(call: LinearCall, ds: Tensor | None, dz: Tensor | None) -> bool:
    """Whether gradients come from the next implementation: of states, and of wide heads' logs."""
    return ds is not None or dz is not None or (call.decay_grad and not _leaves_terms(call))


def _leaves_terms(call: LinearCall) -> bool:
    """Whether walks leave what the gradient of the logs is made of."""
    return width(call.q.shape[3], call.v.shape[3]) in TERMS


def _kernels_refusal(call: LinearCall) -> str | None:
    """What of a call its kernels do not take, or are no quicker at, whichever modules there are."""
    if call.device != "cuda":
        return f"runs on CUDA tensors, not on {call.device}"
    for t in (call.q, call.k, call.v):
        if t.dtype != torch.bfloat16:
            return f"takes bfloat16, not {t.dtype}"
    batch, seqlen, heads, head_dim = call.q.shape
    head_dim_v = call.v.shape[3]
    for name, dim in (("E (the keys' dim)", head_dim), ("M (the values' dim)", head_dim_v)):
        if not LEAST <= dim <= WIDTHS[-1] or dim % 8:
            return f"takes {name} from {LEAST} to {WIDTHS[-1]} in steps of 8, not {dim}"
    least = narrowest(call.normalize, call.decay is not None)
    if head_dim < least and head_dim_v < least:
        return f"takes E or M from {least} on, not {head_dim} and {head_dim_v}"
    if not call.causal:
        return "is causal only"
    if not call.normalize and (call.map_q != "identity" or call.map_k != "identity"):
        return f"takes maps with a denominator only (normalize=True), not {call.map_q!r} and {call.map_k!r}"
    if call.s is not None:
        return "takes no initial state"
    if call.decay is not None and call.normalize:
        return "takes a decay without a denominator only (normalize=False)"
    if call.lengths is not None or call.cu_seqlens is not None:
        return "takes neither lengths nor packed sequences"
    if call.k.shape[1] != seqlen:
        return f"takes as many keys as queries, not {call.k.shape[1]} and {seqlen}"
    if call.k.shape[2] != heads:
        return f"takes as many heads of keys as of queries, not {call.k.shape[2]} and {heads}"
    count = _segments(call)
    if seqlen > LONGEST * count:
        return f"takes up to {LONGEST * count} tokens, not {seqlen}"
    if batch * heads * count * blocks(head_dim, head_dim_v) < FILL * _processors(call.q.device.index):
        return f"needs more sequences and heads to fill the device than {batch} and {heads}"
    if width(head_dim, head_dim_v) == WIDTHS[1] and not outwalks(batch * heads, seqlen, _processors(call.q.device.index)):
        return f"needs more sequences and heads than {batch} and {heads} to walk {seqlen} tokens"
    return None


class Hopper(LinearBackend):
    """Causal calls in bfloat16, of head dims past 64 or with a decay, without states, lengths or packed sequences."""

    name = NAME
    special = True

    def available(self) -> str | None:
        return _examine()

    def wavers(self, problem: LinearCall | None = None) -> bool:
        """Where it builds no modules, another process may; nothing else that it refuses changes."""
        return (problem is None or _kernels_refusal(problem) is None) and modules.cannot_build() is not None

    def supports(self, call: LinearCall) -> str | None:
        refused = _kernels_refusal(call)
        if refused is not None:
            return refused
        cut = False
        if _segments(call) > 1:  # a branch, for tracers too
            cut = True
        paired = False
        if _paired(call):
            paired = True
        kind = call.decay is not None, call.decay is not None and call.decay.ndim == 1, cut, call.decay_grad, paired
        return _module_refusal(width(call.q.shape[3], call.v.shape[3]), call.normalize, *kind)

    def forward(self, call: LinearCall, return_state: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Out, norm, s and z; see `warploom.linear.problem`."""
        if return_state:
            return _beside(call).forward(call, return_state)
        from warploom.linear.hopper.run import forward as run

        return *run(call, _segments(call)), None, None

    def bind(self, call: LinearCall, return_state: bool = False) -> Callable[..., Any] | None:
        """What launches further calls of this kind; see `warploom.linear.backend`."""
        if return_state:
            return _beside(call).bind(call, True)
        from warploom.linear.hopper.run import bind as run

        return run(call, _segments(call))

    def backward(
        self, call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """dq, dk, dv and the decay's gradient; no state came in, so none has one."""
        if _goes_on(call, ds, dz):
            return _beside(call).backward(call, dout, norm, ds, dz)
        from warploom.linear.hopper.run import backward as run

        dq, dk, dv, ddecay = run(call, dout, norm, _segments(call), _paired(call))
        return dq, dk, dv, None, None, ddecay

    def bind_backward(
        self, call: LinearCall, dout: Tensor, norm: Tensor | None, ds: Tensor | None, dz: Tensor | None
    ) -> Callable[..., Any] | None:
        if _goes_on(call, ds, dz):
            return _beside(call).bind_backward(call, dout, norm, ds, dz)
        from warploom.linear.hopper.run import bind_backward as run

        return run(call, _segments(call), _paired(call))


BACKEND = Hopper()
