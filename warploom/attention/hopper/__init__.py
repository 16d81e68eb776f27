"""Exact attention for Hopper (sm_90a) in the CuTe DSL: TMA, wgmma, warp specialisation; forward and backward.

Modules are compiled ahead of time by `warploom build`, or once at first use. A backward pass that has no kernel here goes to
the next implementation that takes it, with the out and lse of this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from warploom.attention.bounds import with_bounds
from warploom.attention.features import Features
from warploom.attention.hopper.documents import MOST_KEYS, as_packed, settled
from warploom.attention.hopper.fp8_plan import fp8_config, problem_refusal
from warploom.attention.hopper.plan import (
    LONG,
    MANY,
    WITH_BIAS,
    as_masked,
    as_wide,
    backward_config,
    backward_config_for,
    bias_backward_refusal,
    bias_refusal,
    config,
    config_for,
    invariance_refusal,
    is_short,
    largest_refusal,
    offsets_refusal,
    pages_refusal,
    pages_unchecked,
    takes_columns,
    takes_dropout,
    tile_dims,
    walked,
    with_largest,
    workspace,
)
from warploom.attention.hopper.stats import HopperStats
from warploom.attention.problem import AttentionArgs, AttentionProblem, halves_refusal
from warploom.attention.stats import Beside
from warploom.runtime import dispatch, modules, traced
from warploom.runtime.backend import Backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from warploom.attention.hopper.config import ForwardConfig

NAME = "hopper"


def _no_backward(problem: AttentionProblem, dlse: bool = False) -> str | None:
    """Why another implementation has to run the backward pass, or None."""
    problem = as_masked(problem)
    short, features = False, Features.of(problem, dlse)
    if is_short(problem.seqlen_q, problem.heads_q > problem.heads_kv, features.columns):  # a branch, for tracers too
        short = True
    if features.bias:
        refused = bias_backward_refusal(features)
        if refused is not None:
            return refused
    if features.columns and not takes_columns(features):
        return "has no kernel for this column mask"
    if not takes_dropout(features):
        return "has no kernel for dropout beside a softcap"
    return _absence(short, True, features)


def _absence(length: bool, backward: bool, features: Features) -> str | None:
    """As ``_module_refusal``, to which a tracer takes constants alone: a call's head dims may be symbols, its tile's not."""
    dtype, head_dim, head_dim_v, *flags = features
    return _module_refusal(length, backward, dtype, *tile_dims(head_dim, head_dim_v), *flags)


@traced.constant
def _module_refusal(length: bool, backward: bool, *fields: Any) -> str | None:
    """Why the module can be neither loaded nor built here.

    ``length``: whether the call is long, of a backward pass whether it is short. ``fields`` are those of its Features, one by
    one: torch.compile hands a NamedTuple over without its items.
    """
    variant = backward_config if backward else config
    return _found.refusal((length, backward, *fields), lambda: [variant(Features(*fields), length).spec])


@traced.constant
def _largest_refusal(long: bool, *fields: Any) -> str | None:
    """As ``_module_refusal``, of the module that finds the largest logits too."""
    variant = config(Features(*fields), long)
    if (variant.head_dim, variant.head_dim_v) not in WITH_BIAS:
        return "finds largest logits at head dims to 64 and from 104 to 128 alone"
    return _found.refusal(("largest", long, *fields), lambda: [with_largest(variant).spec])


_found = traced.Found()


def _takes_backward(args: AttentionArgs, dlse: bool) -> bool:
    from warploom.attention.hopper.run import parts_counters
    from warploom.attention.hopper.run_backward import described

    if parts_counters(args):
        return False
    # The mask is an infinite score, which only a positive scale keeps at the right end; views of packed tokens reach so far.
    if args.scale <= 0.0 or (args.cu_seqlens_q is not None and max(args.q.shape[0], args.k.shape[0]) > MOST_KEYS):
        return False
    features, short = described(args, dlse)
    if features.bias and bias_backward_refusal(features) is not None:
        return False
    if (features.columns and not takes_columns(features)) or not takes_dropout(features):
        return False
    return _absence(short, True, features) is None


def _reaches_too_far(args: AttentionArgs) -> bool:
    """Whether keys lie past what the kernel's TMA views reach, in a page too, or a sequence's pages past 32 bits."""
    table = args.block_table
    return args.k.shape[-3] > MOST_KEYS or (table is not None and table.shape[1] * args.k.shape[1] >= 1 << 31)


def _wide(args: AttentionArgs) -> AttentionArgs:
    """The call over pages of 16 bits, where it is one over FP8 pages."""
    if args.k_scale is None:
        return args
    from warploom.attention.hopper.wide_pages import widen

    return widen(args)


def _next(args: AttentionArgs, backward: bool) -> Backend:
    return dispatch.delegate(NAME, AttentionProblem.from_args(args, backward))


def _variant(problem: AttentionProblem) -> ForwardConfig:
    """What runs a problem here and now: tiles of several heads, or of special lengths, only where their module can come.

    Of FP8 for a bf16 result.
    """
    if problem.dtype.itemsize == 1:
        return fp8_config(Features.of(problem), torch.bfloat16)
    problem = as_masked(as_wide(problem))
    variant, usual = config_for(problem), config(Features.of(problem), problem.seqlen_k >= LONG)
    if variant != usual and modules.loaded(variant.spec) is None and modules.cannot_come(variant.spec):
        return usual
    return variant


class Hopper(Beside):
    """Dense, packed and paged calls in 16 bits, up to 256 dims a head, under any mask."""

    name = NAME

    def available(self) -> str | None:
        return traced.cannot_run()

    def declines(self, problem: AttentionProblem | None = None) -> str | None:
        if problem is None or max(problem.head_dim, problem.head_dim_v) > 256:
            return None
        return pages_unchecked(problem)

    def wavers(self, problem: AttentionProblem | None = None) -> bool:
        """Where it builds no modules, another process may."""
        return modules.cannot_build() is not None

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.dtype.itemsize == 1:  # e4m3, which the door gives to `forward_fp8` alone
            return problem_refusal(problem)
        refused = halves_refusal(problem, widest=256)
        if refused is not None:
            return refused
        if problem.layout == "paged":
            if problem.fp8_pages and problem.batch_invariant:
                return "promises no batch invariance over pages of FP8"  # whose decode() is another implementation's
            problem = as_wide(problem)
            refused = pages_refusal(problem)
            if refused is not None:
                return refused
        if problem.q_offset:
            refused = offsets_refusal(problem)
            if refused is not None:
                return refused
            problem = as_masked(problem)
        if problem.bias:
            refused = bias_refusal(problem)
            if refused is not None:
                return refused
        if problem.batch_invariant:
            refused = invariance_refusal(problem)
            if refused is not None:
                return refused
        if problem.backward and dispatch.following(NAME, problem) is None:
            refused = _no_backward(problem)
            if refused is not None:
                return f"its backward pass {refused}, and no other implementation takes this one"
        long = False
        if problem.seqlen_k >= LONG:  # a branch, which a tracer of symbolic lengths decides and guards
            long = True
        return _absence(long, False, Features.of(as_packed(problem)))

    def rows_apart(self, problem: AttentionProblem) -> bool:
        """Of a window tiles of keys are counted from the first key that some row sees."""
        return problem.left is None

    def prepare(self, args: AttentionArgs) -> AttentionArgs:
        """The call with the bounds of its column mask, computed once for all layers that share the mask's tensors.

        Raises:
            ValueError: a batch-invariant call that ``forward`` would hand over for the length of its batch.
        """
        if args.batch_invariant and args.cu_seqlens_q is not None and args.block_table is None and args.k.shape[0] > MOST_KEYS:
            raise ValueError(
                f"batch_invariant: k has {args.k.shape[0]} packed tokens, and {NAME}, which runs this call's sequences, takes "
                f"{MOST_KEYS} at a time; make two calls, or name backend='triton' for all"
            )
        if args.q_offset is not None:
            from warploom.attention.hopper.offsets import with_columns

            args = with_columns(args)
        return settled(args)

    def tiles(self, args: AttentionArgs) -> tuple[tuple[int, int], int]:
        """Those that are computed."""
        variant = self._runs(args)
        return (walked(variant), variant.tile_n), variant.tile_n

    def loaded_tile(self, args: AttentionArgs) -> tuple[int, int]:
        variant = self._runs(args)
        return variant.queries, variant.tile_n

    @staticmethod
    def _runs(args: AttentionArgs) -> ForwardConfig:
        """The variant of the call's forward pass."""
        return _variant(as_packed(AttentionProblem.from_args(args, False)))

    def packs(self, problem: AttentionProblem) -> bool:
        """Documents in a row."""
        return as_packed(problem) is not problem

    def backward_tiles(self, args: AttentionArgs) -> dict[str, tuple[int, int]]:
        problem = AttentionProblem.from_args(args, True)
        if _no_backward(problem) is not None:
            return _next(args, True).backward_tiles(args)
        variant = backward_config_for(problem)
        return dict.fromkeys(("dq", "dk", "dv"), (variant.tile_m, variant.tile_n))

    def describe(self, problem: AttentionProblem) -> str:
        """The module, its state, and the backward's, or who runs that, and why; of FP8 numbers ``describe_fp8`` has it."""
        if problem.dtype.itemsize == 1:
            return ""
        runs = as_packed(problem)
        variant = _variant(runs)
        words = f"module {variant.name} ({modules.outlook(variant.spec)})"
        if runs is not problem:
            words += "; its documents as packed sequences"
        if problem.fp8_pages:
            words += f"; pages of FP8 are written as {str(problem.dtype).removeprefix('torch.')} first"
        if problem.batch_invariant:
            words += "; batch-invariant: the tiles of packed calls whatever the lengths, one head a tile, nothing split"
        if not problem.backward:
            return words
        refused = _no_backward(problem)
        if refused is not None:
            beside = dispatch.following(NAME, problem)
            return words if beside is None else f"{words}; backward by {beside.name}: {refused}"
        words += f"; backward {backward_config_for(problem).name}"
        if problem.layout == "dense":
            words += f", {workspace(problem) / 2**20:.1f} MiB of workspace"
        return words

    def warm(self, args: AttentionArgs) -> None:
        """Load or build the call's modules and run them once on a token, so that a capturing stream finds them ready.

        The backward's too, where a tensor of the call, its bias among them, requires a gradient.
        """
        from warploom.attention.hopper import run, run_backward

        run.warm(_wide(args))
        asked = args.bias_grad or any(t is not None and t.requires_grad for t in (args.q, args.k, args.v, args.sink))
        if asked and _takes_backward(args, False):
            run_backward.warm(args)

    def hands_on(self, args: AttentionArgs) -> str | None:
        if args.scale <= 0.0:  # the running maximum is of raw scores, which order the scaled ones only for a positive scale
            return f"takes a positive scale, not {args.scale}"
        if _reaches_too_far(args):
            return f"takes at most {MOST_KEYS} keys"
        if args.k_scale is not None:
            from warploom.attention.hopper import wide_pages

            refused = wide_pages.refusal(args)
            if refused is not None:
                return refused
        from warploom.attention.hopper.run import parts_counters

        if parts_counters(args):
            return "takes no dropout under a window that may begin, for all queries, between keys that share a counter"
        return None

    def forward(self, args: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Out in q's dtype and lse in fp32, (batch, heads, seqlen_q) or (heads, total_q) for packed calls."""
        if self.hands_on(args) is not None:
            return _next(args, False).forward(args)
        from warploom.attention.hopper.run import forward as run

        return run(_wide(args))

    def max_logits_refusal(self, args: AttentionArgs) -> str | None:
        """Why ``forward_with_max_logits`` is not for a call that ``forward`` takes; words follow the name."""
        if args.scale <= 0.0 or args.k.shape[-3] > MOST_KEYS or args.q.dtype.itemsize == 1 or args.k_scale is not None:
            return "does not run this call itself"
        features, packed = Features.of_args(args), args.cu_seqlens_q is not None
        few = long = False
        if not packed and args.q.shape[-2] > args.k.shape[-2] and args.q.shape[1] < MANY:  # branches, for tracers too
            few = True
        if (args.max_seqlen_k or 0 if packed else args.k.shape[1]) >= LONG:
            long = True
        refused = largest_refusal(features, few)
        if refused is not None:
            return refused
        dtype, head_dim, head_dim_v, *flags = features
        return _largest_refusal(long, dtype, *tile_dims(head_dim, head_dim_v), *flags)

    def forward_with_max_logits(self, args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
        """As ``forward``, and the largest logits, fp32 (batch, heads) or (sequences, heads)."""
        from warploom.attention.hopper.run import forward_with_largest as run

        return run(args)

    def bind(self, args: AttentionArgs) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """What launches further calls with the metadata of this one, which has run: (q, k, v, sink) to out and lse.

        Of packed calls (q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_k), over pages with their table; under a column mask
        its vectors and their bounds behind those; with dropout the seed comes last.
        """
        if args.scale <= 0.0 or _reaches_too_far(args) or args.q.numel() == 0 or args.k.numel() == 0:
            return None
        if args.bias is not None or args.k_scale is not None or args.q_offset is not None:
            return None
        from warploom.attention.hopper.run import bind as run
        from warploom.attention.hopper.run import parts_counters

        return None if parts_counters(args) else run(args)

    def writes_into(self, args: AttentionArgs) -> bool:
        """Of calls without dropout or pages; ``into`` has strides of whole 16 bytes, and a last one of 1."""
        return args.block_table is None and args.documents is None and not args.dropout_p

    def fp8_refusal(self, args: AttentionArgs, out_dtype: torch.dtype, fast: bool) -> str | None:
        """Why the kernel of FP8 does not run a call whose q, k and v are e4m3, or None; words follow the name."""
        refused = self.available() or problem_refusal(AttentionProblem.from_args(args, False))
        if refused is not None:
            return refused
        from warploom.attention.hopper import fp8_run

        return fp8_run.refusal(args, out_dtype, fast)

    def forward_fp8(
        self, args: AttentionArgs, scales: tuple[Tensor, Tensor, Tensor], out_dtype: torch.dtype, fast: bool
    ) -> tuple[Tensor, Tensor]:
        """As ``forward``, of e4m3 numbers with scales, as `warploom.fp8.Fp8Tensor` has them; ``fast``: sums of one level."""
        from warploom.attention.hopper import fp8_run

        return fp8_run.forward(args, scales, out_dtype, fast)

    def describe_fp8(self, args: AttentionArgs, out_dtype: torch.dtype, fast: bool) -> str:
        """The module of a call over e4m3 numbers, and its state."""
        variant = fp8_config(Features.of_args(args), out_dtype, fast)
        return f"module {variant.name} ({modules.outlook(variant.spec)})"

    def warm_fp8(self, args: AttentionArgs, out_dtype: torch.dtype, fast: bool) -> None:
        """As ``warm``, of such a call."""
        from warploom.attention.hopper import fp8_run

        fp8_run.warm(args, out_dtype, fast)

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv and dsink (empty without a sink), and dbias if asked for, here or by the next that takes the call."""
        if _takes_backward(args, dlse is not None):
            from warploom.attention.hopper.run_backward import backward as run

            return run(args, dout, dlse, out, lse)
        if args.documents is not None:
            args = with_bounds(args)
        return _next(args, True).backward(args, dout, dlse, out, lse)

    def bind_backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        """What launches further backward passes: (dout, dlse, out, lse) and what ``bind`` takes to dq, dk, dv and dsink."""
        if args.q_offset is not None:
            return None
        if _takes_backward(args, dlse is not None):
            from warploom.attention.hopper.run_backward import bind as run

            return run(args, dlse is not None)
        if args.documents is not None:  # whose launches bring no bounds
            return None
        return _next(args, True).bind_backward(args, dout, dlse, out, lse)


BACKEND, STATS = Hopper(), HopperStats(NAME)
