"""The implementations of linear attention, in the order that dispatch asks them."""

from warploom.linear import cpu, hopper, reference, triton
from warploom.runtime import dispatch

# The CPU's is first, since it refuses every CUDA tensor, and Triton's interpreter then runs where it is asked for only.
dispatch.register("linear", *(module.BACKEND for module in (cpu, hopper, triton, reference)))
