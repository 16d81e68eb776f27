"""Check all that a release needs: `make release-check`, with ARGS for the options below.

    python tools/release_check.py [--final] [--python 3.12] [--extra hopper] [--torch SPEC] [--keep FOLDER]

Builds the source archive and the wheel from it, looks at both, runs tests from the unpacked archive, and installs the wheel
for each supported Python that is on this machine, with and without each extra. Needs the network; each Python downloads torch
once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.release import archives, environments, versions  # noqa: E402  isort: skip

NOT_HERE = "not here"
TOOLS = ("build>=1.2", "twine>=6.1", "trove-classifiers")


class Report:
    """A line for each step as it ends, and a table at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []  # step; "ok", "FAILED" or "not here"; what it found

    def step(self, name: str, run: Callable[[], str | list[str]]) -> bool:
        """Run one; it returns what it found, or a list of faults, or raises."""
        print(f"-- {name} …", flush=True)
        start = time.perf_counter()
        try:
            found = run()
        except (RuntimeError, OSError) as error:
            found = [str(error)]
        good = isinstance(found, str) or not found
        words = found if isinstance(found, str) else "; ".join(found)
        self.rows.append((name, "ok" if good else "FAILED", words.splitlines()[0] if words else ""))
        print(
            f"   {'ok' if good else 'FAILED'}, {time.perf_counter() - start:.0f} s{': ' + words if words else ''}", flush=True
        )
        return good

    def absent(self, name: str, why: str) -> None:
        self.rows.append((name, NOT_HERE, why))
        print(f"-- {name}: {why}", flush=True)

    def table(self) -> str:
        wide = max(len(name) for name, _, _ in self.rows)
        lines = [f"{name:<{wide}}  {state:<8}  {words[:90]}".rstrip() for name, state, words in self.rows]
        counts = [f"{sum(state == each for _, state, _ in self.rows)} {each}" for each in ("ok", "FAILED", NOT_HERE)]
        return "\n".join([*lines, "", ", ".join(counts)])

    @property
    def failed(self) -> bool:
        return any(state == "FAILED" for _, state, _ in self.rows)


def check_archives(report: Report, folder: Path, final: bool) -> Path | None:
    """Build both and look at them; the wheel, if there is one."""
    version = versions.project_version(ROOT)
    report.step("versions agree", lambda: versions.disagreements(ROOT, final))
    made: dict[str, Path] = {}
    tools = folder / "tools-environment"

    def build() -> str:
        python = environments.make(sys.executable, tools, *TOOLS)
        archives.copy(ROOT, folder / "sources")
        made["archive"], made["wheel"] = archives.build(python, folder / "sources", folder / "dist")
        return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.2f} MB" for path in made.values())

    if not report.step("build", build):
        return None
    archive, wheel = made["archive"], made["wheel"]
    python = str(tools / "bin" / "python")

    def twine() -> list[str]:
        environments.call([python, "-m", "twine", "check", "--strict", str(archive), str(wheel)], folder)
        return []

    def classifiers() -> list[str]:
        code = "import sys, trove_classifiers as t; print('\\n'.join(set(sys.argv[1:]) - t.classifiers))"
        unknown = environments.call([python, "-c", code, *archives.metadata(wheel).get_all("Classifier", [])], folder)
        return [f"no such classifier: {line}" for line in unknown.splitlines() if line]

    def unpacked() -> str:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        here = folder / f"warploom-{version}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tiny.py"]
        return environments.call(command, here).strip().splitlines()[-1]

    report.step("twine check --strict", twine)
    report.step("wheel contents", lambda: archives.wheel_faults(wheel, version))
    report.step("source archive contents", lambda: archives.archive_faults(archive, ROOT, version))
    report.step("metadata", lambda: archives.metadata_faults(archives.metadata(wheel)))
    report.step("classifiers", classifiers)
    report.step("tests from the source archive", unpacked)
    return wheel


def check_environments(report: Report, folder: Path, wheel: Path, options: argparse.Namespace) -> None:
    """One Python after another, and of each one environment after another: torch takes gigabytes."""
    version = versions.project_version(ROOT)
    extras = [None if extra == "none" else extra for extra in options.extra or environments.MODULES]
    for found in environments.interpreters(options.python or environments.supported(archives.metadata(wheel))):
        name = f"Python {found.version}"
        if found.path is None:
            report.absent(name, "no interpreter of this version on this machine")
            continue
        base, path = folder / f"torch-{found.version}", found.path

        def torch(path: str = path, base: Path = base) -> str:
            python = environments.make(path, base, options.torch)
            return environments.call([python, "-c", "import torch; print(torch.__version__)"], folder).strip()

        if report.step(f"{name}: torch", torch):
            for extra in extras:
                at = folder / f"environment-{found.version}"

                def install(path: str = path, base: Path = base, extra: str | None = extra, at: Path = at) -> str:
                    wanted = str(wheel) + (f"[{extra}]" if extra else "")
                    python = environments.make(path, at, wanted, below=base)
                    found = environments.smoke(python, folder, version, extra)
                    return f"{found}; brought {environments.megabytes(at)} MB beside torch"

                report.step(f"{name}, {f'[{extra}]' if extra else 'no extra'}", install)
                shutil.rmtree(at, ignore_errors=True)
        shutil.rmtree(base, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--final", action="store_true", help="a release is about to be made: its changelog entry must have a date"
    )
    parser.add_argument("--python", action="append", metavar="3.X", help="only this version; may be given again")
    known = [name or "none" for name in environments.MODULES]
    parser.add_argument("--extra", action="append", choices=known, help="only this extra, or none; may be given again")
    parser.add_argument("--torch", default="torch", metavar="SPEC", help="what pip installs as torch, as torch==2.11.0")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the wheel and the source archive there")
    options = parser.parse_args(arguments)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="release-check-") as scratch:
        folder = Path(scratch).resolve()
        wheel = check_archives(report, folder, options.final)
        if wheel is not None:
            check_environments(report, folder, wheel, options)
            if options.keep is not None:
                shutil.copytree(folder / "dist", options.keep, dirs_exist_ok=True)
    print("\n== summary\n" + report.table())
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
