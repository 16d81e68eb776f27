"""The implementations of exact attention, fastest first, and those that compute stats."""

from warploom.attention import ampere, cpu, hopper, reference, triton
from warploom.attention.stats import FAMILY
from warploom.runtime import dispatch

dispatch.register("attention", *(module.BACKEND for module in (cpu, hopper, ampere, triton, reference)))
dispatch.register(FAMILY, cpu.BACKEND, hopper.STATS, triton.BACKEND, reference.BACKEND)
