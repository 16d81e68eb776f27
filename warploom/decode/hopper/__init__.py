"""Split-KV decode for Hopper (sm_90a) in the CuTe DSL: TMA, mma.sync, clusters that merge in shared memory.

One launch a call, without a workspace. It runs where it is asked for by name. Latent caches have a kernel of their own, by
wgmma (`latent_kernel`), which runs unasked. Modules are compiled ahead of time by `warploom build`, or once at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.decode.backend import DecodeBackend
from warploom.decode.hopper import latent_plan
from warploom.decode.hopper.latent_config import HEAD_DIM as LATENT_DIM
from warploom.decode.hopper.latent_config import HEAD_DIM_V as LATENT_DIM_V
from warploom.decode.hopper.plan import (
    DTYPES,
    HEAD_DIMS,
    LEAST_BOX,
    LEAST_HEADS,
    MOST_ROWS,
    VARIANTS,
    config,
    page_size,
    tile_dim,
)
from warploom.decode.problem import DecodeProblem
from warploom.runtime import dispatch, modules, traced

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.decode.hopper.latent_run import Ready as LatentReady
    from warploom.decode.hopper.run import Ready
    from warploom.decode.problem import DecodeArgs

NAME = "hopper"
MOST_SEQUENCES = 65535  # of a grid's second dimension
MOST_LATENT_ROWS = 65535  # a grid's second dimension
MOST_KEYS = 1 << 30  # of a sequence: a window that ends nowhere is so long (base.FAR)


@traced.constant
def _module_refusal(*fields: Any) -> str | None:
    """Why there is no kernel, or its module can be neither loaded nor built here."""
    if config(*fields) not in VARIANTS:
        return "has no kernel yet for these dims, dtype, pages, softcap and sink together"
    return _found.refusal(fields, lambda: [config(*fields).spec])


@traced.constant
def _latent_module_refusal(*fields: Any) -> str | None:
    return _found_latent.refusal(fields, lambda: [latent_plan.config(*fields).spec])


_found, _found_latent = traced.Found(), traced.Found()


def _described(p: DecodeProblem) -> tuple[Any, ...]:
    """What the variant of a problem depends on: constants, where shapes are a tracer's symbols."""
    one = p.page_size == p.capacity  # a table of one column
    dim = tile_dim(p.head_dim, p.head_dim_v)
    return p.dtype, dim, dim, page_size(p.page_size, one), p.softcap, p.sink


def _described_latent(p: DecodeProblem) -> tuple[Any, ...]:
    """As ``_described``, of a latent cache."""
    pair, few = latent_plan.pairs(p.queries, p.heads_q), latent_plan.few(p.queries, p.heads_q)
    one = p.page_size == p.capacity
    if p.page_size is None or one:
        return p.dtype, None if p.page_size is None else latent_plan.BOXES[0], one, pair, few
    return p.dtype, next((box for box in latent_plan.BOXES if box <= p.page_size), p.page_size), False, pair, few


def _heads_refusal(p: DecodeProblem) -> str | None:
    """Why there is no kernel for these heads."""
    for name, dim in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
        if not 16 <= dim <= HEAD_DIMS[-1] or dim % 8:
            return f"takes {name} from 16 to {HEAD_DIMS[-1]} in steps of 8, not {dim}"
    if p.queries * p.heads_q > MOST_ROWS * p.heads_kv:
        return f"takes up to {MOST_ROWS} queries × heads of a key head, not {p.queries * p.heads_q // p.heads_kv}"
    if p.heads_kv < LEAST_HEADS:
        return f"takes {LEAST_HEADS} key heads or more, not {p.heads_kv}"
    return None


def _latent_refusal(p: DecodeProblem) -> str | None:
    """Why there is no kernel for a latent cache of 16 bits."""
    if p.softcap or p.sink:
        return "has no softcap and no sink over latent caches yet"
    if p.heads_kv != 1:
        return f"takes one key head of a latent cache, not {p.heads_kv}"
    if p.queries * p.heads_q > MOST_LATENT_ROWS:
        return f"takes {MOST_LATENT_ROWS} queries × heads of a latent cache at the most, not {p.queries * p.heads_q}"
    if (p.head_dim, p.head_dim_v) != (LATENT_DIM, LATENT_DIM_V):
        dims = f"{p.head_dim} and {p.head_dim_v}"
        return f"takes latent caches of {LATENT_DIM} columns, {LATENT_DIM_V} of them values, not {dims}"
    return None


class Hopper(DecodeBackend):
    """Caches of 16 bits of either kind, of some queries a key head and no tree or bias."""

    name = NAME
    special = True
    device = "cuda"

    def available(self) -> str | None:
        return traced.cannot_run()

    def declines(self, problem: DecodeProblem | None = None) -> str | None:
        """A choice by batch would give a sequence other bits in another batch, so it is the caller's.

        Over latent caches it is faster than Triton throughout.
        """
        if problem is not None and problem.latent:
            return None
        return "is for batches of few sequences, and slower than Triton in large or ragged ones; ask for it by backend='hopper'"

    def wavers(self, problem: DecodeProblem | None = None) -> bool:
        """Where it builds no modules, another process may."""
        return modules.cannot_build() is not None

    def supports(self, problem: DecodeProblem) -> str | None:
        p = problem
        if p.device != "cuda":
            return f"runs on CUDA tensors, not on {p.device}"
        if p.fp8:
            return "reads no FP8 caches yet"
        if p.dtype not in DTYPES:
            return f"takes float16 or bfloat16, not {p.dtype}"
        if p.tree:
            return "has no trees yet"
        if p.bias:
            return "has no bias yet"
        if p.prefix and not p.latent:
            return "reads no shared prefixes once yet"
        refused = _latent_refusal(p) if p.latent else _heads_refusal(p)
        if refused is not None:
            return refused
        if p.page_size is not None and p.page_size < LEAST_BOX:
            return f"takes pages of {LEAST_BOX} keys or more, not of {p.page_size}"
        if p.capacity > MOST_KEYS or p.batch > MOST_SEQUENCES:
            return f"takes {MOST_SEQUENCES} sequences of {MOST_KEYS} keys at the most, not {p.batch} of {p.capacity}"
        return _latent_module_refusal(*_described_latent(p)) if p.latent else _module_refusal(*_described(p))

    def describe(self, problem: DecodeProblem) -> str:
        """The module and its state, and what becomes of a shared prefix."""
        spec = latent_plan.config(*_described_latent(problem)).spec if problem.latent else config(*_described(problem)).spec
        alone = "; each sequence reads the prefix itself" if problem.prefix else ""
        return f"module {spec.name} ({modules.outlook(spec)}){alone}"

    def forward(self, args: DecodeArgs) -> tuple[Tensor, Tensor]:
        """Out (batch, T, heads_q, head_dim_v) in q's dtype and lse, fp32 (batch, heads_q, T)."""
        way = _way(args)
        if not way.readable(args):
            return dispatch.delegate(NAME, DecodeProblem.from_args(args), "decode").forward(args)
        out, lse = way.forward(args)
        return out, lse

    def bind(self, args: DecodeArgs) -> Ready | LatentReady | None:
        """What runs later calls that differ from this one, which has run, in the contents of q and sink alone."""
        way = _way(args)
        return way.ready(args) if way.readable(args) else None


def _way(args: DecodeArgs) -> Any:
    """The module that runs a call."""
    from warploom.decode.hopper import latent_run, run

    return latent_run if args.latent else run


BACKEND = Hopper()
