"""The mathematics of scores, in powers of two: softcap, maxima, sinks, log-sum-exp. Imports the CuTe DSL."""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr

from warploom.kernels.cute.basics import LOG2_E
from warploom.kernels.cute.instructions import exp2, reciprocal


@cute.jit
def multipliers(config, scale, softcap):
    """What turns raw scores into log2 units: a factor, and with a softcap what goes into its tanh (``capped``)."""
    multiplier, cap_in = scale * LOG2_E, Float32(0.0)
    if const_expr(config.softcap):
        cap_in = 2 * LOG2_E * scale / softcap
        multiplier = softcap * LOG2_E
    return multiplier, cap_in


@cute.jit
def capped(raw, multiplier, cap_in):
    """softcap · tanh(x / softcap) by exp2, in log2 units: tanh.approx is no better than a 16-bit P."""
    return multiplier - 2 * multiplier * reciprocal(exp2(raw * cap_in) + 1)


@cute.jit
def capped_and_slope(raw, multiplier, cap_in):
    """As ``capped``, and the derivative there, of the raw score times scale; 2 / (1 + exp2(·)) is 1 - tanh."""
    rest = 2 * reciprocal(exp2(raw * cap_in) + 1)
    return multiplier - multiplier * rest, rest * (2 - rest)


@cute.jit
def finite(top):
    """What a row is exponentiated against: its maximum, or 0 where it has seen nothing, so that -inf gives 0 and not NaN."""
    return 0.0 if top == -Float32.inf else top


@cute.jit
def with_sink(top, total, logit):
    """A row's maximum in log2 units and its sum, and what its O is multiplied by, once a sink of this logit has joined it."""
    new = cute.arch.fmax(top, logit)
    safe = finite(new)
    shrink = exp2(top - safe)
    return new, total * shrink + exp2(logit - safe), shrink


@cute.jit
def log_sum_exp(top, total):
    """A row's lse, natural log, from its maximum in log2 units and its sum; -inf where it has seen nothing."""
    return -Float32.inf if total == 0.0 else (top + cute.math.log2(total)) * math.log(2)
