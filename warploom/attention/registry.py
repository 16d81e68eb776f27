"""The implementations of exact attention, fastest first."""

from warploom.attention import ampere, cpu, hopper, reference, triton
from warploom.runtime import dispatch

dispatch.register("attention", *(module.BACKEND for module in (cpu, hopper, ampere, triton, reference)))
