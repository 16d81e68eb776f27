"""Who is ordered after whom: vector clocks, and by them races between accesses to shared memory.

Warps have a component each, and so has each mbarrier: that of the bytes which TMA brings and it counts. An access is written
down with its component's time; whoever has that time in his clock comes after it, whatever the order in which they happened
to run here.
"""

from __future__ import annotations

import numpy as np

GRANULE = 4  # bytes
NEVER = np.int32(2**31 - 1)  # when a read ends that is under way


class RaceError(AssertionError):
    """Two accesses of which nothing says which comes first."""


class Clock:
    """What a warp, or a barrier, knows of all the others."""

    __slots__ = ("times",)

    def __init__(self, size: int) -> None:
        self.times = np.zeros(size, np.int32)

    def join(self, other: Clock) -> None:
        np.maximum(self.times, other.times, out=self.times)


class Memory:
    """A block's shared memory: of each granule who wrote it last and who has read it since."""

    def __init__(self, size: int, readers: int) -> None:
        granules = size // GRANULE
        self.writer = np.full(granules, -1, np.int32)
        self.written = np.zeros(granules, np.int32)
        self.generic = np.zeros(granules, bool)  # written by an instruction, not by TMA
        self.read = np.zeros((readers, granules), np.int32)

    def check_read(self, at: np.ndarray, clock: Clock, who: str) -> None:
        there = run(at)
        writer = self.writer[there]
        if (writer < 0).any():
            raise RaceError(f"{who} reads what nobody wrote, {where(at[writer < 0])}")
        early = self.written[there] > clock.times[writer]
        if early.any():
            raise RaceError(f"{who} reads {where(at[early])} and does not come after its writer")

    def note_read(self, at: np.ndarray, reader: int, time: int) -> None:
        self.read[reader, run(at)] = time

    def check_write(self, at: np.ndarray, clock: Clock, who: str) -> None:
        there = run(at)
        writer = self.writer[there]
        early = (writer >= 0) & (self.written[there] > clock.times[writer])
        if early.any():
            raise RaceError(
                f"{who} writes {where(at[early])} and does not come after its writer, {set(writer[early].tolist())}"
            )
        readers = self.read.shape[0]
        late = self.read[:, there] > clock.times[:readers, None]
        if late.any():
            rows = np.nonzero(late.any(1))[0].tolist()
            raise RaceError(f"{who} writes {where(at[late.any(0)])} which {rows} may still read")

    def note_write(self, at: np.ndarray, writer: int, time: int, generic: bool) -> None:
        there = run(at)
        self.writer[there], self.written[there], self.generic[there] = writer, time, generic
        self.read[:, there] = 0


def run(at: np.ndarray) -> np.ndarray | slice:
    """Granules in ascending order as numpy reaches them soonest."""
    first, last = at[0], at[-1]
    return slice(first, last + 1) if last - first + 1 == len(at) else at


def where(at: np.ndarray) -> str:
    return f"bytes {int(at.min()) * GRANULE} to {int(at.max() + 1) * GRANULE} of shared memory"
