"""`warploom build` where it is interrupted or refused, with compilers that compile nothing."""

from __future__ import annotations

import _thread
import threading
from pathlib import Path

import pytest

from warploom.cli import main
from warploom.commands import build
from warploom.runtime import module_spec, modules
from warploom.runtime.module_spec import ModuleSpec
from warploom.runtime.trust import CacheError

SPECS = [ModuleSpec(f"kernel_{i}", "sm_90a", "nowhere:build", (), ("runtime/cubin.py",)) for i in range(5)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(modules, "cannot_build", lambda: None)
    return tmp_path


class Compiler:
    """Stands in for the worker process; counts what it is asked and what is closed."""

    opened = closed = 0
    asked: list[str] = []  # noqa: RUF012

    def __init__(self, arch: str) -> None:
        Compiler.opened += 1

    def build(self, spec: ModuleSpec) -> dict[str, int]:
        Compiler.asked.append(spec.name)
        if spec.name == "kernel_1":
            raise RuntimeError("kernel_1 does not compile")
        return {"registers": 1}

    def kill(self) -> None: ...

    def close(self) -> None:
        Compiler.closed += 1


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> type[Compiler]:
    monkeypatch.setattr("warploom.runtime.module_worker.Worker", Compiler)
    Compiler.opened, Compiler.closed, Compiler.asked = 0, 0, []
    return Compiler


def test_a_compiler_that_failed_was_never_closed(compiler: type[Compiler]) -> None:
    rows = build.build_all(SPECS, jobs=1, quiet=True)
    assert [row.get("error") for row in rows] == [None, "kernel_1 does not compile", None, None, None]
    assert compiler.opened == compiler.closed == 2


def test_an_interrupt_did_not_stop_the_builders(compiler: type[Compiler], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, interrupted = threading.Event(), threading.Event()

    def interrupt() -> None:
        begun.wait()
        _thread.interrupt_main()

    def first(self: Compiler, spec: ModuleSpec) -> dict[str, int]:
        compiler.asked.append(spec.name)
        begun.set()
        interrupted.wait()
        return {}

    monkeypatch.setattr(compiler, "build", first)
    monkeypatch.setattr(compiler, "kill", lambda self: interrupted.set())
    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        build.build_all(SPECS, jobs=1, quiet=True)
    assert interrupted.is_set(), "the compiler was left alone"
    presser.join()
    assert compiler.asked == ["kernel_0"] and compiler.closed == 1


def test_a_cache_that_others_can_write_is_refused_before_any_work(
    cache: Path, compiler: type[Compiler], capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "modules").mkdir(mode=0o755)
    (cache / "modules").chmod(0o777)
    assert main(["build", "--only", "*"]) == 2
    assert f"{cache / 'modules'} can be written by others" in capsys.readouterr().err
    assert compiler.opened == 0


def test_a_module_that_others_can_write_fails_its_row_alone(cache: Path, compiler: type[Compiler]) -> None:
    library = cache / "built.so"
    library.write_bytes(b"machine code")
    module_spec.store(SPECS[2], library, {})
    SPECS[2].library().chmod(0o666)
    with pytest.raises(CacheError, match="can be written by others"):
        modules.built(SPECS[2])
    rows = build.build_all(SPECS, jobs=2, quiet=True)
    assert ["error" in row for row in rows] == [False, True, True, False, False]
    assert "can be written by others" in rows[2]["error"] and "kernel_2" not in compiler.asked


def test_a_log_saw_nothing_of_a_long_build(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal, as in the build of an image."""
    many = [ModuleSpec(f"many_{i}", "sm_90a", "nowhere:build", (), ("runtime/cubin.py",)) for i in range(40)]
    build.build_all(many, jobs=2, quiet=False)
    assert capsys.readouterr().err.splitlines() == [f"{4 * tenth}/40 modules" for tenth in range(1, 11)]
