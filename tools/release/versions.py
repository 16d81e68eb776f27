"""What a release says of itself in several files, which are to agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

UNRELEASED = "unreleased"
_ENTRY = re.compile(r"## (?P<version>\S+) \((?P<date>[^)]*)\)")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def project_version(root: Path) -> str:
    found: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return found


def disagreements(root: Path, final: bool = False) -> list[str]:
    """What is wrong, in words: version and date in pyproject.toml, CITATION.cff and CHANGELOG.md's first entry.

    Args:
        root: the folder with those files.
        final: a release is about to be made, so that its entry must have a date.
    """
    version, citation = project_version(root), _citation(root)
    lines = (root / "CHANGELOG.md").read_text().splitlines()
    first = next((line for line in lines if line.startswith("## ")), "")
    entry = _ENTRY.fullmatch(first)
    if entry is None:
        return [f"CHANGELOG.md's first entry is {first!r}; it takes '## VERSION (DATE)'"]
    found = []
    for name, has in (("CITATION.cff", citation.get("version")), ("CHANGELOG.md's first entry", entry["version"])):
        if has != version:
            found.append(f"{name} has version {has}, but pyproject.toml {version}")
    date = entry["date"]
    if date == UNRELEASED:
        if final:
            found.append(f"CHANGELOG.md's entry {version} has no date yet")
        if "date-released" in citation:
            found.append(f"CITATION.cff has a date-released, but CHANGELOG.md says that {version} is unreleased")
    elif not _DATE.fullmatch(date):
        found.append(f"CHANGELOG.md's entry {version} has the date {date!r}; it takes YYYY-MM-DD or '{UNRELEASED}'")
    elif citation.get("date-released") != date:
        found.append(f"CITATION.cff has date-released {citation.get('date-released')}, but CHANGELOG.md {date}")
    return found


def _citation(root: Path) -> dict[str, str]:
    """Its keys of one line."""
    pairs = re.findall(r"^([a-z-]+): (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    return {key: value.strip().strip("\"'") for key, value in pairs}
