"""README.md: its numbers are those of the JSON, its links work wherever it is read, on the package index too."""

from __future__ import annotations

import contextlib
import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from warploom.bench import report

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
REPOSITORY = "https://github.com/warploom/warploom"
FILES = f"{REPOSITORY}/blob/main/", "https://raw.githubusercontent.com/warploom/warploom/main/"
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
# [text](target), ![text](target) and [name]: target
LINKS = [a or b for a, b in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", PROSE, re.MULTILINE)]


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    with contextlib.chdir(ROOT):
        return report.read([path for path in sorted(Path("benchmarks/results").glob("*.json")) if report.is_run(path)])


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_numbers_are_those_of_the_json(page: str, runs: dict[str, Any]) -> None:
    text = (ROOT / page).read_text()
    assert report.fill(text, runs) == text, "run `warploom bench report`"


@pytest.mark.parametrize("name", ["dense.json", "dense-triton.json", "masks.json", "masks-preparation.json", "decode.json"])
def test_other_numbers_in_the_json_are_seen(name: str, runs: dict[str, Any]) -> None:
    """README holds the numbers of each of these runs."""
    changed = copy.deepcopy(runs)
    for row in changed[f"benchmarks/results/{name}"]["rows"]:
        for found in row["contenders"].values():
            if "ms" in found and found is not row["contenders"]["warploom"]:
                found["ms"] *= 2
    assert report.fill(README, changed) != README


def test_no_time_rate_or_ratio_is_typed() -> None:
    """They stand in the part that the report writes."""
    typed = re.sub(r"<!-- bench: headline.*?<!-- bench: end -->", "", PROSE, flags=re.DOTALL)
    assert typed != PROSE
    found = re.findall(r"\d[\d.,]* ?(?:us|ms|µs|%|×|x|times|TFLOP/s|GB/s)(?!\w)|(?<!≥ )\b\d+\.\d\d\b", typed)
    assert not found


def test_every_link_is_absolute_and_leads_somewhere() -> None:
    assert len(LINKS) > 8
    for link in LINKS:
        assert link.startswith("https://"), f"{link} is relative: the package index does not know it"
        if link.startswith(FILES):
            path, _, anchor = link.removeprefix(FILES[0]).removeprefix(FILES[1]).partition("#")
            assert (ROOT / path).is_file(), link
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}, link


def test_links_of_prose_are_defined() -> None:
    used = set(re.findall(r"(?<!!)\[[^\]]+\]\[([^\]]+)\]", PROSE))
    assert used and used == set(re.findall(r"^\[([^\]]+)\]: ", PROSE, re.MULTILINE))


def test_links_lead_to_the_project_of_the_metadata() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert not urls or REPOSITORY in urls.values()
    assert {link for link in LINKS if "github" in link and not link.startswith(FILES)} <= {
        "https://warploom.github.io/warploom/"
    }


def test_the_first_screen_has_it_all() -> None:
    """What it is, a picture, install, an example and the table stand before the second heading, in about forty lines."""
    first = README.split("\n## ")[0]
    wanted = "](https://raw.githubusercontent.com/", "$ pip install ", "```python\n", "```text\n", "\n| ours | beside |"
    places = [first.index(each) for each in wanted]
    assert places == sorted(places) and first.count("](https://raw") == 1
    assert sum(bool(line.strip()) for line in first.splitlines()) <= 45
