"""The implementations of linear attention, in the order that dispatch asks them."""

from warploom.linear import cpu, hopper, reference, triton
from warploom.runtime import dispatch
from warploom.runtime.dispatch import Implementation

# The CPU's is first, since it refuses every CUDA tensor, and Triton's interpreter then runs where it is asked for only.
dispatch.register(
    "linear",
    Implementation("cpu", cpu),
    Implementation("hopper", hopper, special=True),
    Implementation("triton", triton),
    Implementation("reference", reference),
)
