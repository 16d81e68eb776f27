"""What a backend of decode does beside the others of `warploom.runtime.backend`."""

from __future__ import annotations

from warploom.decode.problem import AppendArgs, AppendFp8Args
from warploom.runtime.backend import Backend


class DecodeBackend(Backend):
    """One way to compute decode: ``forward(args)`` returns out (batch, T, heads_q, head_dim_v) and lse (batch, heads_q, T)."""

    def appends(self, device: str) -> bool:
        """Whether ``append`` takes tensors on this type of device; where no backend does, torch ops append."""
        return False

    def append(self, args: AppendArgs) -> None:
        """Write new keys and values into a cache, in place."""
        refused = f"{self.name} appends no tokens"
        raise NotImplementedError(refused)

    def quantizes(self, args: AppendFp8Args) -> bool:
        """Whether ``append_fp8`` takes the call; where no backend does, torch ops rotate, scale and round."""
        return False

    def append_fp8(self, args: AppendFp8Args) -> None:
        """Write new keys and values into an FP8 cache, in place."""
        refused = f"{self.name} quantises no tokens"
        raise NotImplementedError(refused)
