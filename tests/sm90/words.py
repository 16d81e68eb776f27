"""Global memory: words that blocks wait for, and what they hand each other."""

from __future__ import annotations

from tests.sm90.clocks import Clock, RaceError
from tests.sm90.core import Core, Run
from tests.sm90.lanes import LANES, UNKNOWN, Value, lane
from tests.sm90.ptx import Instruction
from tests.sm90.state import Warp


class Words(Core):
    """Loads, atomic operations, and what they say about the order."""

    words: dict[int, int]
    handed: dict[int, tuple[int, int]]
    released: dict[int, Clock]

    def _ld_acquire(self, x: Instruction) -> Run:
        def load(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[1]))
            values = [self._acquire(warp, lane(where, i)) if mask >> i & 1 else UNKNOWN for i in range(LANES)]
            self.set(warp, str(x.operands[0]), values, mask)
            return True

        return load

    def _acquire(self, warp: Warp, at: int) -> int:
        if at in self.released:
            warp.join(self.released[at])
        return self.words.get(at, 0)

    def _release(self, warp: Warp, at: int) -> None:
        if at not in self.released:
            self.released[at] = Clock(self.components)
        self.released[at].join(warp.clock)
        warp.published()

    def _ld_global(self, x: Instruction) -> Run:
        targets = x.operands[0] if isinstance(x.operands[0], tuple) else (x.operands[0],)
        size = int(x.parts[-1][1:]) // 8

        def load(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[1]))
            for n, target in enumerate(targets):
                values = []
                for i in range(LANES):
                    at = lane(where, i)
                    known = mask >> i & 1 and at is not UNKNOWN
                    if known and at in self.launch.watched:
                        self._taken(warp, at)
                    values.append(self.words.get(at + n * size, UNKNOWN) if known else UNKNOWN)
                self.set(warp, target, values, mask)
            return True

        return load

    def _taken(self, warp: Warp, at: int) -> None:
        if at not in self.handed:
            raise RaceError(f"{warp.name} reads what nobody has handed over")
        writer, time = self.handed[at]
        if time > warp.clock.times[writer]:
            raise RaceError(f"{warp.name} reads what is handed over and does not come after its writer")

    def _st_global(self, x: Instruction) -> Run:
        def store(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[0]))
            for i in range(LANES):
                if mask >> i & 1 and lane(where, i) is not UNKNOWN and lane(where, i) in self.launch.watched:
                    self.handed[lane(where, i)] = (warp.component, warp.time)
            return True

        return store

    def _atom_global(self, x: Instruction) -> Run:
        swaps, both = "cas" in x.parts, "acq_rel" in x.parts

        def atom(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[1]))
            given = [self.value(warp, str(o)) for o in x.operands[2:]]
            old: list[Value] = [UNKNOWN] * LANES
            for i in range(LANES):
                if mask >> i & 1:
                    at = lane(where, i)
                    old[i] = self._acquire(warp, at) if both or "acquire" in x.parts else self.words.get(at, 0)
                    if "max" in x.parts:
                        self.words[at] = max(old[i], lane(given[0], i))
                    elif not swaps:
                        self.words[at] = old[i] + lane(given[0], i)
                    elif old[i] == lane(given[0], i):
                        self.words[at] = lane(given[1], i)
                    if both:
                        self._release(warp, at)
            self.set(warp, str(x.operands[0]), old, mask)
            return True

        return atom

    def _red_release(self, x: Instruction) -> Run:
        def add(warp: Warp, mask: int) -> bool:
            where, by = self.address(warp, str(x.operands[0])), self.value(warp, str(x.operands[1]))
            for i in range(LANES):
                if mask >> i & 1:
                    at = lane(where, i)
                    self.words[at] = self.words.get(at, 0) + lane(by, i)
                    self._release(warp, at)
            return True

        return add
