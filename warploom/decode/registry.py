"""The implementations of decode, fastest first."""

from warploom.decode import cpu, hopper, reference, triton
from warploom.runtime import dispatch

dispatch.register("decode", *(module.BACKEND for module in (hopper, triton, cpu, reference)))
