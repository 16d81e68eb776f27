"""What is installed: a pure Python wheel, a light import, an environment that leaves a GPU torch alone."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.release import archives, versions

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_is_light() -> None:
    """Over torch only modules of our own and of Python's, and few calls: 69,000 take 0.16 s, transformers millions."""
    code = """
import json, sys
import torch
before, calls = set(sys.modules), 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
import warploom
sys.setprofile(None)
print(json.dumps([calls, sorted(set(sys.modules) - before)]))
"""
    calls, modules = json.loads(python(code))
    others = {name.partition(".")[0] for name in modules} - {"warploom", "torch"} - sys.stdlib_module_names
    assert not others and "torch._dynamo" not in modules, "import warploom also imported these"
    assert not {"warploom.distributed", "warploom.fp8", "warploom.nn"} & set(modules), "they wait for their first use"
    assert calls < 100_000 and len(modules) < 150, (calls, modules)


def test_nn_needed_an_import_of_its_own() -> None:
    """As `torch.nn` needs none; a star import leaves torch's alone."""
    shown = python(
        "import warploom; print(warploom.nn.__name__)\n"
        "from torch import nn; from warploom import *; print(nn.__name__)"
    )
    assert shown.split() == ["warploom.nn", "torch.nn"]


def test_import_needs_no_unix_module() -> None:
    """The core imports where Python has no fcntl, resource, pwd, grp or termios (Windows)."""
    python(
        "import sys, torch\n"
        "for name in ('fcntl', 'resource', 'pwd', 'grp', 'termios'): sys.modules[name] = None\n"
        "import warploom"
    )


@pytest.mark.skipif(
    not os.environ.get("CI") or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="the extra dev has the compiler on Linux on x86-64, and CI installs it",
)
def test_ci_compiles_what_compile_tests_ask_for() -> None:
    """They skip where there is no compiler; CI's own environment has one."""
    from warploom.runtime import modules

    assert modules.cannot_build() is None
    assert importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive and the wheel from it, made of a copy so that the working tree stays clean."""
    folder = tmp_path_factory.mktemp("built")
    archives.copy(ROOT, folder / "sources")
    return archives.build(sys.executable, folder / "sources", folder / "dist", "--no-isolation")


def test_wheel_holds_our_source_and_nothing_compiled(built: tuple[Path, Path]) -> None:
    wheel = built[1]
    assert archives.wheel_faults(wheel, versions.project_version(ROOT)) == []
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "warploom").rglob("*.py")}
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "warploom/smem/web").iterdir()}
    assert len(page) == 7 and source | page | {"warploom/py.typed"} <= set(zipfile.ZipFile(wheel).namelist())


def test_the_page_says_how_large_the_wheel_is(built: tuple[Path, Path]) -> None:
    said = re.search(r"one pure Python wheel of (\d\.\d) MB", (ROOT / "docs" / "install.md").read_text(encoding="utf-8"))
    assert said is not None and abs(built[1].stat().st_size / 1e6 - float(said[1])) < 0.2


def test_wheel_metadata(built: tuple[Path, Path]) -> None:
    metadata = archives.metadata(built[1])
    assert archives.metadata_faults(metadata) == []
    assert metadata["Requires-Python"] == ">=3.11"
    required = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert required == ["torch>=2.11"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"triton", "hopper", "lab", "transformers", "demo", "docs", "dev"}
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_source_archive_brings_what_its_tests_and_docs_need(built: tuple[Path, Path], tmp_path: Path) -> None:
    archive = built[0]
    assert archives.archive_faults(archive, ROOT, versions.project_version(ROOT)) == []
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (here,) = tmp_path.iterdir()
    where = "import warploom; print(warploom.__file__)"
    tests = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/test_tiny.py", "tests/test_structure.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command, expected in ((["-c", where], str(here / "warploom")), (tests, " passed")):
        run = subprocess.run([sys.executable, *command], cwd=here, env=environment, capture_output=True, text=True)
        assert run.returncode == 0 and expected in run.stdout, run.stdout + run.stderr


def test_nothing_of_ours_warns_on_the_way_in() -> None:
    """Neither `import warploom` nor any module that needs no extra; what others warn of is theirs."""
    python(
        """
import pkgutil, warnings
import torch
warnings.simplefilter("error")
for others in ("torch", "numpy", "triton", "transformers", "matplotlib"):
    warnings.filterwarnings("ignore", module=others + r"(\\.|$)")
import warploom
optional = ("kernels", "hopper", "ampere", "triton", "integrations", "device", "compile")
for module in pkgutil.walk_packages(warploom.__path__, "warploom."):
    if not {*optional, "__main__"} & set(module.name.split(".")) and not module.name.endswith("_kernel"):
        __import__(module.name)
q = torch.randn(1, 16, 2, 16, requires_grad=True)
warploom.attention(q, q, q, mask=warploom.masks.Document([10, 6])).sum().backward()
warploom.linear_attention(q, q, q).sum().backward()
"""
    )


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment() -> ModuleType:
    """tools/environment.py, the script behind `make test` and `make demo`."""
    return tool("environment")


def test_make_test_ended_in_a_traceback_when_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    class Check:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            self.waits = 0

        def wait(self) -> int:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            ended.append("cleaned up")
            return 2

    check = tool("check")
    monkeypatch.setattr(check.subprocess, "Popen", Check)
    assert check.main(["lint", "types"]) == 130
    assert ended == ["cleaned up"]
    assert capsys.readouterr().out.splitlines() == ["== lint: ruff check .", "check: interrupted in lint"]


def test_types_are_checked_beside_the_tests_and_said_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Check:
        def __init__(self, command: list[str], env: dict[str, str], stdout: Any = None, stderr: Any = None) -> None:
            self.name = command[2]
            seen.append(f"begin {self.name}")
            if stdout is not None:
                stdout.write(b"Found 1 error\n")

        def wait(self) -> int:
            seen.append(f"end {self.name}")
            return int(self.name == "mypy")

    check = tool("check")
    monkeypatch.setattr(check.subprocess, "Popen", Check)
    assert check.main(["types", "tests", "docs"]) == 1
    assert seen == ["begin mypy", "begin pytest", "end pytest", "begin mkdocs", "end mkdocs", "end mypy"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[:4]] == ["== tests", "== docs", "== types", "Found 1 error"]
    assert [line.split()[0] for line in said[-3:]] == ["types", "tests", "docs"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_alone_installed_an_environment() -> None:
    shown = subprocess.run(["make", "-n"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 'echo "make test ' in shown and "environment.py" not in shown


def test_an_environment_without_pip_is_made_anew(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Ctrl-C leaves it while it is made."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; sys.modules[\'pip\'] = None; $2"\n')
    python.chmod(0o755)
    run, made = subprocess.run, []

    def recorded(command: list[str], **options: Any) -> Any:
        if command[1:3] != ["-m", "venv"]:
            return run(command, **options)
        made.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environment.subprocess, "run", recorded)
    environment.make(str(tmp_path), sys.executable, "")
    assert not made
    environment.make(str(tmp_path), str(python), "")
    assert made == [[sys.executable, "-m", "venv", "--clear", str(tmp_path)]]


@pytest.mark.parametrize(
    ("lent", "gpu", "wanted"),
    [("", False, "torch==2.13.0"), ("", True, "torch"), ("2.11.0+cu130", True, None)],
    ids=["no GPU", "GPU without torch", "GPU with torch"],
)
def test_environment_settles_torch_first(
    environment: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lent: str,
    gpu: bool,
    wanted: str | None,
) -> None:
    installs: list[tuple[str, ...]] = []
    made: list[str] = []
    compiled: list[str] = []

    def make(folder: str, python: str, lent: str) -> None:
        os.makedirs(folder)
        made.append(lent)

    def pip(python: str, *arguments: str) -> None:
        if "-c" in arguments:
            assert Path(arguments[1]).read_text().splitlines()[0] == (wanted or f"torch=={lent}")
        installs.append(arguments)

    monkeypatch.setattr(environment, "answer", lambda python, code: lent)
    monkeypatch.setattr(environment, "has_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "make", make)
    monkeypatch.setattr(environment, "pip", pip)
    monkeypatch.setattr(environment, "compile_modules", compiled.append)
    monkeypatch.setattr(sys, "argv", ["environment.py", str(tmp_path / "venv"), "dev"])
    environment.main()

    assert made == [lent]
    assert installs[:-1] == ([(wanted,)] if wanted else [])
    assert installs[-1][-2:] == ("-e", ".[dev]")
    assert [Path(python).parents[1].name for python in compiled] == ["venv"]


def test_environment_refuses_an_old_python_in_words(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer"):
        environment.main()
