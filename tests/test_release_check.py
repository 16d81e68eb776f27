"""`make release-check`: each of its parts finds what it is for, on made-up releases."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from tools import release_check
from tools.release import archives, environments, versions

ROOT = Path(__file__).parents[1]


def test_this_tree_agrees_with_itself() -> None:
    assert versions.disagreements(ROOT) == []


def test_citation_is_of_the_format() -> None:
    """What the format requires (cff-version 1.2.0), and links that are the project's own."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["message"] and citation["title"] and all(author["name"] for author in citation["authors"])
    assert citation["version"] == versions.project_version(ROOT) and citation["license"] == "Apache-2.0"
    text = (ROOT / "pyproject.toml").read_text()
    assert f'Repository = "{citation["repository-code"]}"' in text and f'Documentation = "{citation["url"]}"' in text


def release(folder: Path, citation: str = "1.2.3", entry: str = "1.2.3 (unreleased)", date: str = "") -> Path:
    (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    released = f"date-released: {date}\n" if date else ""
    (folder / "CITATION.cff").write_text(f"cff-version: 1.2.0\nversion: {citation}\n{released}")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {entry}\n\n- New.\n\n## 1.2.2 (2020-01-01)\n")
    return folder


@pytest.mark.parametrize(
    ("made", "final", "fault"),
    [
        ({}, False, None),
        ({}, True, "has no date yet"),
        ({"entry": "1.2.3 (2026-12-01)", "date": "2026-12-01"}, True, None),
        ({"entry": "1.2.3 (2026-12-01)"}, False, "date-released None"),
        ({"entry": "1.2.3 (2026-12-01)", "date": "2026-12-02"}, False, "date-released 2026-12-02"),
        ({"date": "2026-12-02"}, False, "unreleased"),
        ({"entry": "1.2.3 (soon)"}, False, "takes YYYY-MM-DD"),
        ({"entry": "1.2.4 (unreleased)"}, False, "CHANGELOG.md's first entry has version 1.2.4"),
        ({"citation": "1.2.2"}, False, "CITATION.cff has version 1.2.2"),
        ({"entry": "Next"}, False, "first entry is '## Next'"),
    ],
)
def test_versions_that_differ_are_found(tmp_path: Path, made: dict[str, str], final: bool, fault: str | None) -> None:
    found = versions.disagreements(release(tmp_path, **made), final)
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0]), found


GOOD = {
    "warploom/__init__.py": "",
    "warploom/py.typed": "",
    "warploom-1.2.3.dist-info/METADATA": "",
    "warploom-1.2.3.dist-info/entry_points.txt": "",
    "warploom-1.2.3.dist-info/licenses/LICENSE": "",
}


def wheel(folder: Path, files: dict[str, str], name: str = "warploom-1.2.3-py3-none-any.whl") -> Path:
    with zipfile.ZipFile(folder / name, "w") as file:
        for each, text in files.items():
            file.writestr(each, text)
    return folder / name


def test_a_good_wheel_has_no_faults(tmp_path: Path) -> None:
    assert archives.wheel_faults(wheel(tmp_path, GOOD), "1.2.3") == []


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"tests/test_a.py": ""}, "more than the package: tests"),
        ({"warploom/test_a.py": ""}, "a test, warploom/test_a.py"),
        ({"warploom/kernel.so": ""}, "the wheel has warploom/kernel.so"),
        ({"warploom/large.py": "x" * 1_600_000}, "more than 1500000"),
    ],
)
def test_a_wheel_with_too_much_is_found(tmp_path: Path, more: dict[str, str], fault: str) -> None:
    found = archives.wheel_faults(wheel(tmp_path, GOOD | more), "1.2.3")
    assert any(fault in each for each in found), found


@pytest.mark.parametrize("name", ["warploom/py.typed", "warploom-1.2.3.dist-info/licenses/LICENSE"])
def test_a_wheel_that_lacks_a_file_is_found(tmp_path: Path, name: str) -> None:
    files = {each: text for each, text in GOOD.items() if each != name}
    assert archives.wheel_faults(wheel(tmp_path, files), "1.2.3") == [f"the wheel lacks {name}"]


def test_a_wheel_for_one_platform_is_found(tmp_path: Path) -> None:
    found = archives.wheel_faults(wheel(tmp_path, GOOD, "warploom-1.2.3-cp311-cp311-linux_x86_64.whl"), "1.2.3")
    assert found == ["the wheel is called warploom-1.2.3-cp311-cp311-linux_x86_64.whl, not warploom-1.2.3-py3-none-any.whl"]


def test_what_a_source_archive_lacks_is_found(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("README.md", "docs/index.md", "tests/test_a.py", "notes.txt", "docs/__pycache__/a.pyc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("text")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as file:
        for name in ("README.md", "docs/index.md"):
            entry = tarfile.TarInfo(f"warploom-1.2.3/{name}")
            file.addfile(entry, io.BytesIO())
    # The tree is no git checkout: every file of the folders that are released counts, others do not.
    assert archives.archive_faults(tmp_path / "a.tar.gz", tree, "1.2.3") == ["the source archive lacks tests/test_a.py"]


def test_metadata_that_an_index_would_show_wrongly_is_found() -> None:
    text = "Project-URL: Homepage, https://example.org\nLicense-Expression: MIT\nClassifier: License :: OSI Approved\n\nText"
    found = archives.metadata_faults(Parser().parsestr(text))
    assert [each.split()[0] for each in found] == ["project", "the", "the", "the"] and "repeats the licence" in found[-1]


def test_pythons_are_those_that_the_classifiers_name_in_their_order() -> None:
    lines = [f"Classifier: Programming Language :: Python :: {name}" for name in ("3", "3 :: Only", "3.12", "3.9", "3.11")]
    assert environments.supported(Parser().parsestr("\n".join(lines))) == ["3.9", "3.11", "3.12"]


def test_interpreters_are_looked_for_and_the_missing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among pyenv's and on the PATH, where a shim of what is not installed only fails."""
    mine = "{}.{}".format(*sys.version_info[:2])
    there = tmp_path / "versions" / f"{mine}.1" / "bin"
    there.mkdir(parents=True)
    (there / "python3").symlink_to(sys.executable)
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\necho not installed >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = environments.interpreters([mine, "3.99"], tmp_path)
    assert found == [environments.Interpreter(mine, str(there / "python3")), environments.Interpreter("3.99", None)]


def test_the_size_of_an_extra_leaves_out_what_every_environment_has(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    for name, size in (
        ("triton/a.so", 3_000_000),
        ("triton/a.pyc", 9_000_000),
        ("pip/b.py", 5_000_000),
        ("alone.py", 1_000_000),
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(bytes(size))
    assert environments.megabytes(tmp_path) == 4


def test_every_extra_is_installed_for_something() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(environments.MODULES) == {None, *project["optional-dependencies"]}


def test_the_smoke_test_runs_here(tmp_path: Path) -> None:
    """On this tree, as in an environment; it is code in a string, which nothing else looks at."""
    wanted = json.dumps([versions.project_version(ROOT), ["pytest"], str(ROOT)])
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['-c', {wanted!r}]\n" + environments.SMOKE
    assert environments.call([sys.executable, "-c", code], tmp_path).startswith("torch ")
    with pytest.raises(RuntimeError, match="nowhere is not installed"):
        environments.call([sys.executable, "-c", code.replace('["pytest"]', '["nowhere"]')], tmp_path)


def test_the_table_says_what_failed_and_what_was_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    report = release_check.Report()
    assert report.step("one", lambda: "found")
    assert not report.step("two", lambda: ["a fault", "another"])
    report.absent("Python 3.99", "no interpreter")

    def raises() -> str:
        raise RuntimeError("broken\nlast line")

    assert not report.step("three", raises) and report.failed
    lines = report.table().splitlines()
    assert lines[0].split() == ["one", "ok", "found"] and "a fault; another" in lines[1]
    assert "not here" in lines[2] and "broken" in lines[3] and lines[-1] == "1 ok, 2 FAILED, 1 not here"
    assert "last line" in capsys.readouterr().out
