"""The implementations of decode, fastest first."""

from warploom.decode import cpu, reference, triton
from warploom.runtime import dispatch

dispatch.register("decode", *(module.BACKEND for module in (triton, cpu, reference)))
