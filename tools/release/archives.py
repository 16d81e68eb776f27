"""The wheel and the source archive: built from what git tracks, and what they hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

MOST_BYTES = 1_500_000  # of a wheel
CODE = (".py", ".typed", ".html", ".css", ".js")  # what the package is made of
# What the source archive brings beside the package.
FILES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "mkdocs.yml", "pyproject.toml")
FOLDERS = ("benchmarks", "docs", "examples", "tests", "tools", "warploom")
URLS = {"Homepage", "Documentation", "Repository", "Changelog", "Issues"}
_LEFT_OUT = {"__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"}


def sources(root: Path) -> list[str]:
    """Files that a release is made of: what git tracks and new ones that it does not ignore; without git all of FOLDERS."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=root, capture_output=True, text=True)
        listed = run.stdout.splitlines() if run.returncode == 0 else []
    except OSError:
        listed = []
    if not listed:
        found = [path for folder in FOLDERS for path in (root / folder).rglob("*")]
        found += [root / name for name in (*FILES, "MANIFEST.in")]
        listed = [path.relative_to(root).as_posix() for path in found]
    return sorted(name for name in listed if (root / name).is_file() and not _LEFT_OUT & set(Path(name).parts))


def copy(root: Path, folder: Path) -> None:
    """The sources in a folder of their own: a build leaves its traces there, and takes none of earlier ones along."""
    for name in sources(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)


def build(python: str, folder: Path, out: Path, *options: str) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it."""
    run = subprocess.run(
        [python, "-m", "build", "--outdir", str(out), *options, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if run.returncode:
        raise RuntimeError(f"python -m build failed: {(run.stdout + run.stderr).strip()[-2000:]}")
    (archive,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(file.read(name).decode())


def wheel_faults(wheel: Path, version: str) -> list[str]:
    """What is wrong with a wheel, in words."""
    found = []
    if wheel.name != f"warploom-{version}-py3-none-any.whl":
        found.append(f"the wheel is called {wheel.name}, not warploom-{version}-py3-none-any.whl")
    if wheel.stat().st_size > MOST_BYTES:
        found.append(f"the wheel has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    information = f"warploom-{version}.dist-info"
    outside = sorted({PurePosixPath(name).parts[0] for name in names} - {"warploom", information})
    if outside:
        found.append(f"the wheel has more than the package: {', '.join(outside)}")
    code = [name for name in names if not name.startswith(information)]
    found += [f"the wheel has {name}" for name in code if PurePosixPath(name).suffix not in CODE]
    found += [f"the wheel has a test, {name}" for name in code if PurePosixPath(name).name.startswith(("test_", "conftest"))]
    needed = ("warploom/py.typed", f"{information}/licenses/LICENSE", f"{information}/entry_points.txt")
    return found + [f"the wheel lacks {name}" for name in needed if name not in names]


def archive_faults(archive: Path, root: Path, version: str) -> list[str]:
    """What of the sources a source archive lacks, in words."""
    top = f"warploom-{version}/"
    with tarfile.open(archive) as file:
        names = {name.removeprefix(top) for name in file.getnames()}
    wanted = [name for name in sources(root) if name in FILES or name.split("/")[0] in FOLDERS]
    return [f"the source archive lacks {name}" for name in wanted if name not in names]


def metadata_faults(found: Message) -> list[str]:
    """What the package index would show wrongly, in words."""
    faults = []
    urls = {line.split(",")[0] for line in found.get_all("Project-URL", [])}
    if urls != URLS:
        faults.append(f"project URLs are {sorted(urls)}, not {sorted(URLS)}")
    if found["Description-Content-Type"] != "text/markdown":
        faults.append(f"the description is {found['Description-Content-Type']}, not text/markdown")
    if found["License-Expression"] != "Apache-2.0":
        faults.append(f"the licence is {found['License-Expression']}, not Apache-2.0")
    classifiers = found.get_all("Classifier", [])
    faults += [f"the classifier {each!r} repeats the licence" for each in classifiers if each.startswith("License ::")]
    return faults
