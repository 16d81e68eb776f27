"""The sweep over model classes itself, and that its table, the documentation and the version floor agree."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.integrations.sweep import compare, judges
from tests.integrations.sweep.core import CORE_EQUAL, CORE_REFUSED
from tests.integrations.sweep.report import counted
from warploom.integrations import transformers as integration

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "transformers.json"


@pytest.fixture(scope="module", autouse=True)
def _judges():
    judges.register()


def swept(model: str, **options):
    import transformers

    return compare.sweep(getattr(transformers, model), **options)


def test_an_equal_class_is_found_equal_and_a_wrong_attention_wrong():
    record = swept("BertModel")
    assert record["outcome"] == compare.EQUAL and record["calls"] > 0
    assert record["stages"]["mutant"]["outcome"] == compare.EQUAL  # noticed
    assert swept("BertModel", name=judges.MUTANT)["outcome"] == compare.WRONG


def test_a_refused_class_is_found_refused():
    record = swept("FalconModel")
    assert record["outcome"] == compare.REFUSED and "falcon" in record["reason"]


def test_an_error_in_other_words_is_a_crash():
    import transformers

    model = compare.construct(transformers.BertModel, compare.tiny_config(transformers.BertConfig), "eager")
    for error in (
        KeyError("warploom"),
        RuntimeError("shapes"),
        ValueError("wrong"),
        ValueError("use attn_implementation='eager'"),
    ):
        assert compare.failure(error, model)["outcome"] == compare.CRASHED
    words = ValueError("BertModel cannot; use attn_implementation='eager'")
    assert compare.failure(words, model)["outcome"] == compare.REFUSED


def test_the_committed_table_has_nothing_wrong_and_no_crash():
    classes = json.loads(TABLE.read_text())["classes"]
    bad = {n: r["reason"] for n, r in classes.items() if r["outcome"] in (compare.WRONG, compare.CRASHED)}
    assert not bad
    assert all(classes[name]["outcome"] == compare.EQUAL for name in CORE_EQUAL)
    assert all(classes[name]["outcome"] == compare.REFUSED for name in CORE_REFUSED)


def test_the_documentation_counts_what_the_table_counts():
    table = json.loads(TABLE.read_text())
    text = (ROOT / "docs" / "transformers.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| ([\d,]+) \|$", text, re.MULTILINE)
    shown = {name: int(count.replace(",", "")) for name, count in rows}
    assert shown == counted(table["classes"])
    assert f"transformers {table['transformers']}" in text


def test_register_the_extra_and_the_documentation_name_the_same_versions():
    oldest, newest, next_one = ".".join(map(str, integration.OLDEST)), "5.24", "5.25"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [r for extra in ("transformers", "demo") for r in extras[extra] if r.startswith("transformers")]
    assert wanted == [f"transformers>={oldest},<{next_one}"] * 2
    for page in ("transformers.md", "install.md"):
        said = rf"transformers {re.escape(oldest)} to {re.escape(newest)}\b"
        assert re.search(said, (ROOT / "docs" / page).read_text(), re.IGNORECASE)


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.15.1", "5.15.0.dev0"])
def test_older_releases_are_refused_in_words(version, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(
        ImportError, match=rf"needs transformers 5\.16 or newer, and {re.escape(version)} is installed: pip install"
    ):
        integration.register()


@pytest.mark.parametrize("version", ["5.16.0", "5.24.0", "5.20.0.dev0"])
def test_newer_releases_are_taken(version, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", version)
    assert integration.register() == "warploom"
