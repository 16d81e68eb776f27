"""The implementations of exact attention, fastest first."""

from warploom.attention import ampere, cpu, hopper, reference, triton
from warploom.runtime import dispatch
from warploom.runtime.dispatch import Implementation

dispatch.register(
    "attention",
    Implementation("cpu", cpu),
    Implementation("hopper", hopper),
    Implementation("ampere", ampere),
    Implementation("triton", triton),
    Implementation("reference", reference),
)
