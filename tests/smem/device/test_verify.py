"""Verification without a GPU: generated patterns, generated CUDA, ncu's tables, and the whole command against stand-ins."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.smem.oracle import simulate
from warploom.cli import main
from warploom.smem import copies as copy_rule
from warploom.smem.access import ACCESSES
from warploom.smem.device.kernels import attention, gemm, ladder, single
from warploom.smem.device.profiler import CONFLICTS, COPIED, LOADS, METRICS, STORES, Launch, parse, run
from warploom.smem.device.residual import Instruction
from warploom.smem.device.verify import GEMM_SIZE, RULE_SETS, SEQLEN, Large, agreement, single_rows
from warploom.smem.model import RULES, Rules, predict
from warploom.smem.patterns import Measured, copies, generate

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


def test_patterns_of_copies() -> None:
    patterns = copies()
    assert len(patterns) >= 200
    assert patterns == copies() and patterns != copies(seed=1)
    assert len({copy_rule.wavefronts(one.places) for one in patterns}) >= 15
    assert sum(None in one.places for one in patterns) >= 60


def test_the_copy_kernel_has_one_copy_without_a_predicate() -> None:
    source = single.copy_source()
    assert source.count("cp.async.cg") == 1 and "pred" not in source and f"void {single.COPY}(" in source


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


SOURCE_HEADER = '"Address","Source","Instructions Executed","L1 Wavefronts Shared","L1 Wavefronts Shared Ideal"'
SASS = {
    "cp.async.128": "LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R4.64]",
    "ldmatrix.x4": "LDSM.16.M88.4 R4, [R2]",
    "ldmatrix.x4.trans": "LDSM.16.MT88.4 R4, [R2]",
    "sts.32": "STS [R2], R4",
    "lds.128": "LDS.128 R4, [R2]",
}


def large_kernels(kind: str) -> dict[str, dict[str, tuple[int, int]]]:
    """(wavefronts, ideal) of each access of the large kernels, in the order in which they are launched."""
    if kind == "gemm":
        size = (GEMM_SIZE,) * 3
        return {config.name: gemm.wavefronts(config, *size) for config in gemm.configs().values()}
    configs = attention.layouts()
    return {f"kernel_cutlass_AmpereForward_{n}": attention.wavefronts(c, SEQLEN) for n, c in configs.items()}


def stand_in_for_ncu(arguments: list[str], wrong: bool) -> None:
    """What ncu would print if the hardware were the simulation of `oracle.py` and the large kernels as predicted."""
    print("==PROF== Connected")
    if "--import" in arguments:
        kernels = large_kernels(Path(arguments[arguments.index("--import") + 1]).read_text())
        if arguments[arguments.index("--page") + 1] == "raw":
            print(HEADER)
            for number, kernel in enumerate(kernels):
                print(line(number, kernel, 1_000_000_000, 0, 0))
            return
        for kernel, accesses in kernels.items():
            print(f'"Kernel Name","{kernel}",\n{SOURCE_HEADER}')
            for place, (access, (wavefronts, ideal)) in enumerate(accesses.items()):
                wavefronts += ideal // 50 * (wrong and kernel == "hgemm_padded" and access == "ldmatrix.x4")
                print(f'"0x{place:x}0","    {SASS[access]}","{ideal // 4}","{wavefronts}","{ideal}"')
        return
    program = arguments[arguments.index("warploom.smem.device.program") + 1 :]
    assert arguments[arguments.index("--metrics") + 1] == ",".join(COPIED if program[0] == "copies" else METRICS)
    if "--export" in arguments:
        Path(arguments[arguments.index("--export") + 1]).write_text(program[0])
        return
    if program[0] == "copies":
        print(HEADER.replace(f'"{CONFLICTS}","{LOADS}","{STORES}"', f'"{COPIED[0]}","{COPIED[1]}"'))
        for number, row in enumerate(Path(program[1]).read_text().splitlines()):
            lanes = list(map(int, row.split()))
            places = [None if to < 0 else (source, to) for to, source in zip(lanes[:32], lanes[32:], strict=True)]
            counted = copy_rule.wavefronts(places) + (wrong and number == 7)
            print(line(number, single.COPY, counted, copy_rule.ideal(places), 0).removesuffix(',"0"'))
        return
    print(HEADER)
    if program == ["ladder"]:
        for number, rung in enumerate(ladder.RUNGS):
            conflicts = rung.excess(True) + rung.excess(False)
            print(line(number, rung.name, conflicts, rung.wavefronts(True), rung.wavefronts(False)))
        return
    names = list(ACCESSES)
    for number, row in enumerate(Path(program[1]).read_text().splitlines()):
        kernel, *addresses = map(int, row.split())
        access = ACCESSES[names[kernel]]
        turns, cycles = simulate(access.name, [None if a < 0 else a for a in addresses])
        cycles += wrong and number == 0
        loads, stores = (cycles, 0) if access.load else (0, cycles)
        print(line(number, single.kernel_name(access), cycles - turns, loads, stores))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def run(command: list[str], seconds: float) -> str:
        assert command[0] == "ncu"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            stand_in_for_ncu(command[1:], wrong=request.param)
        return printed.getvalue()

    monkeypatch.setattr("warploom.smem.device.profiler.run", run)
    monkeypatch.setattr("warploom.smem.device.verify.find", lambda name: name)
    monkeypatch.setattr("warploom.smem.device.kernels.nvrtc.refusal", lambda: None)
    monkeypatch.setattr("warploom.smem.device.kernels.attention.refusal", lambda: None)
    monkeypatch.setattr("warploom.runtime.modules.load", lambda spec: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100")
    device = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: device)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)


@pytest.mark.parametrize("stand_ins", [False], indirect=True)
def test_the_command_agrees_with_a_perfect_machine(stand_ins: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["banks", "--verify", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["device"] == "NVIDIA H100"
    assert result["agree"] == result["kernels"] == len(generate()) + len(copies()) + len(ladder.RUNGS) + 6
    best, *others = result["variants"]
    assert best["agree"] == len(generate()) > others[0]["agree"]
    assert result["rows"][0].keys() >= {"kernel", "pattern", "predicted", "measured", "addresses"}
    excess = {one["kernel"]: one["excess"] for one in result["large"]}
    assert excess["hgemm_swizzled"] == excess["attention_swizzled"] == 0 < excess["attention_padded"]
    assert all(one["excess"] == one["predicted_excess"] for one in result["large"])
    assert printed.err.count("warploom banks: ") == 5
    copied = [row for row in result["rows"] if row["kernel"] == "cp.async.128"]
    assert len(copied) == len(copies()) and all(len(row["sources"]) == len(row["addresses"]) == 32 for row in copied)


@pytest.mark.parametrize("stand_ins", [True], indirect=True)
def test_the_command_names_a_disagreement(stand_ins: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["banks", "--verify", "--seed", "3"]) == 1
    text = capsys.readouterr().out
    total = len(generate(3)) + len(copies(3)) + len(ladder.RUNGS)
    assert f"{total - 2} of {total} kernels predicted exactly, 5 of 6 large kernels within 1%" in text
    assert "disagreements" in text and "pairs n^1" in text
    (named,) = re.findall(r"hgemm_padded: \d of 5; .*\n((?:    .*\n)+)", text)
    assert "LDSM.16.M88.4" in named and "LDS.128" not in named


@pytest.mark.parametrize("stand_ins", [False], indirect=True)
def test_the_command_runs_the_named_parts(
    stand_ins: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["banks", "--verify", "--gemm", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["kernels"], result["left_out"]) == ([], 3, {})
    monkeypatch.setattr("warploom.smem.device.kernels.attention.refusal", lambda: "has no DSL")
    assert main(["banks", "--verify", "--ladder", "--attention"]) == 0
    text = capsys.readouterr().out
    assert "attention left out: has no DSL" in text and "6 of 6 kernels predicted exactly in" in text


def test_a_large_kernel_agrees_within_a_hundredth() -> None:
    def large(excess: int, ideal: int = 100_000) -> Large:
        measured = Instruction(16, "LDSM.16.M88.4", "ldmatrix.x4", ideal // 4, ideal + excess, ideal)
        return Large("kernel", "work", {"ldmatrix.x4": (110_000, 100_000)}, (measured,), 12_000)

    assert large(10_000).agrees and large(10_100).agrees and large(9_900).agrees
    assert not large(10_101).agrees and not large(9_899).agrees and not large(10_000, 100_004).agrees
    assert not Large("kernel", "work", {}, large(10_000).instructions, 0).agrees


def test_misread_copies_are_taken_as_those_that_ran_as_often() -> None:
    def copy(address: int, executed: int, excess: int, predicate: str) -> Instruction:
        sass = f"LDGSTS.E.BYPASS.LTC128B.128 desc[UR10][R52.64], {predicate}, [R0]"
        return Instruction(address, sass, "cp.async.128", executed, 4 * executed + excess, 4 * executed)

    counted = (copy(0, 10, 65, "P1"), copy(16, 10, 0, "P0"), copy(32, 640, 4000, "P3"), copy(48, 640, 0, "P0"))
    one = Large("kernel", "work", {"cp.async.128": (2 * (2600 + 4065), 2 * 2600)}, counted, 900)
    assert [n.misread for n in counted] == [False, True, False, True]
    assert [n.excess for n in one.read] == [65, 65, 4000, 4000]
    assert one.agrees and one.excess == one.predicted_excess == 8130
    assert one.delays == 900, "the hardware's counter has no copies"
    assert one.to_dict()["misread"] == [16, 48] and one.to_dict()["instructions"][1]["wavefronts"] == 40
    # Without one that ran as often there is nothing to take it as.
    assert not replace(one, instructions=(counted[0], counted[3])).agrees
    assert not Instruction(0, "LDSM.16.M88.4 R4, [R2+UP0]", "ldmatrix.x4", 1, 4, 4).misread
    assert Instruction(0, "@!P0 LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64]", "cp.async.128", 1, 4, 4).misread
    assert not Instruction(0, "LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64], UP0", "cp.async.128", 1, 4, 4).misread


def test_finds_tools_in_the_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ncu").write_text("#!/bin/sh\necho found; echo in words >&2; exit $1\n")
    (tmp_path / "bin" / "ncu").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert run(["ncu", "0"], 10) == "found\n"
    with pytest.raises(RuntimeError, match=r"failed \(3\):\nfound\nin words"):
        run(["ncu", "3"], 10)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for options in (["--verify"], ["--ladder"], ["--gemm"], ["--attention"]):
        monkeypatch.setattr("warploom.smem.device.kernels.nvrtc.refusal", lambda: "no CUDA device is visible")
        assert main(["banks", *options]) == 2
        assert capsys.readouterr().err == f"warploom banks: {options[0]}: no CUDA device is visible\n"
    monkeypatch.setattr("warploom.smem.device.kernels.nvrtc.refusal", lambda: None)
    monkeypatch.setattr("warploom.smem.device.verify.find", lambda name: None)
    assert main(["banks", "--verify"]) == 2
    assert "Nsight Compute's ncu is not on the PATH" in capsys.readouterr().err
    assert main(["banks", "--verify", "--size", "512"]) == 2
    assert "--size is of the timed kernels" in capsys.readouterr().err
