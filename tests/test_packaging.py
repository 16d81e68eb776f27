"""What is installed: a pure Python wheel, a light import, an environment that leaves a GPU torch alone."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

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
    assert calls < 100_000 and len(modules) < 130, (calls, modules)


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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy so that the working tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "warploom", folder / "warploom", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = (folder / "dist").iterdir()
    assert path.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_our_source_and_nothing_compiled(wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "warploom").rglob("*.py")}
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "warploom/smem/web").iterdir()}
    assert len(page) == 7 and source | page | {"warploom/py.typed"} <= set(names)
    assert {Path(name).parts[0] for name in names} == {"warploom"}
    assert {Path(name).suffix for name in names} <= {".py", ".typed", ".html", ".css", ".js"}


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    required = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert required == ["torch>=2.11"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"triton", "hopper", "lab", "transformers", "demo", "docs", "dev"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


@pytest.fixture
def environment() -> ModuleType:
    """tools/environment.py, the script behind `make test` and `make demo`."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    monkeypatch.setattr(sys, "argv", ["environment.py", str(tmp_path / "venv"), "dev"])
    environment.main()

    assert made == [lent]
    assert installs[:-1] == ([(wanted,)] if wanted else [])
    assert installs[-1][-2:] == ("-e", ".[dev]")


def test_environment_refuses_an_old_python_in_words(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer"):
        environment.main()
