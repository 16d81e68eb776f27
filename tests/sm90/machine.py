"""Blocks of one kernel: warps in a drawn order, mbarriers, named barriers, TMA, wgmma and who may touch shared memory when.

A wrong number of arrivals or bytes, a wait that never ends, a slot that is overwritten while somebody may read it, and a read
of what may not be there yet all raise an AssertionError. Races are found by ``clocks``, whatever the drawn order.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from tests.sm90.barriers import Barriers
from tests.sm90.clocks import Clock
from tests.sm90.copies import Copies
from tests.sm90.lanes import LANES
from tests.sm90.products import Products
from tests.sm90.ptx import Kernel
from tests.sm90.state import Block, HangError, Launch, Meeting, ProtocolError, Warp
from tests.sm90.words import Words

PATIENCE = 1000  # turns of warps that only look at a word of global memory


class Machine(Barriers, Copies, Products, Words):
    """``run`` plays all blocks through; ``processors`` clusters are there at a time."""

    def __init__(self, kernel: Kernel, launch: Launch, seed: int, processors: int = 1, passing: object = None) -> None:
        self.kernel, self.launch, self.draw = kernel, launch, random.Random(seed)
        others = (("st.global", "ld.global") if launch.watched else ()) + (("ld.shared",) if launch.reads else ())
        self.code, self.labels = kernel.sliced(others)
        self.processors, self.passing = processors, passing
        warps = kernel.threads // LANES
        self.readers = launch.grid * warps
        self.next_component = self.readers
        self.components = self.readers + launch.grid * 64
        self.flying: list[Callable[[], None]] = []
        self.words = dict(launch.words)
        self.released: dict[int, Clock] = {}
        self.stores: dict[int, tuple[int, int, str]] = {}
        self.added: dict[int, list[int]] = defaultdict(list)  # blocks that stored or added at an address
        self.stored = 0  # copies out by tensor maps
        self.handed: dict[int, tuple[int, int]] = {}  # who wrote what is watched
        self.executed: set[int] = set()  # lines of effects
        self.clusters: dict[int, Meeting] = {}
        self.blocks = [Block(self, i, i % launch.cluster) for i in range(launch.grid)]
        self.warps = [w for block in self.blocks for w in block.warps]
        self.products: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # what each warp multiplied
        self.steps = [self._step(x) for x in self.code]
        self.effects = [x.effect for x in self.code]
        self.looks = [x.op.startswith(("ld.acquire", "bra")) for x in self.code]

    # Running

    def run(self, backwards: bool = False) -> Machine:
        """``backwards``: clusters start from the last one on, which no GPU does."""
        groups = [self.blocks[i : i + self.launch.cluster] for i in range(0, len(self.blocks), self.launch.cluster)]
        groups = groups[::-1] if backwards else groups
        active: list[Warp] = []
        running: list[list[Block]] = []
        self.idle = 0
        while groups or active:
            running = [g for g in running if any(w.at for b in g for w in b.warps)]
            while groups and len(running) < self.processors:
                running.append(groups.pop(0))
                active += [w for b in running[-1] for w in b.warps]
            ready = [w for w in active if w.waits is None or w.waits()]
            if self.flying and (not ready or self.draw.random() < 0.3):
                self.flying.pop(self.draw.randrange(len(self.flying)))()
                continue
            if not ready:
                raise HangError("hangs: " + "; ".join(self._where(w) for w in active))
            self.idle += 1
            if self.idle > PATIENCE:
                raise HangError("waits for ever")
            warp = self.draw.choice(ready)
            warp.waits = None
            self._go(warp)
            if not warp.at:
                active.remove(warp)
        self._check_end()
        return self

    def _where(self, warp: Warp) -> str:
        at = min(warp.at)
        return f"{warp.name} at line {self.code[at].line} ({self.code[at].op})"

    def _go(self, warp: Warp) -> None:
        """Until it waits, ends, or others get their chance."""
        budget = self.draw.choice((1, 4, 20, 100))
        at = warp.at
        while at:
            pc = min(at) if len(at) > 1 else next(iter(at))
            mask = at.pop(pc)
            following = self.steps[pc](warp, mask)
            if following is None:  # not yet
                at[pc] = mask
                return
            for to, lanes in following if type(following) is list else ((pc + 1, mask),):
                if lanes:
                    at[to] = at.get(to, 0) | lanes
            if self.effects[pc]:
                budget -= 1
                self.executed.add(self.code[pc].line)
                if not self.looks[pc]:
                    self.idle = 0
                if budget <= 0 and at:
                    return

    def _check_end(self) -> None:
        for block in self.blocks:
            for warp in block.warps:
                if warp.wgmma or warp.open:
                    raise ProtocolError(f"{warp.name} ends before its wgmma")
                if any(not g.ended for g in warp.bulk) or warp.bulk_open.at:
                    raise ProtocolError(f"{warp.name} ends before its bulk copies")
            for barrier in block.mbarriers.values():
                if barrier.bytes:
                    raise ProtocolError(f"{barrier.name} still expects {barrier.bytes} bytes at the end")
        assert not self.flying
