"""The process that compiles: what it may import, where it writes, what it leaves behind."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

import warploom
from warploom.runtime import modules
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.module_worker import Worker, _environment
from warploom.runtime.trust import CacheError

ROOT = Path(__file__).parents[2]
SPEC = ModuleSpec("some_kernel", "sm_90a", "tests.runtime.builders:places", (("width", 3),), ("runtime/cubin.py",))
PLANTED = ("json", "cutlass", "torch", "tvm_ffi", "typing", "warploom", "numpy", "sitecustomize", "usercustomize")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of the modules, at a path that wants quoting."""
    root = tmp_path / "some 'odd\" $cache"
    monkeypatch.setenv("WARPLOOM_CACHE", str(root))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return root / "modules"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, full of modules that must not run."""
    here = tmp_path / "planted"
    for place in (here, here / "relative"):
        place.mkdir()
        for name in PLANTED:
            (place / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder was imported')")
    monkeypatch.chdir(here)
    return here


def test_the_worker_imported_from_the_current_folder_and_wrote_where_others_can(
    folder: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ways in which PYTHONPATH names the current folder, and a TMPDIR with a space that is not there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", "relative", str(ROOT), "../planted", ""]))
    monkeypatch.setenv("TMPDIR", "/no where/at 'all")
    with Worker("sm_90a") as worker:
        found = worker.build(SPEC)
        scratch = Path(found["folder"])
        assert scratch.parent == folder and Path(found["temporary"]) == scratch
        assert found["mode"] == stat.S_IMODE(os.stat(scratch).st_mode) == 0o700
    assert found["modules"]["warploom"] == warploom.__file__
    assert not [name for name, file in found["modules"].items() if str(file or "").startswith(str(planted))]
    assert not [entry for entry in found["path"] if not os.path.isabs(entry) or entry.startswith(str(planted))]
    assert sorted(os.listdir(folder)) == sorted([SPEC.library().name, SPEC.library().with_suffix(".json").name])


def test_a_checkout_as_the_current_folder_lends_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies beside the package's own folder is not imported from either, but for the package."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ROOT / "tests" / "runtime" / "builders.py", elsewhere / "some_builders.py")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    monkeypatch.chdir(ROOT)
    with Worker("sm_90a") as worker:
        found = worker.build(replace(SPEC, builder="some_builders:places"))
    assert found["modules"]["warploom"] == warploom.__file__
    assert str(ROOT) not in found["path"] and str(elsewhere) in found["path"]


def test_the_dsl_kept_files_where_others_can_write(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARPLOOM_KEEP_CUBIN", "kept")
    environment = _environment("sm_90a", folder)
    for name in ("CUTE_DSL_CACHE_DIR", "TMPDIR"):
        assert environment[name] == str(folder)
    assert environment["WARPLOOM_KEEP_CUBIN"] == str(tmp_path / "kept")


def test_a_worker_that_dies_unasked_is_words(folder: Path) -> None:
    with Worker("sm_90a") as worker:
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(RuntimeError, match="died with status -9"):
            worker.build(SPEC)
    assert os.listdir(folder) == []


def test_an_interrupt_ends_the_worker_at_once(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Worker("sm_90a") as worker:
        raise KeyboardInterrupt
    assert worker._process.returncode == -9 and os.listdir(folder) == []


def test_python_that_cannot_be_started_is_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for executable, words in (("", "sys.executable names no Python"), ("/nonexistent/python", "does not start")):
        monkeypatch.setattr("sys.executable", executable)
        with pytest.raises(RuntimeError, match=words):
            Worker("sm_90a")
    assert not folder.exists() or os.listdir(folder) == []


def test_a_limit_on_files_is_words(folder: Path) -> None:
    """As a disk that fills up between the library, of 12 bytes, and its manifest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        worker = Worker("sm_90a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with worker, pytest.raises(CacheError, match=r"\.json cannot be written \(File too large\): raise the limit"):
        worker.build(SPEC)
    assert os.listdir(folder) == [SPEC.library().name]
    assert modules.refusal(SPEC) == "not built"


@pytest.mark.skipif(modules.cannot_build() is not None, reason=f"needs the DSL: {modules.cannot_build()}")
def test_a_tmpdir_with_a_space_could_not_compile(folder: Path, planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel, with a planted compiler in the current folder and a cache at an odd path."""
    from warploom.linear.hopper.plan import configs

    spec = configs(256, False)[0].spec
    monkeypatch.setenv("TMPDIR", str(planted / "with a space"))
    monkeypatch.delenv("HOME", raising=False)
    modules.build(spec, "not built")
    assert modules.refusal(spec) is None and modules.facts(spec)["registers"] > 0
    assert len(os.listdir(folder)) == 3 and not (planted / "with a space").exists()
