"""The implementations of the gated delta rule, in the order that dispatch asks them."""

from warploom.delta import reference, triton
from warploom.runtime import dispatch

dispatch.register("delta", *(module.BACKEND for module in (triton, reference)))
