"""Predictions against the counters of Nsight Compute: `warploom banks --verify`.

Compiles two programs with nvcc and runs each once under ncu: single instructions with generated addresses, and the ladder
of small matrix products. Needs a CUDA GPU, nvcc and ncu, and the permission to read performance counters.
"""

from __future__ import annotations

import csv
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warploom.commands.table import table
from warploom.smem.access import ACCESSES
from warploom.smem.kernels import ladder, single
from warploom.smem.model import RULES, Rules, predict
from warploom.smem.patterns import Measured, generate

LOADS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
STORES = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
METRICS = (LOADS, STORES, CONFLICTS)
SECONDS = 240  # for one program under ncu; some 600 launches of one pass each
RULE_SETS = tuple(Rules(*v) for v in itertools.product(("warp", "phases"), ("ignored", "breaks"), (0, 1)))


@dataclass(frozen=True)
class Launch:
    """One kernel launch as ncu reports it."""

    kernel: str
    counters: dict[str, int]


@dataclass(frozen=True)
class Row:
    """One kernel: wavefronts of loads, of stores, and conflicts; predicted and measured."""

    kernel: str
    pattern: str
    predicted: tuple[int, int, int]
    measured: tuple[int, int, int]
    addresses: tuple[int | None, ...] = ()

    @property
    def agrees(self) -> bool:
        return self.predicted == self.measured


@dataclass(frozen=True)
class Verification:
    """All rows, and for every variant of the model's open rules how many single instructions it predicts."""

    device: str
    seed: int
    rows: tuple[Row, ...]
    variants: tuple[tuple[Rules, int], ...]
    seconds: float

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "kernels": len(self.rows),
            "agree": sum(row.agrees for row in self.rows),
            "counters": list(METRICS),
            "variants": [{**asdict(rules), "agree": agree} for rules, agree in self.variants],
            "rows": [asdict(row) for row in self.rows],
        }


def verify(seed: int = 0) -> Verification:
    """Measure every generated pattern and every rung; some 90 s at most on an H100 is intended, most of it ncu's.

    Raises ValueError where a GPU or a tool is missing, RuntimeError with a tool's own words where it fails.
    """
    start = time.monotonic()
    missing = [name for name in ("nvcc", "ncu", "nvidia-smi") if find(name) is None]
    if missing:
        raise ValueError(f"--verify needs a CUDA GPU with nvcc and ncu on the PATH; not found: {', '.join(missing)}")
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    device, _, capability = run(query, 30).splitlines()[0].partition(", ")
    hopper = float(capability) >= 9
    patterns = [one for one in generate(seed) if hopper or not one.access.name.startswith("stmatrix")]
    rungs = [rung for rung in ladder.RUNGS if hopper or rung.name != "mma_stmatrix"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        architecture = f"sm_{capability.strip().replace('.', '')}"
        numbers = {access: n for n, access in enumerate(ACCESSES)}
        lines = [[numbers[one.access.name], *(-1 if a is None else a for a in one.addresses)] for one in patterns]
        (folder / "table.txt").write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
        singles = measure(compile_program(folder, "single", single.source(), architecture), [str(folder / "table.txt")])
        climbed = measure(compile_program(folder, "ladder", ladder.SOURCE, architecture), [])
    rows = [*single_rows(patterns, singles), *ladder_rows(rungs, climbed)]
    variants = [(rules, agreement(patterns, singles, rules)) for rules in RULE_SETS]
    variants.sort(key=lambda pair: -pair[1])
    return Verification(device, seed, tuple(rows), tuple(variants), time.monotonic() - start)


def find(name: str) -> str | None:
    """A tool on the PATH, or in the CUDA toolkit's folder, which often is not on it."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(os.path.join(root, "bin") for root in roots if root)]
    return shutil.which(name, path=os.pathsep.join(folders))


def run(command: Sequence[str], seconds: float) -> str:
    """The standard output of a tool; RuntimeError with the end of what it said where it fails."""
    command = [find(command[0]) or command[0], *command[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} took more than {seconds:.0f} s") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{command[0]} failed ({done.returncode}):\n{tail}")
    return done.stdout


def compile_program(folder: Path, name: str, source: str, architecture: str) -> Path:
    (folder / f"{name}.cu").write_text(source)
    program = folder / name
    run(["nvcc", "-std=c++17", "-O2", f"-arch={architecture}", "-o", str(program), str(folder / f"{name}.cu")], 120)
    return program


def measure(program: Path, arguments: Sequence[str]) -> list[Launch]:
    options = ["--csv", "--page", "raw", "--cache-control", "none", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    return parse(run(["ncu", *options, str(program), *arguments], SECONDS))


def parse(text: str) -> list[Launch]:
    """The launches in ncu's raw CSV page: a header after ncu's own messages, a line of units, one line for each launch."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("ncu printed no table:\n" + "\n".join(lines[-12:]))
    launches = []
    reader = csv.DictReader(lines[start:])
    absent = [name for name in METRICS if name not in (reader.fieldnames or ())]
    if absent:
        raise RuntimeError(f"ncu's table lacks {', '.join(absent)}")
    for line in reader:
        if not (line["ID"] or "").strip().isdigit():  # units, and messages of the program itself
            continue
        counters = {name: _number(name, line[name]) for name in METRICS}
        launches.append(Launch(line["Kernel Name"].partition("(")[0].strip(), counters))
    return launches


def _number(name: str, text: str | None) -> int:
    try:
        return int(float((text or "").replace(",", "")))
    except ValueError:
        raise RuntimeError(f"ncu gives {text!r} for {name}: this GPU or user cannot read it") from None


def single_rows(patterns: Sequence[Measured], launches: Sequence[Launch]) -> list[Row]:
    names = [single.kernel_name(one.access) for one in patterns]
    rows = []
    for one, launch in zip(patterns, _matching(names, launches), strict=True):
        expected = _expected(one, RULES)
        rows.append(Row(one.access.name, one.name, expected, _triple(launch), one.addresses))
    return rows


def ladder_rows(rungs: Sequence[ladder.Rung], launches: Sequence[Launch]) -> list[Row]:
    rows = []
    for rung, launch in zip(rungs, _matching([rung.name for rung in rungs], launches[: len(rungs)]), strict=True):
        conflicts = rung.excess(True) + rung.excess(False)
        rows.append(Row(rung.name, "16×16×16", (rung.wavefronts(True), rung.wavefronts(False), conflicts), _triple(launch)))
    return rows


def agreement(patterns: Sequence[Measured], launches: Sequence[Launch], rules: Rules) -> int:
    """How many patterns these rules predict exactly."""
    return sum(_expected(one, rules) == _triple(launch) for one, launch in zip(patterns, launches, strict=True))


def _expected(one: Measured, rules: Rules) -> tuple[int, int, int]:
    prediction = predict(one.access, one.addresses, rules)
    wavefronts = prediction.wavefronts
    return (wavefronts if one.access.load else 0, 0 if one.access.load else wavefronts, prediction.excess)


def _triple(launch: Launch) -> tuple[int, int, int]:
    return launch.counters[LOADS], launch.counters[STORES], launch.counters[CONFLICTS]


def _matching(names: Iterable[str], launches: Sequence[Launch]) -> Sequence[Launch]:
    expected, got = list(names), [launch.kernel for launch in launches]
    if expected != got:
        first = next((n for n, pair in enumerate(itertools.zip_longest(expected, got)) if pair[0] != pair[1]), 0)
        raise RuntimeError(
            f"ncu reports {len(got)} launches for {len(expected)}; number {first} is "
            f"{got[first] if first < len(got) else 'missing'}"
        )
    return launches


def report(result: Verification, shown: int = 30) -> str:
    """A table of the kernels, instruction by instruction, and the first disagreements."""
    rows = []
    for kernel in dict.fromkeys(row.kernel for row in result.rows):
        own = [row for row in result.rows if row.kernel == kernel]
        agree = sum(row.agrees for row in own)
        sums = [(sum(row.predicted[n] for row in own), sum(row.measured[n] for row in own)) for n in range(3)]
        rows.append([kernel, f"{agree} of {len(own)}", *(f"{predicted} / {measured}" for predicted, measured in sums)])
    heading = ["kernel", "exact", "load wavefronts", "store wavefronts", "conflicts"]
    lines = [f"{result.device}: predicted / measured, sums over the patterns of each kernel", table(rows, heading)]
    wrong = [row for row in result.rows if not row.agrees]
    if wrong:
        lines.append("disagreements: loads, stores, conflicts")
        cells = [[row.kernel, row.pattern, str(row.predicted), str(row.measured)] for row in wrong[:shown]]
        lines.append(table(cells, ["kernel", "pattern", "predicted", "measured"]))
        if len(wrong) > shown:
            lines.append(f"  and {len(wrong) - shown} more")
    lines.append("variants of the rules, by patterns predicted exactly")
    variants = [
        [f"merging by {rules.merge_scope}", f"inactive {rules.inactive}", f"empty phase {rules.empty_phase}", str(agree)]
        for rules, agree in result.variants
    ]
    lines.append(table(variants))
    exact = sum(row.agrees for row in result.rows)
    lines.append(f"{exact} of {len(result.rows)} kernels predicted exactly in {result.seconds:.0f} s, seed {result.seed}")
    return "\n".join(lines)
