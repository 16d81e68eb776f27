"""Nsight Compute: running a program under it, and reading its pages."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warploom.smem.device.residual import Instruction, parse_source

LOADS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
STORES = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
METRICS = (LOADS, STORES, CONFLICTS)
# The hardware's counters leave cp.async out; these, which ncu computes in code that it adds to the kernel, do not.
COPIED = ("memory_l1_wavefronts_shared", "memory_l1_wavefronts_shared_ideal")
SECONDS = 240  # for one program; the longest has some 600 launches of one pass each
_LEFT_ALONE = ("--cache-control", "none", "--clock-control", "none")


@dataclass(frozen=True)
class Launch:
    """One kernel launch as ncu reports it."""

    kernel: str
    counters: dict[str, int]


def find(name: str) -> str | None:
    """A tool on the PATH, or in the CUDA toolkit's folder, which often is not on it."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(os.path.join(root, "bin") for root in roots if root)]
    return shutil.which(name, path=os.pathsep.join(folders))


def run(command: Sequence[str], seconds: float) -> str:
    """The standard output of a tool; RuntimeError with the end of what it said where it fails."""
    command = [find(command[0]) or command[0], *command[1:]]
    # The program that a tool starts is to be of this package, whatever lies in the current folder.
    package = str(Path(__file__).parents[2])
    search = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} took more than {seconds:.0f} s") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise RuntimeError(f"{command[0]} failed ({done.returncode}):\n{tail}")
    return done.stdout


def _program(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "warploom.smem.device.program", *arguments]


def measure(kernels: str, arguments: Sequence[str], metrics: Sequence[str] = METRICS) -> list[Launch]:
    """The counters of every launch of `program ARGUMENTS` whose kernel's name matches the expression `kernels`."""
    options = ["--csv", "--page", "raw", *_LEFT_ALONE, "--kernel-name", f"regex:{kernels}", "--metrics", ",".join(metrics)]
    return parse(run(["ncu", *options, *_program(arguments)], SECONDS), metrics)


def measure_instructions(kernels: str, arguments: Sequence[str], report: Path) -> list[tuple[Launch, list[Instruction]]]:
    """Of every such launch, the counters and the shared-memory instructions; `report` is where ncu's own file goes."""
    options = [*_LEFT_ALONE, "--kernel-name", f"regex:{kernels}", "--metrics", ",".join(METRICS)]
    options += ["--section", "SourceCounters", "--export", str(report), "--force-overwrite"]
    run(["ncu", *options, *_program(arguments)], SECONDS)
    opened = ["ncu", "--import", str(report), "--csv"]
    launches = parse(run([*opened, "--page", "raw"], SECONDS))
    pages = parse_source(run([*opened, "--page", "source", "--print-source", "sass"], SECONDS))
    if len(pages) != len(launches):
        raise RuntimeError(f"ncu reports {len(launches)} launches and the instructions of {len(pages)}")
    return list(zip(launches, pages, strict=True))


def parse(text: str, metrics: Sequence[str] = METRICS) -> list[Launch]:
    """The launches in ncu's raw CSV page: a header after ncu's own messages, a line of units, one line for each launch."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("ncu printed no table:\n" + "\n".join(lines[-12:]))
    launches = []
    reader = csv.DictReader(lines[start:])
    absent = [name for name in metrics if name not in (reader.fieldnames or ())]
    if absent:
        raise RuntimeError(f"ncu's table lacks {', '.join(absent)}")
    for line in reader:
        if not (line["ID"] or "").strip().isdigit():  # units, and messages of the program itself
            continue
        counters = {name: _number(name, line[name]) for name in metrics}
        launches.append(Launch(line["Kernel Name"].partition("(")[0].strip(), counters))
    return launches


def _number(name: str, text: str | None) -> int:
    try:
        return int(float((text or "").replace(",", "")))
    except ValueError:
        raise RuntimeError(f"ncu gives {text!r} for {name}: this GPU or user cannot read it") from None
