"""CONTRIBUTING.md promises that a feature of a call is a line in one list and in a kernel's configuration: its toy is made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## A new feature of a call\n")[2].partition("\n## ")[0]
)


def changes() -> list[tuple[str, str, str]]:
    """File, text before and text after of each hunk of the section's diff."""
    found = []
    diff = re.search(r"^```diff\n(.*?)^```$", SECTION, flags=re.DOTALL | re.MULTILINE)
    assert diff is not None
    for part in re.split(r"^--- ", diff[1], flags=re.MULTILINE)[1:]:
        file, _, hunks = part.partition("\n")
        for hunk in re.split(r"^@@\n", hunks, flags=re.MULTILINE):
            lines = hunk.splitlines()
            before, after = ("\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
            found.append((file, before, after))
    return found


def test_the_toy_feature_reaches_kernels_by_this_diff_alone(tmp_path: Path) -> None:
    """The tests of the list then hold of it too: read alike, in a module's name, and launched where dispatch looked for it."""
    for folder in ("warploom", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, before, after in changes():
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{file} has {text.count(before)} times:\n{before}"
        (tmp_path / file).write_text(text.replace(before, after), encoding="utf-8")
    command = (sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "tests/attention/test_features.py")
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for test in ("a_problem_and_its_arguments_carry_the_same", "a_call_runs_the_module_that_dispatch_looked_for"):
        assert f"::test_{test}[mqa]" in done.stdout, done.stdout


def test_files_that_the_recipe_names_exist() -> None:
    named = re.findall(r"`((?:warploom|tests|docs)/[\w/.]+|[A-Z]+\.md)`", SECTION)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).is_file()] == []
