"""The implementations of exact attention, fastest first."""

from warploom.attention import cpu, reference, triton
from warploom.runtime import dispatch
from warploom.runtime.dispatch import Implementation

dispatch.register(
    "attention",
    Implementation("cpu", cpu),
    Implementation("triton", triton),
    Implementation("reference", reference),
)
