"""PTX as the compiler writes it: kernels, their parameters, and the instructions that synchronisation depends on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

# Types of what is computed with but never decides anything: their results are unknown.
OPAQUE = {"f32", "f64", "f16", "bf16", "f16x2", "bf16x2"}
# Instructions that do something besides writing registers. st.global is left out: results, which nobody here reads.
EFFECTS = (
    "mbarrier", "bar", "barrier", "cp", "wgmma", "fence", "st.shared", "st.async", "atom", "red", "stmatrix", "ldmatrix",
    "ld.acquire", "ld.shared", "bra", "ret", "exit", "trap", "setmaxnreg",
)  # fmt: skip
WRITES_NOTHING = {
    "st", "bra", "ret", "exit", "trap", "bar", "barrier", "fence", "red", "cp", "stmatrix", "prefetch", "setmaxnreg",
}  # fmt: skip
_LABEL = re.compile(r"^([$\w]+):$")
_INSTRUCTION = re.compile(r"^(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)


@dataclass
class Instruction:
    """One instruction; ``operands`` as written, of vectors a tuple."""

    op: str
    operands: list[str | tuple[str, ...]]
    guard: str | None = None
    negated: bool = False
    line: int = 0
    parts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = tuple(self.op.split("."))

    @cached_property
    def effect(self) -> bool:
        return self.op.startswith(EFFECTS)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Registers that it writes."""
        head = self.parts[0]
        if head in WRITES_NOTHING:
            return ()
        if head == "mbarrier" and self.parts[1] not in ("arrive", "try_wait", "test_wait"):
            return ()
        if (head == "wgmma" and self.parts[1] != "mma_async") or not self.operands:
            return ()
        first = self.operands[0]
        return first if isinstance(first, tuple) else tuple(first.split("|"))

    @cached_property
    def all_reads(self) -> tuple[str, ...]:
        """Registers whose values it takes; of wgmma those of its left factor."""
        if self.parts[0] == "wgmma":
            return tuple(n for x in self.operands[1:] if isinstance(x, tuple) for n in _registers(x))
        return tuple(n for x in (self.operands[1:] if self.writes else self.operands) for n in _registers(x))

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Registers that decide what it does; not those of data that is only carried."""
        rest = self.operands[1:] if self.writes else self.operands
        if self.parts[0] == "wgmma" and rest:
            rest = [x for x in rest if isinstance(x, str)]
        if self.parts[0] == "stmatrix":
            rest = rest[:1]
        found = [name for operand in rest for name in _registers(operand)]
        if self.guard:
            found.append(self.guard)
        return tuple(found)


@dataclass
class Kernel:
    """One entry: bytes of its parameters, instructions, where its labels are, threads of a block."""

    name: str
    parameters: list[int]
    code: list[Instruction]
    labels: dict[str, int]
    threads: int
    slices: dict[tuple[str, ...], tuple[list[Instruction], dict[str, int]]] = field(init=False, default_factory=dict)

    def sliced(self, others: tuple[str, ...] = ()) -> tuple[list[Instruction], dict[str, int]]:
        """Without what neither does anything nor decides about what does; with what begins as one of ``others``."""
        if others not in self.slices:
            self.slices[others] = self._joined(self._kept(others))
        return self.slices[others]

    def _kept(self, others: tuple[str, ...]) -> list[bool]:
        keep = [x.effect or (bool(others) and x.op.startswith(others)) for x in self.code]
        writers: dict[str, list[int]] = {}
        for i, x in enumerate(self.code):
            if not keep[i] and OPAQUE.isdisjoint(x.parts):
                for name in x.writes:
                    writers.setdefault(name, []).append(i)
        waiting = [i for i, kept in enumerate(keep) if kept]
        while waiting:
            for name in self.code[waiting.pop()].reads:
                for i in writers.pop(name, ()):
                    if not keep[i]:
                        keep[i] = True
                        waiting.append(i)
        return keep

    def _joined(self, keep: list[bool]) -> tuple[list[Instruction], dict[str, int]]:
        """What is kept, and between it what becomes of products: one ``product`` for all instructions in a row."""
        carried = self._carried()
        here = set(self.labels.values())
        code: list[Instruction] = []
        starts: list[int] = []
        row: Instruction | None = None
        for i, instruction in enumerate(self.code):
            if i in here:
                row = None
            starts.append(len(code))
            found = () if carried.isdisjoint(instruction.all_reads) else tuple(x for x in instruction.all_reads if x in carried)
            if found:
                if row is None:
                    row = Instruction("product", [], line=instruction.line)
                    code.append(row)
                copies = instruction.parts[0] == "mov" and isinstance(instruction.operands[0], str)
                row.operands.append((str(instruction.operands[0]) if copies else "", *found))
            if keep[i]:
                code.append(instruction)
                row = None
        starts.append(len(code))
        return code, {name: starts[i] for name, i in self.labels.items()}

    def _carried(self) -> set[str]:
        """Registers of products, and those that they are only moved to."""
        found = {name for x in self.code if x.op.startswith("wgmma.mma") for name in x.operands[0]}
        before = 0
        while before < len(found):
            before = len(found)
            for x in self.code:
                if x.parts[0] == "mov" and not found.isdisjoint(x.all_reads) and isinstance(x.operands[0], str):
                    found.add(x.operands[0])
        return found


def kernels(text: str) -> list[Kernel]:
    """All entries of a file."""
    found = []
    for entry in re.split(r"\.visible \.entry\s+", text)[1:]:
        match = re.match(r"(\w+)\((.*?)\)\s*(.*?)\n\{\n(.*)\n\}", entry, re.DOTALL)  # up to the last brace
        assert match, entry[:200]
        name, parameters, directives, body = match.groups()
        sizes = []
        for parameter in filter(None, (p.strip() for p in parameters.split("\n"))):
            array = re.search(r"\[(\d+)\],?$", parameter)
            scalar = re.match(r"\.param \.[a-z](\d+) ", parameter)
            assert array or scalar, parameter
            sizes.append(int(array[1]) if array else int(scalar[1]) // 8)  # type: ignore[index]
        threads = re.search(r"\.reqntid (\d+)", directives)
        assert threads, directives
        code, labels = _body(body.replace(f"{name}_param_", "param_"))
        found.append(Kernel(name, sizes, code, labels, int(threads[1])))
    return found


def _body(text: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    scope: list[int] = []
    blocks = 0
    for number, statement in _statements(text):
        if statement == "{":
            blocks += 1
            scope.append(blocks)
        elif statement == "}":
            scope.pop()
        elif label := _LABEL.match(statement):
            labels[_local(label[1], scope)] = len(code)
        elif not statement.startswith("."):
            match = _INSTRUCTION.match(statement)
            assert match, statement
            negated, guard, op, rest = match.groups()
            operands = [_scoped(x, scope) for x in _split(rest)]
            code.append(Instruction(op, operands, _local(guard, scope) if guard else None, bool(negated), number))
    assert not scope
    return code, labels


def _statements(text: str) -> Iterable[tuple[int, str]]:
    """Statements, labels and the braces of scopes; those of vectors stand inside of statements."""
    for number, line in enumerate(text.split("\n")):
        line = re.sub(r"//.*", "", line).strip()
        while line:
            if line[0] in "{}":
                yield number, line[0]
                line = line[1:].strip()
            elif label := re.match(r"^[$\w]+:(?!:)", line):
                yield number, label[0]
                line = line[label.end() :].strip()
            else:
                statement, _, line = line.partition(";")
                line = line.strip()
                yield number, " ".join(statement.split())


def _split(text: str) -> list[str]:
    """Operands: commas outside of brackets."""
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text + ","):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            if part := text[start:i].strip():
                found.append(part)
            start = i + 1
    return found


def _local(name: str, scope: list[int]) -> str:
    """Names without % or $ belong to their block."""
    return name if name[0] in "%$_" or not scope else f"{name}@{scope[-1]}"


def _scoped(operand: str, scope: list[int]) -> str | tuple[str, ...]:
    if operand[0] == "{":
        return tuple(_local(x.strip(), scope) if x.strip()[0].isalpha() else x.strip() for x in operand[1:-1].split(","))
    if scope and (name := re.fullmatch(r"(\[?)([A-Za-z]\w*)(\]?)", operand)):
        return name[1] + _local(name[2], scope) + name[3]
    return operand


def _registers(operand: str | tuple[str, ...]) -> list[str]:
    text = ",".join(operand) if isinstance(operand, tuple) else operand
    return re.findall(r"%[a-z]+\d+|[A-Za-z]\w*@\d+", text)
