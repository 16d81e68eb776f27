"""Column sums of dense calls by a kernel behind the forward pass; other stats, and all of other calls, are left to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.attention.features import Features
from warploom.attention.hopper.sums_plan import sums_config, sums_dim, sums_refusal
from warploom.attention.problem import AttentionArgs, AttentionProblem
from warploom.attention.stats import FAMILY, Behind, StatsBackend
from warploom.runtime import dispatch, traced

if TYPE_CHECKING:
    from torch import Tensor


@traced.constant
def _module_refusal(*fields: Any) -> str | None:
    """Why the module can be neither loaded nor built here; ``fields`` are those of its Features, one by one."""
    return _found.refusal(fields, lambda: [sums_config(Features(*fields)).spec])


_found = traced.Found()


class HopperStats(Behind):
    """Column sums of dense calls in 16 bits under a band, up to 256 dims a head."""

    def __init__(self, name: str) -> None:
        self.name = name

    def available(self) -> str | None:
        return traced.cannot_run()

    def declines(self, problem: AttentionProblem | None = None) -> str | None:
        return "finds column sums alone, behind a forward pass of its own"

    def supports(self, problem: AttentionProblem) -> str | None:
        refused = sums_refusal(problem)
        if refused is not None:
            return refused
        dtype, head_dim, _, *flags = Features.of(problem)
        head_dim = sums_dim(head_dim)
        return _module_refusal(dtype, head_dim, head_dim, *flags)

    def warm(self, args: AttentionArgs) -> None:
        """Load or build the module of column sums."""
        from warploom.attention.hopper.sums_run import module_of

        module_of(args)

    def forward(self, args: AttentionArgs, *options: Any) -> tuple[Tensor, Tensor]:
        """Out and lse, by the kernels of the same name."""
        found: tuple[Tensor, Tensor] = dispatch.find(self.name).forward(args)
        return found

    def stats(
        self, args: AttentionArgs, lse: Tensor | None, max_logits: bool, column_sums: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Column sums; a call that asks for more goes to the next implementation."""
        if max_logits or not column_sums or lse is None:
            return self._next(args).stats(args, lse, max_logits, column_sums)
        from warploom.attention.hopper.sums_run import column_sums as run

        return None, run(args, lse)

    def _next(self, args: AttentionArgs) -> StatsBackend:
        found = dispatch.delegate(self.name, AttentionProblem.from_args(args, False), FAMILY)
        assert isinstance(found, StatsBackend)
        return found
