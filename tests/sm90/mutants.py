"""Kernels with one fault of synchronisation each, to see that ``machine`` notices it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tests.sm90.machine import Machine
from tests.sm90.ptx import Instruction, Kernel
from tests.sm90.state import Launch

SAMPLE = 12


def check_faults(kernel: Kernel, launch: Launch, harmless: tuple[str, ...] = (), sample: int = SAMPLE) -> None:
    """The machine notices a sample of the faults at instructions that the launch executes.

    ``harmless``: kinds of which some are none in this kernel.
    """
    executed = Machine(kernel, launch, 0).run().executed
    faults = [(what, faulty) for what, line, faulty in mutants(kernel) if line in executed and not what.startswith(harmless)]
    missed = []
    for what, faulty in random.Random(0).sample(faults, sample):
        try:
            Machine(faulty, launch, 0).run()
        except AssertionError:
            continue
        missed.append(what)
    assert not missed, missed


def check_barriers(kernel: Kernel, launch: Launch, barriers: Iterable[Any]) -> None:
    """The machine notices each of these barriers where it lets everybody pass."""
    missed = []
    for barrier in barriers:
        try:
            Machine(kernel, launch, 1, passing=barrier).run()
        except AssertionError:
            continue
        missed.append(barrier)
    assert not missed, missed


def mutants(kernel: Kernel) -> Iterator[tuple[str, int, Kernel]]:
    """A fault at each place where it can be made: (kind and line, line, kernel)."""
    for i, x in enumerate(kernel.code):
        for kind, changed in _faults(x):
            if changed.operands == x.operands and changed.op == x.op:
                continue
            code = [*kernel.code]
            code[i] = changed
            yield f"{kind}, line {x.line}", x.line, replace(kernel, code=code)


def _faults(x: Instruction) -> Iterator[tuple[str, Instruction]]:
    nothing = Instruction("fence.acq_rel.gpu", [], line=x.line)
    if x.op.startswith("mbarrier.init"):
        yield "one arrival too many", _with(x, 1, "1000")
    elif x.op.startswith("mbarrier.try_wait"):
        yield "no wait", Instruction("mov.pred", [x.operands[0], "1"], line=x.line)
        for parity in "01":
            yield f"parity {parity}", _with(x, 2, parity)
    elif "expect_tx" in x.parts:
        yield "bytes", _with(x, 2, "4096")
    elif x.op.startswith("mbarrier.arrive"):
        yield "no arrival", nothing
        yield "two arrivals", _with(x, 2, "2")
    elif x.parts[:2] in (("bar", "sync"), ("bar", "arrive")):
        yield "no named barrier", nothing
        if len(x.operands) > 1:
            yield "another named barrier", _with(x, 0, "14")
        if len(x.operands) > 1:
            yield "threads", _with(x, 1, "128")
    elif x.op.startswith("wgmma.wait_group") or ".wait_group" in x.op:
        yield "no wait for a group", nothing
    elif x.op.startswith("fence.proxy.async.shared"):
        yield "no fence", nothing
    elif x.op.startswith(("cp.async.bulk.tensor", "cp.async.bulk.shared")):
        yield "no copy", nothing


def _with(x: Instruction, index: int, operand: str) -> Instruction:
    operands = [*x.operands]
    operands[index] = operand
    return replace(x, operands=operands)
