"""The implementations of the gated delta rule, in the order that dispatch asks them."""

from warploom.delta import cpu, hopper, reference, triton
from warploom.runtime import dispatch

# The CPU's is first, since it refuses every CUDA tensor, and Triton's interpreter then runs where it is asked for only.
dispatch.register("delta", *(module.BACKEND for module in (cpu, hopper, triton, reference)))
