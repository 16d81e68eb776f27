"""mbarriers, named barriers and the cluster's."""

from __future__ import annotations

from typing import Any

from tests.sm90.core import Core, Run
from tests.sm90.lanes import LANES, lane
from tests.sm90.ptx import Instruction
from tests.sm90.state import EVERY, SHARED_START, Mbarrier, Meeting, ProtocolError, Warp


class Barriers(Core):
    """Instructions that wait, and those that are waited for."""

    next_component: int
    clusters: dict[int, Meeting]

    def _mbarrier_init(self, x: Instruction) -> Run:
        def init(warp: Warp, mask: int) -> bool:
            at = self.one(self.address(warp, str(x.operands[0])), mask)
            count = self.one(self.value(warp, str(x.operands[1])), mask)
            block = warp.block
            assert mask & (mask - 1) == 0, "more than one lane inits a barrier"
            if at in block.mbarriers:
                raise ProtocolError(f"the barrier at {at - SHARED_START} is initialised twice")
            name = f"the barrier at {at - SHARED_START} of block {block.index}"
            block.mbarriers[at] = Mbarrier(at, name, count, self.next_component, self.components)
            self.next_component += 1
            return True

        return init

    def _mbarrier_arrive(self, x: Instruction) -> Run:
        expects = "expect_tx" in x.parts

        def arrive(warp: Warp, mask: int) -> bool:
            where = self.address(warp, str(x.operands[1]))
            count = self.value(warp, str(x.operands[2])) if len(x.operands) > 2 else 1
            for i in range(LANES):
                if mask >> i & 1:
                    barrier = self.barrier(warp, lane(where, i))
                    if expects:
                        barrier.arrive(warp.clock, 1, lane(count, i))
                    else:
                        barrier.arrive(warp.clock, lane(count, i))
            warp.published()
            return True

        return arrive

    def _mbarrier_try_wait(self, x: Instruction) -> Run:
        target, where, parity = map(str, x.operands[:3])

        def wait(warp: Warp, mask: int) -> Any:
            barrier = self.barrier(warp, self.one(self.address(warp, where), mask))
            wanted = self.one(self.value(warp, parity), mask)
            if wanted not in (0, 1):
                raise ProtocolError(f"{warp.name} waits for parity {wanted}")
            if not barrier.passed(wanted) and barrier.at != self.passing:
                warp.waits = lambda: barrier.passed(wanted)
                return None
            if barrier.at != self.passing:
                warp.join(barrier.clock)
            self.set(warp, target, True, mask)
            return True

        return wait

    def _mbarrier_test_wait(self, x: Instruction) -> Run:
        target, where, parity = map(str, x.operands[:3])

        def look(warp: Warp, mask: int) -> bool:
            barrier = self.barrier(warp, self.one(self.address(warp, where), mask))
            there = barrier.passed(self.one(self.value(warp, parity), mask))
            if there:
                warp.join(barrier.clock)
            warp.guessing = not there
            self.set(warp, target, there, mask)
            return True

        return look

    def _named(self, warp: Warp, number: int) -> Meeting:
        if not 0 <= number < 16:
            raise ProtocolError(f"{warp.name}: named barrier {number}")
        named = warp.block.named
        if number not in named:
            named[number] = Meeting(f"named barrier {number}", self.components)
        return named[number]

    def _meet(self, warp: Warp, mask: int, pc: int, meeting: Meeting, threads: int, stay: bool) -> Any:
        if mask != EVERY:
            raise ProtocolError(f"{warp.name} comes to {meeting.name} without all its lanes")
        if pc not in warp.came:
            warp.came[pc] = meeting.arrive(warp.clock, threads)
            warp.published()
        opened = warp.came[pc]
        stay = stay and meeting.name != self.passing
        if stay and not meeting.passed(opened):
            warp.waits = lambda: meeting.passed(opened)
            return None
        del warp.came[pc]
        if stay:
            warp.join(meeting.clock)
        return True

    def _bar(self, x: Instruction) -> Run:
        stay = x.parts[1] == "sync"
        assert x.parts[1] in ("sync", "arrive"), x.op

        def bar(warp: Warp, mask: int) -> Any:
            number = self.one(self.value(warp, str(x.operands[0])), mask)
            threads = self.one(self.value(warp, str(x.operands[1])), mask) if len(x.operands) > 1 else self.kernel.threads
            return self._meet(warp, mask, id(x), self._named(warp, number), threads, stay)

        return bar

    def _barrier_cluster(self, x: Instruction) -> Run:
        def cluster(warp: Warp, mask: int) -> Any:
            first = warp.block.index - warp.block.rank
            if first not in self.clusters:
                self.clusters[first] = Meeting("the cluster's barrier", self.components)
            meeting = self.clusters[first]
            if x.parts[2] == "arrive":
                warp.came[-1] = meeting.arrive(warp.clock, self.launch.cluster * self.kernel.threads, mask.bit_count())
                warp.published()
                return True
            opened = warp.came[-1]
            if not meeting.passed(opened):
                warp.waits = lambda: meeting.passed(opened)
                return None
            warp.join(meeting.clock)
            return True

        return cluster
