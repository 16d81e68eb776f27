"""Shared memory as instructions read and write it, and the fences that show it to TMA and wgmma."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

import numpy as np

from tests.sm90.clocks import GRANULE, Clock, RaceError, where
from tests.sm90.core import Core, Run
from tests.sm90.lanes import LANES, UNKNOWN, Unknown, Value, lane
from tests.sm90.ptx import Instruction
from tests.sm90.state import EVERY, Block, ProtocolError, Warp


@lru_cache(maxsize=4096)  # a stage's addresses come again
def granules(places: tuple[int, ...], size: int) -> np.ndarray:
    """Of so many bytes from each place on."""
    each = np.unique(np.array(places, np.int64))
    return np.unique((each[:, None] + np.arange(0, size, GRANULE)).ravel() // GRANULE)


class Shared(Core):
    """Loads, stores and who comes too early."""

    def _granules(self, address: Value, size: int, mask: int) -> np.ndarray:
        places = [lane(address, i) for i in range(LANES) if mask >> i & 1] if type(address) is list else [address]
        if any(isinstance(p, Unknown) for p in places):
            raise ProtocolError("an address in shared memory is not known")
        return granules(tuple(places), size)

    def _read(self, warp: Warp, at: np.ndarray, what: str) -> None:
        warp.block.memory.check_read(at, warp.clock, f"{warp.name} ({what})")
        warp.block.memory.note_read(at, warp.component, warp.time)

    def _write(self, warp: Warp, at: np.ndarray, what: str) -> None:
        memory = warp.block.memory
        memory.check_write(at, warp.clock, f"{warp.name} ({what})")
        self._overwritten(warp.block, at, warp.clock, warp.name)
        memory.note_write(at, warp.component, warp.time, True)

    def _ld_shared(self, x: Instruction) -> Run:
        targets = x.operands[0] if isinstance(x.operands[0], tuple) else (x.operands[0],)
        where = str(x.operands[1])
        size = int(x.parts[-1][1:]) // 8

        def load(warp: Warp, mask: int) -> bool:
            if warp.guessing:
                for target in targets:
                    self.set(warp, target, UNKNOWN, mask)
                return True
            address = self.address(warp, where)
            self._read(warp, self._granules(address, size * len(targets), mask), f"line {x.line}")
            words = warp.block.words
            for n, target in enumerate(targets):
                offset = n * size
                if type(address) is list:
                    value: Value = [words.get(a + offset, UNKNOWN) if mask >> i & 1 else UNKNOWN for i, a in enumerate(address)]
                else:
                    value = words.get(address + offset, UNKNOWN)
                self.set(warp, target, value, mask)
            return True

        return load

    _ld_volatile = _ld_shared  # kernels read nothing else so

    def _st_shared(self, x: Instruction) -> Run:
        sources = x.operands[1] if isinstance(x.operands[1], tuple) else (x.operands[1],)
        size = int(x.parts[-1][1:]) // 8

        def store(warp: Warp, mask: int) -> bool:
            address = self.address(warp, str(x.operands[0]))
            self._write(warp, self._granules(address, size * len(sources), mask), f"line {x.line}")
            here = [i for i in range(LANES) if mask >> i & 1]
            places = [address[i] for i in here] if type(address) is list else [address] * len(here)
            for n, source in enumerate(sources):
                value = self.value(warp, source)
                values = [value[i] for i in here] if type(value) is list else [value] * len(here)
                warp.block.words.update(zip([p + n * size for p in places], values, strict=True))
            return True

        return store

    def _stmatrix(self, x: Instruction) -> Run:
        rows = 8 * int(x.parts[4].removeprefix("x"))  # of 16 bytes, whose addresses are those of the first lanes

        def store(warp: Warp, mask: int) -> bool:
            if mask != EVERY:
                raise ProtocolError(f"{warp.name}: stmatrix without all lanes")
            address = self.address(warp, str(x.operands[0]))
            self._write(warp, self._granules(address, 16, (1 << rows) - 1), f"line {x.line}")
            return True

        return store

    def _ldmatrix(self, x: Instruction) -> Run:
        rows = 8 * int(x.parts[4].removeprefix("x"))
        assert isinstance(x.operands[0], tuple)

        def load(warp: Warp, mask: int) -> bool:
            if mask != EVERY:
                raise ProtocolError(f"{warp.name}: ldmatrix without all lanes")
            address = self.address(warp, str(x.operands[1]))
            self._read(warp, self._granules(address, 16, (1 << rows) - 1), f"line {x.line}")
            return True

        return load

    def _fence_proxy_async(self, x: Instruction) -> Run:
        def fence(warp: Warp, mask: int) -> bool:
            warp.published()
            warp.fences.append(warp.time)
            return True

        return self._nothing(x) if x.parts[3] == "global" else fence

    def _check_seen(self, warp: Warp, at: np.ndarray, who: str) -> None:
        """As ``check_read`` for TMA and wgmma, which see what instructions wrote after a fence of the writer's."""
        memory = warp.block.memory
        memory.check_read(at, warp.clock, who)
        at = at[memory.generic[at]]
        if not at.size:
            return
        for writer in sorted(set(memory.writer[at].tolist())):
            fences = self.warps[writer].fences
            fence = fences[bisect_right(fences, warp.clock.times[writer]) - 1]
            unseen = at[(memory.writer[at] == writer) & (memory.written[at] >= fence)]
            if unseen.size:
                raise RaceError(f"{who} reads {where(unseen)} without a fence after it was written")

    def _overwritten(self, block: Block, at: np.ndarray, clock: Clock, who: str) -> None:
        """What wgmma read, or is reading: those who use the product must have come first."""
        first, last = int(at[0]), int(at[-1])
        covers = len(at) == last - first + 1 > LANES  # by a copy: what it overwrites after it was read is done with
        for warp in block.warps:
            known, done = int(clock.times[warp.component]), False
            for factor in warp.factors:
                if factor.time <= known:
                    done = done or (covers and not factor.early and first <= factor.first and factor.last <= last)
                elif factor.overlaps(at, first, last):
                    factor.early = factor.early or f"{who} overwrites {where(factor.at)}, which it is reading"
                    if factor.used:
                        factor.use(warp.name)
            if done:
                warp.factors = [f for f in warp.factors if f.early or f.time > known or f.first < first or f.last > last]
