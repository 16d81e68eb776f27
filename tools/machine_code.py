"""Faults of compiled Triton kernels that no test of results is sure to meet.

python tools/machine_code.py FOLDER    every kernel in a cache of Triton's; prints the faults, exit status 1 if there are any

Faults of Triton 3.6 and of the ptxas that it brings (12.8.93) were met, each wrong or not by the order of a kernel's
instructions; docs/lab-notes/compiler.md tells of each.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

# Uniform instructions that write no uniform register, and instructions of other units that do.
_NO_RESULT = ("UTMA", "UBLK", "USETMAXREG", "UCGABAR", "UISETP", "UPLOP3", "UFSETP", "UR2UP", "UCPREFETCH")
_OTHERS = ("R2UR", "S2UR", "REDUX", "VOTEU")

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\bUR(\d+)\b")


def faults(ttgir: str, ptx: str, listing: str) -> list[str]:
    """What is wrong with a kernel, from Triton's GPU dialect, its PTX and nvdisasm's listing of its machine code."""
    ttgir = _unique(re.sub(r" loc\(#loc\d*\)", "", ttgir))
    found = [f"waits twice for {product}" for product in waited_twice(ttgir)]
    found += [f"a copy may overwrite {buffer}, which a product reads" for buffer in overwritten(ttgir)]
    found += [f"describes one address in two ways: {base}" for base in described_twice(ptx)]
    return found + [f"reads what was never written: {text}" for text in undefined(listing)]


def described_twice(ptx: str) -> list[str]:
    """Addresses of shared memory that matrix descriptors of different upper halves (swizzle, strides) are made from.

    ptxas 12.8 may drop the first write of the second one's upper half, and then adds to a register that holds anything.
    """
    uppers: dict[str, set[int]] = {}
    for base, constant in re.findall(r"(?:or|add)\.[bsu]64\s+%rd\d+, (%rd\d+), (-?\d{18,});", ptx):
        uppers.setdefault(base, set()).add((int(constant) & (2**64 - 1)) >> 32)
    return sorted(base for base, found in uppers.items() if len(found) > 1)


def _unique(ttgir: str) -> str:
    """The same with every value under a name of its own: regions that do not enclose each other reuse names."""
    definitions: dict[str, int] = {}

    def numbered(text: str) -> str:
        return re.sub(r"%\w+", lambda value: f"{value[0]}_{definitions.get(value[0], 0)}", text)

    lines = []
    for line in ttgir.splitlines():
        result, equals, rest = line.partition(" = ")
        value = re.match(r"\s*(%\w+)(?::\d+)?$", result)
        if value and equals:
            rest = numbered(rest)
            definitions[value[1]] = definitions.get(value[1], 0) + 1
            lines.append(f"{numbered(value[1])} = {rest}")
        else:
            lines.append(numbered(line))
    return "\n".join(lines)


def waited_twice(ttgir: str) -> list[str]:
    """Products that are waited for more than once: the first wait hands on registers that are not written yet."""
    waits = re.findall(r"warp_group_dot_wait (%\w+)", ttgir)
    return sorted({name for name in waits if waits.count(name) > 1})


def overwritten(ttgir: str) -> list[str]:
    """Buffers that the copy for a later tile may fill while a product that nobody waits for still reads them."""
    stages = max(map(int, re.findall(r"tt.num_stages = (\d+)", ttgir)), default=1)
    buffers = dict(re.findall(r"(%\w+) = ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x", ttgir))
    whole = {name: name for name in buffers}
    for part, source in re.findall(r"(%\w+) = ttg.memdesc_(?:index|trans) (%\w+)", ttgir):
        whole[part] = whole.get(source, "")
    copied = {whole.get(to, "") for to in re.findall(r"async_copy_global_to_local %\w+, (%\w+)", ttgir)}
    copied |= {whole.get(to, "") for to in re.findall(r"async_tma_copy_global_to_local %\w+\[[^\]]*\] (%\w+)", ttgir)}
    pending = set(re.findall(r"warp_group_dot_wait (%\w+),[^{]*{pendings = [1-9]", ttgir))
    found = []
    for product, *operands in re.findall(r"(%\w+) = ttng.warp_group_dot (%\w+), (%\w+),", ttgir):
        for name in (whole.get(operand, "") for operand in operands):
            if product in pending and name in copied and int(buffers[name]) < stages:
                found.append(name)
    return found


@dataclass
class _Block:
    """Instructions that run one after another: (text, registers read, registers written), and the blocks that may follow."""

    instructions: list[tuple[str, set[str], set[str]]] = field(default_factory=list)
    following: list[str] = field(default_factory=list)

    @property
    def written(self) -> set[str]:
        return set().union(*(writes for _, _, writes in self.instructions))


def undefined(listing: str) -> list[str]:
    """Instructions of a kernel that read a register which nothing has written on some way to them.

    An instruction under a predicate counts as run. The stack pointer, R1, is written before the first instruction; in
    arithmetic it stands for a register that was never given a place.
    """
    blocks = _blocks(listing)
    everything = set().union(*(block.written for block in blocks.values()))
    known = dict.fromkeys(blocks, everything)
    first = next(iter(blocks))
    known[first] = set()
    pending, reached = [first], {first}
    while pending:
        name = pending.pop()
        after = known[name] | blocks[name].written
        for successor in blocks[name].following:
            if successor not in reached or not known[successor] <= after:
                reached.add(successor)
                known[successor] = known[successor] & after
                pending.append(successor)
    found = []
    for name in reached:
        have = set(known[name])
        for text, reads, writes in blocks[name].instructions:
            if reads - have:
                found.append(f"{text} ({', '.join(sorted(reads - have))})")
            have |= writes
    return sorted(found)


def _blocks(listing: str) -> dict[str, _Block]:
    blocks: dict[str, _Block] = {}
    current: _Block | None = None  # None after an instruction that nothing follows

    def begin(name: str) -> _Block:
        if current is not None:
            current.following.append(name)
        return blocks.setdefault(name, _Block())

    for line in listing.splitlines():
        label = _LABEL.match(line)
        if label:
            current = begin(label[1])
            continue
        match = _INSTRUCTION.search(line)
        if not match:
            continue
        address, guard, opcode, operands = match.groups()
        if current is None or current.following:
            current = begin(address)
        current.instructions.append((f"{opcode} {operands.strip()}", *_effects(opcode, operands)))
        name = opcode.partition(".")[0]
        if name in ("BRX", "JMX", "BRXU"):
            raise ValueError(f"where {opcode} leads is not in the listing")
        if name in ("BRA", "CALL"):
            current.following += _TARGET.findall(operands)
        # Some branches carry their predicate among the operands.
        always = guard is None and (name in ("EXIT", "RET") or (name == "BRA" and operands.strip().startswith("`")))
        if always:
            current = None
    return blocks


def _effects(opcode: str, operands: str) -> tuple[set[str], set[str]]:
    """Uniform registers that an instruction reads and writes, and a read of R1 that is none of the stack."""
    name = opcode.partition(".")[0]
    parts = [part.strip() for part in operands.split(",")]
    # A predicate may be a first result.
    result = next((i for i, part in enumerate(parts) if not re.match(r"UP[\dT]", part)), 0)
    has_result = (name.startswith("U") and not name.startswith(_NO_RESULT)) or name in _OTHERS
    pair = ".64" in opcode or ".WIDE" in opcode
    reads: set[int] = set()
    writes: set[int] = set()
    for i, part in enumerate(parts):
        for n in map(int, _REGISTER.findall(part)):
            if has_result and i == result:
                writes |= set(range(n, n + (4 if ".128" in opcode else 2 if pair else 1)))
            elif part.startswith("gdesc"):
                # The descriptors of both operands; the first half is unused where the first operand lies in registers.
                first = n + 2 if re.match(r"R\d", parts[1]) else n
                reads |= set(range(first, n + 4))
            elif part.startswith("desc") or (".64" in opcode and name.startswith("U") and name != "ULDC"):
                reads |= {n, n + 1}
            else:
                reads.add(n)
    stack = any(re.fullmatch(r"[-~|]*R1(\.\w+)*\|?", part) for part in parts[1:]) and parts[0] != "R1"
    return {f"UR{n}" for n in reads} | ({"R1"} if stack else set()), {f"UR{n}" for n in writes}


def tool(name: str) -> str:
    """Where one of the CUDA tools lies that come with Triton."""
    triton = find_spec("triton")
    found = Path(triton.origin or "").parent / "backends" / "nvidia" / "bin" / name if triton else Path()
    if not found.is_file():
        raise FileNotFoundError(f"{name} is not here; it comes with the triton package")
    return str(found)


def listing(cubin: bytes) -> str:
    """What nvdisasm prints of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True).stdout


def _faults_of(cubin: Path) -> list[str]:
    ttgir, ptx = (cubin.with_suffix(suffix).read_text() for suffix in (".ttgir", ".ptx"))
    return faults(ttgir, ptx, listing(cubin.read_bytes()))


def _checked(folder: Path) -> Iterator[tuple[str, list[str]]]:
    def check(cubin: Path) -> tuple[str, list[str]]:
        return str(cubin), _faults_of(cubin)

    with ThreadPoolExecutor() as pool:
        yield from pool.map(check, sorted(folder.glob("*/*.cubin")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a cache of Triton's (TRITON_CACHE_DIR)")
    results = list(_checked(parser.parse_args().folder))
    bad = [(name, found) for name, found in results if found]
    for name, found in bad:
        print(name, *found[:4], sep="\n    ")
    print(f"{len(results)} kernels, {len(bad)} with faults")
    return int(bool(bad) or not results)


if __name__ == "__main__":
    sys.exit(main())
