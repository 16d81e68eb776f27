"""The implementations of decode, fastest first."""

from warploom.decode import cpu, reference, triton
from warploom.runtime import dispatch
from warploom.runtime.dispatch import Implementation

dispatch.register(
    "decode",
    Implementation("triton", triton),
    Implementation("cpu", cpu),
    Implementation("reference", reference),
)
