"""Blocks, warps and barriers: what a machine's instructions change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.sm90.clocks import NEVER, Clock, Memory, RaceError
from tests.sm90.lanes import LANES, Value

if TYPE_CHECKING:
    from tests.sm90.machine import Machine

SHARED_START = 1024  # of a block's dynamic shared memory; TMA's swizzles count from 0
SHARED_BYTES = 232448 + SHARED_START
EVERY = (1 << LANES) - 1


class HangError(AssertionError):
    """Nobody can go on."""


class ProtocolError(AssertionError):
    """A barrier is used in a way that it does not allow."""


@dataclass(frozen=True)
class Launch:
    """What a kernel is started with: bytes of its parameters, bytes that a copy by a tensor map brings, words of tensors.

    ``ordered``: bulk additions to one address are to be ordered too. ``watched``: addresses of what blocks hand each other
    by plain stores and loads. ``reads``: loads from shared memory are played too where what they find decides nothing.
    """

    parameters: list[bytes]
    boxes: dict[int, int]
    grid: int = 1
    cluster: int = 1
    words: dict[int, int] = field(default_factory=dict)
    ordered: bool = False
    watched: range = range(0)
    reads: bool = False


class Mbarrier:
    """Its phase ends when ``count`` arrivals and all expected bytes are in."""

    def __init__(self, at: int, name: str, count: int, component: int, size: int) -> None:
        self.at, self.name, self.count, self.component = at, name, count, component
        self.pending, self.bytes, self.phase = count, 0, 0
        self.gathered, self.clock = Clock(size), Clock(size)

    def arrive(self, clock: Clock, count: int = 1, expect: int = 0) -> None:
        self.gathered.join(clock)
        self.bytes += expect
        self.pending -= count
        if self.pending < 0:
            raise ProtocolError(f"{self.name}: more arrivals than its {self.count}")
        self._end()

    def complete(self, clock: Clock, size: int) -> None:
        """Bytes have landed."""
        self.gathered.join(clock)
        self.gathered.times[self.component] = self.phase + 1
        self.bytes -= size
        if self.bytes < 0 and self.pending == 0:
            raise ProtocolError(f"{self.name}: {-self.bytes} bytes more than it expects")
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.clock.join(self.gathered)
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Meeting:
    """A named barrier, or the cluster's: opens when ``threads`` have come."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.threads, self.come, self.opened = name, 0, 0, 0
        self.gathered, self.clock = Clock(size), Clock(size)

    def arrive(self, clock: Clock, threads: int, come: int = LANES) -> int:
        """Come; what ``passed`` takes."""
        if self.come and threads != self.threads:
            raise ProtocolError(f"{self.name}: {threads} threads, of another party {self.threads}")
        opened, self.threads = self.opened, threads
        self.gathered.join(clock)
        self.come += come
        if self.come > threads:
            raise ProtocolError(f"{self.name}: more threads come than its {threads}")
        if self.come == threads:
            self.clock.join(self.gathered)
            self.come, self.opened = 0, opened + 1
        return opened

    def passed(self, opened: int) -> bool:
        return self.opened > opened


@dataclass(eq=False)
class Group:
    """Reads of shared memory that are under way, by wgmma or by bulk copies; and what the latter write."""

    at: list[np.ndarray] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    ended: bool = False  # reading


@dataclass(eq=False)
class Factor:
    """What a wgmma reads of shared memory, and the registers that hold the product.

    Reading too early, or of what is overwritten meanwhile, is a race if anybody uses the product, and else does no harm:
    kernels begin products that nobody looks at where that saves them a branch.
    """

    at: np.ndarray
    results: set[str]
    time: int = int(NEVER)  # when reading ended
    early: str = ""  # why the product is none
    used: bool = False

    def __post_init__(self) -> None:
        self.first, self.last = int(self.at[0]), int(self.at[-1])

    def overlaps(self, at: np.ndarray, first: int, last: int) -> bool:
        return first <= self.last and self.first <= last and bool(np.isin(at, self.at, assume_unique=True).any())

    def use(self, who: str) -> None:
        if self.time == NEVER:
            raise RaceError(f"{who} uses a product that it has not waited for")
        if self.early:
            raise RaceError(f"{who} uses a product: {self.early}")
        self.used = True


class Warp:
    """Lanes that run one code, some of them apart from the others for a while."""

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number = block, number
        self.component = block.index * block.warps_each + number
        self.registers: dict[str, Value] = {}
        self.at: dict[int, int] = {0: EVERY}  # lanes by their instruction
        self.waits: Callable[[], bool] | None = None
        self.guessing = False  # a barrier was not there yet: what is read before products end is not used
        self.open: list[Factor] = []
        self.wgmma: list[list[Factor]] = []
        self.bulk_open, self.bulk = Group(), []  # type: ignore[var-annotated]
        self.clock = Clock(block.machine.components)
        self.clock.times[self.component] = 1
        self.came: dict[int, int] = {}
        self.factors: list[Factor] = []
        self.fences = [0]  # times after which TMA and wgmma see what was written before

    @property
    def name(self) -> str:
        return f"warp {self.number} of block {self.block.index}"

    @property
    def time(self) -> int:
        return int(self.clock.times[self.component])

    def published(self) -> None:
        """Others know now what we did until here."""
        self.clock.times[self.component] += 1

    def join(self, other: Clock) -> None:
        self.clock.join(other)


class Block:
    """Shared memory, barriers and warps."""

    def __init__(self, machine: Machine, index: int, rank: int) -> None:
        self.machine, self.index, self.rank = machine, index, rank
        self.warps_each = machine.kernel.threads // LANES
        self.memory = Memory(SHARED_BYTES, machine.readers)
        self.words: dict[int, Value] = {}
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, Meeting] = {}
        self.tags: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.warps = [Warp(self, n) for n in range(self.warps_each)]
