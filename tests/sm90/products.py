"""wgmma: what it reads of shared memory, until when, and whether anybody uses what it made of it."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np

from tests.sm90.clocks import GRANULE, NEVER, RaceError
from tests.sm90.core import Run
from tests.sm90.ptx import Instruction
from tests.sm90.shared import Shared
from tests.sm90.state import EVERY, Factor, ProtocolError, Warp


class Products(Shared):
    """Groups of wgmma, and the registers of their products."""

    products: defaultdict[int, list[tuple[int, tuple[int, ...]]]]  # what each warp multiplied, by parameter and coordinates

    def _wgmma_mma_async(self, x: Instruction) -> Run:
        rest = x.operands[1:]
        columns = int(x.parts[4].partition("n")[2].partition("k")[0])
        from_registers = isinstance(rest[0], tuple)
        names = [str(rest[1])] if from_registers else [str(rest[0]), str(rest[1])]
        transposed = [str(t) == "1" for t in rest[-(1 if from_registers else 2) :]]
        sizes = [columns] if from_registers else [64, columns]

        results = x.operands[0]
        assert isinstance(results, tuple)
        adds = str(rest[2])

        def issue(warp: Warp, mask: int) -> bool:
            if mask != EVERY:
                raise ProtocolError(f"{warp.name}: wgmma without all lanes")
            if not self.one(self.value(warp, adds), mask):
                self._forget(warp, set(results))
            for name, wide, size in zip(names, transposed, sizes, strict=True):
                descriptor = self.one(self.value(warp, name), mask)
                factor = Factor(footprint(descriptor, wide, size), set(results))
                try:
                    self._check_seen(warp, factor.at, f"{warp.name} (wgmma, line {x.line})")
                except RaceError as error:
                    factor.early = str(error)
                warp.factors.append(factor)
                warp.open.append(factor)
                tag = warp.block.tags.get((descriptor & 0x3FFF) * 16)
                if tag is not None:
                    self.products[warp.component].append(tag)
            return True

        return issue

    def _product(self, x: Instruction) -> Run:
        """Products are moved or used; one of what may not have been there must not be used."""

        steps: list[tuple[str, set[str]]] = []
        for target, *sources in x.operands:
            if not target and steps and not steps[-1][0]:
                steps[-1][1].update(sources)  # of those that use products, one after the other, it does not matter which does
            else:
                steps.append((target, set(sources)))

        def follow(warp: Warp, mask: int) -> bool:
            for target, sources in steps if warp.factors else ():
                if target:
                    self._forget(warp, {target})
                    for factor in warp.factors:
                        if not factor.results.isdisjoint(sources):
                            factor.results.add(target)
                else:
                    for factor in warp.factors:
                        if not factor.used and not factor.results.isdisjoint(sources):
                            factor.use(warp.name)
            return True

        return follow

    def _forget(self, warp: Warp, results: set[str]) -> None:
        """Registers get other contents; of a product that nobody used it does not matter what it was made of."""
        for factor in warp.factors:
            factor.results -= results
        warp.factors = [f for f in warp.factors if f.results or f.used or f.time == NEVER]

    def _wgmma_commit_group(self, x: Instruction) -> Run:
        def commit(warp: Warp, mask: int) -> bool:
            warp.wgmma.append(warp.open)
            warp.open = []
            return True

        return commit

    def _wgmma_wait_group(self, x: Instruction) -> Run:
        left = int(str(x.operands[0]))

        def wait(warp: Warp, mask: int) -> bool:
            warp.guessing = False
            while len(warp.wgmma) > left:
                for factor in warp.wgmma.pop(0):
                    factor.time = warp.time
            return True

        return wait


@lru_cache(maxsize=4096)
def footprint(descriptor: int, transposed: bool, size: int) -> np.ndarray:
    """What a wgmma reads of an operand of ``size`` rows, or columns, and 16 deep: granules of shared memory.

    By the matrix descriptor: where it starts, two strides and the swizzle (PTX ISA, "Matrix-Descriptor Format").
    """
    start, leading, stride = (descriptor >> shift & 0x3FFF for shift in (0, 16, 32))
    width = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    rows = np.arange(8) * width
    if transposed:  # 8 deep by a swizzle's width along ``size``
        bytes_ = np.arange(0, width, GRANULE)
        outer = np.arange(-(-2 * size // width)) * leading * 16
        outer = (outer[:, None] + np.arange(2) * stride * 16).ravel()
    else:
        bytes_ = np.arange(0, 32, GRANULE)
        outer = np.arange(size // 8) * stride * 16
    at = start * 16 + (outer[:, None, None] + rows[:, None] + bytes_).ravel()
    bits = {128: 3, 64: 2, 32: 1}[width]
    swizzled = at ^ (at >> 3 & ((1 << bits) - 1) << 4)
    return np.unique(swizzled // GRANULE)
