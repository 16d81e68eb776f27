"""Copies into shared memory, by TMA and between blocks, and out of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.sm90.clocks import GRANULE, NEVER, Clock, RaceError
from tests.sm90.core import Run
from tests.sm90.lanes import LANES, lane, signed
from tests.sm90.ptx import Instruction
from tests.sm90.shared import Shared
from tests.sm90.state import SHARED_BYTES, SHARED_START, Block, Group, Mbarrier, ProtocolError, Warp


class Copies(Shared):
    """What is on its way: it lands in any order, and is counted where it lands."""

    stores: dict[int, tuple[int, int, str]]
    added: dict[int, list[int]]
    stored: int

    def _land(self, target: Block, start: int, size: int, barrier: Mbarrier, warp: Warp, tag: Any) -> None:
        """Issue a copy into shared memory that counts at a barrier."""
        if start % 16 or size % 16:
            raise ProtocolError(f"{warp.name}: a copy of {size} bytes to {start}")
        if start < SHARED_START or start + size > SHARED_BYTES:
            raise ProtocolError(f"{warp.name}: a copy beyond shared memory")
        at = np.arange(start // GRANULE, (start + size) // GRANULE)
        target.memory.check_write(at, warp.clock, f"a copy by {warp.name}")
        self._overwritten(target, at, warp.clock, f"a copy by {warp.name}")
        target.memory.note_write(at, barrier.component, barrier.phase + 1, False)
        if tag is None:
            target.tags.pop(start, None)
        else:
            target.tags[start] = tag
        issued = Clock(self.components)
        issued.join(warp.clock)
        phase = barrier.phase

        def land() -> None:
            if barrier.phase != phase:
                raise ProtocolError(f"{barrier.name}: a phase ended before its bytes had come")
            barrier.complete(issued, size)

        self.flying.append(land)

    def _cp_async_bulk(self, x: Instruction) -> Run:
        parts = x.parts
        if parts[3] == "commit_group":
            return self._commit_bulk
        if parts[3] == "wait_group":
            return self._wait_bulk(x, "read" in parts)
        if parts[3] == "tensor":
            return self._load_tensor(x) if parts[5].startswith("shared") else self._store_tensor(x)
        if parts[3] == "global":
            return self._bulk_out(x, "store")
        if parts[4] == "global":
            return self._load_bytes(x)
        return self._send_bytes(x)

    def _load_tensor(self, x: Instruction) -> Run:
        multicast = "multicast::cluster" in x.op
        source = str(x.operands[1])
        coordinates: list[str] = []
        text = source if isinstance(source, str) else ",".join(source)
        descriptor, _, rest = text.strip("[]").partition(",")
        coordinates = [c.strip() for c in rest.strip(" {}").split(",")]

        def load(warp: Warp, mask: int) -> bool:
            if mask & (mask - 1):
                raise ProtocolError(f"{warp.name}: {mask.bit_count()} lanes issue one TMA load")
            parameter = (self.one(self.value(warp, descriptor.strip()), mask) >> 40) - 1
            size = self.launch.boxes[parameter]
            start = self.one(self.address(warp, str(x.operands[0])), mask)
            where = self.one(self.address(warp, str(x.operands[2])), mask)
            at = tuple(signed(self.one(self.value(warp, c), mask), 32) for c in coordinates)
            first = warp.block.index - warp.block.rank
            ranks = [warp.block.rank]
            if multicast:
                chosen = self.one(self.value(warp, str(x.operands[3])), mask)
                ranks = [r for r in range(self.launch.cluster) if chosen >> r & 1]
            for rank in ranks:
                block = self.blocks[first + rank]
                self._land(block, start, size, block.mbarriers[where], warp, (parameter, at))
            warp.published()
            return True

        return load

    def _load_bytes(self, x: Instruction) -> Run:
        def load(warp: Warp, mask: int) -> bool:
            start = self.one(self.address(warp, str(x.operands[0])), mask)
            size = self.one(self.value(warp, str(x.operands[2])), mask)
            barrier = self.barrier(warp, self.one(self.address(warp, str(x.operands[3])), mask))
            self._land(warp.block, start, size, barrier, warp, None)
            warp.published()
            return True

        return load

    def _send_bytes(self, x: Instruction) -> Run:
        """Shared memory of this block into another's: its barrier there also says that reading here has ended."""

        def send(warp: Warp, mask: int) -> bool:
            block, start = self.at_shared(warp, self.one(self.address(warp, str(x.operands[0])), mask))
            source = self.one(self.address(warp, str(x.operands[1])), mask)
            size = self.one(self.value(warp, str(x.operands[2])), mask)
            barrier = self.barrier(warp, self.one(self.address(warp, str(x.operands[3])), mask))
            at = np.arange(source // GRANULE, (source + size) // GRANULE)
            memory = warp.block.memory
            self._check_seen(warp, at, f"a copy by {warp.name}")
            # Until it has landed it may read; who waits for the bytes over there, or hears of it, comes after that.
            self._land(block, start, size, barrier, warp, None)
            memory.note_read(at, warp.component, NEVER)
            landed = self.flying.pop()

            def land() -> None:
                memory.check_read(at, warp.clock, f"a copy by {warp.name}, when it lands,")
                memory.note_read(at, warp.component, self._sent_time(warp, barrier))
                landed()

            self.flying.append(land)
            warp.published()
            return True

        return send

    def _sent_time(self, warp: Warp, barrier: Mbarrier) -> int:
        """A time of the sender's that nobody knows but by the barrier at which the bytes count."""
        warp.published()
        time = warp.time
        barrier.gathered.times[warp.component] = max(int(barrier.gathered.times[warp.component]), time)
        warp.published()
        return time

    def _st_async(self, x: Instruction) -> Run:
        def store(warp: Warp, mask: int) -> bool:
            where, value = self.address(warp, str(x.operands[0])), self.value(warp, str(x.operands[1]))
            barriers = self.address(warp, str(x.operands[2]))
            for i in range(LANES):
                if mask >> i & 1:
                    block, start = self.at_shared(warp, lane(where, i))
                    barrier = self.barrier(warp, lane(barriers, i))
                    at = np.arange(start // GRANULE, start // GRANULE + 1)
                    block.memory.check_write(at, warp.clock, f"st.async of {warp.name}")
                    block.memory.note_write(at, barrier.component, barrier.phase + 1, False)
                    block.words[start] = lane(value, i)
                    issued = Clock(self.components)
                    issued.join(warp.clock)
                    self.flying.append(lambda barrier=barrier, issued=issued: barrier.complete(issued, 4))
            warp.published()
            return True

        return store

    # Bulk copies out of shared memory

    def _cp_reduce(self, x: Instruction) -> Run:
        return self._bulk_out(x, "add")

    def _bulk_out(self, x: Instruction, kind: str) -> Run:
        def out(warp: Warp, mask: int) -> bool:
            target = self.one(self.address(warp, str(x.operands[0])), mask)
            source = self.one(self.address(warp, str(x.operands[1])), mask)
            size = self.one(self.value(warp, str(x.operands[2])), mask)
            self._begin_read(warp, warp.bulk_open, source, size)
            self._global(warp, target, kind)
            warp.bulk_open.targets.append(target)
            return True

        return out

    def _store_tensor(self, x: Instruction) -> Run:
        text = ",".join(x.operands[0]) if isinstance(x.operands[0], tuple) else x.operands[0]
        descriptor = text.strip("[]").partition(",")[0].strip()

        def store(warp: Warp, mask: int) -> bool:
            parameter = (self.one(self.value(warp, descriptor), mask) >> 40) - 1
            source = self.one(self.address(warp, str(x.operands[1])), mask)
            self._begin_read(warp, warp.bulk_open, source, self.launch.boxes[parameter])
            self.stored += 1
            return True

        return store

    def _begin_read(self, warp: Warp, group: Group, source: int, size: int) -> None:
        at = np.arange(source // GRANULE, (source + size) // GRANULE)
        self._check_seen(warp, at, f"a copy out by {warp.name}")
        warp.block.memory.note_read(at, warp.component, int(NEVER))
        group.at.append(at)

    def _commit_bulk(self, warp: Warp, mask: int) -> bool:
        warp.bulk.append(warp.bulk_open)
        warp.bulk_open = Group()
        return True

    def _wait_bulk(self, x: Instruction, reading: bool) -> Run:
        left = int(str(x.operands[0]))

        def wait(warp: Warp, mask: int) -> bool:
            done = warp.bulk[: len(warp.bulk) - left]
            self._end_reads(warp, [g for g in done if not g.ended], [g for g in warp.bulk if g not in done])
            for group in done:
                group.ended = True
            if not reading:
                for group in done:
                    for target in group.targets:
                        self._global_done(warp, target)
                warp.bulk = warp.bulk[len(warp.bulk) - left :] if left else []
            return True

        return wait

    def _end_reads(self, warp: Warp, done: list[Group], left: list[Group]) -> None:
        memory = warp.block.memory
        for group in done:
            for at in group.at:
                memory.check_read(at, warp.clock, f"{warp.name}, at the end of a read,")
                memory.note_read(at, warp.component, warp.time)
        for group in left:
            for at in group.at:
                if not group.ended:
                    memory.note_read(at, warp.component, int(NEVER))

    def _global(self, warp: Warp, target: int, kind: str) -> None:
        """A store, or an addition, which comes after the store, and where order counts after the additions before."""
        last = self.stores.get(target)
        if last is not None:
            component, time, what = last
            if time > warp.clock.times[component] and (self.launch.ordered or "store" in (kind, what)):
                raise RaceError(f"{warp.name}: {kind} at {target} beside a {what}")
        if kind == "store" and self.added[target]:
            raise RaceError(f"{warp.name} stores over what was added")
        if last is None or kind == "store" or self.launch.ordered:
            self.stores[target] = (warp.component, int(NEVER), kind)
        self.added[target].append(warp.block.index)

    def _global_done(self, warp: Warp, target: int) -> None:
        component, time, kind = self.stores[target]
        if component == warp.component and time == NEVER:
            self.stores[target] = (component, warp.time, kind)
