"""One frozen configuration per compiled variant of the FP8 forward."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from warploom.attention.hopper.config import SOURCES, ForwardConfig
from warploom.runtime.modules import ModuleSpec

FP8_SOURCES = (
    *(file for file in SOURCES if file != "attention/hopper/build.py"),
    *(f"attention/hopper/fp8_{part}.py" for part in ("build", "config", "base", "producer", "consumers", "forward")),
)


@dataclass(frozen=True)
class Fp8ForwardConfig(ForwardConfig):
    """What is fixed when an FP8 forward module is compiled; ``dtype`` is that of out.

    A key tile lies in one block of 128 keys: ``tile_n`` divides 128. Heads and tensors of one scale have blocks of equal ones.
    """

    # Whether a tile's softmax runs under the PV before it. Without, S and the sums of a PV share registers, and the softmax
    # runs under the products of other warpgroups alone.
    overlap: bool = False
    pv_columns: int = 0  # columns of O of one PV; 0: all
    fast: bool = False  # PV is summed by the tensor cores alone, over all keys: one level

    @property
    def name(self) -> str:
        """File name and symbol."""
        parts = [super().name.replace("attn_fwd_sm90", "attn_fwd_fp8_sm90")]
        parts += ["overlap"] if self.overlap else []
        parts += [f"pv{self.pv_columns}"] if self.pv_columns else []
        parts += ["fast"] if self.fast else []
        return "_".join(parts)

    @cached_property
    def spec(self) -> ModuleSpec:
        """The module that holds this variant."""
        config = tuple(asdict(self).items())
        return ModuleSpec(self.name, "sm_90a", "warploom.attention.hopper.fp8_build:compile_fp8", config, FP8_SOURCES)

    @property
    def apart(self) -> bool:
        """No: between key tiles sums of two levels would have to be brought to an end."""
        return False

    @property
    def boxes(self) -> tuple[int, int]:
        """Columns of a TMA box of Q and K, and keys of one of V, whose rows are head dims."""
        return next(n for n in (128, 64, 32) if self.head_dim % n == 0), self.tile_n

    @property
    def shared_bytes(self) -> int:
        """Shared memory of Q and of the two rings; barriers and the tile ring add less than 512 bytes."""
        return super().shared_bytes // 2
