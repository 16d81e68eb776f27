"""The module cache: what it refuses, in which words, and builders that meet or die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.runtime import modules
from warploom.runtime.module_worker import Worker
from warploom.runtime.modules import ModuleSpec

ROOT = Path(__file__).parents[2]
SPEC = ModuleSpec("some_kernel", "sm_90a", "tests.runtime.builders:build", (("width", 3),), ("runtime/cubin.py",))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setenv("BUILDER_LOG", str(tmp_path / "log"))
    (tmp_path / "modules").mkdir()
    return tmp_path


@pytest.fixture
def stored(cache: Path) -> Path:
    library = cache / "built.so"
    library.write_bytes(b"machine code")
    modules.store(SPEC, library, {"registers": 168})
    return SPEC.library()


def test_a_stored_module_is_taken(stored: Path) -> None:
    assert modules.refusal(SPEC) is None and modules.facts(SPEC) == {"registers": 168}


def test_nothing_there() -> None:
    assert modules.refusal(SPEC) == "not built" and modules.facts(SPEC) == {}


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
    monkeypatch.setattr(modules, key, lambda: "999.1")
    assert words in (modules.refusal(SPEC) or "")


def test_a_machine_without_the_dsl_takes_any(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "dsl_version", lambda: None)
    assert modules.refusal(SPEC) is None


def test_another_processor_is_refused(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = modules.cpu_features()
    manifest = stored.with_suffix(".json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "cpu": [*here, "avx9000"]}))
    assert modules.refusal(SPEC) == "built on a machine whose processor has avx9000, which this one lacks"
    monkeypatch.setattr(modules, "cpu_features", lambda: (*here, "avx9000", "avx9001"))
    assert modules.refusal(SPEC) is None, "a processor that has more runs it"


def test_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "cannot_load", lambda: None)
    monkeypatch.setattr(modules, "cannot_build", lambda: "the CuTe DSL is not installed")
    with pytest.raises(RuntimeError, match=r"some_kernel is not built .* cannot be built: the CuTe DSL is not installed"):
        modules.load(SPEC)
    monkeypatch.setattr(modules, "cannot_load", lambda: "no runtime here")
    with pytest.raises(RuntimeError, match="no runtime here"):
        modules.load(SPEC)


def test_specs_travel() -> None:
    assert modules.from_json(modules.to_json(SPEC)) == SPEC


def test_a_worker_builds_and_reports_errors() -> None:
    with Worker("sm_90a") as worker:
        with pytest.raises(RuntimeError, match="does not compile: ValueError: width must be at most 9, got 10"):
            worker.build(replace(SPEC, config=(("width", 10),)))
        assert worker.build(SPEC)["width"] == 3
    assert modules.refusal(SPEC) is None


def test_a_worker_that_dies_is_an_error() -> None:
    with Worker("sm_90a") as worker, pytest.raises(RuntimeError, match="died"):
        worker.build(replace(SPEC, config=(("width", -1),)))


CODE = """
from warploom.runtime import modules
from tests.runtime.test_modules import SPEC
modules.cannot_build = lambda: None
modules.build(SPEC, "not built")
"""


def builder() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BUILDER_SECONDS": "1.5"}
    return subprocess.Popen(
        [sys.executable, "-c", CODE], env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    )


def test_two_builders_at_once_build_once(cache: Path) -> None:
    pair = [builder(), builder()]
    for process in pair:
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
    assert (cache / "log").read_text().count("some_kernel") == 1
    assert modules.refusal(SPEC) is None


def test_a_builder_killed_midway_leaves_room_for_the_next(cache: Path) -> None:
    process = builder()
    deadline = time.monotonic() + 60
    while not (cache / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert modules.refusal(SPEC) == "not built"
    second = builder()
    _, errors = second.communicate(timeout=90)
    assert second.returncode == 0, errors
    assert modules.refusal(SPEC) is None


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
