"""Predictions against the counters of Nsight Compute: `warploom banks --verify`.

Every kernel of the laboratory runs once under ncu: single instructions with generated addresses, the ladder of small matrix
products, a full-size product and the Ampere forward in three layouts each. Needs a CUDA GPU, ncu, cuda-core, and the
permission to read performance counters; the forward also needs the CuTe DSL.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from warploom.runtime.table import table
from warploom.smem import copies, patterns
from warploom.smem.access import ACCESSES
from warploom.smem.device.kernels import attention, gemm, ladder, nvrtc, single
from warploom.smem.device.profiler import CONFLICTS, COPIED, LOADS, METRICS, STORES, Launch, find, measure, measure_instructions
from warploom.smem.device.residual import Instruction, by_access, corrected, residuals
from warploom.smem.model import RULES, Rules, predict
from warploom.smem.patterns import Copy, Measured

PARTS = ("single", "copies", "ladder", "gemm", "attention")
GEMM_SIZE = 4096
SEQLEN = 3072  # whole tiles of 128 queries and of 48 keys
TOLERANCE = 0.01  # of the excess wavefronts of a large kernel
RULE_SETS = tuple(Rules(*v) for v in itertools.product(("warp", "phases"), ("ignored", "breaks"), (0, 1)))


@dataclass(frozen=True)
class Row:
    """One kernel: wavefronts of loads, of stores, and conflicts; predicted and measured."""

    kernel: str
    pattern: str
    predicted: tuple[int, int, int]
    measured: tuple[int, int, int]
    addresses: tuple[int | None, ...] = ()
    sources: tuple[int | None, ...] = ()  # of copies: byte addresses in global memory

    @property
    def agrees(self) -> bool:
        return self.predicted == self.measured


@dataclass(frozen=True)
class Large:
    """One large kernel: (wavefronts, ideal) of each access predicted, and every instruction measured.

    `conflicts` is the hardware's counter for the whole kernel, which leaves copies out and has delays by other traffic of the
    data pipe.
    """

    kernel: str
    work: str
    predicted: dict[str, tuple[int, int]]
    instructions: tuple[Instruction, ...]
    conflicts: int

    @property
    def predicted_excess(self) -> int:
        return sum(wavefronts - ideal for wavefronts, ideal in self.predicted.values())

    @cached_property
    def read(self) -> list[Instruction]:
        """The instructions, with those that ncu misreads corrected."""
        return corrected(self.instructions)

    @property
    def excess(self) -> int:
        return sum(one.excess for one in self.read)

    @property
    def delays(self) -> int:
        """Conflicts in the hardware's counter that no instruction has."""
        return self.conflicts - sum(one.excess for one in self.read if not one.access.startswith("cp.async"))

    def to_dict(self) -> dict[str, Any]:
        misread = [one.address for one in self.instructions if one.misread]
        sums = {"predicted_excess": self.predicted_excess, "excess": self.excess, "agrees": self.agrees}
        return {**asdict(self), **sums, "misread": misread, "delays": self.delays}

    @property
    def agrees(self) -> bool:
        measured = by_access(self.read)
        return measured.keys() == self.predicted.keys() and all(self._agrees(access, *measured[access]) for access in measured)

    def _agrees(self, access: str, wavefronts: int, ideal: int) -> bool:
        expected_wavefronts, expected_ideal = self.predicted[access]
        excess, expected = wavefronts - ideal, expected_wavefronts - expected_ideal
        return abs(excess - expected) <= TOLERANCE * expected and ideal == expected_ideal


@dataclass(frozen=True)
class Verification:
    """All rows, and for every variant of the model's open rules how many single instructions it predicts.

    `left_out` says why for every part that did not run.
    """

    device: str
    seed: int
    rows: tuple[Row, ...]
    variants: tuple[tuple[Rules, int], ...]
    large: tuple[Large, ...]
    left_out: dict[str, str]
    seconds: float

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows) and all(one.agrees for one in self.large)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "kernels": len(self.rows) + len(self.large),
            "agree": sum(row.agrees for row in self.rows) + sum(one.agrees for one in self.large),
            "counters": list(METRICS),
            "variants": [{**asdict(rules), "agree": agree} for rules, agree in self.variants],
            "rows": [asdict(row) for row in self.rows],
            "large": [one.to_dict() for one in self.large],
            "left_out": self.left_out,
        }


def verify(seed: int = 0, parts: Sequence[str] = PARTS, say: Callable[[str], None] = lambda words: None) -> Verification:
    """Measure the kernels of the named parts, some two minutes for all of them; `say` is told what is under way.

    Raises ValueError where a GPU or a tool is missing, RuntimeError with a tool's own words where it fails.
    """
    start = time.monotonic()
    missing = nvrtc.refusal()
    if missing is None and find("ncu") is None:
        missing = "Nsight Compute's ncu is not on the PATH"
    if missing is not None:
        raise ValueError(f"--verify: {missing}")
    rows: list[Row] = []
    variants: list[tuple[Rules, int]] = []
    large: list[Large] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "single" in parts:
            singles = _patterns(seed)
            say(f"{len(singles)} single instructions")
            launches = _measure_single(singles, folder)
            rows += single_rows(singles, launches)
            variants = [(rules, agreement(singles, launches, rules)) for rules in RULE_SETS]
            variants.sort(key=lambda pair: -pair[1])
        if "copies" in parts:
            found = patterns.copies(seed)
            say(f"{len(found)} single copies")
            rows += copy_rows(found, _measure_copies(found, folder))
        if "ladder" in parts:
            say("the ladder: 16×16×16 products")
            rows += ladder_rows(ladder.rungs(), measure("^(wmma|mma)_", ["ladder"]))
        if "gemm" in parts:
            say(f"products of {GEMM_SIZE}×{GEMM_SIZE} halves")
            large += _large_gemm(folder)
        if "attention" in parts:
            refusal = attention.refusal()
            if refusal is not None:
                left_out["attention"] = refusal
            else:
                say(f"the Ampere forward, {SEQLEN} tokens")
                large += _large_attention(folder)
    device = torch.cuda.get_device_name()
    return Verification(device, seed, tuple(rows), tuple(variants), tuple(large), left_out, time.monotonic() - start)


def _patterns(seed: int) -> list[Measured]:
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return [one for one in patterns.generate(seed) if hopper or not one.access.name.startswith("stmatrix")]


def _measure_single(patterns: Sequence[Measured], folder: Path) -> list[Launch]:
    numbers = {access: n for n, access in enumerate(ACCESSES)}
    lines = [[numbers[one.access.name], *(-1 if a is None else a for a in one.addresses)] for one in patterns]
    (folder / "table.txt").write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    return measure("^(lds|sts|ldmatrix|stmatrix)_", ["single", str(folder / "table.txt")])


def _measure_copies(found: Sequence[Copy], folder: Path) -> list[Launch]:
    ends = [[place or (-1, -1) for place in one.places] for one in found]
    lines = [[*(shared for _, shared in lanes), *(source for source, _ in lanes)] for lanes in ends]
    (folder / "copies.txt").write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
    return measure(f"^{single.COPY}$", ["copies", str(folder / "copies.txt")], COPIED)


def _large_gemm(folder: Path) -> list[Large]:
    configs = list(gemm.configs().values())
    found = measure_instructions("^hgemm_", ["gemm", str(GEMM_SIZE)], folder / "gemm.ncu-rep")
    _matching([config.name for config in configs], [launch for launch, _ in found])
    size = GEMM_SIZE
    return [
        Large(config.name, f"{size}×{size}×{size}", gemm.wavefronts(config, size, size, size), tuple(each), _conflicts(launch))
        for config, (launch, each) in zip(configs, found, strict=True)
    ]


def _large_attention(folder: Path) -> list[Large]:
    from warploom.runtime import modules

    configs = attention.layouts()
    for config in configs.values():  # compiled here, once, and not under the profiler
        modules.load(config.spec)
    found = measure_instructions("AmpereForward", ["attention", str(SEQLEN)], folder / "attention.ncu-rep")
    if len(found) != len(configs):
        raise RuntimeError(f"ncu reports {len(found)} launches of the forward for {len(configs)}")
    work = f"{attention.HEADS} heads, {SEQLEN} tokens"
    return [
        Large(attention.name(layout), work, attention.wavefronts(config, SEQLEN), tuple(each), _conflicts(launch))
        for (layout, config), (launch, each) in zip(configs.items(), found, strict=True)
    ]


def _conflicts(launch: Launch) -> int:
    return launch.counters[CONFLICTS]


def single_rows(patterns: Sequence[Measured], launches: Sequence[Launch]) -> list[Row]:
    names = [single.kernel_name(one.access) for one in patterns]
    rows = []
    for one, launch in zip(patterns, _matching(names, launches), strict=True):
        expected = _expected(one, RULES)
        rows.append(Row(one.access.name, one.name, expected, _triple(launch), one.addresses))
    return rows


def copy_rows(found: Sequence[Copy], launches: Sequence[Launch]) -> list[Row]:
    rows = []
    for one, launch in zip(found, _matching([single.COPY] * len(found), launches), strict=True):
        wavefronts, ideal = copies.wavefronts(one.places), copies.ideal(one.places)
        counted = launch.counters[COPIED[0]], launch.counters[COPIED[1]]
        sources, shared = zip(*((place or (None, None)) for place in one.places), strict=True)
        expected, got = (0, wavefronts, wavefronts - ideal), (0, counted[0], counted[0] - counted[1])
        rows.append(Row(copies.NAME, one.name, expected, got, shared, sources))
    return rows


def ladder_rows(rungs: Sequence[ladder.Rung], launches: Sequence[Launch]) -> list[Row]:
    rows = []
    for rung, launch in zip(rungs, _matching([rung.name for rung in rungs], launches), strict=True):
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
    """Tables of the small kernels, of the rules' variants and of the large kernels; disagreements and residuals by name."""
    lines = [result.device]
    if result.rows:
        lines += _small_lines(result, shown)
    if result.large:
        lines += _large_lines(result.large)
    lines += [f"{part} left out: {why}" for part, why in result.left_out.items()]
    exact = sum(row.agrees for row in result.rows)
    ends = [f"{exact} of {len(result.rows)} kernels predicted exactly"] if result.rows else []
    near = sum(one.agrees for one in result.large)
    ends += [f"{near} of {len(result.large)} large kernels within {TOLERANCE:.0%}"] if result.large else []
    lines.append(f"{', '.join(ends)} in {result.seconds:.0f} s, seed {result.seed}")
    return "\n".join(lines)


def _small_lines(result: Verification, shown: int) -> list[str]:
    rows = []
    for kernel in dict.fromkeys(row.kernel for row in result.rows):
        own = [row for row in result.rows if row.kernel == kernel]
        agree = sum(row.agrees for row in own)
        sums = [(sum(row.predicted[n] for row in own), sum(row.measured[n] for row in own)) for n in range(3)]
        rows.append([kernel, f"{agree} of {len(own)}", *(f"{predicted} / {measured}" for predicted, measured in sums)])
    heading = ["kernel", "exact", "load wavefronts", "store wavefronts", "conflicts"]
    lines = ["predicted / measured, sums over the patterns of each kernel", table(rows, heading)]
    wrong = [row for row in result.rows if not row.agrees]
    if wrong:
        lines.append("disagreements: loads, stores, conflicts")
        cells = [[row.kernel, row.pattern, str(row.predicted), str(row.measured)] for row in wrong[:shown]]
        lines.append(table(cells, ["kernel", "pattern", "predicted", "measured"]))
        if len(wrong) > shown:
            lines.append(f"  and {len(wrong) - shown} more")
    if result.variants:
        variants = [
            [f"merging by {rules.merge_scope}", f"inactive {rules.inactive}", f"empty phase {rules.empty_phase}", str(agree)]
            for rules, agree in result.variants
        ]
        lines += ["variants of the rules, by patterns predicted exactly", table(variants)]
    return lines


def _large_lines(large: Sequence[Large], shown: int = 4) -> list[str]:
    """Per kernel and access, then the conflicting instructions by address, the worst first."""
    rows = []
    for one in large:
        measured = by_access(one.read)
        for access in dict.fromkeys([*one.predicted, *measured]):
            p, m = one.predicted.get(access, (0, 0)), measured.get(access, (0, 0))
            rows.append([one.kernel, access, f"{p[0]} / {m[0]}", f"{p[0] - p[1]} / {m[0] - m[1]}"])
    heading = ["large kernel", "access", "wavefronts", "excess"]
    lines = ["predicted / measured, sums over the instructions of each access", table(rows, heading)]
    lines.append("instructions that conflict")
    for one in large:
        named = residuals(one.read)
        delays = f"the whole kernel's counter has {one.delays} delays in the data pipe beside"
        lines.append(f"  {one.kernel}: {len(named)} of {len(one.instructions)}; {delays}")
        misread = [f"{n.address:#06x}" for n in one.instructions if n.misread]
        if misread:
            lines.append(f"    taken as the copies that ran as often, as ncu misreads their P0: {', '.join(misread)}")
        cells = [[f"  {n.address:#06x}", n.access, f"{n.wavefronts} of {n.ideal}", n.sass] for n in named[:shown]]
        lines += [table(cells)] if cells else []
        if len(named) > shown:
            lines.append(f"    and {len(named) - shown} more, all in --json")
    return lines


def say(words: str) -> None:
    """Progress, where it does not mix with results."""
    print(f"warploom banks: {words}", file=sys.stderr, flush=True)
