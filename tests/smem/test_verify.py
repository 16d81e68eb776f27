"""Verification without a GPU: generated patterns, generated CUDA, ncu's tables, and the whole command against stand-ins."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.smem.oracle import simulate
from warploom.cli import main
from warploom.smem.access import ACCESSES
from warploom.smem.kernels import ladder, single
from warploom.smem.model import RULES, Rules, predict
from warploom.smem.patterns import Measured, generate
from warploom.smem.verify import CONFLICTS, LOADS, METRICS, RULE_SETS, STORES, Launch, agreement, parse, run, single_rows

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    f'"{CONFLICTS}","{LOADS}","{STORES}"'
)
CANNED = f"""==PROF== Connected to process 4242 (/tmp/single)
==PROF== Profiling "lds_128" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4242
{HEADER}
"","","","","","","","","","","","","",""
"0","4242","single","127.0.0.1","lds_128(const int *, unsigned int *)","1","7","(32, 1, 1)","(1, 1, 1)","0","9.0","28","32","0"
"1","4242","single","127.0.0.1","sts_128","1","7","(32, 1, 1)","(1, 1, 1)","0","9.0","1,020","0","1,024"
==WARNING== some words after the table
"""


def line(number: int, kernel: str, conflicts: int, loads: int, stores: int) -> str:
    cells = [number, 1, "single", "host", kernel, 1, 7, "(32, 1, 1)", "(1, 1, 1)", 0, "9.0", conflicts, loads, stores]
    return ",".join(f'"{cell}"' for cell in cells)


def test_parse() -> None:
    assert parse(CANNED) == [
        Launch("lds_128", {LOADS: 32, STORES: 0, CONFLICTS: 28}),
        Launch("sts_128", {LOADS: 0, STORES: 1024, CONFLICTS: 1020}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "ncu printed no table:\n==ERROR== ERR_NVGPUCTRPERM"),
        (CANNED.replace(LOADS, "other"), f"lacks {re.escape(LOADS)}"),
        (CANNED.replace('"28"', '"n/a"'), "ncu gives 'n/a' for"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        parse(text)


def test_patterns() -> None:
    patterns = generate()
    assert len(patterns) >= 200
    assert {one.access.name for one in patterns} == set(ACCESSES)
    assert patterns == generate() and patterns != generate(seed=1)
    wide = [one for one in patterns if one.access.merges]
    partial = [one for one in wide if "elsewhere" in one.name or "apart" in one.name or "alternate" in one.name]
    assert len(wide) >= 200 and len(partial) >= 60
    assert sum(None in one.addresses for one in patterns) >= 60
    for one in patterns:
        prediction = predict(one.access, one.addresses)
        assert (len(prediction.phases), prediction.wavefronts) == simulate(one.access.name, list(one.addresses)), one


def measured(patterns: list[Measured], rules: Rules) -> list[Launch]:
    launches = []
    for one in patterns:
        found = predict(one.access, one.addresses, rules)
        loads, stores = (found.wavefronts, 0) if one.access.load else (0, found.wavefronts)
        launches.append(Launch(single.kernel_name(one.access), {LOADS: loads, STORES: stores, CONFLICTS: found.excess}))
    return launches


def test_patterns_tell_every_variant_of_the_rules_apart() -> None:
    patterns = generate()
    counters = {rules: tuple(tuple(one.counters.values()) for one in measured(patterns, rules)) for rules in RULE_SETS}
    assert len(set(counters.values())) == len(RULE_SETS)
    launches = measured(patterns, RULE_SETS[-1])
    assert agreement(patterns, launches, RULE_SETS[-1]) == len(patterns) > agreement(patterns, launches, RULES)


def test_rows_of_launches_in_another_order_are_refused() -> None:
    patterns = generate()[:3]
    launches = measured(patterns, RULES)
    assert all(row.agrees for row in single_rows(patterns, launches))
    with pytest.raises(RuntimeError, match="ncu reports 2 launches for 3; number 2 is missing"):
        single_rows(patterns, launches[:2])


def test_source_has_a_kernel_for_every_access() -> None:
    source = single.source()
    for access in ACCESSES.values():
        (body,) = re.findall(rf"void {single.kernel_name(access)}\(.*?\n}}\n", source, flags=re.DOTALL)
        instructions = re.findall(r"\b(?:ld\.shared|st\.shared|ldmatrix\.|stmatrix\.)\S*", body)
        assert len(instructions) == 1, "more than one instruction would touch shared memory"
        family = {"lds": "ld.shared", "sts": "st.shared"}.get(access.name[:3], access.name.split(".")[0])
        assert instructions[0].startswith(family)
        assert (".trans" in instructions[0]) == access.name.endswith(".trans")
        if not access.matrix:
            vector = re.search(r"\.v(\d)", instructions[0])
            bits = int(instructions[0][-2:].strip(".bu"))
            assert bits * (int(vector[1]) if vector else 1) == 8 * access.width
    assert Counter(re.findall(r"[a-z]+_[a-z0-9_]+(?=, |\};)", source.split("kernels[] = {")[1].split("\n")[0])).total() == len(
        ACCESSES
    )


def test_ladder_predictions() -> None:
    found = {
        rung.name: (rung.wavefronts(True), rung.wavefronts(False), rung.excess(True), rung.excess(False))
        for rung in ladder.RUNGS
    }
    assert found == {
        "wmma_global": (0, 0, 0, 0),
        "wmma_shared": (20, 16, 8, 4),
        "wmma_padded": (12, 24, 0, 12),
        "mma_shared": (20, 16, 8, 4),
        "mma_swizzled": (12, 12, 0, 0),
        "mma_stmatrix": (12, 12, 0, 0),
    }
    assert all(f"void {rung.name}(" in ladder.SOURCE for rung in ladder.RUNGS)


NVCC = """#!/bin/sh
while [ "$1" != "-o" ]; do shift; done
touch "$2"
"""
NCU = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.smem.test_verify import stand_in_for_ncu
stand_in_for_ncu(sys.argv[1:], wrong={wrong})
"""


def stand_in_for_ncu(arguments: list[str], wrong: bool) -> None:
    """What ncu would print if the hardware were the simulation of `oracle.py`."""
    assert arguments[arguments.index("--metrics") + 1] == ",".join(METRICS)
    print("==PROF== Connected\n" + HEADER)
    if "table.txt" not in arguments[-1]:
        for number, rung in enumerate(ladder.RUNGS):
            conflicts = rung.excess(True) + rung.excess(False)
            print(line(number, rung.name, conflicts, rung.wavefronts(True), rung.wavefronts(False)))
        return
    names = list(ACCESSES)
    for number, row in enumerate(Path(arguments[-1]).read_text().splitlines()):
        kernel, *addresses = map(int, row.split())
        access = ACCESSES[names[kernel]]
        turns, cycles = simulate(access.name, [None if a < 0 else a for a in addresses])
        cycles += wrong and number == 0
        loads, stores = (cycles, 0) if access.load else (0, cycles)
        print(line(number, single.kernel_name(access), cycles - turns, loads, stores))


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    import sys

    root = str(Path(__file__).parents[2])
    ncu = NCU.format(python=sys.executable, root=root, wrong=request.param)
    smi = '#!/bin/sh\necho "NVIDIA H100, 9.0"\n'
    for name, text in (("nvcc", NVCC), ("ncu", ncu), ("nvidia-smi", smi)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize("stand_ins", [False], indirect=True)
def test_the_command_agrees_with_a_perfect_machine(stand_ins: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["banks", "--verify", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == "NVIDIA H100"
    assert result["agree"] == result["kernels"] == len(generate()) + len(ladder.RUNGS)
    best, *others = result["variants"]
    assert best["agree"] == len(generate()) > others[0]["agree"]
    assert result["rows"][0].keys() >= {"kernel", "pattern", "predicted", "measured", "addresses"}


@pytest.mark.parametrize("stand_ins", [True], indirect=True)
def test_the_command_names_a_disagreement(stand_ins: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["banks", "--verify", "--seed", "3"]) == 1
    text = capsys.readouterr().out
    total = len(generate(3)) + len(ladder.RUNGS)
    assert f"{total - 1} of {total} kernels predicted exactly" in text
    assert "disagreements" in text and "pairs n^1" in text


def test_finds_tools_in_the_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ncu").write_text("#!/bin/sh\necho found; echo in words >&2; exit $1\n")
    (tmp_path / "bin" / "ncu").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert run(["ncu", "0"], 10) == "found\n"
    with pytest.raises(RuntimeError, match=r"failed \(3\):\nfound\nin words"):
        run(["ncu", "3"], 10)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("warploom.smem.verify.find", lambda name: None)
    assert main(["banks", "--verify"]) == 2
    assert "needs a CUDA GPU with nvcc and ncu on the PATH; not found: nvcc, ncu, nvidia-smi" in capsys.readouterr().err
