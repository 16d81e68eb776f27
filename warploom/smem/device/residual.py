"""Shared-memory wavefronts of a kernel by machine instruction: what each access costs, and which ones conflict.

Reads the source page of Nsight Compute, in which wavefronts are counted for every instruction by its address in the code, so
that delays by other traffic of the same pipe, which the counters of a whole kernel include, are left out:

    ncu --section SourceCounters --page source --print-source sass --csv PROGRAM
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_COLUMNS = ("Source", "Instructions Executed", "L1 Wavefronts Shared", "L1 Wavefronts Shared Ideal")
_MATRIX = re.compile(r"(LDSM|STSM)\.16\.M(T?)88(?:\.([24]))?$")
_P0 = re.compile(r"(?<!\w)P0\b")
_PLAIN = re.compile(r"(LDS|STS)(?:\.[US](8|16)|\.(64|128))?$")


@dataclass(frozen=True)
class Instruction:
    """One shared-memory instruction of a kernel, over all warps that executed it."""

    address: int  # bytes from the start of the kernel's code
    sass: str
    access: str  # in the laboratory's words; cp.async stores like sts.128
    executed: int
    wavefronts: int
    ideal: int

    @property
    def excess(self) -> int:
        return self.wavefronts - self.ideal

    @property
    def misread(self) -> bool:
        """Whether this is a copy whose predicate, lanes on or bytes to read, is in P0, which ncu takes for another value.

        Seen in Nsight Compute for CUDA 13: it works out what a copy moves in code that it adds to the kernel. One in P0 has the
        same count whether it reads or fills with zeros, those in other registers have not.
        """
        return self.access.startswith("cp.async") and _P0.search(self.sass) is not None


def corrected(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Misread copies with the excess of those that ran as often and are read; as they are where there are none."""
    found = list(instructions)

    def correct(one: Instruction) -> Instruction:
        alike = [n for n in found if n.access == one.access and n.executed == one.executed and not n.misread]
        if not one.misread or not alike:
            return one
        return replace(one, wavefronts=one.ideal + round(sum(n.excess for n in alike) / len(alike)))

    return [correct(one) for one in found]


def access_of(sass: str) -> str | None:
    """The access that a machine instruction makes to shared memory, or None: LDSM.16.MT88.4 is ldmatrix.x4.trans."""
    words = re.sub(r"^@!?U?P\w+\s+", "", sass.strip()).split()
    name = words[0].rstrip(";") if words else ""
    if name.startswith("LDGSTS"):
        bits = next((part for part in name.split(".") if part in ("64", "128")), "32")
        return f"cp.async.{bits}"
    if found := _MATRIX.match(name):
        family = "ldmatrix" if found[1] == "LDSM" else "stmatrix"
        return f"{family}.x{found[3] or 1}{'.trans' if found[2] else ''}"
    if found := _PLAIN.match(name):
        return f"{found[1].lower()}.{found[2] or found[3] or 32}"
    return None


def parse_source(text: str) -> list[list[Instruction]]:
    """The shared-memory instructions of every kernel in a source page that moved anything; RuntimeError if it is none."""
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines) if '"Source"' in line and '"Address"' in line]
    if not starts:
        raise RuntimeError("no source page:\n" + "\n".join(lines[-12:]))
    return [_kernel(lines[start:end]) for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def _kernel(lines: list[str]) -> list[Instruction]:
    """The instructions of one kernel, from a header, a line for each by address, and whatever ncu says after them."""
    rows = csv.DictReader(lines)
    absent = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
    if absent:
        raise RuntimeError(f"the source page lacks {', '.join(absent)}")
    found = []
    for position, row in enumerate(rows):
        if not row["Source"] or row["Instructions Executed"] is None:
            break  # the table is over
        access = access_of(row["Source"])
        executed, wavefronts, ideal = (_number(row[name]) for name in _COLUMNS[1:])
        if access is not None and wavefronts:
            # 16 bytes an instruction on every architecture from Volta on.
            found.append(Instruction(16 * position, row["Source"].strip(), access, executed, wavefronts, ideal))
    return found


def by_access(instructions: Iterable[Instruction]) -> dict[str, tuple[int, int]]:
    """(wavefronts, ideal) of each access."""
    sums: dict[str, tuple[int, int]] = {}
    for one in instructions:
        wavefronts, ideal = sums.get(one.access, (0, 0))
        sums[one.access] = wavefronts + one.wavefronts, ideal + one.ideal
    return sums


def residuals(instructions: Iterable[Instruction]) -> list[Instruction]:
    """The instructions that conflict, worst first."""
    return sorted((one for one in instructions if one.excess), key=lambda one: -one.excess)


def _number(text: str | None) -> int:
    try:
        return int(float((text or "0").replace(",", "")))
    except ValueError:
        return 0
