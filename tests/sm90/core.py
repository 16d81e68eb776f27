"""How an instruction runs: operands of a warp's lanes, integer instructions, branches and exchanges between lanes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from tests.sm90.lanes import LANES, UNKNOWN, Unknown, Value, apply, function, lane
from tests.sm90.ptx import Instruction, Kernel
from tests.sm90.state import EVERY, SHARED_START, Block, Launch, Mbarrier, ProtocolError, Warp

WINDOW = 24  # bits of an address in a block's window of its cluster's shared memory

Run = Callable[[Warp, int], Any]


@cache
def split_address(operand: str) -> tuple[str, int]:
    register, _, offset = operand.strip("[] ").partition("+")
    return register, int(offset or 0)


class Core:
    """What the parts of ``Machine`` share; a method named after an instruction returns what that does."""

    kernel: Kernel
    launch: Launch
    code: list[Instruction]
    labels: dict[str, int]
    draw: random.Random
    blocks: list[Block]
    warps: list[Warp]
    passing: object  # the barrier that lets everybody pass
    components: int  # of clocks
    flying: list[Callable[[], None]]  # copies that have not landed

    # Operands

    def value(self, warp: Warp, operand: str) -> Value:
        found = warp.registers.get(operand)
        if found is not None:
            return found
        if operand[0] == "%" or "@" in operand:
            return self._special(warp, operand)
        warp.registers[operand] = found = self._constant(operand)
        return found

    def _constant(self, operand: str) -> int:
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        if operand[0].isdigit() or operand[0] == "-":
            return int(operand, 0)
        if operand == "__dynamic_shmem__0":
            return SHARED_START
        if operand.startswith("param_"):
            return (int(operand[6:]) + 1) << 40  # an address that only TMA takes
        raise AssertionError(f"what is {operand}?")

    def _special(self, warp: Warp, name: str) -> Value:
        block = warp.block
        values: dict[str, Callable[[], Value]] = {
            "%tid.x": lambda: [warp.number * LANES + i for i in range(LANES)],
            "%laneid": lambda: list(range(LANES)),
            "%warpid": lambda: warp.number,
            "%ctaid.x": lambda: block.index,
            "%nctaid.x": lambda: self.launch.grid,
            "%cluster_ctarank": lambda: block.rank,
            "%cluster_ctaid.x": lambda: block.rank,
        }
        if name in values:
            return values[name]()
        if name.count(".") or name.rstrip("0123456789@")[1:] not in ("r", "rd", "p", "rs", ""):
            raise AssertionError(f"what is {name}?")
        return UNKNOWN

    def set(self, warp: Warp, name: str, value: Value, mask: int) -> None:
        if mask != EVERY and name in warp.registers:
            old = warp.registers[name]
            value = [lane(value if mask >> i & 1 else old, i) for i in range(LANES)]
        warp.registers[name] = value

    def address(self, warp: Warp, operand: str) -> Value:
        """Of ``[register+offset]``."""
        register, offset = split_address(operand)
        base = self.value(warp, register)
        if not offset:
            return base
        return base + offset if type(base) is int else apply(lambda x: x + offset, [base])

    def one(self, value: Value, mask: int) -> int:
        """Of the lanes that are here, which must agree."""
        found = {lane(value, i) for i in range(LANES) if mask >> i & 1} if type(value) is list else {value}
        if len(found) != 1 or isinstance(next(iter(found)), Unknown):
            raise ProtocolError(f"lanes do not agree on an operand: {found}")
        return int(found.pop())

    def at_shared(self, warp: Warp, address: int) -> tuple[Block, int]:
        """Whose shared memory, and where in it."""
        rank = address >> WINDOW
        if rank == 0:
            return warp.block, address
        first = warp.block.index - warp.block.rank
        return self.blocks[first + rank - 1], address & (1 << WINDOW) - 1

    def barrier(self, warp: Warp, address: int) -> Mbarrier:
        block, at = self.at_shared(warp, address)
        if at not in block.mbarriers:
            raise ProtocolError(f"{warp.name}: no barrier at {at - SHARED_START}")
        return block.mbarriers[at]

    # Instructions

    def _step(self, x: Instruction) -> Run:
        """What an instruction does: to a warp and the lanes that are here; None: it waits; a list: where lanes go on."""
        run = self._plain(x)
        if x.guard is None or x.parts[0] == "bra":
            return run
        guard, negated = x.guard, x.negated

        def guarded(warp: Warp, mask: int) -> Any:
            condition = self.value(warp, guard)
            lanes = self._lanes(condition, negated, mask)
            if not lanes:
                return True
            return run(warp, lanes) and True

        return guarded

    def _lanes(self, condition: Value, negated: bool, mask: int) -> int:
        if condition is UNKNOWN:
            return mask if self.draw.random() < 0.5 else 0
        if type(condition) is not list:
            return mask if bool(condition) != negated else 0
        unknown = self.draw.random() < 0.5
        found = 0
        for i, c in enumerate(condition):
            if (unknown if c is UNKNOWN else bool(c)) != negated:
                found |= 1 << i
        return found & mask

    def _plain(self, x: Instruction) -> Run:
        parts = x.parts
        compute = function(parts)
        if parts[0] == "ld" and parts[1] == "param":
            return self._load_parameter(x)
        if compute is not None and not x.effect:
            target, sources = x.operands[0], [s for s in x.operands[1:] if isinstance(s, str)]
            assert isinstance(target, str), x

            def calculate(warp: Warp, mask: int) -> bool:
                registers = warp.registers
                values = [registers[s] if s in registers else self.value(warp, s) for s in sources]
                if mask == EVERY:
                    registers[target] = apply(compute, values)
                else:
                    self.set(warp, target, apply(compute, values), mask)
                return True

            return calculate
        for length in (3, 2, 1):
            method = getattr(self, "_" + "_".join(parts[:length]).replace(":", ""), None)
            if method is not None:
                found: Run = method(x)
                return found
        raise AssertionError(f"{x.op} is not known here, of line {x.line}")

    def _nothing(self, x: Instruction) -> Run:
        return lambda warp, mask: True

    # What adds to, or raises, a result in global memory, which nobody here reads.
    _red_relaxed = _nothing
    _setmaxnreg = _prefetch = _bar_warp = _wgmma_fence = _fence_mbarrier_init = _fence_acq_rel = _nothing

    def _load_parameter(self, x: Instruction) -> Run:
        targets = x.operands[0] if isinstance(x.operands[0], tuple) else (x.operands[0],)
        name, _, offset = str(x.operands[1]).strip("[]").partition("+")
        size = int(x.parts[-1][1:]) // 8
        data = self.launch.parameters[int(name.removeprefix("param_"))]
        start = int(offset or 0)
        values = [int.from_bytes(data[start + i * size : start + (i + 1) * size], "little") for i in range(len(targets))]

        def load(warp: Warp, mask: int) -> bool:
            for target, value in zip(targets, values, strict=True):
                self.set(warp, target, value, mask)
            return True

        return load

    def _mov(self, x: Instruction) -> Run:
        target, source = x.operands
        bits = int(x.parts[-1][1:])
        if isinstance(source, tuple):  # pack
            each = bits // len(source)

            def pack(warp: Warp, mask: int) -> bool:
                values = [self.value(warp, s) for s in source]
                self.set(warp, str(target), apply(lambda *xs: sum(v << each * i for i, v in enumerate(xs)), values), mask)
                return True

            return pack
        if isinstance(target, tuple):
            each = bits // len(target)

            def unpack(warp: Warp, mask: int) -> bool:
                value = self.value(warp, source)
                for i, t in enumerate(target):
                    if t != "_":
                        self.set(warp, t, apply(lambda v, i=i: v >> each * i & (1 << each) - 1, [value]), mask)
                return True

            return unpack

        def move(warp: Warp, mask: int) -> bool:
            value = self.value(warp, source)
            self.set(warp, target, value & (1 << bits) - 1 if type(value) is int else value, mask)
            return True

        return move

    def _cvta(self, x: Instruction) -> Run:
        target, source = map(str, x.operands)

        def copy(warp: Warp, mask: int) -> bool:
            self.set(warp, target, self.value(warp, source), mask)
            return True

        return copy

    def _mapa(self, x: Instruction) -> Run:
        target, source, rank = map(str, x.operands)

        def map_(warp: Warp, mask: int) -> bool:
            values = [self.value(warp, source), self.value(warp, rank)]
            self.set(warp, target, apply(lambda a, r: (r + 1 << WINDOW) | a, values), mask)
            return True

        return map_

    def _elect(self, x: Instruction) -> Run:
        target = str(x.operands[0]).partition("|")[2]

        def elect(warp: Warp, mask: int) -> bool:
            first = (mask & -mask).bit_length() - 1
            self.set(warp, target, [i == first for i in range(LANES)], mask)
            return True

        return elect

    def _shfl(self, x: Instruction) -> Run:
        target, source, distance = map(str, x.operands[:3])
        kind = x.parts[2]
        clamp = int(str(x.operands[3]))

        def shuffle(warp: Warp, mask: int) -> bool:
            value = self.value(warp, source)
            by = self.value(warp, distance)
            if kind == "idx":
                found: Value = [lane(value, lane(by, i) % LANES) for i in range(LANES)]
            elif kind == "bfly":
                found = [lane(value, i ^ lane(by, i)) for i in range(LANES)]
            elif kind == "up":
                found = [lane(value, i - lane(by, i) if i - lane(by, i) >= clamp else i) for i in range(LANES)]
            else:
                raise AssertionError(x.op)
            found = found[0] if found.count(found[0]) == LANES else found
            self.set(warp, target, found, mask)
            return True

        return shuffle

    def _vote(self, x: Instruction) -> Run:
        target, source = map(str, x.operands[:2])
        kind = x.parts[2]

        def vote(warp: Warp, mask: int) -> bool:
            value = self.value(warp, source)
            each = [lane(value, i) for i in range(LANES) if mask >> i & 1]
            found: Value
            if kind == "ballot":
                assert UNKNOWN not in each
                found = sum(bool(lane(value, i)) << i for i in range(LANES) if mask >> i & 1)
            elif kind == "any":
                found = True if any(v is not UNKNOWN and v for v in each) else UNKNOWN if UNKNOWN in each else False
            elif kind == "all":
                found = False if any(v is not UNKNOWN and not v for v in each) else UNKNOWN if UNKNOWN in each else True
            else:
                raise AssertionError(x.op)
            self.set(warp, target, found, mask)
            return True

        return vote

    def _bra(self, x: Instruction) -> Run:
        to = self.labels[str(x.operands[0])]
        if x.guard is None:
            return lambda warp, mask: [(to, mask)]
        guard, negated = x.guard, x.negated
        following = next(i for i, y in enumerate(self.code) if y is x) + 1

        def branch(warp: Warp, mask: int) -> Any:
            taken = self._lanes(self.value(warp, guard), negated, mask)
            return [(to, taken), (following, mask & ~taken)]

        return branch

    def _ret(self, x: Instruction) -> Run:
        return lambda warp, mask: [(0, 0)]

    _exit = _ret
