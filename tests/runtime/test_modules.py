"""The module cache: what it refuses, in which words, and builders that meet or die."""

from __future__ import annotations

import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.cli import main
from warploom.runtime import module_spec, modules
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.module_worker import Worker

ROOT = Path(__file__).parents[2]
SPEC = ModuleSpec("some_kernel", "sm_90a", "tests.runtime.builders:build", (("width", 3),), ("runtime/cubin.py",))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setenv("BUILDER_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the builders, which no worker looks for in the current folder
    return tmp_path


@pytest.fixture
def stored(cache: Path) -> Path:
    library = cache / "built.so"
    library.write_bytes(b"machine code")
    module_spec.store(SPEC, library, {"registers": 168})
    return SPEC.library()


def test_a_stored_module_is_taken(stored: Path) -> None:
    assert modules.refusal(SPEC) is None and modules.facts(SPEC) == {"registers": 168}


def test_nothing_there() -> None:
    assert modules.refusal(SPEC) == "not built" and modules.facts(SPEC) == {}


PAST, FUTURE = 1_000_000_000, 4_000_000_000  # seconds, when a folder was changed last


def test_what_is_not_there_is_looked_for_when_the_folder_has_changed(
    stored: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, away = stored.parent, cache / "away"
    there.rename(away)
    there.mkdir(mode=0o700)
    find, looked = modules.find, []
    monkeypatch.setattr(modules, "find", lambda spec: looked.append(spec) or find(spec))
    os.utime(there, (FUTURE, FUTURE))  # another change may fall into the same tick
    for expected in (1, 2):
        assert modules.refusal(SPEC) == "not built" and len(looked) == expected
    os.utime(there, (PAST, PAST))
    for _ in range(3):
        assert modules.refusal(SPEC) == "not built" and len(looked) == 3
    for file in away.iterdir():
        file.rename(there / file.name)
    assert modules.refusal(SPEC) is None


@pytest.mark.parametrize("content", [b"", b"machine", b"machine cope"])
def test_damage_is_refused(stored: Path, content: bytes) -> None:
    stored.write_bytes(content)
    assert modules.refusal(SPEC) == "truncated or corrupted"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_refused(stored: Path, content: str) -> None:
    stored.with_suffix(".json").write_text(content)
    assert modules.refusal(SPEC) is not None


def test_a_library_without_manifest_is_refused(stored: Path) -> None:
    stored.with_suffix(".json").unlink()
    assert modules.refusal(SPEC) == "not built"


def test_other_sources_are_refused(stored: Path) -> None:
    assert modules.refusal(replace(SPEC, sources=("runtime/modules.py",))) == "built from other kernel sources"


def test_another_configuration_is_refused(stored: Path) -> None:
    assert modules.refusal(replace(SPEC, config=(("width", 4),))) == "built for another configuration"


@pytest.mark.parametrize(("key", "words"), [("dsl_version", "nvidia-cutlass-dsl"), ("ffi_version", "apache-tvm-ffi")])
def test_other_versions_are_refused(stored: Path, monkeypatch: pytest.MonkeyPatch, key: str, words: str) -> None:
    monkeypatch.setattr(module_spec, key, lambda: "999.1")
    assert words in (modules.refusal(SPEC) or "")


def test_a_machine_without_the_dsl_takes_any(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_spec, "dsl_version", lambda: None)
    assert modules.refusal(SPEC) is None


def test_another_processor_is_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = module_spec.cpu_features()
    manifest = stored.with_suffix(".json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "cpu": [*here, "avx9000"]}))
    assert modules.refusal(SPEC) == "built on a machine whose processor has avx9000, which this one lacks"
    monkeypatch.setattr(module_spec, "cpu_features", lambda: (*here, "avx9000", "avx9001"))
    assert modules.refusal(SPEC) is None, "a processor that has more runs it"


# As /proc/cpuinfo of an EPYC of Zen 4 and of a Xeon of Sapphire Rapids tells them, kernel features and all.
SHARED = [
    "fpu",
    "vme",
    "de",
    "pse",
    "tsc",
    "msr",
    "pae",
    "mce",
    "cx8",
    "apic",
    "sep",
    "mtrr",
    "pge",
    "mca",
    "cmov",
    "pat",
    "pse36",
    "clflush",
    "mmx",
    "fxsr",
    "sse",
    "sse2",
    "ht",
    "syscall",
    "nx",
    "pdpe1gb",
    "rdtscp",
    "lm",
    "constant_tsc",
    "rep_good",
    "nopl",
    "pni",
    "pclmulqdq",
    "ssse3",
    "fma",
    "cx16",
    "pcid",
    "sse4_1",
    "sse4_2",
    "x2apic",
    "movbe",
    "popcnt",
    "aes",
    "xsave",
    "avx",
    "f16c",
    "rdrand",
    "hypervisor",
    "lahf_lm",
    "abm",
    "3dnowprefetch",
    "fsgsbase",
    "bmi1",
    "avx2",
    "smep",
    "bmi2",
    "erms",
    "invpcid",
    "avx512f",
    "avx512dq",
    "rdseed",
    "adx",
    "smap",
    "avx512ifma",
    "clflushopt",
    "clwb",
    "avx512cd",
    "sha_ni",
    "avx512bw",
    "avx512vl",
    "xsaveopt",
    "xsavec",
    "xgetbv1",
    "xsaves",
    "avx512_bf16",
    "avx512vbmi",
    "umip",
    "avx512_vbmi2",
    "gfni",
    "vaes",
    "vpclmulqdq",
    "avx512_vnni",
    "avx512_bitalg",
    "avx512_vpopcntdq",
    "rdpid",
]
EPYC = [*SHARED, "mmxext", "sse4a", "misalignsse", "clzero", "xsaveerptr", "wbnoinvd", "rdpru", "topoext", "svm", "fma4_absent"]
XEON = [*SHARED, "avx_vnni", "amx_bf16", "amx_tile", "amx_int8", "serialize", "tsxldtrk", "cldemote", "movdiri", "waitpkg"]


def cpuinfo(flags: list[str]) -> str:
    return "processor\t: 0\nvendor_id\t: some\nflags\t\t: " + " ".join(flags) + "\nbogomips\t: 1\n"


def test_processors_of_two_makers_run_each_others_modules(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has and the other lacks is what compilers do not use unasked, but for avx_vnni."""
    manifest = stored.with_suffix(".json")
    content = json.loads(manifest.read_text())
    machine = module_spec.cpu_features()[0]
    for built, here, refused in ((EPYC, XEON, None), ([*XEON[:-9], *XEON[-8:]], EPYC, None), (XEON, EPYC, "avx_vnni")):
        features = (machine, *module_spec.instruction_sets(cpuinfo(here)))
        monkeypatch.setattr(module_spec, "cpu_features", lambda features=features: features)
        # Whether the builder's list was sifted, or written whole by an earlier version.
        for flags in (module_spec.instruction_sets(cpuinfo(built)), built):
            manifest.write_text(json.dumps({**content, "cpu": [machine, *flags]}))
            words = modules.refusal(SPEC)
            assert (words is None) if refused is None else (refused in (words or "") and "amx" not in (words or ""))


def test_an_old_processor_is_told_what_it_lacks(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = module_spec.cpu_features()[0]
    manifest = stored.with_suffix(".json")
    content = {**json.loads(manifest.read_text()), "cpu": [machine, *module_spec.instruction_sets(cpuinfo(EPYC))]}
    manifest.write_text(json.dumps(content))
    old = [flag for flag in EPYC if "512" not in flag]
    monkeypatch.setattr(module_spec, "cpu_features", lambda: (machine, *module_spec.instruction_sets(cpuinfo(old))))
    assert "avx512f" in (modules.refusal(SPEC) or "") and "sse4a" not in (modules.refusal(SPEC) or "")
    manifest.write_text(json.dumps({**content, "cpu": ["another", "asimd"]}))
    assert "another" in (modules.refusal(SPEC) or "")


def test_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "cannot_load", lambda: None)
    monkeypatch.setattr(modules, "cannot_build", lambda: "the CuTe DSL is not installed")
    with pytest.raises(RuntimeError, match=r"some_kernel is not built .* cannot be built: the CuTe DSL is not installed"):
        modules.load(SPEC)
    monkeypatch.setattr(modules, "cannot_load", lambda: "no runtime here")
    with pytest.raises(RuntimeError, match="no runtime here"):
        modules.load(SPEC)


@pytest.mark.parametrize("library", [None, "_cutlass_ir.cu13.cpython-27-x86_64-linux-gnu.so", "_cutlass_ir.pyi"])
def test_a_dsl_without_its_compiler_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, library: str | None
) -> None:
    """Only its Python part is here, or a compiler of another interpreter, or another package of the DSL's name."""
    folder = tmp_path / "cutlass" / "_mlir" / "_mlir_libs"
    folder.mkdir(parents=True)
    (tmp_path / "cutlass" / "__init__.py").touch()
    if library is not None:
        (folder / library).touch()
    spec = importlib.machinery.PathFinder.find_spec("cutlass", [str(tmp_path)])
    monkeypatch.setattr(modules, "find_spec", lambda name: spec)
    monkeypatch.setattr("warploom.commands.build.build_all", lambda *arguments, **options: pytest.fail("it builds"))
    modules.cannot_build.cache_clear()
    try:
        assert main(["build", "--only", "*_bfloat16_d128_*"]) == 2
        assert "nothing can be built here: the CuTe DSL is installed without its compiler" in capsys.readouterr().err
        with pytest.raises(RuntimeError, match=r"some_kernel is not built .* without its compiler for this Python"):
            modules.build(SPEC, "not built")
        (folder / f"_cutlass_ir.cu13{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
        modules.cannot_build.cache_clear()
        assert modules.cannot_build() is None
    finally:
        modules.cannot_build.cache_clear()


def test_specs_travel() -> None:
    assert module_spec.from_json(module_spec.to_json(SPEC)) == SPEC


def test_a_worker_builds_and_reports_errors() -> None:
    with Worker("sm_90a") as worker:
        with pytest.raises(RuntimeError, match="does not compile: ValueError: width must be at most 9, got 10"):
            worker.build(replace(SPEC, config=(("width", 10),)))
        assert worker.build(SPEC)["width"] == 3
    assert modules.refusal(SPEC) is None


def test_a_worker_that_dies_is_an_error() -> None:
    with Worker("sm_90a") as worker, pytest.raises(RuntimeError, match="died with status -9"):
        worker.build(replace(SPEC, config=(("width", -signal.SIGKILL),)))
    assert os.listdir(modules.cache_folder()) == []


CODE = """
import fcntl, sys
from warploom.runtime import modules
from tests.runtime.test_modules import SPEC
modules.cannot_build = lambda: None
flock = fcntl.flock

def told(file, operation):
    try:
        flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waits", file=sys.stderr, flush=True)
        flock(file, operation)

fcntl.flock = told
modules.build(SPEC, "not built")
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """What a builder waits for: a pipe that is opened to write, see tests/runtime/builders.py."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def builder(gate: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BUILDER_GATE": str(gate)}
    return subprocess.Popen(
        [sys.executable, "-c", CODE], env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )


def wait_until_it(says: str, process: subprocess.Popen[str]) -> None:
    """Read what a builder prints up to this line; its end instead is an error."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line == f"{says}\n":
            return
    pytest.fail(f"the builder ended before it {says}: {''.join(lines)}")


def test_two_builders_at_once_build_once(cache: Path, gate: Path) -> None:
    first = builder(gate)
    wait_until_it("builds", first)
    second = builder(gate)
    wait_until_it("waits", second)
    gate.open("w").close()
    for process in (first, second):
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert (cache / "log").read_text().count("some_kernel") == 1
    assert modules.refusal(SPEC) is None


def test_a_builder_killed_midway_leaves_room_for_the_next(cache: Path, gate: Path) -> None:
    process = builder(gate)
    wait_until_it("builds", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert modules.refusal(SPEC) == "not built"
    second = builder(gate)
    wait_until_it("builds", second)
    gate.open("w").close()
    _, errors = second.communicate()
    assert second.returncode == 0, errors
    assert modules.refusal(SPEC) is None
    assert not list(modules.cache_folder().glob(".scratch-*")), "what the first left is still there"


def test_a_builder_killed_alone_leaves_a_worker_that_ends_its_work(cache: Path, gate: Path) -> None:
    process = builder(gate)
    wait_until_it("builds", process)
    process.kill()
    process.wait()
    gate.open("w").close()
    process.communicate()  # until the worker has closed its stderr too
    assert modules.refusal(SPEC) is None
    assert not list(modules.cache_folder().glob(".scratch-*"))


@pytest.mark.parametrize(
    ("body", "version"),
    [("*v = 13000; return 0;", 13000), ("*v = 12040; return 0;", 12040), ("return 100;", None), (None, None)],
)
def test_driver_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str | None, version: int | None) -> None:
    """Of a driver library made here; None where there is none or it fails."""
    library = tmp_path / "libcuda.so.1"
    if body is not None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler")
        source = tmp_path / "driver.c"
        source.write_text(f"int cuDriverGetVersion(int *v) {{ {body} }}")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    real = modules.ctypes.CDLL
    monkeypatch.setattr(modules.ctypes, "CDLL", lambda name, *rest: real(str(library) if "libcuda" in name else name, *rest))
    modules.driver_version.cache_clear()
    assert modules.driver_version() == version
    modules.driver_version.cache_clear()
