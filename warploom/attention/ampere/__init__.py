"""Exact attention for Ampere and Ada (sm_80 to sm_89) in the CuTe DSL: cp.async, ldmatrix, mma.sync; the forward pass.

Modules are compiled ahead of time by `warploom build`, or once at first use. A backward pass goes to the next implementation
that takes it, with the out and lse of this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.attention.ampere.plan import ARCHS, config, tile_dim
from warploom.attention.features import Features
from warploom.attention.problem import AttentionArgs, AttentionProblem, halves_refusal
from warploom.runtime import dispatch, machine, modules, traced
from warploom.runtime.backend import Backend

if TYPE_CHECKING:
    from torch import Tensor

NAME = "ampere"
MEANT_FOR = ((8, 0), (8, 6), (8, 7), (8, 9))


@traced.constant
def _examine() -> str | None:
    """Why this machine cannot run it."""
    if not _capabilities():
        return "no CUDA device is visible"
    return _device_refusal() or modules.cannot_load()


def _device_refusal() -> str | None:
    strangers = sorted(set(_capabilities()) - set(ARCHS))
    if strangers:
        return f"is for compute capability 8.0 to 8.9, this machine has {_words(strangers)}"
    return modules.driver_refusal()


@traced.constant
def _others() -> str | None:
    """Why it does not run unasked here."""
    others = sorted(set(_capabilities()) - set(MEANT_FOR))
    if others:
        return f"is for compute capability 8.0 to 8.9; on {_words(others)} it runs for backend={NAME!r} only"
    return None


def _words(found: list[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in found)


@machine.examined
def _capabilities() -> tuple[tuple[int, int], ...]:
    return machine.capabilities()


@traced.constant
def _module_refusal(*fields: Any) -> str | None:
    """Why the module of a call with these Features can be neither loaded nor built here."""
    if modules.cannot_build() is None:
        return None
    # Devices of one machine may differ; what their modules need does not, but for the tiling.
    spec = config(_capabilities()[0], Features(*fields)).spec
    return None if modules.loaded(spec) is not None else modules.absence(spec)


def _next(args: AttentionArgs, backward: bool) -> Backend:
    return dispatch.delegate(NAME, AttentionProblem.from_args(args, backward))


class Ampere(Backend):
    """The forward pass of dense calls without column masks or dropout."""

    name = NAME

    def available(self) -> str | None:
        return _examine()

    def declines(self, problem: Any = None) -> str | None:
        return _others()

    def wavers(self, problem: AttentionProblem | None = None) -> bool:
        """Where it builds no modules, another process may."""
        return modules.cannot_build() is not None

    def supports(self, problem: AttentionProblem) -> str | None:
        refused = halves_refusal(problem, widest=128)
        if refused is not None:
            return refused
        if problem.layout != "dense":
            return "takes no packed sequences" if problem.layout == "varlen" else "takes no pages"
        if problem.columns:
            return "has no column masks"
        if problem.dropout:
            return "has no dropout"
        if problem.q_offset:
            return "has no query offsets"
        if problem.bias:
            return "has no bias"
        if problem.batch_invariant:
            return "promises no batch invariance, as packed calls run elsewhere"
        if problem.backward and dispatch.following(NAME, problem) is None:
            return "has no backward pass of its own, and no other implementation takes this one"
        dtype, head_dim, head_dim_v, *flags = Features.of(problem)
        dim = tile_dim(head_dim, head_dim_v)  # a constant, where head dims are a tracer's symbols
        return _module_refusal(dtype, dim, dim, *flags)

    def describe(self, problem: AttentionProblem) -> str:
        """The module, its state, and who runs the backward pass."""
        spec = config(_capabilities()[0], Features.of(problem)).spec
        words = f"module {spec.name} ({modules.outlook(spec)})"
        beside = dispatch.following(NAME, problem) if problem.backward else None
        return words if beside is None else f"{words}; backward by {beside.name}: it has none of its own"

    def forward(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q)."""
        if args.scale <= 0.0:
            # The running maximum is of raw scores, which order the scaled ones only for a positive scale.
            return _next(args, False).forward(args)
        from warploom.attention.ampere.run import forward as run

        return run(args)

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv and dsink by the next implementation that takes the call."""
        return _next(args, True).backward(args, dout, dlse, out, lse)


BACKEND = Ampere()
