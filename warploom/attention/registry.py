"""The implementations of exact attention, fastest first."""

from warploom.attention import cpu, hopper, reference, triton
from warploom.runtime import dispatch
from warploom.runtime.dispatch import Implementation

dispatch.register(
    "attention",
    Implementation("cpu", cpu),
    Implementation("hopper", hopper),
    Implementation("triton", triton),
    Implementation("reference", reference),
)
